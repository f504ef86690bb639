"""Faults of single steps: losses and gradients that are not finite, and memory that runs out."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.distributed import all_reduce_sum, gather_objects, world_size
from vitkit.engine.checkpoints import LAST_NAME, Progress
from vitkit.engine.settings import TrainSettings
from vitkit.errors import TrainingError
from vitkit.structures import Batch

logger = logging.getLogger("vitkit")
MOST_IN_A_ROW = 5
_NAMED = 8


class Agreed(NamedTuple):
    """What all ranks do with a step."""

    take: bool
    stop: bool
    save: bool


class StepGuard:
    """Lets a step be taken only where every loss and gradient of every rank is finite, and says which is not.

    Collect each batch of the step by `add`, then `agree`, then `clear`. The running statistics of batch norms, which
    the forward pass has changed by then, are put back where a step is not taken.

    Args:
        model: whose gradients are named.
        device: of the process group.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self.device = device
        self.losses: list[dict[str, Tensor]] = []
        """Detached, of the step's batches."""
        self._targets: list[Sequence[Mapping[str, Any]]] = []
        self._said = ""
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]
        self._before = [buffer.clone() for buffer in self._statistics]

    def compute(self, criterion: nn.Module, outputs: Any, targets: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The criterion's losses; nan where it finds out by itself that the outputs are not finite."""
        try:
            return criterion(outputs, targets)
        except TrainingError as error:
            # The other ranks wait in what this one reduces with them, so it takes part, with numbers that do not count.
            self._said = str(error)
            return {name: value * math.nan for name, value in criterion(_finite(outputs), targets).items()}

    def add(self, losses: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> None:
        self.losses.append({name: value.detach().float() for name, value in losses.items()})
        self._targets.append(targets)

    def agree(self, grad_norm: Tensor, progress: Progress, *, loss_scale: float, stop: bool, save: bool) -> Agreed:
        """One decision of all ranks for the batches that were added; `progress` counts the steps that are skipped.

        Args:
            grad_norm: of all gradients, without the loss scale.
            loss_scale: above 1 too large gradients are the scale's fault, which is lowered, and count for nothing.
            stop, save: what this rank asks for; if one does, all do so.
        Raises:
            TrainingError: several steps in a row were skipped.
        """
        # A sum is not finite if any of its terms is not. One transfer from the device tells all.
        total = torch.stack([value for losses in self.losses for value in losses.values()]).sum()
        bad = torch.stack([~total.isfinite(), ~grad_norm.isfinite()]).float()
        asked = torch.tensor([stop, save], dtype=torch.float32)
        flags = torch.cat([bad, asked.to(bad.device, non_blocking=True)])
        bad_loss, bad_gradient, stop, save = (all_reduce_sum(flags) > 0).tolist()
        if bad_loss or (bad_gradient and loss_scale <= 1):
            progress.bad_in_a_row += 1
            self._report(progress, "" if bad_loss else self._gradients(float(grad_norm)))
        elif not bad_gradient:
            progress.bad_in_a_row = 0
        take = not (bad_loss or bad_gradient)
        if self._statistics:
            kept = (self._before, self._statistics) if take else (self._statistics, self._before)
            torch._foreach_copy_(*kept)
        return Agreed(take, stop, save)

    def clear(self) -> None:
        self.losses, self._targets, self._said = [], [], ""

    def _report(self, progress: Progress, gradients: str) -> None:
        own = [_describe(losses, targets) for losses, targets in zip(self.losses, self._targets)]
        own = [text for text in own if text]
        if gradients:
            own = [f"{gradients}; {_images([target for targets in self._targets for target in targets])}"]
        if self._said:
            own.append(self._said)
        of_ranks = gather_objects("; ".join(own))
        many = world_size() > 1
        faults = "; ".join(f"rank {number}: {text}" if many else text for number, text in enumerate(of_ranks) if text)
        where = f"the step after step {progress.step} (epoch {progress.epoch}, batch {progress.batch})"
        if progress.bad_in_a_row < MOST_IN_A_ROW:
            logger.warning(
                "%s is skipped, %d in a row so far: %s. After %d the run ends.",
                where, progress.bad_in_a_row, faults, MOST_IN_A_ROW,
            )  # fmt: skip
            return
        raise TrainingError(
            f"{where}: {faults or 'see rank 0'}. Was skipped as {MOST_IN_A_ROW} in a row now. The weights are as they "
            f"were before, and {LAST_NAME} is the last good checkpoint. Lower optimizer.lr, set train.clip_grad_norm, "
            "use train.precision=bf16 in place of fp16, or look at these images."
        )

    def _gradients(self, norm: float) -> str:
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        bad = [name for name, gradient in named if not gradient.isfinite().all()]
        more = f" and {len(bad) - 3} others" if len(bad) > 3 else ""
        return f"the gradient's norm is {norm}, by {', '.join(bad[:3]) or 'its size'}{more}"


def _describe(losses: Mapping[str, Tensor], targets: Sequence[Mapping[str, Any]]) -> str:
    """Which losses of a batch are not finite, and its images; nothing if all are."""
    values = {name: float(value) for name, value in losses.items()}
    bad = {name: value for name, value in values.items() if not math.isfinite(value)}
    if not bad:
        return ""
    values = ", ".join(dict.fromkeys(map(str, bad.values())))
    return f"loss {', '.join(bad)} is {values}; {_images(targets)}"


def _images(targets: Sequence[Mapping[str, Any]]) -> str:
    ids = [str(target.get("image_id", target.get("index", "?"))) for target in targets]
    return f"image {', '.join(ids[:_NAMED])}" + (f" and {len(ids) - _NAMED} others" if len(ids) > _NAMED else "")


def _finite(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.nan_to_num(0.0, 0.0, 0.0) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


@contextmanager
def memory_explained(batch: Batch, remedies: Callable[[Batch], Sequence[str]]) -> Iterator[None]:
    """
    Args:
        remedies: of a batch: what would take less memory, see `training_remedies`.
    Raises:
        TrainingError: in place of an error that there is no memory left; it says for what.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(_memory_message(batch, remedies(batch), error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or this machine, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def training_remedies(batch: Batch, settings: TrainSettings) -> list[str]:
    """What makes a training step take less memory."""
    remedies = [
        f"a smaller data.images_per_gpu (this batch has {len(batch)}) and as much larger a train.accumulate "
        f"(now {settings.accumulate}), which trains alike",
        "smaller images (the sizes in data.train.transforms)",
    ]
    if settings.precision == "fp32":
        remedies.append("train.precision=bf16")
    if not settings.activation_checkpointing:
        remedies.append("train.activation_checkpointing=true")
    if settings.strategy == "ddp" and world_size() > 1:
        remedies.append("train.strategy=fsdp")
    return remedies


def evaluation_remedies(batch: Batch, precision: str) -> list[str]:
    """What makes an evaluation take less memory."""
    if "images" not in batch.inputs:
        remedies = ["a smaller data.tokens_per_gpu"]
    else:
        fewer = [f"a smaller data.val_images_per_gpu (this batch has {len(batch)})"] if len(batch) > 1 else []
        remedies = [*fewer, "smaller images (the sizes in data.val.transforms)"]
    return remedies + (["train.precision=bf16"] if precision == "fp32" else [])


def _memory_message(batch: Batch, remedies: Sequence[str], error: BaseException) -> str:
    sizes = ", ".join(f"{name} {'x'.join(map(str, value.shape))}" for name, value in batch.inputs.items())
    counts = [len(target["labels"]) for target in batch.targets if "labels" in target]
    objects = f" with {' + '.join(map(str, counts))} objects" if counts else ""
    said = str(error).split("\n")[0] or type(error).__name__
    return (
        f"out of memory at a batch of {sizes}{objects}, {_images(batch.targets)} ({said}). "
        f"Less memory is taken by {'; '.join(remedies)}. A training run that was begun goes on by --resume."
    )
