"""Measurement for the benchmarks: calls are timed in turn; a CPU's peak memory is measured in a separate process."""

import ctypes
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from vitkit.devices import autocast

Call = Callable[[], object]
Builder = Callable[[], Call]

_MMAP_THRESHOLD = -3
"""The value of M_MMAP_THRESHOLD in the C library's malloc.h."""
PAUSE = 0.1
"""Seconds before each call that is timed."""


class Measurement(NamedTuple):
    """Time and memory of one implementation; those with the same `what` are compared with the first of them."""

    what: str
    name: str
    seconds: float | None
    """The median time over the rounds; None if it cannot run, see `note`."""
    ratio: float | None
    """The median over the rounds of the ratio of the time to that of the reference in the same round, which is the
    first row, or in the part "latency" transformers' fastest; None without one."""
    peak_mib: float | None = None
    """The growth of the process's memory during the first two calls, in MiB; None if not measured."""
    peak_ratio: float | None = None
    published_ap: float | None = None
    """The published COCO AP of a detector, in percent."""
    setting: str = ""
    """What differs between the rows of a run, such as "2 threads"."""
    note: str = ""
    """Why it cannot run."""
    lowest_ratio: float | None = None
    """Of the rounds whose median is `ratio`."""
    highest_ratio: float | None = None


class OnnxFromOutside(NamedTuple):
    """An ONNX file that vitkit has not written."""

    name: str
    ap: float | None
    """The published COCO AP, in percent."""
    path: Path


@dataclass(frozen=True)
class Options:
    """Settings of the measurement in every part."""

    repeats: int = 9
    """The number of rounds, after a warm-up round."""
    device: str = "cpu"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    memory: bool = True
    """Whether peak memory is also measured."""
    clock: Callable[[], float] = time.perf_counter
    """The clock; `time.process_time` counts only the time that the process computes, not the time that it waits."""
    images: Path | None = None
    """A folder of JPEGs for the loader; None: images are generated."""
    models: Sequence[str] = ()
    """The models of the part "latency", or "all"; none: six of them."""
    rows: Sequence[str] = ()
    """The rows of each of these models; none: all that can be measured here."""
    batch_sizes: Sequence[int] = (1,)
    """The numbers of images that the part "latency" runs at once."""
    compiled: bool = False
    """Whether only training steps are measured, of compiled models."""
    onnx: Sequence[OnnxFromOutside] = ()
    """Files that the part "latency" measures as well."""

    def autocast(self) -> torch.autocast:
        """Return the autocast context of `precision` on `device`."""
        return autocast(torch.device(self.device), self.precision)


def compare(what: str, builders: Mapping[str, Builder], options: Options, *, memory: bool = True) -> list[Measurement]:
    """Time calls in turn (A B C A B C), so that other load on the machine affects all of them.

    Args:
        builders: name -> a picklable function that makes the call to measure, such as a partial of a module's function.
        memory: whether the peak memory is meaningful for these calls.
    """
    times = time_in_turn({name: build() for name, build in builders.items()}, options)
    reference = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        peak = peak_memory(builders[name], device=options.device) if memory and options.memory else None
        peak_ratio = peak and peak / (rows[0].peak_mib if rows else peak)
        row = Measurement(what, name, statistics.median(seconds), None, peak, peak_ratio)
        rows.append(row._replace(**ratios_to(reference, seconds)))
    return rows


def ratios_to(reference: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes of the ratios in each round, as the arguments of a `Measurement`."""
    ratios = [a / b for a, b in zip(seconds, reference)]
    return dict(ratio=statistics.median(ratios), lowest_ratio=min(ratios), highest_ratio=max(ratios))


def time_in_turn(calls: Mapping[str, Call], options: Options) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, after a warm-up round.

    Before each call there is a pause: the threads of the one before spin for a while, waiting for more work, and take
    the cores of another runtime's.
    """
    rounds = []
    for _ in range(options.repeats + 1):
        rounds.append({})
        for name, call in calls.items():
            time.sleep(PAUSE)
            rounds[-1][name] = seconds_of(call, options)
    return {name: [seconds[name] for seconds in rounds[1:]] for name in calls}


def seconds_of(call: Call, options: Options) -> float:
    """Return the time of a call, until the device has finished."""
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    synchronize()
    start = options.clock()
    call()
    synchronize()
    return options.clock() - start


def peak_memory(build: Builder, *, device: str = "cpu") -> float | None:
    """Measure the peak memory of a call, minus the memory before it, in MiB.

    Args:
        build: makes the call, which runs twice, on a CPU in a new process.
        device: on "cuda" only PyTorch's tensors count, on "cpu" all resident memory.
    Returns:
        None if the system does not report it (Linux does).
    """
    if device == "cuda":  # earlier work leaves no holes in what PyTorch counts
        return _peak_memory(build, device, torch.get_num_threads())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_memory, (build, torch.device(device).type, torch.get_num_threads()))


def _peak_memory(build: Builder, device: str, threads: int) -> float | None:
    torch.set_num_threads(threads)
    measurable = Path("/proc/self/clear_refs").exists()
    if measurable:
        # Return large blocks to the system as soon as they are freed. Otherwise the peak would include the holes
        # between them, and vary from run to run by up to half.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    call = build()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    elif measurable:
        # Otherwise the call could reuse memory that was freed after building the model, which would not be counted.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status_bytes("VmRSS")
    else:
        return None
    for _ in range(2):
        call()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _status_bytes("VmHWM")
    return (peak - before) / 2**20


def _status_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
