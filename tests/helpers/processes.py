"""Processes that start within a moment: forks of a server that has imported what tools and models need."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import unsynced  # noqa: F401, also in the processes

from vitkit.apps.training.process_group import close_distributed

PROCESSES = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).resolve().parents[2]
PROCESS_TIMEOUT = 600.0
"""Timeout in seconds of tests' processes, many times what they take on a slow and busy machine."""
# A run imports all that a config may name.
REGISTERED = [
    f"vitkit.{package}.{path.stem}"
    for package in ("matchers", "models", "necks", "seq2seq")
    for path in sorted((ROOT / "vitkit" / package).glob("[a-z]*.py"))
]
# Otherwise each process would spend seconds on imports. A tool imports what trains only when it runs.
PROCESSES.set_forkserver_preload(
    [
        "pytest",
        "matplotlib.backends.backend_agg",
        "torch.distributed.checkpoint",
        "torch.utils.tensorboard",
        "vitkit.apps.inference",
        "vitkit.apps.training.testing",
        "vitkit.configs.quickstart.detr",
        "vitkit.data.synthetic.shapes",
        "vitkit.engine.optimizers",
        "vitkit.engine.schedules",
        "vitkit.engine.trainer",
        "vitkit.evaluation",
        "vitkit.losses",
        "vitkit.models.detr",
        "vitkit.models.dino",
        "vitkit.tools.test",
        "vitkit.tools.train",
        *REGISTERED,
    ]
)


def run_forked(job: Callable[..., None], *args) -> tuple[int, str]:
    """Call a function in a process; return the process's exit status and everything that it printed."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = PROCESSES.Process(target=print_to, args=(output.name, dict(os.environ), job, *args))
        process.start()
        process.join(PROCESS_TIMEOUT)
        if process.is_alive():
            process.kill()
            pytest.fail(f"{job.__name__} does not end: {output.read()[-2000:]}")
        return process.exitcode, output.read()


def print_to(path: str, environment: dict[str, str], job: Callable[..., None], *args) -> None:
    with open(path, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    job(*args)


def is_running(pid: int) -> bool:
    """Return whether a process runs, by Linux's /proc; one that has ended may still be listed there as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may disappear at any time, also between opening and reading
        return False
    return state not in "ZX"


def run_anew(program: str) -> tuple[int, str]:
    """Run a program in a process that has imported other packages, but not vitkit; return what `run_forked` does."""
    return run_forked(import_anew, program)


def import_anew(program: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vitkit"]:
        del sys.modules[name]
    exec(program, {})


def start_rank(number: int, folder: str, ranks: int, job: Callable) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/init{ranks}{job.__name__}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks)
    result = job(Path(folder))
    torch.save(result, f"{folder}/{job.__name__}{number}.pth")
    close_distributed()


def on_ranks(ranks: int, folder: Path, job: Callable) -> list:
    """Run a function of a folder on several gloo ranks; return the result of each."""
    arguments = (str(folder), ranks, job)
    context = torch.multiprocessing.start_processes(start_rank, arguments, ranks, join=False, start_method="forkserver")
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while not context.join(timeout=1):  # True once all have ended
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    return [torch.load(folder / f"{job.__name__}{number}.pth") for number in range(ranks)]
