import torch

from vitkit.ops.masks import mask_logits


def test_mask_logits_are_dot_products_of_queries_and_pixels():
    embed, features = torch.randn(2, 3, 4), torch.randn(2, 4, 5, 6)
    expected = torch.stack([torch.stack([(features[i] * q[:, None, None]).sum(0) for q in embed[i]]) for i in range(2)])
    torch.testing.assert_close(mask_logits(embed, features), expected)
    torch.testing.assert_close(mask_logits(embed[0], features[0]), expected[0])
