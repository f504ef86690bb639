import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import box_iou

from vitkit.errors import ConfigError
from vitkit.losses.class_losses import focal_loss, iou_aware_loss, matchability_aware_loss, varifocal_loss
from vitkit.losses.matched import MatchedLayers
from vitkit.ops.boxes import box_iou as paired_iou
from vitkit.ops.boxes import cxcywh_to_xyxy
from vitkit.registry import CRITERIA

LN2, LN4, LN4_3 = math.log(2), math.log(4), math.log(4 / 3)
QUERY_INDICES = tuple(torch.zeros(1, 1, dtype=torch.int64) for _ in range(3))
"""Indices of the only match: layer 0, image 0, query 0."""
LABEL = torch.ones(1, 1, dtype=torch.int64)
"""The class of the match, 1."""


def of_matches(logits, indices, labels) -> MatchedLayers:
    """Return the matches of a layer's queries, whose targets are not looked at."""
    return MatchedLayers(logits, indices, labels, labels, torch.ones(()), torch.ones(()), None)


def one_match(loss, logit: float, iou: float, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of two queries and two classes, all with one logit, and its gradient."""
    logits = torch.full((1, 1, 2, 2), logit, requires_grad=True)
    value = loss(of_matches(logits, QUERY_INDICES, LABEL), torch.tensor([[iou]]), **settings)
    value.sum().backward()
    return value.detach(), logits.grad[0, 0]


def test_varifocal_loss_by_hand():
    value, gradient = one_match(varifocal_loss, 0.0, 0.8, alpha=0.75, gamma=2.0)
    torch.testing.assert_close(value, torch.tensor([0.8 * LN2 + 3 * 0.75 * 0.25 * LN2]))
    # The weights are constants: that of no object is 0.75 * 0.25, and the slope of its cross entropy p.
    torch.testing.assert_close(gradient, torch.tensor([[0.09375, 0.8 * (0.5 - 0.8)], [0.09375, 0.09375]]))


def test_label_of_a_match_without_overlap_costs_nothing_in_varifocal_loss():
    value, gradient = one_match(varifocal_loss, 0.0, 0.0, alpha=0.75, gamma=2.0)
    torch.testing.assert_close(value, torch.tensor([3 * 0.75 * 0.25 * LN2]))
    assert gradient[0, 1] == 0


def test_matchability_aware_loss_by_hand():
    # p = 3/4, and the target of an IoU of 1/4 is (1/4) ** 1.5 = 1/8.
    value, gradient = one_match(matchability_aware_loss, math.log(3), 0.25, gamma=1.5)
    torch.testing.assert_close(value, torch.tensor([LN4_3 / 8 + LN4 * 7 / 8 + 3 * 0.75**1.5 * LN4]))
    torch.testing.assert_close(gradient[0], torch.tensor([0.75**2.5, 0.75 - 0.125]))


def test_iou_aware_loss_by_hand():
    # p = 1/2 and the target of an IoU of 1/16 is (1/2) ** 0.25 * (1/16) ** 0.75 = 2 ** -3.25.
    value, gradient = one_match(iou_aware_loss, 0.0, 1 / 16, alpha=0.25, gamma=2.0)
    torch.testing.assert_close(value, torch.tensor([LN2 + 3 * LN2 / 4]))
    # Only the target is a constant: no object has the slope of p^2 times its cross entropy.
    others = 2 * 0.5 * 0.25 * LN2 + 0.25 * 0.5
    torch.testing.assert_close(gradient, torch.tensor([[others, 0.5 - 2**-3.25], [others, others]]))


def test_match_without_overlap_still_counts_as_an_object_in_iou_aware_loss():
    _, gradient = one_match(iou_aware_loss, 0.0, 0.0, alpha=0.25, gamma=2.0)
    assert gradient[0, 1].item() == pytest.approx(0.5 - 0.01)


def test_confident_poor_match_costs_more_with_mal_than_with_varifocal():
    poor = dict(logit=4.0, iou=0.05)
    others = 3 * torch.sigmoid(torch.tensor(4.0)) ** 2 * F.softplus(torch.tensor(4.0))
    mal = one_match(matchability_aware_loss, **poor, gamma=2.0)[0] - others
    varifocal = one_match(varifocal_loss, **poor, alpha=1.0, gamma=2.0)[0] - others
    assert mal > 3.9
    assert varifocal < 0.3


@pytest.mark.parametrize("loss", [varifocal_loss, matchability_aware_loss])
def test_perfect_boxes_without_focal_factor_give_binary_cross_entropy(loss):
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 4, 5)
    query_indices = (torch.tensor([[0], [1], [2]]), torch.tensor([[1], [0], [1]]), torch.tensor([[3], [0], [2]]))
    labels = torch.tensor([[4], [0], [2]])
    class_targets = torch.zeros_like(logits)
    class_targets[0, 1, 3, 4] = class_targets[1, 0, 0, 0] = class_targets[2, 1, 2, 2] = 1
    expected = F.binary_cross_entropy_with_logits(logits, class_targets, reduction="none").sum((1, 2, 3))
    settings = dict(alpha=1.0, gamma=0.0) if loss is varifocal_loss else dict(gamma=0.0)
    torch.testing.assert_close(loss(of_matches(logits, query_indices, labels), torch.ones(3, 1), **settings), expected)


def test_no_object_costs_as_much_as_in_the_focal_loss():
    logits, nothing = torch.randn(2, 1, 3, 4), torch.zeros(2, 0, dtype=torch.int64)
    matched = of_matches(logits, (nothing,) * 3, nothing)
    focal = focal_loss(matched, alpha=0.25, gamma=2.0)
    torch.testing.assert_close(varifocal_loss(matched, nothing.float(), alpha=0.75, gamma=2.0), focal)
    mal = matchability_aware_loss(matched, nothing.float(), gamma=2.0)
    torch.testing.assert_close(0.75 * mal, focal)


def test_paired_iou_is_the_diagonal_of_all_pairs_and_zero_without_area():
    torch.manual_seed(0)
    a, b = (cxcywh_to_xyxy(torch.rand(6, 4)) for _ in range(2))
    torch.testing.assert_close(paired_iou(a, b), box_iou(a, b).diagonal())
    points = torch.full((1, 4), 0.5)
    assert paired_iou(points, points) == 0


def make_criterion(class_loss: str, **changes):
    matcher = dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    weights = dict(labels=2.0, l1=5.0, giou=2.0)
    return CRITERIA.build(dict(type="SetCriterion", class_loss=class_loss, matcher=matcher, weights=weights, **changes))


def make_case(counts: list[int]):
    torch.manual_seed(0)

    def layer():
        shape = (len(counts), 6)
        return dict(
            pred_logits=torch.randn(*shape, 5).requires_grad_(), pred_boxes=torch.rand(*shape, 4).requires_grad_()
        )

    outputs = dict(**layer(), aux_outputs=[layer()])
    outputs["training_outputs"] = [dict(layer(), name="enc", class_agnostic=True)]
    targets = [dict(labels=torch.randint(5, (n,)), boxes_cxcywh=torch.rand(n, 4)) for n in counts]
    return outputs, targets


def by_loop(criterion, class_loss: str, layer: dict, targets: list[dict]) -> torch.Tensor:
    """Compute the loss by the original code's formulas, class by class."""
    ((matches,),) = criterion.matcher([([layer], targets)])
    total = torch.zeros(())
    for i, (queries, indices) in enumerate(matches):
        pairs = dict(zip(queries.tolist(), indices.tolist()))
        for query, logits in enumerate(layer["pred_logits"][i]):
            for c, p in enumerate(logits.sigmoid()):
                index = pairs.get(query)
                if index is None or targets[i]["labels"][index] != c:
                    total -= (0.75 * p**2 if class_loss == "varifocal" else p**1.5) * (1 - p).log()
                    continue
                boxes = layer["pred_boxes"][i, query], targets[i]["boxes_cxcywh"][index]
                q = box_iou(*(cxcywh_to_xyxy(box[None]) for box in boxes)).squeeze()
                if class_loss == "varifocal":
                    total -= q * (q * p.log() + (1 - q) * (1 - p).log())
                else:
                    total -= q**1.5 * p.log() + (1 - q**1.5) * (1 - p).log()
    return 2 * total / max(sum(len(t["labels"]) for t in targets), 1)


@pytest.mark.parametrize("class_loss", ["varifocal", "mal"])
@pytest.mark.parametrize("counts", [[3, 2], [0, 4], [0, 0], [8, 1]])
def test_losses_of_layers_and_first_stage_equal_a_plain_loop(counts, class_loss):
    criterion = make_criterion(class_loss)
    outputs, targets = make_case(counts)
    losses = criterion(outputs, targets)
    with torch.no_grad():
        objects = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
        torch.testing.assert_close(losses["labels"], by_loop(criterion, class_loss, outputs, targets))
        aux, encoder = outputs["aux_outputs"][0], outputs["training_outputs"][0]
        torch.testing.assert_close(losses["aux0_labels"], by_loop(criterion, class_loss, aux, targets))
        torch.testing.assert_close(losses["enc_labels"], by_loop(criterion, class_loss, encoder, objects))
    losses["labels"].backward()
    assert outputs["pred_logits"].grad.isfinite().all()
    assert outputs["pred_boxes"].grad is None, "the class loss must not change the IoU, which is its target"


def test_wrong_class_losses_and_arguments_are_named():
    with pytest.raises(ConfigError, match="class_loss='focall': unknown loss. Did you mean 'focal'"):
        make_criterion("focall")
    with pytest.raises(ConfigError, match=r"focal_alpha=0\.25: class_loss='mal' has no alpha"):
        make_criterion("mal", focal_alpha=0.25)
    with pytest.raises(ConfigError, match=r"focal_gamma=-1\.0: expected at least 0"):
        make_criterion("varifocal", focal_gamma=-1.0)
    with pytest.raises(ConfigError, match=r"no_object_weight=0\.1: class_loss='mal' has no class"):
        make_criterion("mal", no_object_weight=0.1)
