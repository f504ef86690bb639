"""Before training, a run reports whether its checkpoints fit on the disk."""

import shutil
from collections import namedtuple

import pytest
import torch
from helpers.toy_training import Regression, run
from torch import nn

from vitkit.engine.checkpointing import optimizer_state_bytes
from vitkit.errors import ConfigError
from vitkit.weights.locate import LAST_NAME

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {}), ("AdamW", {"amsgrad": True}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("NAdam", {})],
)
def test_optimizer_state_size_is_known_before_the_first_step(name, options):
    model = nn.Sequential(nn.Linear(300, 20), nn.Linear(20, 100, bias=False))
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(model, (0.1, 0.2))]
    optimizer = getattr(torch.optim, name)(groups, **options)
    expected = optimizer_state_bytes(optimizer)
    assert not optimizer.state
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    actual = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    # Adam also stores a step count for each parameter.
    assert expected == pytest.approx(actual, rel=1e-3)
    assert optimizer_state_bytes(optimizer) == actual


def test_unknown_optimizer_counts_as_adam():
    model = nn.Linear(30, 20)
    assert optimizer_state_bytes(torch.optim.LBFGS(model.parameters())) == 2 * 4 * 620


class Large(Regression):
    """A model whose weights take up almost all of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.layers[3] = nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.zeros(500_000))

    def forward(self, images):
        return {"value": super().forward(images)["value"] + 0 * self.unused.sum()}


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"keep_checkpoints": 3}])
def test_too_small_disk_is_an_error_that_names_needed_and_free_space(tmp_path, monkeypatch, options):
    run(tmp_path / "whole", model=Large(), epochs=1, **options)
    full = (tmp_path / "whole" / LAST_NAME).stat().st_size
    number = options.get("keep_checkpoints", 1) + 1
    needed = number * full + 4 * 500_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 0.97 * needed))
    with pytest.raises(
        ConfigError, match=r"run: its disk has [\d.]+ MiB for checkpoints, .* take ([\d.]+) MiB"
    ) as error:
        run(tmp_path / "run", model=Large(), epochs=1, **options)
    assert f"MiB: {number} of {full / 2**20:.1f}"[:-1] in str(error.value) and "--run-dir" in str(error.value)
    assert not list((tmp_path / "run").iterdir())
    for usage in (Usage(10**12, 0, 1.03 * needed), Usage(0, 0, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        run(tmp_path / "run", model=Large(), epochs=1, **options)


def test_files_that_a_resumed_run_replaces_count_as_free(tmp_path, monkeypatch):
    run(tmp_path / "run", model=Large(), epochs=1)
    full = (tmp_path / "run" / LAST_NAME).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 1.4 * full))
    run(tmp_path / "run", model=Large(), epochs=2, resume=tmp_path / "run" / LAST_NAME)
    with pytest.raises(ConfigError):
        run(tmp_path / "other", model=Large(), epochs=2)
