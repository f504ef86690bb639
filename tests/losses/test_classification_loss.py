import json
import math
from pathlib import Path

import pytest
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.losses.classification import ClassificationLoss

LOGITS = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0], [math.log(4.0), 0.0]])
TARGETS = [{"label": 1}, {"label": 0}, {"label": 1}]


def test_the_loss_is_the_mean_cross_entropy():
    criterion = ClassificationLoss()
    loss = criterion({"logits": LOGITS}, TARGETS)["cross_entropy"]
    assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 2) + math.log(1 / 5)) / 3)
    assert criterion.meters["accuracy"].compute() == (pytest.approx(2 / 3), 3)


def test_labels_are_smoothed_only_in_training():
    criterion = ClassificationLoss(label_smoothing=0.2)
    loss = criterion({"logits": LOGITS[:1]}, TARGETS[:1])["cross_entropy"]
    assert loss.item() == pytest.approx(-(0.9 * math.log(3 / 4) + 0.1 * math.log(1 / 4)))
    loss = criterion.eval()({"logits": LOGITS[:1]}, TARGETS[:1])["cross_entropy"]
    assert loss.item() == pytest.approx(-math.log(3 / 4))


def test_mixed_images_count_for_each_of_their_classes():
    criterion = ClassificationLoss()
    targets = [{"label": 1, "class_weights": torch.tensor([0.7, 0.3])}]
    loss = criterion({"logits": LOGITS[:1]}, targets)["cross_entropy"]
    assert loss.item() == pytest.approx(-(0.7 * math.log(1 / 4) + 0.3 * math.log(3 / 4)))
    assert criterion.meters["accuracy"].compute() == (0.0, 1)


def test_loss_of_low_precision_logits_is_computed_in_float32():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ClassificationLoss()({"logits": LOGITS.bfloat16()}, TARGETS)["cross_entropy"]
    assert loss.dtype == torch.float32


def test_wrong_labels_and_settings_are_named():
    with pytest.raises(DataError, match="labels 0 to 2, but the model has 2 classes"):
        ClassificationLoss()({"logits": LOGITS}, [{"label": 0}, {"label": 2}, {"label": 1}])
    with pytest.raises(ConfigError, match="label_smoothing=1: expected at least 0 and below 1"):
        ClassificationLoss(label_smoothing=1)


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "distillation.json").read_text())


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_the_loss_and_gradients_with_a_teacher_are_those_of_deit_and_timm(name):
    case, inputs = GOLDEN["cases"][name], {key: torch.tensor(value) for key, value in GOLDEN["inputs"].items()}
    logits, distillation_logits = (inputs[key].requires_grad_() for key in ("logits", "distillation_logits"))
    options = dict(kind=case["kind"], weight=case["weight"])
    if case["kind"] == "soft":
        options |= dict(temperature=case["temperature"], divide_by="elements" if "deit" in name else "images")
    targets = [{"label": int(label)} for label in inputs["labels"]]
    if case["mixed"]:
        targets = [dict(target, class_weights=row) for target, row in zip(targets, inputs["class_weights"])]
    outputs = dict(
        logits=logits, distillation_logits=distillation_logits, teacher_logits=inputs["teacher_logits"].requires_grad_()
    )
    losses = ClassificationLoss(distillation=options)(outputs, targets)
    assert losses.keys() == {"cross_entropy", "distillation"}
    loss = sum(losses.values())
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    for x, field in ((logits, "gradient"), (distillation_logits, "distillation_gradient")):
        torch.testing.assert_close(x.grad, torch.tensor(case[field]), rtol=1e-4, atol=2e-6)


def test_only_training_has_a_teacher():
    criterion = ClassificationLoss(distillation=dict(kind="hard"))
    outputs = {"logits": LOGITS}
    taught = dict(outputs, distillation_logits=LOGITS, teacher_logits=LOGITS)
    assert criterion.eval()(outputs, TARGETS).keys() == {"cross_entropy"}
    with pytest.raises(ConfigError, match="no teacher_logits. Expected the model DistilledClassifier with a teacher"):
        criterion.train()(outputs, TARGETS)
    with pytest.raises(ConfigError, match="distillation: not set, so the model's teacher has no effect"):
        ClassificationLoss()(taught, TARGETS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="harsh"), "distillation.kind='harsh': unknown. Did you mean 'hard'?"),
        (dict(kind="soft", divide_by="batch"), "distillation.divide_by='batch': unknown. Known: elements, images"),
        (dict(alpha=0.5), "distillation: unknown key 'alpha'. Known: divide_by, kind, temperature, weight"),
        (dict(weight=1.5), "distillation.weight=1.5: expected 0 to 1"),
        (dict(kind="soft", temperature=0), "distillation.temperature=0: expected above 0"),
        (dict(temperature=3.0), "distillation.temperature: only kind='soft' has one"),
    ],
)
def test_wrong_options_of_the_distillation_are_named(options, message):
    with pytest.raises(ConfigError) as error:
        ClassificationLoss(distillation=options)
    assert message in str(error.value)
