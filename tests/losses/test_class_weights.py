"""Class weights equal those of PyTorch's losses, or count a query, pixel or image several times."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.config.check import check_config
from vitkit.engine.build import build_criterion
from vitkit.errors import ConfigError
from vitkit.losses.classification import ClassificationLoss
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.losses.per_pixel import PerPixelCriterion
from vitkit.losses.set_criterion import SetCriterion

WEIGHTS = [1.0, 3.0, 0.5]
CLASSES = ["red", "white", "platelets"]
COSTS = dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0)
TERMS = dict(labels=1.0, l1=5.0, giou=2.0)
SIGMOID = dict(matcher={**COSTS, "activation": "sigmoid"}, weights=TERMS)


def case(num_logits):
    torch.manual_seed(0)
    layers = [dict(pred_logits=torch.randn(2, 6, num_logits), pred_boxes=torch.rand(2, 6, 4)) for _ in range(3)]
    encoder = dict(layers[2], name="enc", class_agnostic=True)
    outputs = dict(layers[0], aux_outputs=[layers[1]], training_outputs=[encoder])
    targets = [dict(labels=torch.tensor(labels), boxes_cxcywh=torch.rand(len(labels), 4)) for labels in ([1, 0], [2])]
    return outputs, targets


def test_cross_entropy_is_pytorchs_weighted_mean():
    criterion = SetCriterion(COSTS, TERMS, no_object_weight=0.1, class_weights=WEIGHTS)
    outputs, targets = case(4)
    losses = criterion(outputs, targets)
    for prefix, layer in (("", outputs), ("aux0_", outputs["aux_outputs"][0])):
        ((matches,),) = criterion.matcher([([layer], targets)])
        classes = torch.full((2, 6), 3)
        for image, (query, index) in enumerate(matches):
            classes[image, query] = targets[image]["labels"][index]
        expected = F.cross_entropy(layer["pred_logits"].flatten(0, 1), classes.flatten(), torch.tensor([*WEIGHTS, 0.1]))
        torch.testing.assert_close(losses[f"{prefix}labels"], expected)


@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "mal"])
def test_a_query_matched_with_a_weighted_class_counts_as_often_in_a_sigmoid_loss(class_loss):
    outputs, targets = case(3)
    losses = [
        SetCriterion(**SIGMOID, class_loss=class_loss, class_weights=weights)(outputs, targets)
        for weights in (None, [1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 4.0, 1.0], WEIGHTS)
    ]
    plain, ones, twice, four, mixed = (values["labels"] for values in losses)
    torch.testing.assert_close(ones, plain)
    torch.testing.assert_close(four - plain, 3 * (twice - plain))
    assert twice > plain and mixed != plain
    # Boxes, and the first stage, which only knows objects, have no classes to weigh.
    for name in ("l1", "giou", "enc_labels"):
        assert all(values[name] == losses[0][name] for values in losses)


def test_focal_loss_by_hand():
    logits = torch.tensor([[[2.0, -1.0], [0.5, 1.5]]])
    box = torch.tensor([[[0.5, 0.5, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]]])
    target = dict(labels=torch.tensor([1]), boxes_cxcywh=box[0, :1])
    settings = dict(class_loss="focal", focal_gamma=0.0, focal_alpha=0.5, class_weights=[1.0, 3.0])
    loss = SetCriterion(**SIGMOID, **settings)(dict(pred_logits=logits, pred_boxes=box), [target])["labels"]
    expected = F.binary_cross_entropy_with_logits(logits[0], torch.tensor([[0.0, 1], [0, 0]]), reduction="none") / 2
    torch.testing.assert_close(loss, 3 * expected[0].sum() + expected[1].sum())


def test_mask_criterion_weighs_its_cross_entropy():
    matcher = dict(type="FixedMaskMatcher")
    outputs = dict(pred_logits=torch.randn(1, 2, 4), pred_masks=torch.randn(1, 2, 8, 8), input_size=(8, 8))
    targets = [dict(labels=torch.tensor([0, 1]), masks=torch.rand(2, 8, 8) > 0.5)]
    settings = dict(weights=dict(labels=1.0, mask=1.0, dice=1.0), no_object_weight=0.1, mask_loss="focal")
    losses = MaskCriterion(matcher, **settings, class_weights=WEIGHTS)(outputs, targets)
    expected = F.cross_entropy(outputs["pred_logits"][0], torch.tensor([0, 1]), torch.tensor([*WEIGHTS, 0.1]))
    torch.testing.assert_close(losses["labels"], expected)
    plain = MaskCriterion(matcher, **settings)(outputs, targets)
    assert losses["mask"] == plain["mask"] and losses["dice"] == plain["dice"]


def test_pixels_are_weighted_by_class():
    logits, masks = torch.randn(1, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.bool)
    masks[0, :2], masks[1, 2] = True, True
    outputs = dict(pred_semantic=logits, input_size=(4, 4))
    losses = PerPixelCriterion(class_weights=WEIGHTS)(outputs, [dict(labels=torch.tensor([0, 1]), masks=masks)])
    labels = torch.tensor([0] * 8 + [1] * 4 + [-100] * 4).view(1, 4, 4)
    torch.testing.assert_close(losses["semantic"], F.cross_entropy(logits, labels, torch.tensor(WEIGHTS)))
    empty = [dict(labels=torch.tensor([], dtype=torch.long), masks=masks[:0])]
    assert PerPixelCriterion(class_weights=WEIGHTS)(outputs, empty)["semantic"] == 0


def test_images_are_weighted_by_class():
    logits, weights = torch.randn(3, 3), torch.tensor(WEIGHTS)
    criterion = ClassificationLoss(label_smoothing=0.1, class_weights=WEIGHTS)
    loss = criterion(dict(logits=logits), [dict(label=label) for label in (1, 1, 2)])["cross_entropy"]
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor([1, 1, 2]), weights, label_smoothing=0.1))
    mixed = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    loss = criterion.eval()(dict(logits=logits), [dict(class_weights=target) for target in mixed])["cross_entropy"]
    expected = -(mixed * weights * logits.log_softmax(1)).sum() / (mixed @ weights).sum()
    torch.testing.assert_close(loss, expected)


def test_weights_are_by_name_or_in_the_order_of_the_classes():
    spec = dict(type="SetCriterion", **SIGMOID, class_loss="focal")
    named = {**spec, "class_weights": {"platelets": 4.0}}
    check_config(dict(criterion=named))
    assert build_criterion(named, CLASSES).class_weights.tolist() == [1.0, 1.0, 4.0]
    assert build_criterion({**spec, "class_weights": WEIGHTS}, CLASSES).class_weights.tolist() == WEIGHTS
    assert build_criterion(spec, None).class_weights is None
    assert "class_weights" not in build_criterion(named, CLASSES).state_dict()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"platelet": 2.0}, "criterion.class_weights: the data has no class 'platelet'. Did you mean 'platelets'"),
        ({1: 2.0}, "criterion.class_weights: the data has no class 1. Known: "),
        (2.0, "criterion.class_weights: got 2.0; expected {'NAME': 2.0}, or a list."),
        ("red", "criterion.class_weights: got 'red'; expected {'NAME': 2.0}, or a list."),
        ([1.0, 2.0], "criterion.class_weights: got 2 weights; the data has 3 classes."),
        ([1.0, 0.0, 2.0], r"class_weights=[1.0, 0.0, 2.0]: expected positive numbers."),
        ({"red": float("nan")}, r"class_weights=[nan, 1.0, 1.0]: expected positive numbers."),
    ],
)
def test_wrong_weights_are_errors(weights, message):
    with pytest.raises(ConfigError) as error:
        build_criterion(dict(type="PerPixelCriterion", class_weights=weights), CLASSES)
    assert message in str(error.value)


@pytest.mark.parametrize("class_loss", ["focal", "cross_entropy"])
def test_a_wrong_number_of_weights_is_an_error_in_python_also(class_loss):
    outputs, targets = case(3 if class_loss == "focal" else 4)
    settings = SIGMOID if class_loss == "focal" else dict(matcher=COSTS, weights=TERMS, no_object_weight=0.1)
    with pytest.raises(ConfigError, match="class_weights: got 4; the model has 3 classes"):
        SetCriterion(**settings, class_loss=class_loss, class_weights=[1.0] * 4)(outputs, targets)
    with pytest.raises(ConfigError, match="names need the data's classes"):
        SetCriterion(**settings, class_loss=class_loss, class_weights={"red": 2.0})
