import pytest

from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import ConfigError


@pytest.mark.parametrize(
    "name", ["epochs", "accumulate", "log_every", "eval_every", "patience", "reference_batch_size"]
)
def test_counts_are_at_least_one(name):
    assert getattr(TrainSettings(**{"epochs": 3, name: 1}), name) == 1
    with pytest.raises(ConfigError, match=rf"train\.{name}: got 0; expected at least 1"):
        TrainSettings(**{"epochs": 3, name: 0})


def test_decay_of_the_moving_average_is_a_fraction():
    with pytest.raises(ConfigError, match=r"train\.ema_decay: got 2"):
        TrainSettings(epochs=1, ema_decay=2)


def test_what_needs_a_best_metric_says_so():
    assert TrainSettings(epochs=1, best_metric=None).best_metric is None
    for needs in (dict(patience=2), dict(restart_epoch=1, ema_decay=0.9)):
        with pytest.raises(ConfigError, match=rf"train\.{next(iter(needs))}: .*Set train\.best_metric"):
            TrainSettings(epochs=1, best_metric=None, **needs)


def test_all_missing_keys_are_named():
    config = {"model": {"type": "DETR"}, "data": {"train": None}, "train": 3}
    require(config, "model", "model.type")
    with pytest.raises(ConfigError, match=r"data\.train, train\.epochs, optimizer not set"):
        require(config, "data.train", "model.type", "train.epochs", "optimizer")
