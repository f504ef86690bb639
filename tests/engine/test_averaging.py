"""The moving average against a loop, and the return to the best weights wherever the run is killed."""

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from helpers.toy_training import Batches, Regression, run
from torch import nn

from vitkit.engine import checkpointing
from vitkit.engine.averaging import MovingAverage
from vitkit.engine.hooks import Hook
from vitkit.engine.settings import TrainSettings
from vitkit.errors import CheckpointError, ConfigError
from vitkit.weights import read_checkpoint
from vitkit.weights.locate import BEST_NAME, LAST_NAME


@pytest.mark.parametrize(("decay", "ramp_steps"), [(0.9999, 1000), (0.993, 100), (0.9, 3), (0.9, 0)])
def test_average_equals_a_loop_over_weights_and_buffers(decay, ramp_steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    average = MovingAverage(model, decay=decay, ramp_steps=ramp_steps)
    expected = None
    for update in range(1, 40):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(8, 4, dtype=torch.float64))
        average.update_parameters(model)
        weights = {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}
        d = decay * (1 - math.exp(-update / ramp_steps)) if ramp_steps else decay
        if expected is None:
            expected = weights
        expected = {name: d * value + (1 - d) * weights[name] for name, value in expected.items()}
    assert "1.running_var" in expected
    for name, value in expected.items():
        torch.testing.assert_close(average.module.state_dict()[name], value, atol=1e-12, rtol=1e-12)


def test_integers_are_those_of_the_model():
    model = nn.BatchNorm1d(4)
    model.register_buffer("index", torch.arange(1000))
    average = MovingAverage(model, decay=0.9999, ramp_steps=1000)
    for _ in range(60):
        model.num_batches_tracked += 1
        average.update_parameters(model)
    assert torch.equal(average.module.index, torch.arange(1000))
    assert average.module.num_batches_tracked == 60


def test_decay_rises_as_published():
    average = MovingAverage(nn.Linear(1, 1), decay=0.9999, ramp_steps=1000)
    assert average.current_decay() == pytest.approx(0.9999 * (1 - math.exp(-0.001)))
    average.continue_at(999, 0.9998)
    assert average.current_decay() == pytest.approx(0.9998 * (1 - math.exp(-1)))


class Killed(BaseException):
    pass


class DiesAt(Batches):
    def __init__(self, epoch, batch):
        super().__init__()
        self.died_at = (epoch, batch)

    def __iter__(self):
        for position, batch in enumerate(super().__iter__(), start=self.batch):
            if (self.epoch, position) == self.died_at:
                raise Killed
            yield batch


class Norm(Regression):
    """With a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.layers.append(nn.BatchNorm1d(1))


class Metric(Hook):
    """A number that jumps with the weights: the best epoch before the restart is the first one, then one after it."""

    @contextmanager
    def during_evaluation(self, run):
        self.epoch = run.progress.epoch
        yield

    def __call__(self, model):
        weights = float(sum(p.detach().double().sum() for p in model.parameters()))
        # Which epoch is the best does not depend on the weights, whose rounding differs between processors.
        return {"bbox/AP": (0.5, 0.2, 0.8, 0.4)[self.epoch] + 0.1 * math.sin(1000 * weights)}


OPTIONS = dict(epochs=4, ema_decay=0.9, ema_ramp_steps=5, restart_epoch=2, restart_ema_decay=0.8, save_every_steps=3)


def train(folder, **changed):
    torch.manual_seed(0)
    metric = Metric()
    return run(folder, model=Norm(), **{**OPTIONS, "evaluate": metric, "added_hooks": [metric], **changed})


def assert_same(folder, other):
    a, b = (read_checkpoint(path / LAST_NAME) for path in (folder, other))
    assert a["progress"] == b["progress"] and a["schedule"] == b["schedule"]
    for key in ("model", "ema"):
        assert all(value.equal(b[key][name]) for name, value in a[key].items())
    best_a, best_b = (read_checkpoint(path / BEST_NAME)["model"] for path in (folder, other))
    assert all(value.equal(best_b[name]) for name, value in best_a.items())


def test_restart_returns_model_and_average_to_the_best_weights(tmp_path, monkeypatch):
    states, save = [], checkpointing.save_checkpoint

    def recorded(path, state):
        states.append((path.name, copy.deepcopy(dict(state))))
        save(path, state)

    monkeypatch.setattr(checkpointing, "save_checkpoint", recorded)
    train(tmp_path / "run")
    at_restart = next(i for i, (_, state) in enumerate(states) if state["progress"]["restart_step"])
    best = [state for name, state in states[:at_restart] if name == BEST_NAME][-1]
    restarted = states[at_restart][1]
    assert restarted["progress"]["restart_step"] == 16 and restarted["progress"]["epoch"] == 2
    for name, value in best["model"].items():
        assert value.equal(restarted["model"][name]) and value.equal(restarted["ema"][name])
    assert not restarted["model"]["layers.0.weight"].equal(states[at_restart - 1][1]["model"]["layers.0.weight"])
    # The next checkpoint is two steps later, at step 18: the average follows the ramp from its beginning.
    after = states[at_restart + 1][1]
    assert after["progress"]["step"] == 18
    optimizer_state = after["optimizer"]["state"][0]["step"]
    assert float(optimizer_state) == 18  # the optimizer continues


def test_average_after_a_restart_equals_a_loop(tmp_path, monkeypatch):
    weights, updated = [], MovingAverage.update_parameters

    def recorded(self, model):
        weights.append([p.detach().clone() for p in model.parameters()])
        updated(self, model)

    monkeypatch.setattr(MovingAverage, "update_parameters", recorded)
    train(tmp_path / "run")
    expected = None
    for update, values in enumerate(weights[16:], start=1):
        d = 0.8 * (1 - math.exp(-update / 5))
        expected = [d * e + (1 - d) * v for e, v in zip(expected or values, values)]
    ema = read_checkpoint(tmp_path / "run" / LAST_NAME)["ema"]
    for (name, _), value in zip(Norm().named_parameters(), expected):
        torch.testing.assert_close(ema[name], value)


@pytest.mark.parametrize("where", [(1, 7), (2, 0), (2, 1), (2, 5), (3, 0), (3, 4)])
def test_run_killed_before_and_after_a_restart_equals_an_uninterrupted_one(tmp_path, where):
    train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "parts", loader=DiesAt(*where))
    train(tmp_path / "parts", resume=tmp_path / "parts" / LAST_NAME)
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_run_killed_before_any_of_its_saves_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    """Also at the restart itself, and when best.pth is already of the last part and last.pth is not."""
    saved, save = [], checkpointing.save_checkpoint
    dies_before = math.inf

    def dying(path, state):
        if len(saved) == dies_before:
            raise Killed
        saved.append((path.name, state["progress"]["step"], state["progress"]["restart_step"]))
        save(path, state)

    monkeypatch.setattr(checkpointing, "save_checkpoint", dying)
    options = dict(save_every_steps=None, save_every_minutes=None)
    train(tmp_path / "whole", **options)
    order = list(saved)
    assert (LAST_NAME, 16, 16) in order and any(name == BEST_NAME and step > 16 for name, step, _ in order)
    for dies_before in range(1, len(order)):
        folder = tmp_path / f"parts{dies_before}"
        saved.clear()
        with pytest.raises(Killed):
            train(folder, **options)
        dies_before = math.inf
        train(folder, resume=folder / LAST_NAME, **options)
        assert_same(folder, tmp_path / "whole")


def test_restart_without_best_weights_of_its_first_part_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"best\.pth: does not exist, and train\.restart_epoch=2 continues"):
        train(tmp_path / "none", best_metric="accuracy")
    train(tmp_path / "run", restart_epoch=None)
    with pytest.raises(Killed):
        train(tmp_path / "again", loader=DiesAt(1, 7))
    (tmp_path / "again" / BEST_NAME).write_bytes((tmp_path / "run" / BEST_NAME).read_bytes())
    best = read_checkpoint(tmp_path / "again" / BEST_NAME)
    checkpointing.save_checkpoint(tmp_path / "again" / BEST_NAME, {**best, "progress": {"epoch": 4}})
    options = dict(resume=tmp_path / "again" / LAST_NAME, evaluate=lambda model: {"bbox/AP": -2.0})
    with pytest.raises(CheckpointError, match=r"is from epoch 4, but train\.restart_epoch=2 continues from the best"):
        train(tmp_path / "again", **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(ema_decay=None), "train.restart_epoch: begins a new average, and there is none"),
        (dict(eval_every=3), "train.restart_epoch: got 2; expected at least train.eval_every=3"),
        (dict(restart_ema_decay=1.5), "train.restart_ema_decay: got 1.5; expected 0 to 1"),
        (dict(ema_ramp_steps=-1), "train.ema_ramp_steps: got -1; expected at least 0"),
    ],
)
def test_impossible_averages_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**{"epochs": 4, "ema_decay": 0.9, "restart_epoch": 2, **settings})


def test_run_that_ends_before_its_restart_warns(tmp_path, caplog):
    _, progress = train(tmp_path / "run", epochs=2, evaluate=None)
    assert progress.restart_step == 0
    assert "train.restart_epoch=2: the run ends before, with train.epochs=2, so it never returns" in caplog.text
