"""Resuming: what may change, what may not, and that a refused attempt leaves the run as it was."""

import json
import logging
from pathlib import Path

import pytest
import torch

from vitkit.weights import read_checkpoint

train = pytest.importorskip("vitkit.tools.train", reason="vitkit is not installed (pip install -e .)")
evaluate = pytest.importorskip("vitkit.tools.test", reason="vitkit is not installed (pip install -e .)")

CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    world = dict(type="ShapesDetection", image_size=32)
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 16
    cfg["model"]["head"].update(d_model=16, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    cfg["data"] = dict(
        train=dict(**world, num_images=6), val=dict(**world, num_images=2, split="val"),
        images_per_gpu=2, num_workers=0,
    )
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=1, log_every=1)
    return cfg
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    # So small a model is several times slower if its threads wait for cores that other processes use.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("vitkit")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    Path("tiny.py").write_text(CONFIG)
    return "tiny.py"


def call(tool, *argv: str) -> None:
    tool.main([*argv, "--device", "cpu"])


def error(tool, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        call(tool, *argv)
    assert str(caught.value.code).startswith("error: ")
    return caught.value.code


def val_metrics(run: str) -> dict[str, float]:
    return json.loads(Path(run, "log.jsonl").read_text().splitlines()[-1])["metrics"]


def test_resumed_run_with_moving_average_and_accumulation_equals_an_uninterrupted_one(config, capsys):
    # Three batches; the last one makes a step by itself.
    options = ["train.ema_decay=0.5", "train.accumulate=2"]
    call(train, config, "--run-dir", "whole", "train.epochs=2", *options)
    call(train, config, "--run-dir", "parts", *options)
    call(train, "--resume", "parts", "train.epochs=2")
    whole, parts = (read_checkpoint(f"{run}/last.pth") for run in ("whole", "parts"))
    assert parts["progress"] == whole["progress"] and parts["progress"]["step"] == 4
    for key in ("model", "ema"):
        assert all(value.equal(parts[key][name]) for name, value in whole[key].items())
    assert val_metrics("whole") == val_metrics("parts")
    # The change is kept for the next time, and the config of a run evaluates it.
    assert json.loads(Path("parts/config.json").read_text())["train"]["epochs"] == 2
    capsys.readouterr()
    call(evaluate, "parts/config.json", "parts/last.pth")
    (boxes,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("boxes"))
    assert boxes[1] == f"{val_metrics('parts')['bbox/AP']:.3f}"


def test_incompatible_change_is_refused_and_leaves_the_run_intact(config):
    call(train, config, "--run-dir", "run")
    before = Path("run/config.json").read_text()
    for override, message in {
        "model.num_queries=5": "its model does not fit this config's",
        "train.ema_decay=0.9": "it lacks ema",
        "optimizer.lr=1e-5": "optimizer.lr cannot change when a run is resumed",
        "optimizer.type=SGD": "optimizer.type cannot change",
        "schedule.drop_at_epochs=[1]": "schedule.drop_at_epochs cannot change",
    }.items():
        refused = error(train, "--resume", "run", "train.epochs=2", override)
        assert message in refused and "--init" in refused
        assert Path("run/config.json").read_text() == before
    call(train, "--resume", "run", "train.epochs=2")
    assert read_checkpoint("run/last.pth")["progress"]["epoch"] == 2


def test_a_schedule_that_ends_with_the_run_is_made_longer_with_it(config):
    call(train, config, "--run-dir", "run", "schedule=CosineLR")
    call(train, "--resume", "run", "train.epochs=2")
    steps = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    rates = {record["step"]: record["lr"] for record in steps if record["kind"] == "train"}
    assert read_checkpoint("run/last.pth")["progress"]["epoch"] == 2 and len(set(rates.values())) > 1


def test_a_folder_without_config_or_checkpoint_holds_no_run(config):
    for name in ("config.json", "last.pth"):
        assert f"--resume run: contains no run to resume (no {name})" in error(train, "--resume", "run")
        Path("run").mkdir(exist_ok=True)
        Path("run", name).write_text("{}")


def test_sections_that_a_tool_needs_are_all_named(config):
    assert "data.train, train.epochs not set" in error(train, config, "data.train=none", "train={}")
    assert "data.val not set" in error(evaluate, config, "nothing.pth", "data.val=none")


def test_results_folder_is_created(config):
    call(train, config, "--run-dir", "run")
    call(evaluate, config, "run/last.pth", "--out", "new/folder/results.json")
    assert json.loads(Path("new/folder/results.json").read_text())


@pytest.mark.parametrize("tool", [train, evaluate])
def test_missing_device_is_reported(config, tool, monkeypatch, capsys):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(SystemExit):
        tool.main([config, *(["last.pth"] if tool is evaluate else []), "--device", "cuda"])
    assert "PyTorch finds no accelerator here" in capsys.readouterr().err
