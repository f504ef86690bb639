"""The evaluation loop."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, Protocol

import torch
from torch import nn

from vitkit.distributed import all_reduce_sum, broadcast_object, gather_objects
from vitkit.engine.faults import evaluation_remedies, memory_explained
from vitkit.engine.parallel import is_sharded, whole_weights
from vitkit.logging import RatioMeter
from vitkit.structures import Batch


class Evaluator(Protocol):
    """What turns predictions into numbers; registered in EVALUATORS."""

    def update(self, predictions: list, targets: list) -> None:
        """Takes one batch."""

    def gather(self) -> None:
        """Brings all ranks' batches to the main process."""

    def compute(self) -> dict[str, float]:
        """The metrics, on the main process; an empty dict elsewhere."""

    def table(self) -> str:
        """The metrics as people read them, after `compute`."""


def autocast(device: torch.device, precision: Literal["fp32", "bf16", "fp16"]) -> torch.autocast:
    """The autocast context of a run's precision; it does nothing for "fp32"."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    evaluator: Evaluator,
    *,
    device: torch.device,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    criterion: nn.Module | None = None,
    on_batch: Callable[[list, Batch], None] | None = None,
    progress: Callable[[str], None] | None = None,
    progress_seconds: float = 20.0,
    seconds: list[float] | None = None,
) -> dict[str, float]:
    """Predicts every batch and returns the evaluator's metrics (on the main process).

    Args:
        model: has `postprocess(outputs, original_sizes)`; or, where one output leads to the next as in text,
            `generate(inputs)`; or neither, for an evaluator with `takes_outputs`, which gets each sample's outputs.
        criterion: adds the mean loss per image as "loss", and its meters by name.
        on_batch: called with the predictions and the batch, such as to draw them.
        progress: takes a line every `progress_seconds`, to print.
        seconds: takes how long the predictions of each batch took, without loading and scoring, per image.
    Raises:
        TrainingError: there is no memory left for a batch.
    """
    was_training = model.training
    model.eval()
    meters: dict[str, RatioMeter] = getattr(criterion, "meters", {})
    if criterion is not None:
        criterion.eval()
        kept = {name: meter.state_dict() for name, meter in meters.items()}
        for meter in meters.values():
            meter.reset()
    loss_sum = torch.zeros(2, dtype=torch.float64, device=device)
    start = last_line = time.monotonic()
    num_batches = len(loader)
    takes_outputs = getattr(evaluator, "takes_outputs", False)
    generates = hasattr(model, "generate") and not takes_outputs
    less_memory = partial(evaluation_remedies, precision=precision)
    for index, batch in enumerate(_batches(loader, model, alone=generates, precision=precision), start=1):
        batch = batch.to(device)
        started = _now(device) if seconds is not None else 0.0
        with memory_explained(batch, less_memory), autocast(device, precision):
            outputs = None if generates and criterion is None else model(**batch.inputs)
            if criterion is not None:
                loss = sum(criterion(outputs, batch.targets).values())
                loss_sum += torch.stack([loss.double() * len(batch), loss.new_tensor(len(batch)).double()])
            if takes_outputs:
                predictions = [{name: value[i] for name, value in outputs.items()} for i in range(len(batch))]
            elif generates:
                predictions = model.generate(batch.inputs)
            else:
                predictions = model.postprocess(outputs, [target["original_size"] for target in batch.targets])
        if seconds is not None:
            seconds.append((_now(device) - started) / len(batch))
        evaluator.update(predictions, batch.targets)
        if on_batch is not None:
            on_batch(predictions, batch)
        now = time.monotonic()
        if progress is not None and now - last_line > progress_seconds:
            last_line = now
            rate = index / (now - start)
            progress(
                f"evaluated {index}/{num_batches} batches  {rate:.2f} it/s  ETA {(num_batches - index) / rate:.0f} s"
            )
    evaluator.gather()
    metrics = evaluator.compute()
    if criterion is not None:
        total, count = all_reduce_sum(loss_sum).tolist()
        metrics["loss"] = total / count if count else float("nan")
        for name, meter in meters.items():
            metrics[name] = meter.compute(device)[0]
            meter.load_state_dict(kept[name])
        criterion.train()
    model.train(was_training)
    return metrics


def _batches(loader: Iterable[Batch], model: nn.Module, *, alone: bool, precision: str) -> Iterator[Batch]:
    """The batches; a model whose weights are divided is kept in step with the other ranks, whose parts it needs.

    A rank that has fewer batches than others predicts its last one again, which counts for nothing.

    Args:
        alone: how often the model computes differs between ranks, as in generating text; all weights are brought to
            every rank then.
    """
    if not is_sharded(model):
        yield from loader
        return
    numbers = broadcast_object(gather_objects(len(loader)))
    if alone or min(numbers) == 0:
        with whole_weights(model):
            yield from loader
        return
    for batch in loader:
        yield batch
    device = next(model.parameters()).device
    for _ in range(max(numbers) - len(loader)):
        with autocast(device, precision):
            model(**batch.to(device).inputs)


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
