import math

import pytest
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.losses import ClassificationLoss

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
