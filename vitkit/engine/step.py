"""One optimizer step, and the decision of all ranks whether it is taken: not if a loss or gradient is not finite."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitkit.distributed import all_reduce_sum, gather_objects, world_size
from vitkit.engine.checkpointing import LAST_NAME
from vitkit.engine.failures import describe_images
from vitkit.engine.parallel import no_sync
from vitkit.errors import TrainingError
from vitkit.protocols import Model
from vitkit.structures import Batch, UncompiledTargets

if TYPE_CHECKING:
    from vitkit.engine.run import TrainRun

logger = logging.getLogger("vitkit")
MAX_SKIPPED_IN_A_ROW = 5


class Decision(NamedTuple):
    """What to do once a step's gradients are complete; the same on all ranks."""

    step: bool
    """Take the optimizer step; otherwise skip it."""
    save: bool
    """Save after the step."""
    stop: bool
    """Save after the step and end the run, to be resumed later."""


def train_step(run: "TrainRun", batches: Iterator[Batch], num_batches: int) -> Decision:
    """Train on the next `num_batches` batches: accumulate their gradients, clip them, and take an optimizer step.

    Returns:
        what all ranks decided: whether the step was taken, and whether to save or stop after it.
    Raises:
        TrainingError: the loader has ended early, or several steps in a row were skipped.
    """
    run.targets, run.losses = [], []
    for index, batch in enumerate(_timed(run, islice(batches, num_batches)), start=1):
        run.batch = batch = batch.to(run.device)
        # Ranks synchronize their gradients once per step, in its last backward pass.
        with nullcontext() if index == num_batches else no_sync(run.wrapped_model):
            with run.autocast:
                outputs = run.wrapped_model(**training_inputs(run.model, batch))
                losses = run.criterion(outputs, batch.targets)
                loss = sum(losses.values())
            run.scaler.scale(loss / num_batches).backward()
        run.targets.append(batch.targets)
        run.losses.append({name: value.detach().float() for name, value in losses.items()})
    if len(run.losses) < num_batches:
        raise TrainingError(
            f"the training loader ended after {run.progress.batch + len(run.losses)} batches of the epoch, but its "
            f"length is {run.progress.num_batches}. Expected as many batches as its __len__ says: correct one of them."
        )
    run.progress.batch += num_batches

    run.scaler.unscale_(run.optimizer)
    run.grad_norm = gradient_norm(run.parameters)
    run.lr = max(run.schedule.get_last_lr())
    for hook in run.hooks:
        hook.before_step(run)
    decision = run.guard.decide(run)
    if decision.step:
        if run.settings.clip_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(run.parameters, run.settings.clip_grad_norm, run.grad_norm)
        run.scaler.step(run.optimizer)
        run.schedule.step()
        if run.ema is not None:
            run.ema.update_parameters(run.model)
        run.progress.step += 1
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    run.batch = None
    return decision


def _timed(run: "TrainRun", batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, adding the time spent waiting for each one to `run.data_seconds`."""
    while True:
        start = time.monotonic()
        batch = next(batches, None)
        run.data_seconds += time.monotonic() - start
        if batch is None:
            return
        yield batch


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
    """Skips a step unless every loss and gradient of every rank is finite, and reports which are not."""

    def __init__(self) -> None:
        self._statistics: list[Tensor] = []

    def watch(self, model: nn.Module) -> None:
        """Copy the running statistics of a model's batch norms, which are restored if a step is skipped."""
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]
        self._last_good = [buffer.clone() for buffer in self._statistics]

    def decide(self, run: "TrainRun") -> Decision:
        """Decide, together with all ranks, about the step, saving and stopping; count the skipped steps.

        Raises:
            TrainingError: several steps in a row were skipped.
        """
        save, stop = run.is_save_due(), run.stop_signal is not None
        # A sum is not finite if any of its terms is not, so a single transfer from the device is enough.
        loss = torch.stack([value for losses in run.losses for value in losses.values()]).sum()
        not_finite = torch.stack([~loss.isfinite(), ~run.grad_norm.isfinite()]).float()
        requests = torch.tensor([save, stop], dtype=torch.float32).to(not_finite.device, non_blocking=True)
        flags = all_reduce_sum(torch.cat([not_finite, requests])) > 0
        bad_loss, bad_gradient, save, stop = flags.tolist()
        step = not (bad_loss or bad_gradient)
        # Gradients may overflow because the loss scale is too high: it is then lowered, and the step does not count as
        # bad.
        scale_is_too_high = bad_gradient and run.scaler.is_enabled() and run.scaler.get_scale() > 1
        if step:
            run.progress.bad_in_a_row = 0
        elif bad_loss or not scale_is_too_high:
            run.progress.bad_in_a_row += 1
            self._report(run, bad_loss=bad_loss)
        if self._statistics and step:
            torch._foreach_copy_(self._last_good, self._statistics)
        elif self._statistics:
            # The forward pass has already changed them.
            torch._foreach_copy_(self._statistics, self._last_good)
        return Decision(step, save, stop)

    def _report(self, run: "TrainRun", *, bad_loss: bool) -> None:
        progress = run.progress
        if bad_loss:
            local = "; ".join(filter(None, map(_describe_losses, run.losses, run.targets)))
        else:
            images = describe_images([target for targets in run.targets for target in targets])
            local = f"{_describe_gradients(run.model, float(run.grad_norm))}; {images}"
        per_rank = gather_objects(local)
        problems = [f"rank {rank}: {text}" if world_size() > 1 else text for rank, text in enumerate(per_rank) if text]
        step = f"the step after step {progress.step} (epoch {progress.epoch}, batch {progress.batch})"
        if progress.bad_in_a_row < MAX_SKIPPED_IN_A_ROW:
            logger.warning(
                "%s is skipped, %d in a row so far: %s. After %d the run ends.",
                step,
                progress.bad_in_a_row,
                "; ".join(problems),
                MAX_SKIPPED_IN_A_ROW,
            )
            return
        raise TrainingError(
            f"{step}: {'; '.join(problems) or 'see rank 0'}. {MAX_SKIPPED_IN_A_ROW} steps in a row were skipped. "
            f"The weights are as they were before, and {LAST_NAME} is the last good checkpoint. Lower optimizer.lr, "
            "set train.clip_grad_norm, use train.precision=bf16 in place of fp16, or look at these images."
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
