"""The training loop of every task: one batch, top to bottom.

It receives built objects and knows no concrete model, dataset or metric.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitkit.distributed import all_reduce_mean, all_reduce_sum, broadcast, broadcast_object
from vitkit.engine.checkpoints import BEST_NAME, LAST_NAME, Progress, RunCheckpoints
from vitkit.engine.evaluate import autocast
from vitkit.engine.faults import StepGuard, memory_explained, training_remedies
from vitkit.engine.parallel import clip_gradients, gradient_norm, is_sharded, unsynchronised, wrap
from vitkit.engine.settings import TrainSettings
from vitkit.engine.stopping import Stopped, StopSignals
from vitkit.logging import RatioMeter, RunLog, peak_memory_mb
from vitkit.registry import nearest

__all__ = ["BEST_NAME", "LAST_NAME", "Progress", "Stopped", "train"]
logger = logging.getLogger("vitkit")


def train(
    model: nn.Module,
    criterion: nn.Module,
    loader,
    *,
    optimizer: Optimizer,
    schedule: LRScheduler,
    settings: TrainSettings,
    device: torch.device,
    run_dir: Path,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    resume: Path | None = None,
    saved_with: Mapping[str, Any] | None = None,
    on_start: Callable[[], None] | None = None,
) -> Progress:
    """Trains until `settings.epochs`, evaluating and saving on the way.

    A run that is stopped or killed at any moment and resumed ends in the same weights as one that never was: what is
    saved is the state between two optimiser steps, with the position in the epoch.

    Args:
        model: on `device` already; wrapped for DDP here when there are several ranks.
        loader: yields batches; `loader.set_position(epoch, batch)` chooses their order and how many are skipped.
        evaluate: takes the model to evaluate, returns metrics (an empty dict on ranks other than the main one).
        resume: a checkpoint of this run to go on from.
        saved_with: plain values that every checkpoint shall hold (config, classes).
        on_start: called once the checkpoint to resume from has proved to fit.
    Raises:
        TrainingError: several steps in a row had a loss or a gradient that is not finite, or there is no memory left.
        CheckpointError: `resume` does not fit this run, or the last state cannot be written.
        Stopped: a signal asked for it, and the state is saved.
    """
    ema = _moving_average(model, settings)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    meters: dict[str, RatioMeter] = getattr(criterion, "meters", {})
    parts = {"model": model, "ema": ema, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    checkpoints = RunCheckpoints(
        run_dir, parts, meters=meters, saved_with=saved_with or {}, keep=settings.keep_checkpoints, device=device,
        sharded=settings.sharded_checkpoints,
    )  # fmt: skip
    progress = checkpoints.resume(resume) if resume else Progress()
    _check_position(progress, loader, settings)
    if on_start:
        on_start()
    if not resume:
        # Then a run can be resumed from its first moment on; and a disk that is full is known before hours are spent.
        checkpoints.save(progress, must=True)
    trained = wrap(model, settings, device)
    # Once: looking for them in every module takes as long as many a step's norm of gradients.
    parameters = list(model.parameters())
    guard = StepGuard(model, device)
    window = _Window(device)
    saving = _SaveTimes(settings)
    less_memory = partial(training_remedies, settings=settings)

    with RunLog(run_dir, position=(progress.step, progress.epoch)) as log, StopSignals() as signals:
        for epoch in range(progress.epoch, settings.epochs):
            loader.set_position(epoch, progress.batch)
            progress.num_batches = num_batches = len(loader)
            if progress.batch == 0:
                for meter in meters.values():
                    meter.reset()
            model.train()
            criterion.train()
            window.restart()
            for index, batch in enumerate(loader, start=progress.batch + 1):
                window.batch_arrived()
                batch = batch.to(device)
                group_size = _group_size(index, num_batches, settings.accumulate)
                steps_now = index % settings.accumulate == 0 or index == num_batches
                with memory_explained(batch, less_memory), nullcontext() if steps_now else unsynchronised(trained):
                    with autocast(device, settings.precision):
                        outputs = trained(**batch.inputs)
                        losses = guard.compute(criterion, outputs, batch.targets)
                        loss = sum(losses.values())
                    scaler.scale(loss / group_size).backward()
                guard.add(losses, batch.targets)
                if steps_now:
                    progress.batch = index
                    with memory_explained(batch, less_memory):
                        norm = _unscaled_norm(parameters, optimizer, scaler)
                    agreed = guard.agree(
                        norm, progress, loss_scale=scaler.get_scale() if scaler.is_enabled() else 1.0,
                        stop=signals.received is not None, save=saving.is_time(),
                    )  # fmt: skip
                    lr = max(schedule.get_last_lr())
                    with memory_explained(batch, less_memory):  # a first step makes the optimiser's state
                        _step(parameters, optimizer, schedule, scaler, norm, settings.clip_grad_norm, take=agreed.take)
                    if agreed.take:
                        progress.step += 1
                        window.add(guard.losses)
                        if ema is not None:
                            ema.update_parameters(model)
                    guard.clear()
                    if window.has_losses and (progress.step % settings.log_every == 0 or index == num_batches):
                        _log_steps(log, window, progress, settings, lr=lr)
                    if agreed.save or agreed.stop or (agreed.take and saving.is_turn(progress.step)):
                        checkpoints.save(progress, must=agreed.stop)
                        saving.saved()
                    if agreed.stop:
                        raise Stopped(signals.received or signal.SIGTERM)  # it may be another rank that was told
                window.batch_done()

            metrics = {name: meter.compute(device) for name, meter in meters.items()}
            summary = "  ".join(f"{name} {ratio:.3f} of {count}" for name, (ratio, count) in metrics.items())
            skipped = int(all_reduce_sum(torch.tensor(float(getattr(loader, "num_skipped", 0)), device=device)))
            since = "since the last --resume" if resume else "so far"
            skips = f"  {skipped} samples replaced {since}, of files that cannot be used" if skipped else ""
            log.say(f"epoch {epoch + 1}/{settings.epochs} done  {summary}{skips}")
            is_best = False
            if evaluate and ((epoch + 1) % settings.eval_every == 0 or epoch + 1 == settings.epochs):
                evaluated = ema.module if ema is not None else model
                # Running statistics differ between ranks; what is saved shall be what is evaluated.
                for buffer in evaluated.buffers():
                    broadcast(buffer)
                before = checkpoints.of_ranks()
                alone_saves = not is_sharded(model)
                if not alone_saves:
                    checkpoints.save(progress, of_ranks=before)
                try:
                    # Evaluation changes no weight, so it need not end before the run can be saved.
                    with signals.interrupting(enabled=alone_saves):
                        result = evaluate(evaluated)
                except BaseException as error:  # a fault of the evaluation shall not cost the epoch
                    if alone_saves:
                        checkpoints.save(progress, must=isinstance(error, Stopped), of_ranks=before)
                    raise
                result = broadcast_object(result)
                result |= {f"train_{name}": ratio for name, (ratio, _) in metrics.items()}
                log.validation(
                    {"step": progress.step, "epoch": epoch + 1, "metrics": result},
                    epoch_label=f"epoch {epoch + 1}/{settings.epochs}",
                )
                if settings.best_metric in result:
                    is_best = _note_metric(progress, result[settings.best_metric])
                else:
                    known = nearest(settings.best_metric, result)
                    log.say(f"train.best_metric={settings.best_metric}: not measured, so no best is kept. {known}")
            progress.epoch, progress.batch = epoch + 1, 0
            checkpoints.save(progress, is_best=is_best, must=progress.epoch == settings.epochs)
            saving.saved()
            if settings.patience is not None and progress.worse_in_a_row >= settings.patience:
                log.say(f"stopping early: {settings.patience} evaluations without a better {settings.best_metric}")
                break
    return progress


def _moving_average(model: nn.Module, settings: TrainSettings) -> AveragedModel | None:
    if settings.ema_decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay), use_buffers=True)


def _check_position(progress: Progress, loader: Any, settings: TrainSettings) -> None:
    """Where the epoch that is under way has another number of batches now, goes on at the same part of it."""
    if progress.batch == 0:
        return
    loader.set_position(progress.epoch, 0)
    now, before = len(loader), progress.num_batches
    if now != before:
        batch = progress.batch * now // before
        progress.batch = now if progress.batch == before else batch - batch % settings.accumulate
        logger.warning(
            "the epoch had %d batches and has %d now: it goes on at batch %d, and not as the same run would have.",
            before, now, progress.batch,
        )  # fmt: skip


def _unscaled_norm(parameters: Sequence[nn.Parameter], optimizer: Optimizer, scaler: torch.amp.GradScaler) -> Tensor:
    """The norm of all gradients together, which are without the loss scale afterwards."""
    scaler.unscale_(optimizer)
    return gradient_norm(parameters)


def _step(
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    schedule: LRScheduler,
    scaler: torch.amp.GradScaler,
    norm: Tensor,
    clip_grad_norm: float | None,
    *,
    take: bool,
) -> None:
    """One optimiser step from unscaled gradients of the given norm; without `take` they are only dropped."""
    if take:
        if clip_grad_norm is not None:
            clip_gradients(parameters, norm, clip_grad_norm)
        scaler.step(optimizer)
        schedule.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def _group_size(index: int, num_batches: int, accumulate: int) -> int:
    """How many batches share the optimiser step of batch `index` (from 1): fewer in an epoch's last step."""
    last = num_batches % accumulate
    return last if index > num_batches - last else accumulate


class _Window:
    """Losses and times since the last progress line. Losses stay on the device until they are asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.restart()

    def restart(self) -> None:
        self._start = self._mark = time.monotonic()
        self._waited = 0.0
        self._batches = 0
        self._sums: dict[str, Tensor] = {}

    def batch_arrived(self) -> None:
        """Counts the time since the last batch was done with as waiting for data."""
        self._waited += time.monotonic() - self._mark

    def add(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Takes the detached losses of a step's batches."""
        for losses in batches:
            for name, value in losses.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._batches += 1

    @property
    def has_losses(self) -> bool:
        """Whether a step was taken since the last progress line."""
        return self._batches > 0

    def batch_done(self) -> None:
        self._mark = time.monotonic()

    def take(self) -> tuple[dict[str, float], float, float]:
        """Mean losses over batches and ranks, seconds per batch, and the share of time spent waiting for data."""
        names = list(self._sums)
        means = all_reduce_mean(torch.stack([self._sums[name] for name in names]) / self._batches).tolist()
        seconds = max(time.monotonic() - self._start, 1e-9)
        result = dict(zip(names, means)), seconds / self._batches, self._waited / seconds
        self.restart()
        return result


class _SaveTimes:
    """When to save within an epoch."""

    def __init__(self, settings: TrainSettings):
        self.every_steps = settings.save_every_steps
        self.every_seconds = math.inf if settings.save_every_minutes is None else 60 * settings.save_every_minutes
        self.saved()

    def saved(self) -> None:
        self._since = time.monotonic()

    def is_time(self) -> bool:
        """By this rank's clock, which may differ from another's."""
        return time.monotonic() - self._since >= self.every_seconds

    def is_turn(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0


def _log_steps(log: RunLog, window: _Window, progress: Progress, settings: TrainSettings, *, lr: float) -> None:
    losses, seconds_per_batch, data_share = window.take()
    seconds_per_step = seconds_per_batch * settings.accumulate
    epoch = progress.epoch + progress.batch / progress.num_batches
    steps_per_epoch = math.ceil(progress.num_batches / settings.accumulate)
    record = {
        "step": progress.step,
        "epoch": round(epoch, 4),
        "loss": sum(losses.values()),
        "losses": losses,
        "lr": lr,
        "it_s": 1 / seconds_per_step,
        "data_share": data_share,
        "memory_mb": peak_memory_mb(window.device),
    }
    label = f"epoch {epoch:.2f}/{settings.epochs}  step {progress.step}"
    log.train(record, epoch_label=label, eta_seconds=(settings.epochs - epoch) * steps_per_epoch * seconds_per_step)


def _note_metric(progress: Progress, value: float) -> bool:
    """Counts an evaluation, and says whether it was the best."""
    is_best = value > progress.best
    progress.best = max(progress.best, value)
    progress.worse_in_a_row = 0 if is_best else progress.worse_in_a_row + 1
    return is_best
