"""Hooks that a user's config adds to a run."""

import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from helpers.toy_training import records, run

from vitkit import ConfigError, load_config
from vitkit.engine.hooks import Hook
from vitkit.registry import HOOKS

GUIDE = Path(__file__).resolve().parents[2] / "vitkit" / "engine" / "hooks" / "README.md"


@pytest.fixture(autouse=True)
def unregister():
    """Unregister the tests' hooks, so that each test may use the same names."""
    before = dict(HOOKS._constructors)
    yield
    HOOKS._constructors.clear()
    HOOKS._constructors.update(before)


class Recorder(Hook):
    """Records the calls, and the step of each call."""

    def __init__(self, name: str = "recorder", calls: list | None = None):
        self.name, self.calls = name, calls if calls is not None else []

    @contextmanager
    def during_training(self, run):
        self.calls.append("start")
        yield
        self.calls.append("end")

    def before_epoch(self, run):
        self.calls.append(f"epoch {run.progress.epoch}")

    def after_step(self, run, step):
        assert step.decision.take and step.grad_norm.isfinite() and len(step.losses) == run.settings.accumulate
        self.calls.append(f"step {run.progress.step}")

    def on_log(self, run, record):
        self.calls.append(f"log {record['kind']} {record['step']}")

    def after_epoch(self, run):
        self.calls.append("epoch done")

    @contextmanager
    def during_evaluation(self, run):
        self.calls.append("evaluating")
        yield
        self.calls.append("evaluated")

    def after_evaluation(self, run, metrics):
        self.calls.append(sorted(metrics))


def test_hook_methods_are_called_in_the_order_of_the_loop(tmp_path):
    recorder = Recorder()
    hooks = {"hooks": [recorder], "epochs": 1, "accumulate": 4, "log_every": 1}
    run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": 0.5}, **hooks)
    assert recorder.calls == [
        "start",
        "epoch 0",
        "log train 1",
        "step 1",
        "log train 2",
        "step 2",
        "epoch done",
        "evaluating",
        "evaluated",
        "log val 2",
        ["bbox/AP", "train_close"],
        "end",
    ]


def test_a_hook_can_end_a_run(tmp_path):
    class FirstEpochOnly(Hook):
        def should_end(self, run):
            return run.progress.epoch == 1

    _, progress = run(tmp_path / "run", hooks=[FirstEpochOnly()])
    assert (progress.epoch, progress.step) == (1, 8)


def test_a_hook_sees_gradients_through_the_optimizer(tmp_path):
    class Gradients(Hook):
        @contextmanager
        def during_training(self, run):
            self.norms = []
            run.optimizer.register_step_pre_hook(lambda *_: self.norms.append(run.parameters[0].grad.norm()))
            yield

    gradients = Gradients()
    run(tmp_path / "run", epochs=1, hooks=[gradients])
    assert len(gradients.norms) == 8 and min(gradients.norms) > 0


def test_error_for_an_unknown_hook_names_the_nearest(tmp_path):
    (tmp_path / "hooks.py").write_text(
        "from vitkit import HOOKS\nfrom vitkit.engine.hooks import Hook\n\n\n"
        "@HOOKS.register\nclass Chime(Hook):\n    def __init__(self, volume: int = 3): ...\n"
    )
    (tmp_path / "config.py").write_text(
        "from vitkit.configs.quickstart.detr import config as quickstart\n\n\ndef config():\n"
        '    cfg = quickstart()\n    cfg["imports"] = ["hooks.py"]\n'
        '    cfg["train"]["hooks"] = [dict(type="Chime", volume=5)]\n    return cfg\n'
    )
    config = tmp_path / "config.py"
    assert load_config(config)["train"]["hooks"] == [{"type": "Chime", "volume": 5}]
    assert load_config(config, ["train.hooks.0.volume=7"])["train"]["hooks"][0]["volume"] == 7
    with pytest.raises(ConfigError, match=r"train\.hooks\.0: unknown hook 'Chim'\. Did you mean 'Chime'"):
        load_config(config, ["train.hooks.0.type=Chim"])
    with pytest.raises(ConfigError, match=r"volum.* Did you mean 'volume'"):
        load_config(config, ["train.hooks.0.volum=7"])
    with pytest.raises(ConfigError, match=r"train\.hooks\.0\.volume: got 'loud'; expected int"):
        load_config(config, ["train.hooks.0.volume=loud"])


class Tracker(ModuleType):
    """A stand-in for wandb or mlflow that records the calls, and whether a run is open."""

    def __init__(self, name):
        super().__init__(name)
        self.started, self.logged, self.open = [], [], False

    @contextmanager
    def init(self, **arguments):
        self.started.append(arguments)
        self.open = True
        yield
        self.open = False

    start_run = init

    def log(self, values, step):
        assert self.open
        self.logged.append((step, values))

    log_metrics = log

    def set_experiment(self, name):
        self.experiment = name


def example(name: str) -> str:
    """Return the guide's code for a tracker."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return next(block for block in blocks if f"import {name}\n" in block)


@pytest.mark.parametrize(("name", "spec"), [("wandb", dict(project="boxes")), ("mlflow", dict(experiment="boxes"))])
def test_trackers_of_the_guide_get_losses_and_metrics(tmp_path, monkeypatch, name, spec):
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    namespace = {"__name__": "my_trackers"}
    exec(compile(example(name), f"guide, {name}", "exec"), namespace)
    hook = next(key for key, value in namespace.items() if getattr(value, "__module__", "") == "my_trackers")
    hooks = {"hooks": [dict(type=hook, **spec)], "epochs": 1}
    run(tmp_path / "boxes", evaluate=lambda model: {"bbox/AP": 0.5}, **hooks)
    assert len(tracker.started) == 1 and not tracker.open
    assert [step for step, _ in tracker.logged] == [4, 8, 8]
    train = records(tmp_path / "boxes", "train")[0]
    values = tracker.logged[0][1]
    assert values["squared"] == train["losses"]["squared"] and values["lr"] == train["lr"]
    assert tracker.logged[-1][1]["bbox/AP"] == 0.5
    json.dumps(tracker.started)
