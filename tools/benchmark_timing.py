"""How the benchmarks measure: rounds in turn, and peak memory in a process of its own."""

import ctypes
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of the C library's malloc.h."""


class Row(NamedTuple):
    """One way of doing what is measured. The first row of the same `what` is what the others are compared with."""

    what: str
    name: str
    seconds: float
    """Median over the rounds."""
    ratio: float
    """Median over the rounds of the time's ratio to the first's in the same round."""
    peak_mib: float | None = None
    """Growth of the process's memory during the first two calls; None if not measured."""
    peak_ratio: float | None = None


def compare(
    what: str,
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times the calls in turn (A B C A B C), so that whatever else the machine does falls on all of them.

    Args:
        calls: what to run, by name.
        repeats: rounds, after one to warm up.
        clock: `time.process_time` counts what the process computes and not what it waits for others.
    """
    rounds = []
    for _ in range(repeats + 1):
        rounds.append({name: _seconds(call, torch.device(device), clock) for name, call in calls.items()})
    times = {name: [seconds[name] for seconds in rounds[1:]] for name in calls}
    first = next(iter(times.values()))
    return [
        Row(what, name, statistics.median(own), statistics.median(a / b for a, b in zip(own, first)))
        for name, own in times.items()
    ]


def _seconds(call: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    _wait(device)
    start = clock()
    call()
    _wait(device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(build: Callable[..., Callable[[], object]], *args: object, device: str = "cpu") -> float | None:
    """Memory that a call takes at most, beyond what there was before it, in MiB.

    Args:
        build: `build(*args)` gives the call; it runs twice, in a new process. Both must be picklable.
        device: on "cuda" only PyTorch's tensors count, on "cpu" all resident memory.
    Returns:
        None where the system does not tell (it is Linux that does).
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (build, args, torch.device(device).type, torch.get_num_threads()))


def _peak_memory(build: Callable, args: tuple, device: str, threads: int) -> float | None:
    torch.set_num_threads(threads)
    measurable = Path("/proc/self/clear_refs").exists()
    if measurable:
        # Large blocks go back to the system as soon as they are freed. The peak would else count the holes between
        # them, which change it from run to run, by up to half.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    call = build(*args)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    elif measurable:
        # What building the model has freed would otherwise serve the call, and not count.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = _status_bytes("VmRSS")
    else:
        return None
    for _ in range(2):
        call()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _status_bytes("VmHWM")
    return (peak - before) / 2**20


def _status_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
