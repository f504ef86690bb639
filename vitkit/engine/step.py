"""One optimizer step, and the decision of all ranks whether to take it: not if a loss or gradient is not finite."""

import logging
import math
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitkit.devices import OUT_OF_MEMORY, is_out_of_memory
from vitkit.distributed import all_reduce_sum, gather_objects, rank, world_size
from vitkit.engine.averaging import MovingAverage
from vitkit.engine.checkpointing import Progress, RunCheckpoints
from vitkit.engine.failures import describe_images, out_of_memory_error, training_remedies
from vitkit.engine.parallel import no_sync
from vitkit.engine.settings import TrainSettings
from vitkit.errors import TrainingError
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.model import Model
from vitkit.structures import Batch, UncompiledTargets
from vitkit.weights.locate import LAST_NAME

logger = logging.getLogger("vitkit")
MAX_SKIPPED_IN_A_ROW = 5


class Decision(NamedTuple):
    """The decision about a step whose gradients are complete; the same on all ranks."""

    take: bool
    """Take the optimizer step; otherwise skip it."""
    save: bool
    """Save after the step."""
    stop: bool
    """Save after the step and end the run, to be resumed later."""


class Step(NamedTuple):
    """The results of one step."""

    losses: list[dict[str, Tensor]]
    """Detached losses of each batch, by name; scalars on the device."""
    grad_norm: Tensor
    """Norm over all gradients, without the loss scale and before clipping."""
    lr: float
    """Largest learning rate of the parameter groups."""
    decision: Decision
    """What all ranks decided: whether the step was taken, and whether to save or stop after it."""
    data_seconds: float
    """Time spent waiting for the batches, in seconds."""


def train_step(
    model: nn.Module,
    criterion: Criterion,
    batches: Iterator[Batch],
    num_batches: int,
    *,
    wrapped_model: nn.Module,
    parameters: Sequence[nn.Parameter],
    autocast: torch.autocast,
    optimizer: Optimizer,
    schedule: LRScheduler,
    scaler: torch.amp.GradScaler,
    ema: MovingAverage | None,
    guard: "StepGuard",
    progress: Progress,
    settings: TrainSettings,
    device: torch.device,
) -> Step:
    """Train on the next `num_batches` batches: accumulate their gradients, clip them, and take an optimizer step.

    Args:
        wrapped_model: the model as it is called: compiled, and synchronizing the gradients of all ranks.
        parameters: the model's; collecting them anew can take as long as computing the norm of their gradients.
        progress: is advanced by these batches and, if the step is taken, by one step.
    Raises:
        TrainingError: the loader has ended early, several steps in a row were skipped, or memory ran out.
    """
    losses, targets, data_seconds, batch = [], [], 0.0, None
    same_for_any_ranks = settings.images_per_step is not None
    try:
        loaded = load_batches(batches, num_batches, progress, settings)
        if same_for_any_ranks:
            whole_step = list(loaded)
            shares = step_shares(criterion, [batch.targets for batch, _ in whole_step], device)
            loaded = iter(whole_step)
        for index, (batch, seconds) in enumerate(loaded):
            data_seconds += seconds
            batch = batch.to(device)
            if same_for_any_ranks:
                seed_batch(settings.seed, progress, index, stage=1)
                set_step_share(criterion, shares[index])
            # Ranks synchronize their gradients once per step, in its last backward pass.
            with nullcontext() if index + 1 == num_batches else no_sync(wrapped_model):
                with autocast:
                    outputs = wrapped_model(**training_inputs(model, batch))
                    batch_losses = criterion(outputs, batch.targets)
                    loss = sum(batch_losses.values())
                scaler.scale(loss / num_batches).backward()
            losses.append({name: value.detach().float() for name, value in batch_losses.items()})
            targets.append(batch.targets)
        progress.batch += num_batches

        scaler.unscale_(optimizer)
        grad_norm = gradient_norm(parameters)
        lr = float(max(schedule.get_last_lr()))
        decision = guard.decide(losses, targets, grad_norm, progress)
        if decision.take:
            if settings.clip_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, settings.clip_grad_norm, grad_norm)
            scaler.step(optimizer)
            schedule.step()
            if ema is not None:
                ema.update_parameters(model)
            progress.step += 1
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    except OUT_OF_MEMORY as error:
        if batch is None or not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, batch, training_remedies(batch, settings)) from error
    return Step(losses, grad_norm, lr, decision, data_seconds)


def load_batches(
    batches: Iterator[Batch], num_batches: int, progress: Progress, settings: TrainSettings
) -> Iterator[tuple[Batch, float]]:
    """Yield the step's batches, each with the seconds that it was waited for.

    Raises:
        TrainingError: the loader has ended early.
    """
    for index in range(num_batches):
        if settings.images_per_step is not None:
            seed_batch(settings.seed, progress, index, stage=0)  # for transforms on the device
        started = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            raise TrainingError(
                f"the training loader ended after {progress.batch + index} batches of the epoch, but its length is "
                f"{progress.num_batches}. Expected as many batches as its __len__ says: correct one of them."
            )
        yield batch, time.monotonic() - started


def seed_batch(seed: int, progress: Progress, index: int, *, stage: int) -> None:
    """Seed all random numbers by the number of a batch of the step among those of all ranks in the epoch.

    Args:
        index: number of the batch in the step.
        stage: 0 while it is loaded, 1 while the model trains on it.
    """
    number = (progress.batch + index) * world_size() + rank()
    entropy = np.random.SeedSequence([seed, progress.epoch, number, stage])
    seed_everything(int(entropy.generate_state(1, np.uint64)[0]))


def step_shares(
    criterion: Criterion, targets: Sequence[Sequence[Mapping[str, Any]]], device: torch.device
) -> list[Tensor]:
    """Return `Criterion.step_share` for each batch of a step, from the targets of all of them."""
    counts = torch.tensor([criterion.count(part) for part in targets], dtype=torch.float32).view(len(targets), -1)
    total = all_reduce_sum(counts.sum(0).to(device))
    mean = total.where(total > 0, 1) / (len(counts) * world_size())
    return list(mean / counts.where(counts > 0, 1).to(device))


def set_step_share(criterion: nn.Module, share: Tensor) -> None:
    """Set `step_share` of a criterion and of those that it is made of."""
    for module in criterion.modules():
        if isinstance(module, Criterion):
            module.step_share = share


def set_epoch(criterion: nn.Module, epoch: int) -> None:
    """Set `epoch` of a criterion and of those that it is made of."""
    for module in criterion.modules():
        if isinstance(module, Criterion):
            module.epoch = epoch


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # a rank's seed may exceed the 32 bits that NumPy takes
    torch.manual_seed(seed)


def training_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the inputs of a model in training: the batch's, and its targets if the model uses them."""
    if isinstance(model, Model) and model.uses_targets:
        return {**batch.inputs, "targets": UncompiledTargets(batch.targets)}
    return batch.inputs


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm over all gradients, the same on every rank."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    # The norm of sharded gradients is sharded itself.
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class StepGuard:
    """Skips a step unless every loss and gradient of every rank is finite, and reports which are not.

    Args:
        model: the model whose running statistics are restored if a step is skipped.
        scaler: scales the losses, so that gradients may overflow.
        checkpoints: the run's, which record when it was last saved.
        save_every_minutes: see `TrainSettings`.
    """

    def __init__(
        self,
        model: nn.Module,
        scaler: torch.amp.GradScaler,
        checkpoints: RunCheckpoints,
        *,
        save_every_minutes: float | None,
    ):
        self.model = model
        self.scaler = scaler
        self.checkpoints = checkpoints
        self.save_every_minutes = save_every_minutes
        self.stop_signal: signal.Signals | None = None
        """The signal that asked this process to end the run after the current step; None without one."""
        self._statistics: list[Tensor] = []
        self._last_good: list[Tensor] = []

    def watch(self) -> None:
        """Copy the running statistics of the model's batch norms, before an epoch's first step."""
        norms = [module for module in self.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]
        self._last_good = [buffer.clone() for buffer in self._statistics]

    def is_save_due(self) -> bool:
        """Return whether `save_every_minutes` have passed by this rank's clock, which may differ from other ranks'."""
        minutes = self.save_every_minutes
        return minutes is not None and time.monotonic() - self.checkpoints.saved_at >= 60 * minutes

    def decide(
        self,
        losses: Sequence[Mapping[str, Tensor]],
        targets: Sequence[Sequence[Mapping[str, Any]]],
        grad_norm: Tensor,
        progress: Progress,
    ) -> Decision:
        """Decide, together with all ranks, about the step, saving and stopping; count the skipped steps.

        Args:
            losses, targets: those of each batch of the step.
        Raises:
            TrainingError: several steps in a row were skipped.
        """
        wishes = [self.is_save_due(), self.stop_signal is not None]
        # A sum is not finite if any of its terms is not, so a single transfer from the device is enough.
        loss = torch.stack([value for batch_losses in losses for value in batch_losses.values()]).sum()
        not_finite = torch.stack([~loss.isfinite(), ~grad_norm.isfinite()]).float()
        requests = torch.tensor(wishes, dtype=torch.float32).to(not_finite.device, non_blocking=True)
        flags = all_reduce_sum(torch.cat([not_finite, requests])) > 0
        bad_loss, bad_gradient, save, stop = flags.tolist()
        take = not (bad_loss or bad_gradient)
        if self._statistics and take:
            torch._foreach_copy_(self._last_good, self._statistics)
        elif self._statistics:
            # The forward pass has already changed them; now, as the last of several skipped steps ends the run below.
            torch._foreach_copy_(self._statistics, self._last_good)
        # Gradients may overflow because the loss scale is too high: it is then lowered, and the step does not count as
        # bad.
        scale_is_too_high = bad_gradient and self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if take:
            progress.bad_in_a_row = 0
        elif bad_loss or not scale_is_too_high:
            progress.bad_in_a_row += 1
            if bad_loss:
                local = "; ".join(filter(None, map(_describe_losses, losses, targets)))
            else:
                images = describe_images([target for batch_targets in targets for target in batch_targets])
                local = f"{_describe_gradients(self.model, float(grad_norm))}; {images}"
            _report_skipped(local, progress)
        return Decision(take, save, stop)


def _report_skipped(local: str, progress: Progress) -> None:
    """Report a skipped step from the descriptions `local` of each rank, and end the run after too many in a row."""
    per_rank = gather_objects(local)
    issues = [f"rank {number}: {text}" if world_size() > 1 else text for number, text in enumerate(per_rank) if text]
    step = f"the step after step {progress.step} (epoch {progress.epoch}, batch {progress.batch})"
    if progress.bad_in_a_row < MAX_SKIPPED_IN_A_ROW:
        logger.warning(
            "%s is skipped, %d in a row so far: %s. After %d the run ends.",
            step,
            progress.bad_in_a_row,
            "; ".join(issues),
            MAX_SKIPPED_IN_A_ROW,
        )
        return
    raise TrainingError(
        f"{step}: {'; '.join(issues) or 'see rank 0'}. {MAX_SKIPPED_IN_A_ROW} steps in a row were skipped. "
        f"The weights are as they were before, and {LAST_NAME} is the last good checkpoint. Lower optimizer.lr, "
        "set train.clip_grad_norm, use train.precision=fp32, or bf16 in place of fp16, or look at these images."
    )


def _describe_gradients(model: nn.Module, norm: float) -> str:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    more = f" and {len(bad) - 3} others" if len(bad) > 3 else ""
    names = f"of {', '.join(bad[:3])}{more}" if bad else "of all parameters together"
    return f"the gradient norm {names} is {norm}"


def _describe_losses(losses: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> str:
    """Return which losses of a batch are not finite, and its images; "" if all are finite."""
    values = {name: float(value) for name, value in losses.items()}
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if not bad:
        return ""
    return f"loss {', '.join(bad)} is {', '.join(dict.fromkeys(map(str, bad.values())))}; {describe_images(targets)}"
