"""CopyBlend: objects of a batch, blended into its images."""

import numpy as np
import pytest
import torch

from vitkit.data.loading.batch_augmentation import BatchAugmentation, CopyBlend, mix
from vitkit.errors import ConfigError
from vitkit.structures import Sample

SQUARES = dict(sizes=[64])


def sample(value, boxes, *, size=64, masks=True, **others):
    target = {"labels": torch.arange(len(boxes)) + value, "boxes_cxcywh": torch.tensor(boxes).view(-1, 4), **others}
    if masks:
        target["masks"] = torch.zeros(len(boxes), size, size, dtype=torch.bool)
        for mask, (cx, cy, w, h) in zip(target["masks"], boxes):
            y, x = int((cy - h / 2) * size), int((cx - w / 2) * size)
            mask[y : y + int(h * size), x : x + int(w * size)] = True
    return Sample(image=torch.full((3, size, size), value, dtype=torch.uint8), target=target)


def test_objects_without_a_mask_stay_so_among_others():
    lacking = dict(has_masks=torch.tensor([True, False]))
    some, all_ = (
        sample(0, [[0.5, 0.5, 0.5, 0.25], [0.25, 0.25, 0.25, 0.25]], **lacking),
        sample(7, [[0.5, 0.5, 0.25, 0.25]]),
    )
    assert mix(some, all_, 0.5)["target"]["has_masks"].tolist() == [True, False, True]
    assert mix(all_, some, 0.5)["target"]["has_masks"].tolist() == [True, True, False]
    for one in blended([some, all_], num_objects=3):
        target = one["target"]
        assert torch.equal(target["has_masks"], target["labels"] != 1) and len(target["masks"]) == len(target["labels"])


def batch():
    # Three objects: 32 x 16 and 16 x 16 pixels, and one of 4 x 4 that is too small.
    return [sample(0, [[0.5, 0.5, 0.5, 0.25], [0.25, 0.25, 0.0625, 0.0625]]), sample(100, [[0.25, 0.75, 0.25, 0.25]])]


def blended(samples, **options):
    return BatchAugmentation(SQUARES, None, dict(probability=1.0, share=[0.25, 0.25], **options), seed=1)(samples, 0, 0)


def test_objects_are_blended_with_their_boxes_and_masks():
    before = batch()
    after = blended(before, margin=[0.0, 0.0])
    for old, new in zip(before, after):
        count = len(old["target"]["labels"])
        assert new["target"]["labels"][:count].tolist() == old["target"]["labels"].tolist()
        assert sorted(new["target"]["labels"][count:].tolist()) == [0, 100]  # all large ones, its own included
        for label, box, mask in zip(*(new["target"][name][count:] for name in ("labels", "boxes_cxcywh", "masks"))):
            sides = (32, 16) if label == 0 else (16, 16)
            assert (box[2:] * 64).tolist() == list(sides)
            x0, y0 = ((box[:2] - box[2:] / 2) * 64).round().int().tolist()
            assert x0 >= 0 and y0 >= 0 and x0 + sides[0] <= 64 and y0 + sides[1] <= 64
            inside = torch.zeros(64, 64, dtype=torch.bool)
            inside[y0 : y0 + sides[1], x0 : x0 + sides[0]] = True
            assert torch.equal(mask, inside)
    # A quarter of the image below and three of the object, which is always of the batch before blending.
    blends = {100: {100, 25}, 0: {0, 75}}
    for value, new in zip((0, 100), after):
        changed = new["target"]["masks"][-2:][new["target"]["labels"][-2:] != value].any(0)
        assert set(new["image"][:, ~new["target"]["masks"][-2:].any(0)].unique().tolist()) == {value}
        assert set(new["image"][:, changed].unique().tolist()) - blends[value] <= {6, 18, 81, 93}  # twice
    assert all(torch.equal(old["image"], same["image"]) for old, same in zip(before, batch()))


def test_margins_belong_to_the_patch_and_not_to_the_box():
    images = [sample(0, []), sample(100, [[0.5, 0.5, 0.25, 0.25]])]
    first = blended(images, margin=[0.25, 0.25], num_objects=1)[0]
    box = first["target"]["boxes_cxcywh"][0] * 64
    assert box[2:].tolist() == [16, 16]
    rows, columns = (first["image"][0] == 75).any(1).nonzero(), (first["image"][0] == 75).any(0).nonzero()
    for lines, center in ((rows, box[1]), (columns, box[0])):
        low, high = max(int(center) - 12, 0), min(int(center) + 12, 64)
        assert (int(lines.min()), int(lines.max()) + 1) == (low, high)


def test_a_batch_without_large_objects_or_outside_the_epochs_stays():
    small = [sample(0, [[0.25, 0.25, 0.0625, 0.0625]]), sample(100, [])]
    assert all(new is old for new, old in zip(blended(small), small))
    blend = CopyBlend(probability=1.0, from_epoch=2, until_epoch=4)
    counts = [len(blend(batch(), epoch, np.random.default_rng(0))[1]["target"]["labels"]) for epoch in range(5)]
    assert counts == [1, 1, 3, 3, 1]


def test_mixed_batches_get_no_objects():
    augment = BatchAugmentation(SQUARES, dict(probability=0.5), dict(probability=1.0), seed=3)
    counts = {len(augment(batch(), 0, number)[1]["target"]["labels"]) for number in range(20)}
    assert counts == {3}  # 1 + 2 of the other image, or 1 + both large ones
    values = {int(augment(batch(), 0, number)[1]["image"][0, 0, 0]) for number in range(20)}
    assert 100 in values and any(40 < value < 60 for value in values)


def test_present_classes_are_no_longer_absent():
    images = [sample(0, [], negative_labels=[7, 100]), sample(100, [[0.5, 0.5, 0.25, 0.25]], negative_labels=[7])]
    assert blended(images)[0]["target"]["negative_labels"] == [7]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: BatchAugmentation(None, None, {}), "data.copy_blend: blends images of one size. Set data.squares"),
    (lambda: CopyBlend(probability=2), "data.copy_blend.probability: got 2; expected 0 to 1"),
    (lambda: CopyBlend(num_objects=0), "data.copy_blend.num_objects: got 0; expected at least 1"),
    (lambda: CopyBlend(share=(0.6, 0.5)), r"data.copy_blend.share: got \[0.6, 0.5\]; expected \(minimum, maximum\)"),
    (lambda: CopyBlend(margin=(-1, 0)), r"data.copy_blend.margin: got \[-1, 0\]; expected \(minimum, maximum\)"),
    (lambda: blended([Sample(image=torch.zeros(3, 64, 64, dtype=torch.uint8), target={"label": 1})]),
     "data.copy_blend: blends images with boxes, and these have none. Leave it out"),
    (lambda: blended([sample(0, [], phrases=["a"])]), "data.copy_blend: blends images whose labels are classes, and"),
])  # fmt: skip
def test_wrong_settings_and_samples_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
