import json
from pathlib import Path

import pytest

from vitkit import load_config
from vitkit.apps.starter import start, timed_run
from vitkit.apps.starter.child_runs import StepCost
from vitkit.tools.data.make_shapes import main as make_shapes

CHECKS_OF_THE_MODEL = ("weights", "sizes_after_resizing", "random_evaluation", "step_budget", "memory")
"""Checks that build a model, and need ImageNet's weights where a test only pretends that there are some."""


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Return the synthetic world in COCO's layout: 24 + 8 images of 64 pixels."""
    out = tmp_path_factory.mktemp("start") / "shapes"
    make_shapes(["--out", str(out), "--num-train", "24", "--num-val", "8", "--image-size", "64"])
    return out


@pytest.fixture
def step_cost(monkeypatch, tmp_path):
    """Let steps take the time in `costs`: seconds by precision, at 224 pixels; proportionally more at larger sizes."""
    monkeypatch.chdir(tmp_path)
    costs, timed = {"fp32": 1.0, "bf16": 2.0}, []

    def time_steps(command, folder, minutes, epoch_minutes):
        config = load_config(command[2], [word for word in command[3:] if "=" in word])
        size = config["data"]["val"]["transforms"].get("short_side", 224)
        precision = config["train"]["precision"]
        timed.append((size, precision))
        minutes = costs[precision] * (size / 224) ** 2 / 60
        return StepCost(minutes, minutes, len(json.loads(Path("runs/start/data/train.json").read_text())["images"]) / 2)

    monkeypatch.setattr(timed_run, "time_steps", time_steps)
    monkeypatch.setattr(start, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(start, "SLOW_CHECKS", (*start.SLOW_CHECKS, *CHECKS_OF_THE_MODEL))
    return costs, timed
