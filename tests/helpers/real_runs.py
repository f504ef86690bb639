"""Real runs of tools in separate processes, which may be killed at any moment."""

import importlib
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.ports import reserve_port
from helpers.processes import PROCESS_TIMEOUT, PROCESSES
from torch.distributed.checkpoint import FileSystemWriter

from vitkit.apps.training import api
from vitkit.distributed import rank, world_size
from vitkit.engine import trainer
from vitkit.weights import read_checkpoint

LAST_STEP = 12  # three epochs of eight batches, two batches per step
CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    world = dict(type="ShapesDetection", image_size=32)
    cfg = quickstart()
    cfg["model"]["backbone"].update(base_channels=8, out_features=["res2"])  # saving takes time for each tensor
    cfg["model"]["neck"]["out_channels"] = 16
    cfg["model"]["head"].update(
        d_model=16, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1, dropout=0.1
    )
    cfg["data"] = dict(
        train=dict(**world, num_images=32, transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")])),
        val=dict(**world, num_images=2, split="val"), images_per_gpu=4, num_workers=0,
    )
    cfg["schedule"] = dict(type="CosineLR", warmup_steps=2)
    cfg["train"] = dict(
        epochs=3, log_every=1, accumulate=2, ema_decay=0.5, clip_grad_norm=0.1, save_every_steps=1, keep_checkpoints=2
    )
    return cfg
"""


def run_tool(tool: str, argv: list[str], environment: dict[str, str], prepare: Callable[[], None] | None) -> None:
    """Run a tool in a separate process, which first calls `prepare`; what it prints is appended to output.txt."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Other tests look at curves; here, drawing them would take longer than the run.
    api.FIGURES["plot_training"] = lambda log_path, out_path: None
    if prepare:
        prepare()
    importlib.import_module(f"vitkit.tools.{tool}").main([*argv, "--device", "cpu"])


def die_in(function: str, call: int) -> None:
    """Have this process kill itself in the n-th call of a function."""
    module, name = {
        "save": (torch, "save"),
        "rename": (os, "replace"),
        "link": (os, "link"),
        "shards": (FileSystemWriter, "write_data"),
        "folder": (os, "rename"),
    }[function]
    original, calls = getattr(module, name), 0

    def dying(*args, **options):
        nonlocal calls
        calls += args[-1] != "config.json"
        if calls == call:
            if function == "save":
                whole = io.BytesIO()
                original(args[0], whole)
                args[1].write(whole.getvalue()[: len(whole.getvalue()) // 2])
                args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(module, name, dying)


def hold_after(steps: int) -> None:
    """Have the last rank wait after so many steps, and the others wait for it, until it is asked to stop, or killed."""
    original = trainer.next_step

    def held(run, batches):
        while run.progress.step >= steps and run.guard.stop_signal is None and rank() == world_size() - 1:
            time.sleep(0.01)
        return original(run, batches)

    trainer.next_step = held


def start(
    *argv: str, tool: str = "train", ranks: int = 1, prepare: Callable[[], None] | None = None, **variables: str
) -> list:
    """Start a tool on some ranks, each of which has further environment variables and first calls `prepare`."""
    group = {}
    if ranks > 1:
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    processes = []
    for number in range(ranks):
        own = {**group, "RANK": str(number), "LOCAL_RANK": str(number)} if group else {}
        environment = {**os.environ, **own, **variables}
        process = PROCESSES.Process(target=run_tool, args=(tool, list(argv), environment, prepare))
        process.start()
        processes.append(process)
    return processes


def finish(processes: list) -> list[int]:
    deadline = time.monotonic() + PROCESS_TIMEOUT
    for process in processes:
        process.join(timeout=max(0, deadline - time.monotonic()))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, "the run hangs: " + Path("output.txt").read_text()[-2000:]
    return [process.exitcode for process in processes]


def reached(run: str) -> int:
    log = Path(run, "log.jsonl")
    steps = re.findall(r'"step": (\d+)', log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def losses_of(run: str) -> dict[int, float]:
    records = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def wait_for_step(run: str, step: int, processes: list) -> None:
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while reached(run) < step and all(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.002)


def share_batch(ranks: int) -> list[str]:
    """Return the override by which so many ranks train on batches of 4 images in all."""
    return [f"data.images_per_gpu={4 // ranks}"]


def assert_same(run: str, whole: str) -> None:
    a, b = (read_checkpoint(Path(name, "last.pth")) for name in (run, whole))
    assert a["progress"] == b["progress"] and a["progress"]["step"] == LAST_STEP
    for key in {"model", "ema"} & a.keys():
        assert a[key].keys() == b[key].keys()
        for name, value in a[key].items():
            assert value.equal(b[key][name]), f"{key} {name}"
    for one, other in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert all(value.equal(other[name]) for name, value in one.items())
    assert a["schedule"] == b["schedule"]
    assert all(one["torch"].equal(other["torch"]) for one, other in zip(a["rng"], b["rng"], strict=True))
    assert log_of(run) == log_of(whole)
    assert not list(Path(run).glob("*.tmp"))


def log_of(run: str) -> list:
    """Return the log's records without values that depend on time and machine, and without means that began anew."""
    records = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    kept = [(r["kind"], r["step"], r["epoch"], r.get("lr"), r.get("metrics"), r.get("loss")) for r in records]
    assert len({entry[:3] for entry in kept}) == len(kept), "a record is there twice"
    return kept
