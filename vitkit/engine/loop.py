"""The training loop of every task: epochs of steps, each followed by an evaluation and a checkpoint.

It receives built objects and knows no concrete model, dataset or metric.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from vitkit.distributed import broadcast, broadcast_object
from vitkit.engine.checkpoints import Progress
from vitkit.engine.disk_space import check_disk_space
from vitkit.engine.hooks import default_hooks
from vitkit.engine.run import TrainRun
from vitkit.engine.step import train_step
from vitkit.logging import say
from vitkit.structures import Batch

logger = logging.getLogger("vitkit")
Validate = Callable[[nn.Module], dict[str, float]]


def train(
    run: TrainRun,
    *,
    validate: Validate | None = None,
    resume: Path | None = None,
    on_start: Callable[[], None] | None = None,
) -> Progress:
    """Train until `settings.epochs`, with evaluations and checkpoints in between.

    A run that is interrupted or killed at any moment and then resumed ends with the same weights as an uninterrupted
    one: a checkpoint holds the state between two optimiser steps, including the position in the epoch.

    Args:
        validate: takes the model to evaluate, returns metrics (an empty dict on ranks other than the main one).
        resume: a checkpoint of this run to resume from.
        on_start: called after that checkpoint was found to fit.
    Raises:
        ConfigError: the disk has no room for the run's checkpoints.
        TrainingError: several steps in a row had a loss or gradient that is not finite, memory ran out, or the loader
            ended early.
        CheckpointError: `resume` does not fit this run, or the last state cannot be written.
        Interrupted: a signal requested the end, and the state is saved.
    """
    settings = run.settings
    run.hooks = default_hooks(settings)
    if resume:
        run.progress = run.checkpoints.resume(resume)
        _check_position(run)
    check_disk_space(run)
    if on_start:
        on_start()
    if not resume:
        # So a run can be resumed from its very beginning, and a full disk is noticed before hours of training.
        run.save(raise_on_error=True)

    with ExitStack() as contexts:
        for hook in run.hooks:
            contexts.enter_context(hook.during_training(run))
        if run.progress.epoch >= settings.epochs:
            say(f"nothing is left to train: all {settings.epochs} epochs are done")
        elif settings.compile:
            say("train.compile: the first step, and the first with images of another size, can take minutes")
        for epoch in range(run.progress.epoch, settings.epochs):
            if run.should_end:
                break
            train_epoch(run, epoch)
            if validate and ((epoch + 1) % settings.eval_every == 0 or epoch + 1 == settings.epochs):
                evaluate_epoch(run, validate)
            run.progress.epoch, run.progress.batch = epoch + 1, 0
            run.save(raise_on_error=run.should_end or epoch + 1 == settings.epochs)
    return run.progress


def train_epoch(run: TrainRun, epoch: int) -> None:
    """Train on one epoch's batches, or on the rest of them after resuming."""
    progress = run.progress
    run.loader.set_position(epoch, progress.batch)
    progress.num_batches = len(run.loader)
    if progress.batch == 0:
        for meter in run.meters.values():
            meter.reset()
    run.model.train()
    run.criterion.train()
    for hook in run.hooks:
        hook.before_epoch(run)
    batches = _timed(run, run.loader)
    while progress.batch < progress.num_batches:
        train_step(run, batches, min(run.settings.accumulate, progress.num_batches - progress.batch))
        for hook in run.hooks:
            hook.after_step(run)
    for hook in run.hooks:
        hook.after_epoch(run)


def evaluate_epoch(run: TrainRun, validate: Validate) -> None:
    """Evaluate the weights, or their moving average."""
    model = run.model if run.ema is None else run.ema.module
    # Running statistics differ between ranks; they must be the same in the evaluation and in the checkpoint.
    for buffer in model.buffers():
        broadcast(buffer)
    train_metrics = {f"train_{name}": meter.compute(run.device)[0] for name, meter in run.meters.items()}
    with ExitStack() as contexts:
        for hook in run.hooks:
            contexts.enter_context(hook.during_evaluation(run))
        metrics = validate(model)
    metrics = broadcast_object(metrics) | train_metrics
    for hook in run.hooks:
        hook.after_evaluation(run, metrics)


def _timed(run: TrainRun, loader: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the loader's batches, adding the time spent waiting for each one to `run.data_seconds`."""
    batches = iter(loader)
    while True:
        start = time.monotonic()
        batch = next(batches, None)
        run.data_seconds += time.monotonic() - start
        if batch is None:
            return
        yield batch


def _check_position(run: TrainRun) -> None:
    """Continue at the same fraction of the epoch if it has a different number of batches than in the saved run."""
    progress = run.progress
    if progress.batch == 0:
        return
    run.loader.set_position(progress.epoch, 0)
    now, before = len(run.loader), progress.num_batches
    if now != before:
        batch = progress.batch * now // before
        progress.batch = now if progress.batch == before else batch - batch % run.settings.accumulate
        logger.warning(
            "the epoch had %d batches and has %d now: it continues at batch %d, and results will differ from "
            "an uninterrupted run.",
            before,
            now,
            progress.batch,
        )
