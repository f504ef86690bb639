"""Processes join torchrun's group, also after a restart, and end if a machine is lost."""

import datetime
import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from helpers.processes import PROCESS_TIMEOUT, PROCESSES

from vitkit.apps.training import process_group
from vitkit.apps.training.process_group import (
    close_distributed,
    connect_machines,
    init_distributed,
    store_of_this_attempt,
)
from vitkit.distributed import all_reduce_sum
from vitkit.errors import ConfigError


@pytest.fixture
def watched(monkeypatch) -> list[tuple[str, dict[str, int]]]:
    """Record what is watched: the name, and the socket's options, once its process has ended."""
    names, original = [], process_group._watch

    def record(connection, name):
        original(connection, name)
        options = {key: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, key)) for key in KEEPALIVE}
        names.append((name, options | {"on": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}))

    monkeypatch.setattr(process_group, "_watch", record)
    return names


KEEPALIVE = [key for key in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT") if hasattr(socket, key)]


def test_machines_are_watched_by_a_connection_of_which_strangers_have_no_part(watched):
    store = dist.HashStore()
    connect_machines(store, 0, "127.0.0.1")
    port, token = store.get("machines").decode().split()
    with socket.create_connection(("127.0.0.1", int(port))) as stranger:
        stranger.sendall(b"something 5 else\n")
    with socket.create_connection(("127.0.0.1", int(port))) as machine:
        machine.sendall(f"{token} 3 node7\n".encode())
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while not watched and time.monotonic() < deadline:
        time.sleep(0.01)
    ((name, options),) = watched
    assert name == "the machine of rank 3 (node7)" and options["on"] == 1
    if KEEPALIVE:
        waits = options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"]
        assert waits == process_group.SECONDS_UNTIL_LOST


def test_a_machine_that_does_not_answer_ends_the_process_with_one_line(monkeypatch, capsys):
    class Lost:
        def settimeout(self, _): ...
        def setsockopt(self, *_): ...
        def recv(self, _):
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    codes = []
    monkeypatch.setattr(process_group.os, "_exit", codes.append)
    process_group._watch(Lost(), "the machine of rank 1 (node7)")
    assert not codes  # without a process group, nothing waits
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: True)
    process_group._watch(Lost(), "the machine of rank 1 (node7)")
    assert codes == [1]
    assert capsys.readouterr().err == (
        "error: the machine of rank 1 (node7) does not answer (Connection timed out): it or the network is lost. "
        "Resume with --resume; torchrun does so by itself with --max-restarts.\n"
    )


def test_number_of_a_device_is_an_error_that_names_the_type():
    with pytest.raises(ConfigError, match="device=cuda:1: expected a type of device, such as 'cuda', .*_DEVICES"):
        init_distributed("cuda:1")


def join(environment: dict[str, str], seconds: float) -> None:
    os.environ.update(environment)
    time.sleep(seconds)
    init_distributed("cpu")
    assert float(all_reduce_sum(torch.ones(()))) == 2
    close_distributed()


@contextmanager
def joining(port: int, *starts: tuple[int, int]) -> Iterator[list]:
    """Start processes that join torchrun's store, each with its rank (0 or 1) and its delay in seconds."""
    environment = {
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    processes = []
    try:
        for number, seconds in starts:
            own = {name: str(value) for name, value in {**environment, "RANK": number}.items()}
            processes.append(PROCESSES.Process(target=join, args=(own, seconds)))
            processes[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def statuses(processes: list) -> list[int | None]:
    for process in processes:
        process.join(timeout=PROCESS_TIMEOUT)
    return [process.exitcode for process in processes]


@pytest.fixture
def agent() -> dist.TCPStore:
    """Return torchrun's store, which outlives the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_restarted_ranks_do_not_join_the_ended_ones(agent):
    # In the later attempts, one rank has enough time to read what the ended ranks left before the other one joins.
    for starts in ([(0, 0), (1, 0)], [(0, 0), (1, 0.5)], [(0, 0.5), (1, 0)]):
        with joining(agent.port, *starts) as ranks:
            assert statuses(ranks) == [0, 0]


def test_rank_that_ended_before_the_others_started_is_not_waited_for(agent):
    with joining(agent.port, (1, 0)):
        while not agent.check(["name_of_1"]):
            time.sleep(0.01)
    with joining(agent.port, (0, 0), (1, 0.5)) as ranks:
        assert statuses(ranks) == [0, 0]


def test_missing_rank_is_named():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not join within 0:00:00.1"):
        store_of_this_attempt(store, 0, 2, datetime.timedelta(seconds=0.1))
