"""Runs on any number of processes, which may change while a run is interrupted."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.elastic_runs import agent, lose, wait_for_ranks
from helpers.ports import reserve_port
from helpers.real_runs import CONFIG, finish, hold_after, losses_of, start, wait_for_step
from helpers.sharded_training import needs_newer_torch
from PIL import Image

from vitkit import load
from vitkit.apps.training.averaging import average
from vitkit.data.loading.batch_augmentation import BatchAugmentation
from vitkit.data.loading.samplers import TrainBatches
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.settings import TrainSettings
from vitkit.errors import ConfigError
from vitkit.structures import Sample
from vitkit.weights import read_checkpoint

pytest.importorskip("vitkit.tools.train", reason="vitkit is not installed (pip install -e .)")
# Two epochs of four steps of eight images.
ANY_NUMBER = ["train.accumulate=1", "train.images_per_step=8", "data.images_per_gpu=2", "train.epochs=2"]


# D-FINE with its recipe: denoising, batch norms (of each batch, on a CPU), strong augmentation, a moving average.
DFINE = """
from vitkit.configs.dfine import config as dfine
from vitkit.configs.parts.realtime import dfine_data


def config():
    cfg = dfine("n")
    cfg["model"].update(num_queries=10)
    cfg["model"]["backbone"]["pretrained"] = False
    cfg["model"]["neck"].update(out_channels=32, d_ffn=32)
    cfg["model"]["head"].update(d_model=32, d_ffn=32, num_decoder_layers=2)
    world = dict(type="ShapesDetection", image_size=128)
    data = dict(train=dict(**world, num_images=64), val=dict(**world, num_images=2, split="val"), num_workers=0)
    cfg["data"] = dfine_data(4, size=128, size_repeats=2, data=data)
    # From random weights, batch norms of two images and AdamW, which divides gradients that are only rounding by their
    # own size, would enlarge differences in rounding tenfold in each step.
    cfg["optimizer"] = dict(type="SGD", lr=1e-5, momentum=0.9)
    cfg["schedule"]["warmup_steps"] = 5
    cfg["train"].update(epochs=5, log_every=1, save_every_steps=1, restart_epoch=None, reference_batch_size=None)
    cfg["train"].update(clip_grad_norm=None, precision="fp32")  # in bf16, scores are tied: rounding selects queries
    return cfg
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)
    Path("dfine.py").write_text(DFINE)


def rates(run: str) -> list[float]:
    records = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    return [record["lr"] for record in records if record["kind"] == "train"]


def assert_same_results(run: str, other: str) -> None:
    assert losses_of(run) == pytest.approx(losses_of(other), rel=1e-4)
    one, two = (read_checkpoint(f"{name}/last.pth") for name in (run, other))
    assert one["progress"]["step"] == two["progress"]["step"] and one["schedule"] == two["schedule"]
    for part in {"model", "ema"} & one.keys():
        for name, value in one[part].items():
            if "running" not in name and value.is_floating_point():  # statistics are those of the main rank's batches
                torch.testing.assert_close(two[part][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "numbers"),
    [("tiny", (4, 1)), *(pytest.param(name, (8, 4, 2, 1), marks=pytest.mark.slow) for name in ("tiny", "dfine"))],
)
def test_losses_do_not_depend_on_the_number_of_processes(config, numbers):
    options = [*ANY_NUMBER, "train.epochs=5"] if 8 in numbers else ANY_NUMBER
    # Batch norms need more than one image.
    options += {"tiny": ["data.images_per_gpu=1"] * (8 in numbers), "dfine": ["train.images_per_step=16"]}[config]
    for ranks in numbers:
        assert finish(start(f"{config}.py", "--run-dir", f"run{ranks}", *options, ranks=ranks)) == [0] * ranks
    for ranks in numbers[:-1]:
        differences = [abs(value / losses_of("run1")[step] - 1) for step, value in losses_of(f"run{ranks}").items()]
        first, most = max(differences[:4]), max(differences)
        print(f"{config}: losses of {ranks} processes and 1 differ by {first:.1e} in four steps, {most:.1e} in all")
        if config == "tiny":
            assert_same_results(f"run{ranks}", "run1")
        else:  # until a tied cost is matched, or a tied query selected, in another way
            assert first < 1e-4 and most < 0.05
    assert len(losses_of("run1")) == (20 if 8 in numbers else 8)


def test_a_run_killed_on_two_processes_continues_on_one_and_then_on_two():
    assert finish(start("tiny.py", "--run-dir", "whole", *ANY_NUMBER, ranks=2)) == [0, 0]
    argv = ["tiny.py", "--run-dir", "parts", *ANY_NUMBER]
    for ranks, step in ((2, 2), (1, 5)):
        processes = start(*argv, ranks=ranks)
        wait_for_step("parts", step, processes)
        for process in processes:
            process.kill()
        finish(processes)
        argv = ["--resume", "parts"]
    assert finish(start("--resume", "parts", ranks=2)) == [0, 0]
    assert_same_results("parts", "whole")
    said = Path("output.txt").read_text()
    assert "last.pth was saved by 2 ranks, this run has 1: steps, data and random numbers stay the same" in said
    assert "results will differ" not in said


def test_a_run_without_images_per_step_advances_its_schedule_by_the_fraction_done():
    options = ["tiny.py", "train.accumulate=1", "data.images_per_gpu=2", "train.epochs=1"]
    options += ["schedule.warmup_steps=0"]  # two processes: 8 steps an epoch; one: 16
    assert finish(start(*options, "--run-dir", "run", ranks=2)) == [0, 0]
    assert finish(start("--resume", "run", "train.epochs=2")) == [0]
    assert finish(start(*options[:-1], "schedule.warmup_steps=0", "train.epochs=2", "--run-dir", "one")) == [0]
    assert rates("run")[8:] == pytest.approx(rates("one")[16:]) and len(losses_of("run")) == 8 + 16
    said = Path("output.txt").read_text()
    assert "an epoch had 8 steps and has 16 now: the learning-rate schedule continues at step 16 in place of 8" in said
    assert "was saved by 2 ranks, this run has 1: it continues, but results will differ" in said
    assert "train.images_per_step" in said


def test_a_run_interrupted_within_an_epoch_continues_at_the_same_fraction_without_images_per_step():
    options = ["tiny.py", "--run-dir", "run", "train.accumulate=1", "data.images_per_gpu=2", "train.epochs=1"]
    processes = start(*options, ranks=2, prepare=partial(hold_after, 3))
    wait_for_step("run", 3, processes)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    finish(processes)
    done = read_checkpoint("run/last.pth")["progress"]["batch"]
    assert finish(start("--resume", "run")) == [0]
    progress = read_checkpoint("run/last.pth")["progress"]
    assert done == 4 and progress["step"] == done + (16 - 2 * done) and progress["epoch"] == 1
    assert f"the epoch had 8 batches and has 16 now: it continues at batch {2 * done}" in Path("output.txt").read_text()


# Saving takes most of the time of such a run.
SHARDED = ["train.strategy=fsdp", "train.sharded_checkpoints=true", "train.save_every_steps=none"]


@needs_newer_torch
def test_shards_and_their_average_are_those_of_full_weights_and_resumed_by_another_number_of_ranks():
    options = ["tiny.py", *ANY_NUMBER, "train.restart_epoch=1"]
    assert finish(start(*options, "--run-dir", "full", ranks=2)) == [0, 0]
    assert finish(start(*options, *SHARDED, "--run-dir", "four", ranks=2)) == [0, 0]
    assert_same_results("four", "full")
    best, full = (average([Path(run, "best.pth")])["model"] for run in ("four", "full"))
    assert all(value.allclose(best[name], rtol=1e-3, atol=1e-4) for name, value in full.items())
    for run, ranks in (("full", 2), ("four", 4)):
        assert finish(start("--resume", run, "train.epochs=3", ranks=ranks)) == [0] * ranks
    assert_same_results("four", "full")
    # The cosine of two epochs has become that of three.
    assert rates("four") == rates("full") and rates("four")[8] > rates("four")[7]
    assert load("four/last.pth")(Image.new("RGB", (32, 32))) is not None


# Over so many steps, a higher rate would make much of differences in rounding.
ELASTIC = [*ANY_NUMBER, "train.epochs=40", "optimizer.lr=1e-5"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process's children are read from /proc")
def test_torchrun_loses_a_machine_and_gets_it_back():
    """Two agents are two machines. One is killed with its process, and started again later."""
    endpoint = f"127.0.0.1:{reserve_port()}"
    options = ["tiny.py", *ELASTIC, "--run-dir", "elastic"]
    agents = [agent(endpoint, *options)]
    try:
        for ranks in (1, 2, 1, 2):
            if ranks == 2:
                agents.append(agent(endpoint, *options))
            elif len(agents) > 1:
                lose(agents.pop())
            wait_for_ranks("elastic", ranks, agents)
        assert agents[0].wait(timeout=200) == 0
    finally:
        for process in agents:
            if process.poll() is None:
                lose(process)
    assert finish(start("tiny.py", "--run-dir", "one", *ELASTIC)) == [0]
    assert_same_results("elastic", "one")


def test_a_number_of_processes_that_does_not_divide_is_an_error_with_the_nearest_that_do():
    settings, data = TrainSettings(epochs=1, images_per_step=32), DataSettings(images_per_gpu=4)
    assert [settings.for_processes(data, n).accumulate for n in (1, 2, 4, 8)] == [8, 4, 2, 1]
    for processes, nearest in {
        3: "2 or 4 processes, or train.images_per_step=24 or 36.",
        12: "8 processes, or train.images_per_step=48.",
        16: "8 processes, or data.images_per_gpu=2, or train.images_per_step=64.",
    }.items():
        with pytest.raises(ConfigError) as error:
            settings.for_processes(data, processes)
        assert str(error.value) == (
            f"train.images_per_step=32: {processes} processes cannot share these images evenly in batches of "
            f"data.images_per_gpu=4. The nearest that work: {nearest}"
        )
    with pytest.raises(
        ConfigError, match=r"1 process cannot .*: data.images_per_gpu=3, or .*images_per_step=28 or 32\."
    ):
        TrainSettings(epochs=1, images_per_step=30).for_processes(data, 1)
    with pytest.raises(ConfigError, match="train.accumulate=2: the second follows from the first"):
        TrainSettings(epochs=1, images_per_step=32, accumulate=2).for_processes(data, 1)
    with pytest.raises(ConfigError, match="no fixed number of sentences. Set train.accumulate"):
        settings.for_processes(DataSettings(tokens_per_gpu=100), 1)


def test_each_step_has_the_same_images_in_the_same_batches_for_any_number_of_ranks():
    def steps(ranks: int) -> list[list]:
        settings = dict(batch_size=2, seed=3, world_size=ranks, batches_per_step=8 // ranks)
        of_ranks = [list(TrainBatches(37, rank=rank, **settings)) for rank in range(ranks)]
        in_order = [batches[i] for i in range(len(of_ranks[0])) for batches in of_ranks]
        return [in_order[start : start + 8] for start in range(0, len(in_order), 8)]

    assert steps(1) == steps(2) == steps(4) == steps(8) and [len(step) for step in steps(1)] == [8, 8, 8]


def test_sizes_and_mixtures_of_batches_are_the_same_for_any_number_of_ranks():
    def drawn(ranks: int) -> list:
        results = []
        for number in range(16 // ranks):
            for rank in range(ranks):
                settings = dict(seed=3, batches_per_step=8 // ranks, rank=rank, world_size=ranks)
                augment = BatchAugmentation(dict(sizes=[8, 16, 24]), dict(probability=0.5), **settings)
                images = [torch.full((3, 8, 8), float(value)) for value in (1, 2)]
                boxes = {"boxes_cxcywh": torch.zeros(0, 4)}
                results.append(
                    [sample["image"] for sample in augment([Sample(image=i, target=boxes) for i in images], 0, number)]
                )
        return results

    for one, two in zip(drawn(1), drawn(4), strict=True):
        assert all(a.equal(b) for a, b in zip(one, two, strict=True))
    assert len({len(images[0][0]) for images in drawn(1)[:8]}) == 1  # a step has one size
