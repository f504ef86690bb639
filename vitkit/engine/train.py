"""The training loop of every task: one batch, top to bottom.

It receives built objects and knows no concrete model, dataset or metric.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitkit.checkpoint import read_checkpoint, rng_state, save_checkpoint, set_rng_state
from vitkit.distributed import all_reduce_mean, broadcast, broadcast_object, gather_objects, is_main, rank, world_size
from vitkit.engine.evaluate import autocast
from vitkit.engine.settings import TrainSettings
from vitkit.errors import CheckpointError, TrainingError
from vitkit.logging import RatioMeter, RunLog, peak_memory_mb
from vitkit.registry import nearest

logger = logging.getLogger("vitkit")
LAST_NAME, BEST_NAME = "last.pth", "best.pth"


@dataclass
class Progress:
    """How far a run is: what a checkpoint counts."""

    epoch: int = 0
    """Epochs that are complete."""
    step: int = 0
    """Optimiser steps that are done."""
    best: float = -math.inf
    """The best metric so far."""
    worse_in_a_row: int = 0
    """Evaluations since then."""


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

    Args:
        model: on `device` already; wrapped for DDP here when there are several ranks.
        loader: yields batches; `loader.set_position(epoch)` chooses their order.
        evaluate: takes the model to evaluate, returns metrics (an empty dict on ranks other than the main one).
        resume: a checkpoint of this run to go on from.
        saved_with: plain values that every checkpoint shall hold (config, classes).
        on_start: called once the checkpoint to resume from has proved to fit.
    Raises:
        TrainingError: a loss is not finite.
        CheckpointError: `resume` does not fit this run.
    """
    num_steps = math.ceil(len(loader) / settings.accumulate)
    ema = _moving_average(model, settings)
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    meters: dict[str, RatioMeter] = getattr(criterion, "meters", {})
    parts = {"model": model, "ema": ema, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    progress = _resume(resume, parts) if resume else Progress()
    if on_start:
        on_start()
    trained = _wrap(model, settings, device)
    window = _Window(device)

    with RunLog(run_dir) as log:
        for epoch in range(progress.epoch, settings.epochs):
            loader.set_position(epoch)
            model.train()
            criterion.train()
            for meter in meters.values():
                meter.reset()
            window.restart()
            for index, batch in enumerate(loader, start=1):
                window.batch_arrived()
                batch = batch.to(device)
                steps_now = index % settings.accumulate == 0 or index == len(loader)
                waits = isinstance(trained, DistributedDataParallel) and not steps_now
                with trained.no_sync() if waits else nullcontext():
                    with autocast(device, settings.precision):
                        outputs = trained(**batch.inputs)
                        losses = criterion(outputs, batch.targets)
                        loss = sum(losses.values())
                    scaler.scale(loss / _group_size(index, len(loader), settings.accumulate)).backward()
                window.add(losses)
                if steps_now:
                    lr = max(schedule.get_last_lr())
                    if _step(model, optimizer, schedule, scaler, settings.clip_grad_norm):
                        progress.step += 1
                        if ema is not None:
                            ema.update_parameters(model)
                    if progress.step % settings.log_every == 0 or index == len(loader):
                        steps_left = (settings.epochs - epoch) * num_steps - math.ceil(index / settings.accumulate)
                        epochs_done = epoch + index / len(loader)
                        _log_steps(log, window, progress, settings, lr=lr, epoch=epochs_done, steps_left=steps_left)
                window.batch_done()
            progress.epoch = epoch + 1

            metrics = {name: meter.compute(device) for name, meter in meters.items()}
            summary = "  ".join(f"{name} {ratio:.3f} of {count}" for name, (ratio, count) in metrics.items())
            log.say(f"epoch {progress.epoch}/{settings.epochs} done  {summary}")
            is_best = False
            if evaluate and (progress.epoch % settings.eval_every == 0 or progress.epoch == settings.epochs):
                evaluated = ema.module if ema is not None else model
                # Running statistics differ between ranks; what is saved shall be what is evaluated.
                for buffer in evaluated.buffers():
                    broadcast(buffer)
                result = broadcast_object(evaluate(evaluated))
                result |= {f"train_{name}": ratio for name, (ratio, _) in metrics.items()}
                log.validation(
                    {"step": progress.step, "epoch": progress.epoch, "metrics": result},
                    epoch_label=f"epoch {progress.epoch}/{settings.epochs}",
                )
                if settings.best_metric in result:
                    is_best = _note_metric(progress, result[settings.best_metric])
                else:
                    known = nearest(settings.best_metric, result)
                    log.say(f"train.best_metric={settings.best_metric}: not measured, so no best is kept. {known}")
            _save(run_dir, parts, progress, saved_with or {}, is_best=is_best)
            if settings.patience is not None and progress.worse_in_a_row >= settings.patience:
                log.say(f"stopping early: {settings.patience} evaluations without a better {settings.best_metric}")
                break
    return progress


def _moving_average(model: nn.Module, settings: TrainSettings) -> AveragedModel | None:
    if settings.ema_decay is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay), use_buffers=True)


def _wrap(model: nn.Module, settings: TrainSettings, device: torch.device) -> nn.Module:
    """The model as the loop calls it; parameters are shared with `model`."""
    if settings.compile:
        model = torch.compile(model)
    if world_size() > 1:
        ids = [device.index] if device.type == "cuda" else None
        # Gradients of 1x1 kernels come in channels-last strides, which for them are the same order of numbers.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return model


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler,
    scaler: torch.amp.GradScaler,
    clip_grad_norm: float | None,
) -> bool:
    """One optimiser step; False if the scaler skipped it, because a scaled gradient overflowed."""
    if clip_grad_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    taken = scaler.get_scale() >= scale
    if taken:
        schedule.step()
    return taken


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

    def add(self, losses: Mapping[str, Tensor]) -> None:
        for name, value in losses.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._batches += 1

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


def _log_steps(
    log: RunLog,
    window: _Window,
    progress: Progress,
    settings: TrainSettings,
    *,
    lr: float,
    epoch: float,
    steps_left: int,
) -> None:
    losses, seconds_per_batch, data_share = window.take()
    bad = [name for name, value in losses.items() if not math.isfinite(value)]
    if bad:
        raise TrainingError(
            f"step {progress.step}: loss {', '.join(bad)} is {', '.join(str(losses[name]) for name in bad)}. "
            "Lower optimizer.lr, set train.clip_grad_norm, or use train.precision=bf16 in place of fp16. "
            "The last checkpoint is from before."
        )
    seconds_per_step = seconds_per_batch * settings.accumulate
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
    log.train(record, epoch_label=label, eta_seconds=steps_left * seconds_per_step)


def _note_metric(progress: Progress, value: float) -> bool:
    """Counts an evaluation, and says whether it was the best."""
    is_best = value > progress.best
    progress.best = max(progress.best, value)
    progress.worse_in_a_row = 0 if is_best else progress.worse_in_a_row + 1
    return is_best


def _save(
    run_dir: Path, parts: Mapping[str, Any], progress: Progress, saved_with: Mapping[str, Any], *, is_best: bool
) -> None:
    rngs = gather_objects(rng_state())
    if not is_main():
        return
    state = {name: _weights(part) for name, part in parts.items() if part is not None}
    state |= {"progress": asdict(progress), "rng": rngs, **saved_with}
    save_checkpoint(run_dir / LAST_NAME, state)
    if is_best:
        save_checkpoint(run_dir / BEST_NAME, state)


def _weights(part: Any) -> Mapping[str, Any]:
    return part.module.state_dict() if isinstance(part, AveragedModel) else part.state_dict()


def _resume(path: Path, parts: Mapping[str, Any]) -> Progress:
    state = read_checkpoint(path)
    lacking = [name for name, part in parts.items() if part is not None and name not in state]
    if lacking:
        raise CheckpointError(
            f"{path}: cannot be resumed, it lacks {', '.join(lacking)}. Resume from a run's {LAST_NAME}, made with the "
            "same train.ema_decay; to start a new run from its weights use --init."
        )
    if _lengths(state["schedule"]) != _lengths(parts["schedule"].state_dict()):
        raise CheckpointError(
            f"{path}: its learning rates were planned over another number of steps. Resume with the run's own "
            "train.epochs, batch size and number of images; to train longer start a new run from its weights by --init."
        )
    for name, part in parts.items():
        if part is None:
            continue
        try:
            (part.module if isinstance(part, AveragedModel) else part).load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{path}: its {name} does not fit this config's ({reason}). Resume with the run's own config; to "
                "start a new run from its weights use --init."
            ) from error
    progress = Progress(**state["progress"])
    if parts["ema"] is not None:
        parts["ema"].n_averaged.fill_(progress.step)
    if len(state["rng"]) == world_size():
        set_rng_state(state["rng"][rank()])
    else:
        logger.warning(
            "%s was saved by %d ranks, this run has %d: it goes on, but not as the same run would have.",
            path, len(state["rng"]), world_size(),
        )  # fmt: skip
    return progress


def _lengths(schedule_state: Mapping[str, Any]) -> list:
    """The numbers of steps that a schedule of torch, or a sequence of them, was built with."""
    own = [schedule_state[name] for name in ("T_max", "total_iters", "milestones") if name in schedule_state]
    return own + [_lengths(inner) for inner in schedule_state.get("_schedulers", [])]
