"""Training and testing from Python."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import vitkit
from vitkit import devices
from vitkit.apps.inference import Predictor
from vitkit.engine import trainer
from vitkit.errors import ConfigError
from vitkit.tools import train as train_tool

pytestmark = pytest.mark.smoke

TINY = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=1)
    world = dict(type="ShapesDetection", image_size=32, max_objects=2, min_size=0.3, max_size=0.5)
    cfg["data"] = dict(
        train=dict(**world, num_images=8), val=dict(**world, num_images=4, split="val"),
        images_per_gpu=4, val_images_per_gpu=2, num_workers=0,
    )
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=1, log_every=1, best_metric="bbox/AP50")
    return cfg
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A config file that trains in a second; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY)
    return "tiny.py"


def test_run_returns_its_folder_and_metrics_and_testing_repeats_them(tiny):
    run = vitkit.train(tiny, train=dict(epochs=2), device="cpu")
    assert run.path == Path("runs/tiny") and run.weights.name == "best.pth"
    assert len(run.history) == 2 and run.history[-1] == run.metrics and "bbox/AP" in run.metrics
    result = vitkit.test(run.path / "last.pth", device="cpu", out="new/results.json")
    assert result.metrics["bbox/AP"] == run.metrics["bbox/AP"] and Path("new/results.json").is_file()
    assert result.metrics["bbox/AR100"] == run.metrics["bbox/AR100"] and "AP50" in repr(result)
    assert isinstance(run.load(), Predictor)
    small = vitkit.test(run.path, device="cpu", data=dict(val=dict(num_images=2)))
    assert len(small.evaluator.stored_predictions) == 2


@pytest.mark.parametrize("flags, precision", [({"avx512f", "amx_bf16"}, "bf16"), ({"avx512f"}, "fp32")])
def test_auto_precision_is_the_processors_and_stays_on_another(tiny, monkeypatch, capsys, flags, precision):
    monkeypatch.setattr(devices, "_processor_flags", lambda: flags)
    vitkit.train(tiny, train=dict(precision="auto"), device="cpu")
    assert f"1 x cpu of 1 thread, {precision}" in capsys.readouterr().out
    assert vitkit.load_config("runs/tiny/config.json")["train"]["precision"] == precision
    # On a processor that would choose the other precision, as the run's config and then as a config with "auto".
    other = {"avx512f"} if precision == "bf16" else {"amx_bf16"}
    monkeypatch.setattr(devices, "_processor_flags", lambda: other)
    vitkit.train(resume="runs/tiny", train=dict(epochs=2), device="cpu")
    out, err = capsys.readouterr()
    assert f"1 x cpu of 1 thread, {precision}" in out and ("train.precision=fp32" in err) == (precision == "bf16")
    train_tool.main(["tiny.py", "--resume", "runs/tiny", "train.precision=auto", "train.epochs=3", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert f"1 x cpu of 1 thread, {precision}" in out and f"started with {precision} and continues with it" in err
    assert vitkit.load_config("runs/tiny/config.json")["train"]["precision"] == precision


def test_precision_that_differs_from_the_resumed_runs_is_reported(tiny, capsys):
    vitkit.train(tiny, train=dict(precision="fp32"), device="cpu")
    vitkit.train(resume="runs/tiny", train=dict(precision="bf16", epochs=2), device="cpu")
    assert "resuming with a changed train.precision: 'fp32' -> 'bf16'" in capsys.readouterr().err


def test_bfloat16_without_instructions_for_it_causes_a_warning(tiny, monkeypatch, capsys):
    monkeypatch.setattr(devices, "_processor_flags", lambda: {"avx2", "avx512f"})
    run = vitkit.train(tiny, train=dict(precision="bf16"), device="cpu")
    assert "no fast instructions" in capsys.readouterr().err
    vitkit.test(run.path, device="cpu")
    assert "no fast instructions" in capsys.readouterr().err
    vitkit.test(run.path, device="cpu", train=dict(precision="auto"))
    assert "bfloat16" not in capsys.readouterr().err


def test_values_and_dotted_keys_override_a_loaded_config(tiny):
    config = vitkit.load_config(tiny)
    run = vitkit.train(
        config,
        run_dir="mine",
        device="cpu",
        optimizer=dict(type="SGD", lr=0.01),
        train=dict(best_metric="bbox/AP75"),
        **{"model.num_queries": 7},
    )
    saved = vitkit.load_config(run.path / "config.json")
    assert run.path == Path("mine") and saved["model"]["num_queries"] == 7
    assert saved["optimizer"] == dict(type="SGD", lr=0.01) and saved["train"]["best_metric"] == "bbox/AP75"
    assert saved["train"]["epochs"] == 1 and config["optimizer"]["type"] == "AdamW"


class Resolved(Exception):
    """Raised in place of training, with the config."""


@pytest.fixture
def resolved(monkeypatch):
    """Return a function that returns the config that a call would train."""

    def run_training(config, *args, **others):
        raise Resolved(config)

    def resolve(*args, **overrides):
        with pytest.raises(Resolved) as error:
            vitkit.train(*args, device="cpu", **overrides)
        return error.value.args[0]

    monkeypatch.setattr("vitkit.apps.training.api.run_training", run_training)
    return resolve


def test_dicts_by_names_are_overrides(tiny, resolved):
    by_class, by_part = {"circle": 2.0, "square": 3.0}, {"head.decoder.": 0.5, "neck": 2.0}
    config = resolved(tiny, criterion=dict(class_weights=by_class), optimizer=dict(lr_multipliers=by_part))
    assert config["criterion"]["class_weights"] == by_class and config["optimizer"]["lr_multipliers"] == by_part
    assert config["criterion"]["weights"] == vitkit.load_config(tiny)["criterion"]["weights"]


def test_paths_and_numbers_of_numpy_are_values(tiny, resolved):
    config = vitkit.load_config(tiny)
    config["data"]["root"] = Path("a folder")
    numbers = dict(lr=np.float64(0.5), lr_multipliers=dict(neck=np.float32(0.25)))
    config = resolved(config, optimizer=numbers, train=dict(epochs=np.int64(3)))
    assert config["data"]["root"] == "a folder" and config["train"]["epochs"] == 3
    assert config["optimizer"]["lr"] == 0.5 and config["optimizer"]["lr_multipliers"] == dict(neck=0.25)


def test_training_starts_from_weights_or_resumes_a_run(tiny):
    first = vitkit.train(tiny, device="cpu")
    assert {"curves.png", "predictions.png"} <= {path.name for path in first.path.iterdir()}
    second = vitkit.train(tiny, init=first.weights, device="cpu")
    assert second.path == Path("runs/tiny-2")
    resumed = vitkit.train(resume=first.path, device="cpu")
    assert resumed.path == first.path and resumed.metrics == first.metrics


def test_ctrl_c_saves_and_leaves_python_running(tiny, monkeypatch):
    def interrupted_step(run, batches, original=trainer.next_step):
        step = original(run, batches)
        os.kill(os.getpid(), signal.SIGINT)
        return step

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trainer, "next_step", interrupted_step)
        vitkit.train(tiny, device="cpu", train=dict(epochs=2))
    assert len(vitkit.train(resume="runs/tiny", device="cpu").history) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either a config, or resume=RUN"),
        ({"config": "tiny.py", "resume": "runs/tiny"}, "give either a config, or resume=RUN"),
        ({"resume": "runs/tiny", "init": "a.pth"}, "it takes neither init nor run_dir"),
        ({"resume": "runs/none"}, "contains no run to resume"),
        ({"config": "quickstart/detrr"}, "Did you mean 'quickstart/detr'"),
        ({"config": "tiny.py", "train": {"epoch": 2}}, "train.epoch: unknown key 'epoch'. Did you mean 'epochs'"),
        ({"config": "tiny.py", "train": {"epochs": "two"}}, "train.epochs"),
        ({"config": dict}, "config: got the function or class <class 'dict'>; expected what it returns"),
        ({"config": {"model": {"type": dict}}}, "config: has a type, <class 'dict'>; expected numbers, texts, lists"),
    ],
)
def test_wrong_arguments_are_helpful_errors(tiny, arguments, message):
    with pytest.raises(ConfigError, match=message):
        vitkit.train(**arguments, device="cpu")
