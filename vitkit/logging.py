"""What a run says while it goes on: meters, the progress line, JSON lines, TensorBoard."""

import datetime
import json
import logging
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vitkit.distributed import all_reduce_sum, is_main

LOG_NAME = "log.jsonl"


def setup_logging() -> None:
    """Sends the messages of the "vitkit" logger to standard error, from the main process alone."""
    logger = logging.getLogger("vitkit")
    logger.setLevel(logging.INFO if is_main() else logging.ERROR)
    handler = next((h for h in logger.handlers if isinstance(h, logging.StreamHandler)), None)
    if handler is None:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    handler.stream = sys.stderr  # which may be another one than at the last call


class RatioMeter:
    """A ratio of two sums, such as right answers over answers. Adding never waits for the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, numerator: Tensor, denominator: Tensor) -> None:
        """Adds two scalars to the sums; those of a batch whose loss is not finite count nothing."""
        pair = torch.stack([numerator.detach().double(), denominator.detach().double().to(numerator.device)])
        pair = pair.where(pair.isfinite().all(), 0)
        self._sums = pair if self._sums is None else self._sums + pair

    def compute(self, device: torch.device | str = "cpu") -> tuple[float, int]:
        """The ratio over all ranks and its denominator; (nan, 0) when nothing was added anywhere.

        Args:
            device: the process group's device, for a rank that has added nothing yet.
        """
        sums = self._sums if self._sums is not None else torch.zeros(2, dtype=torch.float64, device=device)
        numerator, denominator = all_reduce_sum(sums).tolist()
        return (numerator / denominator if denominator else float("nan")), int(denominator)

    def reset(self) -> None:
        self._sums = None

    def state_dict(self) -> dict[str, Tensor | None]:
        return {"sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        self._sums = state["sums"]


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MiB: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource  # Unix alone has it
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def format_losses(losses: Mapping[str, float]) -> str:
    """The terms of the final layer; auxiliary layers repeat them and are only in the log file."""
    return " ".join(f"{name} {value:.3f}" for name, value in losses.items() if not name.startswith("aux"))


class RunLog:
    """Writes one run's records to the console, to `log.jsonl` and, when it is installed, to TensorBoard.

    Only the main process writes. A resumed run appends.

    Args:
        position: steps and whole epochs that are done; records from beyond, which a killed run wrote after its last
            checkpoint, are taken out, as the run writes them again. None leaves all.
    """

    def __init__(self, run_dir: Path, *, position: tuple[int, int] | None = None):
        self._file = self._tensorboard = None
        self._whole = True
        if is_main():
            path = run_dir / LOG_NAME
            if position is not None and path.exists():
                cut_log(path, *position)
            self._file = path.open("ab", buffering=0)
            self._tensorboard = _tensorboard_writer(run_dir, None if position is None else position[0] + 1)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What a full disk could not take fails again on closing.
        with suppress(OSError):
            if self._file:
                self._file.close()
            if self._tensorboard:
                self._tensorboard.close()

    def train(self, record: dict, *, epoch_label: str, eta_seconds: float) -> None:
        """One stretch of training steps.

        Args:
            record: step, epoch, loss, losses, lr, it_s, data_share, memory_mb.
        """
        eta = datetime.timedelta(seconds=round(eta_seconds))
        self._say(
            f"{epoch_label}  loss {record['loss']:.3f} ({format_losses(record['losses'])})  lr {record['lr']:.1e}  "
            f"{record['it_s']:.2f} it/s  ETA {eta}  mem {record['memory_mb'] / 1024:.2f} GiB  "
            f"data {record['data_share']:.0%}"
        )
        self._write({"kind": "train", **record})

    def validation(self, record: dict, *, epoch_label: str) -> None:
        """One evaluation.

        Args:
            record: step, epoch, metrics.
        """
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
        self._say(f"{epoch_label}  validation  {metrics}")
        self._write({"kind": "val", **record})

    def say(self, message: str) -> None:
        """One line on the console, from the main process."""
        self._say(message)

    def _say(self, line: str) -> None:
        if self._file:
            print(line, flush=True)

    def _write(self, record: dict) -> None:
        if not self._file:
            return
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        try:
            # After a line that a full disk cut off, the next one must not be its continuation.
            line = line if self._whole else b"\n" + line
            self._whole = self._file.write(line) == len(line)
            if self._tensorboard:
                for name, value in _scalars(record):
                    self._tensorboard.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        except OSError as error:
            self._whole = False
            self._say(f"{self._file.name}: not written ({error.strerror}); training goes on")


def cut_log(path: Path, step: int, epoch: int) -> None:
    """Ends a log before its first record from beyond `step` steps or `epoch` whole epochs, or half a line."""
    kept = 0
    with path.open("r+b") as file:
        for line in file:
            try:
                record = json.loads(line)
                beyond = record["step"] > step or (record["kind"] == "val" and record["epoch"] > epoch)
            except (ValueError, KeyError, TypeError):
                beyond = False
            if beyond or not line.endswith(b"\n"):
                break
            kept += len(line)
        file.truncate(kept)


def _finite(value: Any) -> Any:
    """The record with None for numbers that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: Mapping) -> list[tuple[str, float]]:
    pairs = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            pairs += [(f"{name}/{inner}", v) for inner, v in _scalars(value)]
        elif isinstance(value, int | float) and name != "step":
            pairs.append((name, float(value)))
    return pairs


def _tensorboard_writer(run_dir: Path, purge_step: int | None):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)
