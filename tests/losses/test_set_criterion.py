import pytest
import torch
import torch.nn.functional as F

from vitkit.errors import ConfigError, DataError
from vitkit.matchers.base import Matcher
from vitkit.ops.boxes import cxcywh_to_xyxy, generalized_box_iou
from vitkit.registry import CRITERIA

NUM_CLASSES, NUM_QUERIES = 5, 6
MATCHER = dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0)
WEIGHTS = dict(labels=1.0, l1=5.0, giou=2.0)


def make_criterion(**changes):
    settings = dict(type="SetCriterion", matcher=MATCHER, weights=WEIGHTS, no_object_weight=0.1)
    return CRITERIA.build({**settings, **changes})


def make_layer(batch_size: int, dtype: torch.dtype = torch.float32) -> dict:
    return {
        "pred_logits": torch.randn(batch_size, NUM_QUERIES, NUM_CLASSES + 1).to(dtype).requires_grad_(),
        "pred_boxes": torch.rand(batch_size, NUM_QUERIES, 4).to(dtype).requires_grad_(),
    }


def make_case(counts: list[int], *, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    outputs = {**make_layer(len(counts), dtype), "aux_outputs": [make_layer(len(counts), dtype) for _ in range(2)]}
    targets = [{"labels": torch.randint(NUM_CLASSES, (n,)), "boxes_cxcywh": torch.rand(n, 4)} for n in counts]
    return outputs, targets


def losses_by_loop(criterion, layer: dict, targets: list[dict]) -> dict[str, torch.Tensor]:
    """Compute DETR's terms of one layer, image by image and pair by pair."""
    ((matches,),) = criterion.matcher([([layer], targets)])
    classes = torch.full(layer["pred_logits"].shape[:2], NUM_CLASSES)
    l1 = giou = torch.zeros(())
    for i, (queries, indices) in enumerate(matches):
        for query, index in zip(queries, indices):
            classes[i, query] = targets[i]["labels"][index]
            box, target_box = layer["pred_boxes"][i, query], targets[i]["boxes_cxcywh"][index]
            l1 = l1 + F.l1_loss(box, target_box, reduction="sum")
            giou = giou + 1 - generalized_box_iou(cxcywh_to_xyxy(box), cxcywh_to_xyxy(target_box))
    num_boxes = max(sum(len(t["labels"]) for t in targets), 1)
    class_weights = torch.tensor([1.0] * NUM_CLASSES + [0.1])
    labels = F.cross_entropy(layer["pred_logits"].transpose(1, 2), classes, class_weights)
    return {"labels": labels, "l1": 5 * l1 / num_boxes, "giou": 2 * giou / num_boxes}


@pytest.mark.parametrize("counts", [[3, 2], [0, 4], [8, 1]], ids=["both", "one_empty", "more_than_queries"])
def test_terms_of_every_layer_equal_a_plain_loop(counts):
    criterion = make_criterion()
    outputs, targets = make_case(counts)
    losses = criterion(outputs, targets)
    for prefix, layer in {"": outputs, "aux0_": outputs["aux_outputs"][0], "aux1_": outputs["aux_outputs"][1]}.items():
        for name, expected in losses_by_loop(criterion, layer, targets).items():
            torch.testing.assert_close(losses[prefix + name], expected)


@pytest.mark.parametrize("counts", [[3, 2], [0, 2], [0, 0]])
def test_keys_are_constant_and_gradients_reach_every_output(counts):
    outputs, targets = make_case(counts)
    losses = make_criterion()(outputs, targets)
    assert list(losses) == [f"{p}{n}" for p in ("", "aux0_", "aux1_") for n in ("labels", "l1", "giou")]
    sum(losses.values()).backward()
    for layer in (outputs, *outputs["aux_outputs"]):
        assert layer["pred_logits"].grad.isfinite().all()
        assert layer["pred_boxes"].grad.isfinite().all()


def test_without_any_target_the_box_terms_are_zero_and_every_query_is_no_object():
    outputs, targets = make_case([0, 0])
    losses = make_criterion()(outputs, targets)
    assert losses["l1"] == losses["aux1_giou"] == 0
    expected = -outputs["pred_logits"].log_softmax(-1)[..., -1].mean()
    torch.testing.assert_close(losses["labels"], expected)


def test_zero_weight_keeps_the_key():
    outputs, targets = make_case([2])
    losses = make_criterion(weights=dict(labels=1.0, l1=0.0, giou=2.0))(outputs, targets)
    assert losses["l1"] == losses["aux0_l1"] == 0
    assert losses["giou"] > 0


def test_outputs_may_lack_auxiliary_layers():
    outputs, targets = make_case([2])
    del outputs["aux_outputs"]
    assert list(make_criterion()(outputs, targets)) == ["labels", "l1", "giou"]


def test_loss_is_float32_under_autocast():
    outputs, targets = make_case([2, 3], dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = make_criterion()(outputs, targets)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    as_float = {
        **{k: v.float() for k, v in outputs.items() if k != "aux_outputs"},
        "aux_outputs": [{k: v.float() for k, v in layer.items()} for layer in outputs["aux_outputs"]],
    }
    for name, expected in make_criterion()(as_float, targets).items():
        torch.testing.assert_close(losses[name], expected)


def test_matched_accuracy_counts_matched_queries_of_the_last_layer():
    criterion = make_criterion()
    outputs, targets = make_case([2, 1, 0])
    with torch.no_grad():
        outputs["pred_logits"].zero_()
        for i, target in enumerate(targets):
            outputs["pred_boxes"][i, : len(target["labels"])] = target["boxes_cxcywh"]
        outputs["pred_logits"][0, 0, targets[0]["labels"][0]] = 9
        outputs["pred_logits"][0, 1, -1] = 9
        outputs["pred_logits"][1, 0, targets[1]["labels"][0]] = 9
    criterion(outputs, targets)
    assert criterion.meters["matched_accuracy"].compute() == (pytest.approx(2 / 3), 3)
    criterion(*make_case([0]))
    assert criterion.meters["matched_accuracy"].compute()[1] == 3


def test_unknown_term_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown term 'label'. Did you mean 'labels'\? Known: dice, giou"):
        make_criterion(weights=dict(label=1.0, l1=5.0, giou=2.0))


def test_missing_term_is_named():
    with pytest.raises(ConfigError, match="no weight for l1, giou"):
        make_criterion(weights=dict(labels=1.0))


def test_no_object_weight_must_be_positive():
    with pytest.raises(ConfigError, match="^criterion: no_object_weight=0: expected a positive number"):
        make_criterion(no_object_weight=0)


def test_label_out_of_range_is_an_error():
    outputs, targets = make_case([2])
    targets[0]["labels"][0] = 91
    with pytest.raises(DataError, match=r"label 91; expected 0\.\.4"):
        make_criterion()(outputs, targets)


def focal_criterion(**changes):
    matcher = dict(type="HungarianMatcher", activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
    settings = dict(type="SetCriterion", class_loss="focal", matcher=matcher, weights=WEIGHTS)
    return CRITERIA.build({**settings, **changes})


def focal_by_loop(criterion, layer: dict, targets: list[dict], *, alpha: float, gamma: float) -> torch.Tensor:
    ((matches,),) = criterion.matcher([([layer], targets)])
    total = torch.zeros(())
    for i, (queries, indices) in enumerate(matches):
        labels = dict(zip(queries.tolist(), targets[i]["labels"][indices].tolist()))
        for query, logits in enumerate(layer["pred_logits"][i]):
            for c, p in enumerate(logits.sigmoid()):
                true = labels.get(query) == c
                total = total - (alpha * (1 - p) ** gamma * p.log() if true else (1 - alpha) * p**gamma * (1 - p).log())
    return total / max(sum(len(t["labels"]) for t in targets), 1)


@pytest.mark.parametrize("counts", [[3, 2], [0, 4], [0, 0], [8, 1]])
def test_focal_losses_of_layers_and_first_stage_equal_a_plain_loop(counts):
    criterion = focal_criterion(focal_alpha=0.3, focal_gamma=1.5)
    outputs, targets = make_case(counts)
    encoder = make_layer(len(counts))
    outputs["training_outputs"] = [dict(encoder, name="enc", class_agnostic=True)]
    for target in targets:
        target["labels"] = target["labels"].clamp(min=1)  # class 0 is that of all objects in the first stage
    losses = criterion(outputs, targets)
    layers = {"": outputs, "aux1_": outputs["aux_outputs"][1]}
    for prefix, layer in layers.items():
        expected = focal_by_loop(criterion, layer, targets, alpha=0.3, gamma=1.5)
        torch.testing.assert_close(losses[f"{prefix}labels"], expected)
    objects = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
    expected = focal_by_loop(criterion, encoder, objects, alpha=0.3, gamma=1.5)
    torch.testing.assert_close(losses["enc_labels"], expected)
    sum(losses.values()).backward()
    assert encoder["pred_boxes"].grad is not None


def test_a_matcher_may_be_given_as_it_is():
    class First(Matcher):
        def forward(self, layers_and_targets):
            return []

    assert isinstance(make_criterion(matcher=First()).matcher, First)


def test_settings_for_another_kind_of_logits_are_refused():
    with pytest.raises(ConfigError, match=r"matcher\.activation='softmax' is for other logits.*expected 'sigmoid'"):
        focal_criterion(matcher=MATCHER)
    with pytest.raises(ConfigError, match=r"no_object_weight=0\.1: class_loss='focal' has no class"):
        focal_criterion(no_object_weight=0.1)
    with pytest.raises(ConfigError, match="no_object_weight=None: expected a positive number"):
        make_criterion(no_object_weight=None)
