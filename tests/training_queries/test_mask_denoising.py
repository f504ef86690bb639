import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.heads.mask2former import Mask2FormerHead
from vitkit.nn.queries import part_sizes
from vitkit.structures import FeatureInfo
from vitkit.training_queries.mask_denoising import MaskDenoising, flip_points

HEIGHT, WIDTH = 16, 24


def target(*labels):
    masks = torch.zeros(len(labels), HEIGHT, WIDTH, dtype=torch.bool)
    for i, mask in enumerate(masks):
        mask[:8, 8 * i : 8 * i + 8] = True
    return dict(labels=torch.tensor(labels, dtype=torch.int64), masks=masks)


def make_head():
    info = {"mask_features": FeatureInfo(8, 4), "res5": FeatureInfo(8, 32)}
    small = dict(d_model=8, num_heads=2, d_ffn=8, num_decoder_layers=1, num_levels=1)
    return Mask2FormerHead(info, 5, num_queries=3, **small)


def make(num_classes=5, **options):
    head = make_head()
    torch.manual_seed(0)
    return MaskDenoising(head, num_classes, **{"num_queries": 7, **options})


def make_set(module, targets):
    (query_set,) = module(make_head(), targets, None)
    return query_set


def test_rows_are_copies_of_the_targets_with_their_masks_in_every_size():
    module = make(label_flips=0.0, mask_flips=0.0)
    noised = make_set(module, [target(4, 1, 0), target(2)])
    assert noised["repeats"] == 2 and part_sizes(noised) == [3, 3]
    embed = module.label_embed.weight
    torch.testing.assert_close(noised["queries"].content[0], embed[[4, 1, 0, 4, 1, 0]])
    zero = torch.zeros(8)
    torch.testing.assert_close(noised["queries"].content[1], torch.stack([embed[2], zero, zero, embed[2], zero, zero]))
    assert [[rows.tolist() for rows in pair] for pair in noised["matches"]] == [
        [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]],
        [[0, 3], [0, 0]],
    ]
    small, full = (noised["queries"].masks(size) for size in ((HEIGHT // 8, WIDTH // 8), (HEIGHT, WIDTH)))
    assert small[0, 4].tolist() == [[False, True, False], [False, False, False]]
    assert torch.equal(full[0, :3], target(4, 1, 0)["masks"]) and torch.equal(full[0, 3:], full[0, :3])
    assert not full[1, [1, 2, 4, 5]].any()


@pytest.mark.parametrize(("count", "copies"), [(1, 7), (3, 2), (7, 1), (9, 1)])
def test_copies_fit_into_the_number_of_queries_with_at_least_one_copy(count, copies):
    noised = make_set(make(), [target(*range(count % 5)) if count < 5 else target(*([1] * count))])
    copied = min(count, 7)  # of more, a sample
    assert noised["repeats"] == pytest.approx(copies * copied / count)
    assert noised["queries"].content.shape[1] == copies * copied


def test_no_targets_give_no_rows_and_the_embedding_still_has_a_gradient():
    module = make()
    noised = make_set(module, [target(), target()])
    assert noised["queries"].content.shape == (2, 0, 8) and noised["queries"].masks((4, 6)).shape == (2, 0, 4, 6)
    assert noised["repeats"] == 1 and part_sizes(noised) == [0]
    noised["queries"].content.sum().backward()
    assert torch.equal(module.label_embed.weight.grad, torch.zeros_like(module.label_embed.weight))


def test_labels_flip_to_any_class_with_the_given_probability():
    module = make(label_flips=0.5, num_queries=4000)
    noised = make_set(module, [target(3)])
    kept = (noised["queries"].content[0] == module.label_embed.weight[3]).all(1).float().mean()
    assert abs(kept - 0.6) < 0.03, "half are drawn anew, one in five of these as it was"
    labels = module._add_noise(torch.full((1000,), 99))
    assert labels.min() == 0 and labels.max() == 4


def test_points_flip_in_proportion_to_the_mask_and_differently_in_each_layer():
    torch.manual_seed(0)
    masks = torch.zeros(3, 100, 100, dtype=torch.bool)
    masks[1, :40, :50] = True
    masks[2] = True
    flipped = (flip_points(masks, 0.2) ^ masks).sum((1, 2))
    assert flipped[0] == 0
    assert abs(flipped[1] - 400) < 80 and abs(flipped[2] - 2000) < 160
    masks = make_set(make(mask_flips=0.2), [target(1)])["queries"].masks
    assert not torch.equal(masks((HEIGHT, WIDTH)), masks((HEIGHT, WIDTH)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_queries=0), "num_queries=0: expected at least 1"),
        (dict(num_classes=0), "num_classes=0 leaves no labels to noise"),
        (dict(label_flips=1.5), r"label_flips=1\.5, mask_flips=0\.2: expected fractions in 0 to 1"),
        (dict(mask_flips=-0.1), r"mask_flips=-0\.1: expected fractions"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)
