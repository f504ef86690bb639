"""Criteria, matchers and training queries get the same from masks that are stored as bits, to the bit."""

import copy

import pytest
import torch

from vitkit.losses.matched import repeat_targets
from vitkit.ops.packed_masks import PackedMasks
from vitkit.registry import CRITERIA
from vitkit.training_queries.box_denoising import sample_targets
from vitkit.training_queries.mask_denoising import NoisedMasks

NUM_CLASSES, INPUT_SIZE, SIZES = 3, (24, 32), [(24, 29), (17, 32)]
_MASKS = dict(mask=5.0, dice=5.0)
_BOXES = dict(labels=2.0, l1=5.0, giou=2.0)
_COSTS = dict(cost_labels=2.0, cost_mask=5.0, cost_dice=5.0)
_BOX_COSTS = dict(cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)


def mask_criterion(kind):
    matcher = dict(type="HungarianMaskMatcher", mask_cost=kind, **_COSTS)
    return dict(
        type="MaskCriterion", mask_loss=kind, no_object_weight=0.1, weights=dict(labels=2.0, **_MASKS), matcher=matcher
    )


def box_mask_criterion(mask_loss, mask_cost):
    matcher = dict(type="HungarianBoxMaskMatcher", mask_cost=mask_cost, cost_mask=5.0, cost_dice=5.0, **_BOX_COSTS)
    return dict(type="BoxMaskCriterion", mask_loss=mask_loss, weights=_BOXES | _MASKS, matcher=matcher)


CRITERION_SPECS = {
    "points": mask_criterion("points"),
    "whole": mask_criterion("focal"),
    "windows": mask_criterion("points"),
    "DETR": dict(
        type="SetCriterion",
        no_object_weight=0.1,
        weights=_BOXES | _MASKS,
        matcher=dict(type="HungarianMatcher", **_BOX_COSTS),
    ),
    "points beside boxes": box_mask_criterion("points", "points"),
    "within boxes": box_mask_criterion("boxes", "focal"),
    "per pixel": dict(type="PerPixelCriterion", dice_weight=1.0),
}


def make_targets(counts):
    """Return targets of random masks: the second of an image is full, the third a pixel, and the fourth empty."""
    generator = torch.Generator().manual_seed(0)
    targets = []
    for size, count in zip(SIZES, counts):
        masks = torch.rand(count, *size, generator=generator) > 0.6
        masks[1:2], masks[2:4] = True, False
        masks[2:3, 3, 7] = True
        boxes = 0.2 + 0.3 * torch.rand(count, 4, generator=generator)
        targets.append(dict(labels=torch.arange(count) % NUM_CLASSES, boxes_cxcywh=boxes, masks=masks, image_size=size))
    return targets


def packed(targets):
    return [{**t, "masks": PackedMasks.pack(t["masks"].numpy(), t["masks"].shape[1:])} for t in targets]


def make_outputs(name):
    """Return random outputs of two layers and a function that returns their gradients."""
    generator = torch.Generator().manual_seed(1)
    leaves = []

    def leaf(*shape):
        leaves.append(torch.randn(*shape, generator=generator).requires_grad_())
        return leaves[-1]

    images = 3 if name == "windows" else 2
    features = leaf(images, 4, 6, 8)

    def layer():
        if name == "per pixel":
            return dict(pred_semantic=leaf(2, NUM_CLASSES, 6, 8))
        num_logits = NUM_CLASSES + (name in ("points", "whole", "windows", "DETR"))
        masks = dict(pred_masks=leaf(2, 6, 6, 8)) if name == "DETR" else dict(mask_embed=leaf(images, 6, 4))
        boxes = leaf(images, 6, 4).sigmoid()
        return dict(pred_logits=leaf(images, 6, num_logits), pred_boxes=boxes, mask_features=features, **masks)

    outputs = dict(layer(), aux_outputs=[layer()], input_size=INPUT_SIZE)
    if name == "windows":
        outputs |= dict(input_size=(16, 24), windows=torch.tensor([[0, 0, 0], [0, 8, 5], [1, 1, 8]]))
    return outputs, leaves


@pytest.mark.parametrize("counts", [(4, 1), (0, 3), (0, 0), (9, 2)], ids=str)
@pytest.mark.parametrize("name", CRITERION_SPECS)
def test_losses_and_gradients_are_those_of_the_masks(name, counts):
    targets, results = make_targets(counts), []
    for each in (targets, packed(targets)):
        criterion = CRITERIA.build(copy.deepcopy(CRITERION_SPECS[name])).train()
        outputs, leaves = make_outputs(name)
        torch.manual_seed(2)
        losses = criterion(outputs, each)
        sum(losses.values()).backward()
        results.append((losses, [leaf.grad for leaf in leaves], criterion.count(each)))
    (expected, expected_grads, expected_count), (losses, grads, count) = results
    assert losses == expected and count == expected_count
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, expected_grads))


def test_images_with_and_without_masks_train_together():
    targets = make_targets((4, 2))
    losses = []
    for first in (targets[0], packed(targets)[0]):
        criterion = CRITERIA.build(copy.deepcopy(CRITERION_SPECS["within boxes"]))
        boxes_alone = {key: value for key, value in targets[1].items() if key != "masks"}
        losses.append(criterion(make_outputs("within boxes")[0], [first, boxes_alone]))
    assert losses[0] == losses[1]


def test_training_queries_have_the_same_masks():
    targets = make_targets((9, 2))
    noised = []
    for each in (targets, packed(targets)):
        torch.manual_seed(0)
        repeated = repeat_targets(each, 2)
        sampled, _ = sample_targets(repeated, 7)
        assert all(type(t["masks"]) is type(s["masks"]) for t, s in zip(each, sampled))
        same_size = [{**target, "masks": target["masks"][:, :16, :24]} for target in sampled]
        noised.append(NoisedMasks(same_size, 2, 0.3)((5, 7)))
    assert torch.equal(*noised) and noised[0].shape == (2, 14, 5, 7)
