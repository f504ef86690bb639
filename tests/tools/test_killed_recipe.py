"""The whole recipe of real-time detectors in one run: killed in any of its parts and resumed, it ends the same."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from helpers.real_runs import assert_same, die_in, finish, log_of, share_batch, start, wait_for_step

from vitkit.weights import read_checkpoint

SLOW = pytest.mark.slow
# Four epochs of six batches, two batches per step: without augmentation, with mosaics and mixup, without those, and
# again without augmentation, from the best weights so far.
CONFIG = """
from vitkit.configs.parts.realtime import deim_data, flat_cosine, training
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    world = dict(type="ShapesDetection", image_size=40)
    cfg = quickstart()
    cfg["model"]["backbone"].update(norm="bn", base_channels=8, out_features=["res2"])
    cfg["model"]["neck"]["out_channels"] = 16
    cfg["model"]["head"].update(
        d_model=16, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1, dropout=0.1
    )
    own = dict(
        train=dict(**world, num_images=24), val=dict(**world, num_images=2, split="val"),
        images_per_gpu=4, num_workers=0,
    )
    cfg["data"] = deim_data(1, 2, 3, size=64, size_repeats=1, data=own)
    cfg["optimizer"] = dict(
        type="AdamW", lr=1e-3, backbone_lr=5e-4, weight_decay=1e-2, no_weight_decay=["norms", "head.vectors"]
    )
    cfg["schedule"] = flat_cosine(2, 3, warmup_steps=2)
    cfg["train"] = training(4, 3, restart_ema_decay=0.8) | dict(
        precision="fp32", ema_decay=0.9, ema_ramp_steps=4, accumulate=2, reference_batch_size=None,
        log_every=1, save_every_steps=1, keep_checkpoints=1,
    )
    return cfg
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with uninterrupted runs: `whole1` of one rank, `whole2` of two."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.py").write_text(CONFIG)
    before = Path.cwd()
    os.chdir(folder)
    for ranks in (1, 2):
        assert finish(start("recipe.py", "--run-dir", f"whole{ranks}", *share_batch(ranks), ranks=ranks)) == [0] * ranks
    os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_every_part_of_the_recipe_took_place():
    state = read_checkpoint("whole1/last.pth")
    assert state["progress"]["restart_step"] == 9 and state["progress"]["step"] == 12
    records = [json.loads(line) for line in Path("whole1/log.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if record["kind"] == "train"]
    assert rates == pytest.approx([0, 0.25e-3] + [1e-3] * 5 + [0.875e-3, 0.625e-3] + [0.5e-3] * 3)
    assert "epoch 4 continues from the weights of epoch" in Path("whole1/console.txt").read_text()
    assert any("running_mean" in name for name in state["ema"])


@pytest.mark.parametrize(
    ("ranks", "steps", "workers"), [(1, (4, 9, 10), 1), (2, (5, 9), 1), pytest.param(1, (2, 5, 8), 0, marks=SLOW)]
)
def test_killed_run_equals_an_uninterrupted_one(ranks, steps, workers):
    run = f"killed{ranks}-{steps[0]}"
    # Forked workers end with a trainer that is killed.
    workers = [f"data.num_workers={workers}", "data.start_workers=fork"]
    argv = ["recipe.py", "--run-dir", run, *share_batch(ranks), *workers]
    for step in steps:
        processes = start(*argv, ranks=ranks)
        wait_for_step(run, step, processes)
        for process in processes:
            process.kill()
        assert set(finish(processes)) <= {-signal.SIGKILL, 0, 1}
        argv = ["--resume", run]
    assert finish(start("--resume", run, ranks=ranks)) == [0] * ranks
    assert_same(run, f"whole{ranks}")
    best, whole = (read_checkpoint(f"{name}/best.pth")["model"] for name in (run, f"whole{ranks}"))
    assert all(value.equal(whole[name]) for name, value in best.items())


def test_run_killed_while_it_saves_the_restart_equals_an_uninterrupted_one():
    # One save before training; three of steps, one of the epoch and, of equal values, one of the best in three epochs.
    assert finish(start("recipe.py", "--run-dir", "saving", prepare=partial(die_in, "save", 17))) == [-signal.SIGKILL]
    progress = read_checkpoint("saving/last.pth")["progress"]
    assert (progress["epoch"], progress["step"], progress["restart_step"]) == (3, 9, 0)
    assert "epoch 4 continues from the weights" in Path("saving/console.txt").read_text()
    assert finish(start("--resume", "saving")) == [0]
    assert_same("saving", "whole1")
    assert len(log_of("saving")) == 16
