"""What logging, and the checks of losses and gradients, take of a training run: the quickstart's DETR."""

import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from vitkit import build_dataset, build_model
from vitkit.configs.quickstart.detr import config as quickstart
from vitkit.data.loader import DataSettings
from vitkit.engine import train as engine
from vitkit.engine.faults import StepGuard
from vitkit.engine.settings import TrainSettings
from vitkit.registry import CRITERIA, OPTIMIZERS, SCHEDULES
from vitkit.structures import Batch
from vitkit.tools.benchmark_timing import Row

LOGGING, CHECKS = "its progress lines, log file and TensorBoard, every 50 steps", "its checks of losses and gradients"
TIMED = (
    (engine, "_log_steps", LOGGING),
    *((engine._Window, name, LOGGING) for name in ("add", "batch_arrived", "batch_done", "restart")),
    (engine, "gradient_norm", CHECKS),
    *((StepGuard, name, CHECKS) for name in ("add", "agree", "clear")),
)


class Repeated:
    """The first batch of a loader, again and again, so that no loading is measured."""

    def __init__(self, loader: Any, steps: int):
        loader.set_position(0)
        self.batch, self.steps = next(iter(loader)), steps

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Every epoch is the same."""

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return iter([self.batch] * self.steps)


def measure(*, steps: int = 200, clock: Callable[[], float] = time.perf_counter) -> list[Row]:
    """One run without clipping, in which the time spent in each is summed: their difference to a run without them
    would be lost in the noise. On a GPU a check also waits for the step, so this is measured on the processor.

    Args:
        steps: of the run.
    """
    config = quickstart()
    settings = TrainSettings(epochs=1, log_every=50, save_every_minutes=None)
    data = DataSettings(**{**config["data"], "num_workers": 0})
    dataset = build_dataset(data.train)
    model = build_model(config["model"], classes=dataset.classes)
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    schedule = SCHEDULES.build(config["schedule"], optimizer=optimizer, steps_per_epoch=steps, epochs=1)
    loader = Repeated(data.train_loader(dataset, 0), steps)
    spent: Counter[str] = Counter()
    with ExitStack() as stack:
        for owner, name, what in TIMED:
            stack.enter_context(patch.object(owner, name, _timed(getattr(owner, name), spent, what, clock)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = clock()
        engine.train(
            model, CRITERIA.build(config["criterion"]), loader, optimizer=optimizer, schedule=schedule,
            settings=settings, device=torch.device("cpu"), run_dir=folder,
        )  # fmt: skip
        whole = clock() - start
    what = f"a step of training, 64x64, batch {len(loader.batch)}"
    rows = [Row(what, "all of it", whole / steps, 1.0)]
    return rows + [Row(what, name, spent[name] / steps, spent[name] / whole) for name in (LOGGING, CHECKS)]


def _timed(function: Callable, spent: Counter[str], what: str, clock: Callable[[], float]) -> Callable:
    @functools.wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        start = clock()
        try:
            return function(*args, **options)
        finally:
            spent[what] += clock() - start

    return timed


if __name__ == "__main__":
    for row in measure():
        print(row)
