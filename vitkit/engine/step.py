"""One optimiser step."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitkit.devices import autocast
from vitkit.engine.guard import Decision
from vitkit.engine.parallel import no_sync
from vitkit.engine.run import TrainRun
from vitkit.errors import TrainingError
from vitkit.protocols import Model
from vitkit.structures import Batch, UncompiledTargets


def train_step(run: TrainRun, batches: Iterator[Batch], num_batches: int) -> Decision:
    """Train on the next `num_batches` batches: accumulate their gradients, clip them, and take an optimiser step.

    Returns:
        what all ranks decided: whether the step was taken, and whether to save or stop after it.
    Raises:
        TrainingError: the loader has ended early, or several steps in a row were skipped.
    """
    run.targets, run.losses = [], []
    for index, batch in enumerate(islice(batches, num_batches), start=1):
        run.batch = batch = batch.to(run.device)
        # Ranks synchronise their gradients once per step, in its last backward pass.
        with nullcontext() if index == num_batches else no_sync(run.wrapped_model):
            with autocast(run.device, run.settings.precision):
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
