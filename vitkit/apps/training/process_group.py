"""Joins torchrun's process group, and ends a process whose group has lost a machine."""

import datetime
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from vitkit.distributed import world_size
from vitkit.errors import ConfigError, TrainingError, error_line

logger = logging.getLogger("vitkit")

SECONDS_UNTIL_LOST = 60
"""How long a machine may not answer."""


def init_distributed(device_type: str) -> torch.device:
    """Join torchrun's process group, if there is one, and return this process's device.

    Args:
        device_type: such as "cuda" (NCCL), "cpu" (gloo) or "mps" (a single process).
    Raises:
        ConfigError: it has the number of a device, or Slurm has started several processes that do not know each other.
    """
    kind, colon, _ = device_type.partition(":")
    if colon:
        raise ConfigError(
            f"device={device_type}: expected a type of device, such as {kind!r}, of which each process takes its own. "
            "For CUDA, the variable CUDA_VISIBLE_DEVICES chooses among several."
        )
    if "RANK" not in os.environ:
        _check_slurm(os.environ)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(device_type) if device_type in ("cpu", "mps") else torch.device(device_type, local_rank)
    if device.index is not None:
        torch.accelerator.set_device_index(local_rank)
    if "RANK" in os.environ and not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device.type)
        # One rank may evaluate or write for a long time while the others wait for it.
        timeout = datetime.timedelta(minutes=60)
        store, rank_, size = next(dist.rendezvous("env://", timeout=timeout))
        store = store_of_this_attempt(store, rank_, size, timeout)
        if int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size and int(os.environ.get("LOCAL_RANK", 0)) == 0:
            connect_machines(store, rank_, os.environ["MASTER_ADDR"])
        dist.init_process_group(backend, store=store, rank=rank_, world_size=size, timeout=timeout)
    return device


def _check_slurm(environment: Mapping[str, str]) -> None:
    """Raise a ConfigError in a Slurm job of several tasks without torchrun: each would do all the work by itself."""
    variable = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), None)
    if variable is not None and environment[variable].isdecimal() and int(environment[variable]) > 1:
        raise ConfigError(
            f"{variable}={environment[variable]}: Slurm's tasks do not know each other, so that each would do all the "
            "work alone. Start one torchrun per node: srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES "
            "--nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 … (vitkit/engine/machines.md). For a "
            f"single process in this job: {variable}=1 in front of the command."
        )


def store_of_this_attempt(store: dist.Store, number: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    """Return the part of a store that only the ranks of this attempt write to and read from.

    torchrun keeps its store when it restarts the ranks; a new rank would find the address of an ended one in it, and
    wait for that one. Restart counts do not tell the attempts apart, because they differ between machines. So every
    rank stores a unique name, and rank 0 answers it with the name of the attempt. The name of an ended rank may be
    answered too, but nobody takes that answer: rank 0 continues until each rank has taken one.

    Raises:
        TimeoutError: a rank did not take an answer within the timeout.
    """
    if number > 0:
        name = uuid.uuid4().hex
        store.set(f"name_of_{number}", name)
        attempt = store.get(f"attempt_of_{name}").decode()  # waits for rank 0
        store.set(f"{attempt}/{number}", "taken")
        return dist.PrefixStore(attempt, store)
    attempt = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    missing = range(1, size)
    while missing := [other for other in missing if not store.check([f"{attempt}/{other}"])]:
        for other in missing:
            if store.check([f"name_of_{other}"]):
                store.set(f"attempt_of_{store.get(f'name_of_{other}').decode()}", attempt)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {missing} of {size} did not join within {timeout}. Did their machines start?")
        time.sleep(0.02)
    return dist.PrefixStore(attempt, store)


def connect_machines(store: dist.Store, number: int, main_address: str) -> None:
    """End this process if another machine, or the network to it, is lost; the first process of each machine calls it.

    A lost machine closes no connection, so that others would wait for it until the process group's timeout. So there is
    one connection between the main process and each other machine that transfers nothing. Through it, the systems ask
    each other every few seconds whether they are still there, and answer even while a process computes for minutes.
    """
    if number == 0:
        both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        listener, token = socket.create_server(("", 0), **both), uuid.uuid4().hex
        threading.Thread(target=_accept_machines, args=(listener, token), daemon=True).start()
        store.set("machines", f"{listener.getsockname()[1]} {token}")
        return
    port, token = store.get("machines").decode().split()
    try:
        connection = socket.create_connection((main_address, int(port)), timeout=SECONDS_UNTIL_LOST)
        connection.sendall(f"{token} {number} {socket.gethostname()}\n".encode())
    except OSError as error:
        logger.warning(
            "rank %d cannot reach port %s of %s (%s): that a machine is lost will be noticed late.",
            number,
            port,
            main_address,
            error.strerror or error,
        )
        return
    threading.Thread(target=_watch, args=(connection, f"the machine of rank 0 ({main_address})"), daemon=True).start()


def _accept_machines(listener: socket.socket, token: str) -> None:
    """Watch the connections of other machines; one without the token of the store is from a stranger."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(SECONDS_UNTIL_LOST)
        with suppress(OSError, ValueError):
            own, number, host = connection.makefile().readline(200).split()
            if own == token:
                name = f"the machine of rank {number} ({host})"
                threading.Thread(target=_watch, args=(connection, name), daemon=True).start()


def _watch(connection: socket.socket, name: str) -> None:
    """Wait until the process at the other end of a connection ends, and end this one if its machine does not answer."""
    interval = SECONDS_UNTIL_LOST // 4
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", interval), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # elsewhere the system's own, of two hours
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        connection.recv(1)
    except OSError as error:
        if dist.is_initialized():
            _end_without(name, error)


def _end_without(name: str, error: OSError) -> None:
    """End this process, whose main thread waits in a collective operation that nothing interrupts."""
    lost = TrainingError(
        f"{name} does not answer ({error.strerror}): it or the network is lost. Resume with --resume; torchrun does so "
        "by itself with --max-restarts."
    )
    report_failure(lost)
    print(error_line(lost), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def has_lost_peer(error: BaseException) -> bool:
    """Return whether a collective operation failed because another rank has ended."""
    signs = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "Broken pipe")
    return world_size() > 1 and isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def report_failure(error: BaseException) -> None:
    """Record an error for torchrun, which reports the first rank's failure as the cause when it ends."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def close_distributed() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        # In torch 2.6 a thread of gloo may still need the GIL to free the tensors of the last operation. It would wait
        # for ever, as this thread holds the GIL while it waits for that thread to end. Sleeping releases the GIL.
        time.sleep(0.05)
        dist.destroy_process_group()
