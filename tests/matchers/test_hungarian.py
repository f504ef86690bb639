import itertools
import re

import pytest
import torch

from vitkit.errors import DataError
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.ops.boxes import cxcywh_to_xyxy, generalized_box_iou
from vitkit.registry import MATCHERS

NUM_CLASSES = 5


def make_matcher() -> HungarianMatcher:
    return MATCHERS.build(dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0))


def match(matcher, logits, boxes, targets):
    """Match the layers of logits and boxes, (L, B, Q, ...)."""
    layers = [dict(pred_logits=l, pred_boxes=b) for l, b in zip(logits, boxes)]
    (matches,) = matcher([(layers, targets)])
    return matches


def make_case(counts: list[int], *, num_layers: int = 2, num_queries: int = 6):
    torch.manual_seed(0)
    logits = torch.randn(num_layers, len(counts), num_queries, NUM_CLASSES + 1)
    boxes = torch.rand(num_layers, len(counts), num_queries, 4)
    targets = [
        {"labels": torch.randint(NUM_CLASSES, (n,)), "boxes_cxcywh": torch.rand(n, 4), "image_id": 40 + i}
        for i, n in enumerate(counts)
    ]
    return logits, boxes, targets


def pair_cost(logits, box, label, target_box) -> float:
    giou = generalized_box_iou(cxcywh_to_xyxy(box), cxcywh_to_xyxy(target_box))
    return float(-logits.softmax(-1)[label] + 5 * (box - target_box).abs().sum() - 2 * giou)


def test_matching_is_the_cheapest_of_all_assignments():
    counts = [3, 0, 2]
    logits, boxes, targets = make_case(counts)
    matches = match(make_matcher(), logits, boxes, targets)
    for layer, image in itertools.product(range(2), range(3)):
        query, target = matches[layer][image]
        cost = [
            [pair_cost(logits[layer, image, q], boxes[layer, image, q], label, target_box) for q in range(6)]
            for label, target_box in zip(targets[image]["labels"], targets[image]["boxes_cxcywh"])
        ]
        best = min(
            itertools.permutations(range(6), counts[image]), key=lambda qs: sum(cost[t][q] for t, q in enumerate(qs))
        )
        assert sorted(zip(target.tolist(), query.tolist())) == list(enumerate(best))


@pytest.mark.parametrize(("num_layers", "counts", "num_queries"), [(1, [1], 1), (2, [3, 0, 2], 6)])
def test_predictions_and_targets_are_not_modified(num_layers, counts, num_queries):
    case = make_case(counts, num_layers=num_layers, num_queries=num_queries)
    match(make_matcher(), *case)
    untouched = make_case(counts, num_layers=num_layers, num_queries=num_queries)
    torch.testing.assert_close(case, untouched, rtol=0, atol=0)


def test_queries_ascend_and_indices_are_int64_on_the_cpu():
    matches = match(make_matcher(), *make_case([4, 3]))
    for query, target in matches[0] + matches[1]:
        assert query.tolist() == sorted(query.tolist())
        assert query.dtype == target.dtype == torch.int64


@pytest.mark.parametrize("counts", [[0], [0, 0], [2, 0]])
def test_images_without_targets_get_empty_indices(counts):
    matches = match(make_matcher(), *make_case(counts))
    assert [[len(query) for query, _ in layer] for layer in matches] == [counts, counts]


def test_with_more_targets_than_queries_every_query_is_matched():
    query, target = match(make_matcher(), *make_case([9], num_queries=4))[0][0]
    assert query.tolist() == [0, 1, 2, 3]
    assert len(set(target.tolist())) == 4


def test_an_images_matches_do_not_depend_on_the_batch():
    logits, boxes, targets = make_case([3, 5, 1])
    together = match(make_matcher(), logits, boxes, targets)
    for i in range(3):
        alone = match(make_matcher(), logits[:, i : i + 1], boxes[:, i : i + 1], targets[i : i + 1])
        for layer in range(2):
            assert all(a.equal(b) for a, b in zip(alone[layer][0], together[layer][i]))


def test_half_precision_under_autocast_matches_like_its_float32_copy():
    logits, boxes, targets = make_case([3, 2])
    logits, boxes = logits.bfloat16(), boxes.bfloat16()
    expected = match(make_matcher(), logits.float(), boxes.float(), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = match(make_matcher(), logits, boxes, targets)
    assert all(a.equal(b) for e, g in zip(expected, got) for pe, pg in zip(e, g) for a, b in zip(pe, pg))


def test_nan_logit_names_layer_image_and_term(caplog):
    logits, boxes, targets = make_case([3, 2])
    logits[1, 1, 4] = torch.nan
    message = r"layer 1, image 1 of the batch \(image_id 41\), query 4, target 0: labels = nan;"
    expected = match(make_matcher(), *make_case([3, 2]))
    matches = match(make_matcher(), logits, boxes, targets)
    assert re.search(message, caplog.text)
    # All targets are still matched, and the matches of the other layers and images do not change.
    assert [[len(query) for query, _ in layer] for layer in matches] == [[3, 2]] * len(matches)
    assert all(a.equal(b) for a, b in zip(expected[0][1], matches[0][1]))


def test_infinite_box_names_its_terms(caplog):
    logits, boxes, targets = make_case([3, 2])
    boxes[0, 0, 2, 0] = torch.inf
    matches = match(make_matcher(), logits, boxes, targets)
    assert re.search(r"layer 0, image 0 .* query 2, target 0: l1 = inf, giou = nan", caplog.text)
    assert 2 not in matches[0][0][0]


def test_label_out_of_range_names_image_and_label():
    logits, boxes, targets = make_case([3, 2])
    targets[1]["labels"][1] = NUM_CLASSES  # the no-object class is not a valid label
    with pytest.raises(DataError, match=r"image_id 41\), target 1 has label 5; expected 0\.\.4"):
        match(make_matcher(), logits, boxes, targets)


def test_focal_cost_is_the_loss_saved_by_a_true_label():
    torch.manual_seed(0)
    logits, boxes = torch.randn(1, 2, 4, NUM_CLASSES), torch.rand(1, 2, 4, 4)
    targets = [{"labels": torch.tensor([1, 4]), "boxes_cxcywh": torch.rand(2, 4)} for _ in range(2)]
    weights = dict(cost_labels=2.0, cost_l1=0.0, cost_giou=0.0)
    matcher = MATCHERS.build(dict(type="HungarianMatcher", activation="sigmoid", **weights))
    for image, (query, target) in enumerate(match(matcher, logits, boxes, targets)[0]):
        p = logits[0, image].sigmoid()[:, targets[image]["labels"]]  # (Q, N)
        cost = 0.25 * (1 - p) ** 2 * -p.log() - 0.75 * p**2 * -(1 - p).log()
        best = min(
            itertools.permutations(range(4), 2), key=lambda queries: sum(cost[q, t] for t, q in enumerate(queries))
        )
        assert sorted(zip(query.tolist(), target.tolist())) == sorted(zip(best, range(2)))


def test_focal_cost_treats_the_last_column_as_a_class():
    matcher = MATCHERS.build(dict(type="HungarianMatcher", activation="sigmoid", cost_labels=1, cost_l1=1, cost_giou=1))
    logits, boxes = torch.zeros(1, 1, 3, 2), torch.rand(1, 1, 3, 4)
    match(matcher, logits, boxes, [{"labels": torch.tensor([1]), "boxes_cxcywh": torch.rand(1, 4)}])
    with pytest.raises(DataError, match=r"label 2; expected 0\.\.1"):
        match(matcher, logits, boxes, [{"labels": torch.tensor([2]), "boxes_cxcywh": torch.rand(1, 4)}])


def test_a_box_whose_edges_have_crossed_counts_as_a_line():
    """From the line at x = 0.2 the hull is larger than from the narrow box at 0.25, and so the GIoU lower."""
    boxes = torch.tensor([[[[0.2, 0.5, -0.2, 0.2], [0.25, 0.5, 0.01, 0.2]]]])
    targets = [{"labels": torch.zeros(1, dtype=torch.int64), "boxes_cxcywh": torch.tensor([[0.6, 0.5, 0.2, 0.2]])}]
    matcher = HungarianMatcher(cost_labels=0.0, cost_l1=0.0, cost_giou=1.0)
    (((query, _),),) = match(matcher, torch.zeros(1, 1, 2, 2), boxes, targets)
    assert query.tolist() == [1]
