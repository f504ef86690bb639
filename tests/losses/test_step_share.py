"""With the counts of a step, batch by batch gives the loss of all its images at once."""

import pytest
import torch

from vitkit.engine.step import set_step_share, step_shares
from vitkit.losses.matched import SetLayers
from vitkit.registry import CRITERIA
from vitkit.structures import PAD

CPU = torch.device("cpu")
COSTS = dict(cost_labels=1.0, cost_l1=5.0, cost_giou=2.0)
COUNTS = [3, 1, 0, 0, 2, 4]
"""Number of objects in each of six images; two images make a batch, of which the second has none."""


def detection(class_loss: str):
    generator = torch.Generator().manual_seed(0)
    softmax = class_loss == "cross_entropy"
    boxes = torch.rand(6, 5, 4, generator=generator) * 0.4 + 0.2
    outputs = {"pred_logits": torch.randn(6, 5, 3 + softmax, generator=generator), "pred_boxes": boxes}
    targets = [
        {
            "labels": torch.randint(3, (count,), generator=generator),
            "boxes_cxcywh": torch.rand(count, 4, generator=generator) * 0.4 + 0.2,
        }
        for count in COUNTS
    ]
    matcher = dict(type="HungarianMatcher", activation="softmax" if softmax else "sigmoid", **COSTS)
    spec = dict(type="SetCriterion", class_loss=class_loss, matcher=matcher, weights=dict(labels=1.0, l1=5.0, giou=2.0))
    return spec | (dict(no_object_weight=0.1) if softmax else {}), outputs, targets


def words():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 2, 5, 1, 5, 3]
    targets = [{"tokens": torch.randint(PAD + 1, 9, (length,), generator=generator)} for length in lengths]
    return dict(type="SequenceLoss"), {"logits": torch.randn(6, 5, 9, generator=generator)}, targets


def classes():
    outputs = {"logits": torch.randn(6, 3, generator=torch.Generator().manual_seed(0))}
    targets = [{"label": label} for label in (0, 2, 0, 0, 1, 2)]
    return dict(type="ClassificationLoss", class_weights=[0.1, 1.0, 3.0]), outputs, targets


def keypoints():
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(6, 4, 3, 3, generator=generator) * 50
    points[..., 2] = 2
    points[:, :3, :, 2] *= torch.tensor([1, 1, 0, 0, 0, 1])[:, None, None]  # only the last person is in all images
    targets = [
        {"labels": torch.zeros(4, dtype=torch.int64), "keypoints": keypoints, "areas": torch.full((4,), 400.0)}
        | {"boxes_cxcywh": torch.full((4, 4), 0.4), "image_size": (64, 64)}
        for keypoints in points
    ]
    outputs = {
        "pred_logits": torch.randn(6, 9, 2, generator=generator),
        "pred_keypoints": torch.rand(6, 9, 3, 2, generator=generator),
    }
    matcher = dict(type="HungarianKeypointMatcher", cost_labels=2.0, cost_keypoint_l1=10.0, cost_oks=4.0)
    weights = dict(labels=2.0, keypoint_l1=10.0, oks=4.0)
    return dict(type="KeypointCriterion", matcher=matcher, weights=weights), outputs, targets


def weighted(spec_outputs_targets):
    spec, outputs, targets = spec_outputs_targets
    return spec | dict(class_weights=[0.1, 1.0, 10.0]), outputs, targets


def pixels():
    generator = torch.Generator().manual_seed(0)
    outputs = {"pred_semantic": torch.randn(6, 3, 4, 4, generator=generator), "input_size": (4, 4)}
    fractions = torch.tensor([0.1, 0.9, 0.0, 0.0, 0.5, 0.3])
    masks = torch.rand(6, 2, 4, 4, generator=generator) < fractions[:, None, None, None]
    return dict(type="PerPixelCriterion"), outputs, [{"labels": torch.tensor([0, 2]), "masks": m} for m in masks]


CASES = {
    "cross_entropy": lambda: detection("cross_entropy"),
    "focal": lambda: detection("focal"),
    "weighted cross_entropy": lambda: weighted(detection("cross_entropy")),
    "keypoints": keypoints,
    "words": words,
    "classes": classes,
    "pixels": pixels,
    "weighted pixels": lambda: weighted(pixels()),
}


def part_of(outputs: dict, start: int) -> dict:
    return {name: value[start : start + 2] if torch.is_tensor(value) else value for name, value in outputs.items()}


@pytest.mark.parametrize("case", CASES)
def test_batches_that_know_the_step_have_the_loss_of_the_joined_batch(case):
    spec, outputs, targets = CASES[case]()
    criterion = CRITERIA.build(spec)
    joined = criterion(outputs, targets)
    starts = (0, 2, 4)
    parts = [targets[start : start + 2] for start in starts]
    plain, known = [], []
    for start, part, share in zip(starts, parts, step_shares(criterion, parts, CPU)):
        set_step_share(criterion, None)
        plain.append(criterion(part_of(outputs, start), part))
        set_step_share(criterion, share)
        known.append(criterion(part_of(outputs, start), part))
    for name, value in joined.items():
        torch.testing.assert_close(torch.stack([losses[name] for losses in known]).mean(), value)
    assert any(not torch.stack([losses[name] for losses in plain]).mean().isclose(joined[name]) for name in joined)


def test_a_step_without_any_object_has_a_finite_loss():
    spec, outputs, targets = detection("focal")
    criterion = CRITERIA.build(spec)
    empty = [{name: value[:0] for name, value in target.items()} for target in targets]
    joined = criterion(outputs, empty)
    shares = step_shares(criterion, [empty[:3], empty[3:]], CPU)
    halves = []
    for start, share in zip((0, 3), shares):
        set_step_share(criterion, share)
        halves.append(criterion({k: v[start : start + 3] for k, v in outputs.items()}, empty[start : start + 3]))
    torch.testing.assert_close(halves[0]["labels"] / 2 + halves[1]["labels"] / 2, joined["labels"])


@pytest.mark.parametrize("mask_loss", ["points", "boxes"])
def test_mask_losses_are_divided_by_the_objects_with_masks(mask_loss):
    weights = dict(labels=1, l1=5, giou=2, mask=5, dice=5)
    costs = dict(cost_labels=2, cost_l1=5, cost_giou=2, cost_mask=5, cost_dice=5)
    matcher = dict(type="HungarianBoxMaskMatcher", **costs)
    criterion = CRITERIA.build(
        dict(type="BoxMaskCriterion", matcher=matcher, weights=weights, mask_loss=mask_loss, class_weights=[1.0, 3.0])
    )

    def target(number, num_masks):
        has_masks = torch.arange(number) < num_masks
        return dict(labels=torch.arange(number) % 2, boxes_cxcywh=torch.rand(number, 4), has_masks=has_masks)

    batches = [[target(10, 0)], [target(2, 2)], [target(3, 1)]]
    for batch, share in zip(batches, step_shares(criterion, batches, CPU)):
        set_step_share(criterion, share)
        number = batch[0]["has_masks"].sum().float()
        if number or mask_loss == "points":
            assert criterion._mask_normalizer(SetLayers([""], [], batch, 1, None, False), number).item() == 1
