import torch

from vitkit.apps.explanations.backbones import attention_distance, rollout


def test_rollout_of_three_tokens_by_hand():
    # Half of each is the identity: rows (.75, .25, 0), (0, .5, .5), (0, 0, 1) and (.5, 0, .5), (0, 1, 0),
    # (.25, .25, .5).
    first = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    second = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]])
    expected = torch.tensor([[0.375, 0.125, 0.5], [0.0, 0.5, 0.5], [0.1875, 0.1875, 0.625]])
    after_first, after_second = rollout([first, second])
    assert torch.allclose(after_first, first[0] / 2 + torch.eye(3) / 2)
    assert torch.allclose(after_second, expected)
    # Heads are averaged first.
    (reached,) = rollout([torch.cat((first, second))])
    assert torch.allclose(reached, (first + second)[0] / 4 + torch.eye(3) / 2)


def test_attention_distance_equals_a_loop_without_padding():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 3, 4, 5, generator=generator).softmax(-1)
    queries, keys = torch.rand(2, 4, 2, generator=generator), torch.rand(2, 5, 2, generator=generator)
    queries[1, 3], keys[0, 2] = torch.nan, torch.nan
    for head in range(3):
        distances = []
        for group in range(2):
            for i in range(4):
                if (group, i) == (1, 3):
                    continue
                seen = [j for j in range(5) if (group, j) != (0, 2)]
                total = sum(weights[group, head, i, j] * (queries[group, i] - keys[group, j]).norm() for j in seen)
                distances.append(total / sum(weights[group, head, i, j] for j in seen))
        expected = torch.stack(distances).mean()
        assert torch.allclose(attention_distance(weights, queries, keys)[head], expected, atol=1e-6)
