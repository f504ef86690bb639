"""Unusual but possible targets (more than queries, none at all, masks without a pixel): no loss becomes NaN."""

import logging
import re

import pytest
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.registry import CRITERIA, MATCHERS

SIZE, STRIDE, NUM_CLASSES, NUM_QUERIES = (32, 48), 4, 3, 5
MASK_MATCHER = dict(type="HungarianMaskMatcher", cost_labels=1.0, cost_mask=1.0, cost_dice=1.0)
SPECS = {
    "points": dict(
        type="MaskCriterion",
        no_object_weight=0.1,
        num_points=64,
        weights=dict(labels=2.0, mask=5.0, dice=5.0),
        matcher=dict(**MASK_MATCHER, num_points=64),
    ),
    "focal": dict(
        type="MaskCriterion",
        no_object_weight=0.1,
        mask_loss="focal",
        weights=dict(labels=1.0, mask=20.0, dice=1.0),
        matcher=dict(**MASK_MATCHER, mask_cost="focal"),
    ),
    "boxes": dict(
        type="SetCriterion",
        no_object_weight=0.1,
        weights=dict(labels=1.0, l1=5.0, giou=2.0, mask=1.0, dice=1.0),
        matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
    ),
}


def target(count, *, empty=()):
    """Return a target of `count` objects; those in `empty` have no pixel and a box without area."""
    masks = torch.rand(count, 30, 41) > 0.7
    boxes = torch.rand(count, 4) * 0.4 + 0.1
    for i in empty:
        masks[i], boxes[i] = False, 0.0
    return dict(labels=torch.randint(NUM_CLASSES, (count,)), masks=masks, boxes_cxcywh=boxes, image_id=7)


CASES = {
    "more than queries": lambda: [target(9), target(2)],
    "none in one image": lambda: [target(0), target(2)],
    "none at all": lambda: [target(0), target(0)],
    "an empty mask": lambda: [target(3, empty=[1]), target(2)],
    "all masks empty": lambda: [target(2, empty=[0, 1]), target(1, empty=[0])],
    "all of these": lambda: [target(9, empty=[0, 5]), target(0)],
}


def layer():
    height, width = (side // STRIDE for side in SIZE)
    return dict(
        pred_logits=torch.randn(2, NUM_QUERIES, NUM_CLASSES + 1, requires_grad=True),
        pred_boxes=(torch.rand(2, NUM_QUERIES, 4) * 0.4 + 0.1).requires_grad_(),
        pred_masks=torch.randn(2, NUM_QUERIES, height, width, requires_grad=True),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SPECS)
def test_losses_and_gradients_are_finite_and_keys_are_constant(name, case):
    torch.manual_seed(0)
    criterion = CRITERIA.build(SPECS[name])
    outputs = dict(layer(), aux_outputs=[layer()], input_size=SIZE)
    losses = criterion(outputs, CASES[case]())
    assert losses.keys() == criterion(outputs, [target(1), target(1)]).keys()
    total = sum(losses.values())
    assert torch.isfinite(total), losses
    total.backward()
    for key in ("pred_logits", "pred_masks"):
        assert torch.isfinite(outputs[key].grad).all()


@pytest.mark.parametrize("name", SPECS)
def test_more_targets_than_queries_are_reported_once_with_their_number(name, caplog):
    criterion = CRITERIA.build(SPECS[name])
    outputs = dict(layer(), input_size=SIZE)
    with caplog.at_level(logging.WARNING, logger="vitkit"):
        criterion(outputs, [target(NUM_QUERIES), target(2)])
        assert not caplog.records
        criterion(outputs, [target(1), target(9)])
        criterion(outputs, [target(8), target(9)])
    (record,) = caplog.records
    assert "image 7 has 9 targets, but the model has 5 queries: 4 of the targets" in record.getMessage()


@pytest.mark.parametrize("mask_cost", ["points", "focal"])
def test_the_mask_matcher_matches_as_many_as_it_can(mask_cost):
    torch.manual_seed(0)
    matcher = MATCHERS.build(dict(**MASK_MATCHER, mask_cost=mask_cost, num_points=64))
    ((images,),) = matcher([([layer()], [target(9, empty=[2]), target(0)])], input_size=SIZE)
    assert [len(query) for query, _ in images] == [NUM_QUERIES, 0]
    query, found = images[0]
    assert query.tolist() == list(range(NUM_QUERIES)) and len(set(found.tolist())) == NUM_QUERIES


@pytest.mark.parametrize("mask_cost", ["points", "focal"])
@pytest.mark.parametrize(
    ("field", "terms"), [("pred_logits", "labels"), ("pred_masks", "mask, dice")], ids=["classes", "masks"]
)
def test_non_finite_cost_names_layer_image_and_term(mask_cost, field, terms, caplog):
    matcher = MATCHERS.build(dict(**MASK_MATCHER, mask_cost=mask_cost, num_points=64))
    layers = [layer(), layer()]
    layers[1][field].data[1] = torch.nan
    message = rf"non-finite cost in layer 1, image 1 of the batch \(image_id 7\): {terms}\. Expected finite costs"
    (matches,) = matcher([(layers, [target(2), target(3)])], input_size=SIZE)
    assert len(re.findall(message, caplog.text)) == 1
    assert [[len(query) for query, _ in layer] for layer in matches] == [[2, 3]] * 2


def test_label_out_of_range_names_image_and_label():
    matcher = MATCHERS.build(dict(**MASK_MATCHER, num_points=64))
    wrong = target(1) | dict(labels=torch.tensor([NUM_CLASSES]))
    with pytest.raises(DataError, match=r"image 1 of the batch \(image_id 7\) has labels \[3\]; expected 0\.\.2"):
        matcher([([layer()], [target(2), wrong])], input_size=SIZE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(weights=dict(label=1.0, mask=1.0, dice=1.0)), "unknown term 'label'. Did you mean 'labels'"),
        (dict(weights=dict(labels=1.0, mask=1.0)), "no weight for dice. Set it to 0"),
        (dict(no_object_weight=0.0), "no_object_weight=0.0: expected a positive number"),
        (dict(importance=1.5), "importance=1.5: expected at least 1, at least 1, and 0 to 1"),
        (dict(mask_loss="point"), "mask_loss='point': expected 'points' or 'focal'"),
        (dict(matcher=dict(**MASK_MATCHER, mask_cost="point")), "mask_cost='point': expected 'points' or 'focal'"),
        (dict(matcher=dict(**MASK_MATCHER, num_points=0)), "num_points=0: expected at least 1"),
    ],
)
def test_wrong_settings_of_the_mask_criterion_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        CRITERIA.build(SPECS["points"] | changes)
