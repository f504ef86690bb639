"""How the benchmarks measure: calls in turn, and peak memory in a process of its own."""

import ctypes
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Call = Callable[[], object]
Builder = Callable[[], Call]

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


@dataclass(frozen=True)
class Options:
    """How every part measures."""

    repeats: int = 9
    """Rounds, after one to warm up."""
    device: str = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    memory: bool = True
    """Whether peak memory is measured too, in a new process for each row."""
    clock: Callable[[], float] = time.perf_counter
    """`time.process_time` counts what the process computes, and not what it waits for others."""
    images: Path | None = None
    """A folder of JPEGs for the loader; None draws some."""

    def autocast(self) -> torch.autocast:
        """The context of `precision` on `device`."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bf16")


def compare(what: str, builders: Mapping[str, Builder], options: Options, *, memory: bool = True) -> list[Row]:
    """Times calls in turn (A B C A B C), so that whatever else the machine does affects all of them.

    Args:
        builders: by name, what makes the call to measure; picklable, such as a partial of a module's function.
        memory: whether the peak memory means something here.
    """
    calls = {name: build() for name, build in builders.items()}
    rounds = []
    for _ in range(options.repeats + 1):
        rounds.append({name: _seconds(call, options) for name, call in calls.items()})
    del calls  # their models
    times = {name: [seconds[name] for seconds in rounds[1:]] for name in builders}
    reference = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, reference))
        peak = peak_memory(builders[name], device=options.device) if memory and options.memory else None
        peak_ratio = peak and peak / (rows[0].peak_mib if rows else peak)
        rows.append(Row(what, name, statistics.median(seconds), ratio, peak, peak_ratio))
    return rows


def _seconds(call: Call, options: Options) -> float:
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    synchronize()
    start = options.clock()
    call()
    synchronize()
    return options.clock() - start


def peak_memory(build: Builder, *, device: str = "cpu") -> float | None:
    """The most memory that a call takes beyond what there was before it, in MiB.

    Args:
        build: makes the call, which runs twice, in a new process.
        device: on "cuda" only PyTorch's tensors count, on "cpu" all resident memory.
    Returns:
        None where the system does not tell (Linux does).
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (build, torch.device(device).type, torch.get_num_threads()))


def _peak_memory(build: Builder, device: str, threads: int) -> float | None:
    torch.set_num_threads(threads)
    measurable = Path("/proc/self/clear_refs").exists()
    if measurable:
        # Large blocks go back to the system as soon as they are freed. The peak would else count the holes between
        # them, which change it from run to run, by up to half.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    call = build()
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
