"""torchrun's agents as machines of a run, which may be lost at any moment and come back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from vitkit.weights import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def agent(
    endpoint: str,
    *argv: str,
    address: str = "127.0.0.1",
    is_host: bool | None = None,
    inside: Sequence[str] = (),
    variables: dict[str, str] | None = None,
) -> subprocess.Popen:
    """Start torchrun's agent of a machine with one process, which trains with others or alone; see its agent*.txt.

    Args:
        address: the machine's.
        is_host: whether the machine has the endpoint; None: it does if that is free. Otherwise machines are waited for
            as long as torchrun does by default.
        inside: the beginning of the command.
        variables: further environment variables.
    """
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"]
    elastic += ["--rdzv-endpoint", endpoint, "--rdzv-id", "17", "--local-addr", address]
    settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    if is_host is not None:
        settings = f"last_call_timeout=10,is_host={int(is_host)}"
    elastic += ["--rdzv-conf", settings]
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *elastic, str(ROOT / "tools" / "train.py")]
    with open(f"agent{time.monotonic_ns()}.txt", "w") as output:
        return subprocess.Popen(
            [*command, *argv, "--device", "cpu"],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}:{Path.cwd()}",
                # Otherwise torch 2.14's agent keeps the first round's store to itself, and one that joins later waits.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                **(variables or {}),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def lose(machine: subprocess.Popen) -> None:
    """Kill an agent and then its processes, which it could otherwise restart."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
    machine.kill()
    machine.wait()
    for process in children:
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def num_ranks(run: str) -> int:
    """Return by how many ranks a run was saved last, 0 if it was not."""
    return len(read_checkpoint(f"{run}/last.pth")["rng"]) if Path(run, "last.pth").exists() else 0


def wait_for_ranks(run: str, ranks: int, agents: Sequence[subprocess.Popen], *, seconds: float = 120) -> None:
    """Wait until a run has saved on so many ranks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if num_ranks(run) == ranks:
            return
        assert all(agent.poll() is None for agent in agents), "an agent has ended"
        time.sleep(0.2)
    pytest.fail(f"the run does not continue on {ranks} ranks")
