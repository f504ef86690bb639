"""The evaluation loop."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from vitkit.devices import Precision, autocast, synchronize
from vitkit.distributed import RatioMeter, accumulation_dtype, all_reduce_sum, broadcast_object, gather_objects
from vitkit.engine.contracts import check_losses, check_metrics, check_outputs
from vitkit.engine.failures import evaluation_remedies, explain_out_of_memory
from vitkit.engine.parallel import full_weights, is_sharded
from vitkit.logging import ProgressLines, print_line
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Loader
from vitkit.protocols.evaluator import Evaluator
from vitkit.protocols.model import GenerativeModel, Model
from vitkit.structures import Batch, ImageSizes
from vitkit.text_format import pluralize


@torch.no_grad()
def evaluate(
    model: Any,
    loader: Loader,
    evaluator: Evaluator,
    *,
    device: torch.device,
    precision: Precision = "fp32",
    criterion: Criterion | None = None,
    on_batch: Callable[[list[dict[str, Any]], Batch], None] | None = None,
    seconds: list[float] | None = None,
    compute: bool = True,
) -> dict[str, float]:
    """Predict every batch and return the evaluator's metrics (on the main process), logging progress regularly.

    Args:
        model: a `DenseModel` or `GenerativeModel`, or any model if the evaluator takes outputs.
        criterion: if set, and not `training_only`, the mean loss per image is added as "loss", and the criterion's
            meters by name.
        on_batch: called with the predictions and the batch, for instance to draw them.
        seconds: list to which the prediction time per image of each batch is appended, excluding loading and scoring.
        compute: compute the metrics; False if the batches are a part of the dataset: then the result is empty.
    Raises:
        TrainingError: there is not enough memory for a batch.
    """
    if criterion is not None and criterion.training_only:
        criterion = None
    meters = {} if criterion is None else criterion.meters
    takes_outputs = evaluator.takes_outputs
    generates = isinstance(model, GenerativeModel) and not takes_outputs
    remedies = partial(evaluation_remedies, precision=precision)
    # Ranks that encode in different batches would wait for each other's shards.
    encodes = isinstance(model, Model) and not is_sharded(model)
    kept: dict[str, Any] = {}
    with _evaluation_mode(model, criterion, meters):
        loss_sum = torch.zeros(2, dtype=accumulation_dtype(device), device=device)
        progress = ProgressLines(len(loader), "batches evaluated", every=20.0)
        for batch in _batches(loader, model, generates=generates, precision=precision):
            batch = batch.to(device)
            started = _now(device) if seconds is not None else 0.0
            with explain_out_of_memory(batch, remedies), autocast(device, precision):
                inputs = model.encode_shared(batch.inputs, kept) if encodes else batch.inputs
                outputs = None if generates and criterion is None else model(**inputs)
                if criterion is not None:
                    assert outputs is not None
                    check_outputs(model, criterion, outputs)
                    losses = criterion(outputs, batch.targets)
                    check_losses(criterion, losses)
                    loss = sum(losses.values())
                    loss_sum += len(batch) * torch.stack([loss, torch.ones_like(loss)]).to(loss_sum.dtype)
                if takes_outputs:
                    assert outputs is not None
                    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
                    predictions = [{name: value[i] for name, value in tensors.items()} for i in range(len(batch))]
                elif generates:
                    predictions = model.generate(batch.inputs)
                else:
                    predictions = model.postprocess(outputs, [target["original_size"] for target in batch.targets])
            if seconds is not None:
                seconds.append((_now(device) - started) / len(batch))
            evaluator.update(predictions, batch.targets)
            if on_batch is not None:
                on_batch(predictions, batch)
            progress.step()
        if not compute:
            return {}
        evaluator.gather()
        metrics = evaluator.compute()
        check_metrics(evaluator, metrics)
        # NumPy's numbers pass that check, but can neither be logged as JSON nor be read from a checkpoint.
        metrics = {name: float(value) for name, value in metrics.items()}
        padded = int(all_reduce_sum(torch.tensor(float(getattr(loader, "num_padded", 0)), device=device)))
        if padded:
            print_line(f"{pluralize(padded, 'videos')} shorter than a clip: the last frame was repeated")
        if criterion is not None:
            total, count = all_reduce_sum(loss_sum).tolist()
            metrics["loss"] = total / count if count else float("nan")
            metrics |= {name: meter.compute(device)[0] for name, meter in meters.items()}
    return metrics


class SizeCounter:
    """Collects the sizes of evaluated images, as stored and as the model received them."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, int]] = []
        self.resized: list[tuple[int, int]] = []

    def add(self, predictions: Sequence[Any], batch: Batch) -> None:
        """Add a batch's sizes, (height, width); data without images have none."""
        for target in batch.targets:
            if "image_size" in target and "original_size" in target:
                self.stored.append(tuple(target["original_size"]))
                self.resized.append(tuple(target["image_size"]))

    def line(self, noun: str) -> str:
        """Return the line about the sizes that images are resized to; empty without images."""
        if not self.stored:
            return ""
        stored = ImageSizes.of(self.stored)
        if self.stored == self.resized:
            return f"{noun} are evaluated at their stored size: {stored}"
        sizes = str(ImageSizes.of(self.resized))
        if self._changes_proportions():
            height, width = self.resized[0]
            sizes = f"to {width}x{height} pixels (width x height), whatever their proportions"
        return f"{noun} are resized for the model: {sizes} (stored: {stored})"

    def _changes_proportions(self) -> bool:
        """Whether all images have one size for the model, and this is not due to the rounding of sides."""
        size = height, width = self.resized[0]
        allowed = 1 + 1 / min(size)
        ratios = [(h / w) / (height / width) for h, w in self.stored]
        return set(self.resized) == {size} and any(not 1 / allowed <= ratio <= allowed for ratio in ratios)


@contextmanager
def _evaluation_mode(model: nn.Module, criterion: nn.Module | None, meters: Mapping[str, RatioMeter]) -> Iterator[None]:
    """Set evaluation mode and reset the meters inside the context, and restore both afterwards, even after an error."""
    modules = [module for module in (model, criterion) if module is not None]
    were_training = [module.training for module in modules]
    sums = {name: meter.state_dict() for name, meter in meters.items()}
    try:
        for module in modules:
            module.eval()
        for meter in meters.values():
            meter.reset()
        yield
    finally:
        for module, was_training in zip(modules, were_training):
            module.train(was_training)
        for name, meter in meters.items():
            meter.load_state_dict(sums[name])


def _batches(loader: Loader, model: nn.Module, *, generates: bool, precision: Precision) -> Iterator[Batch]:
    """Yield the batches, keeping a sharded model in step with the other ranks, whose shards it needs.

    A rank that has fewer batches than others repeats its last one, whose predictions are ignored.
    """
    if not is_sharded(model):
        yield from loader
        return
    numbers = broadcast_object(gather_objects(len(loader)))
    if generates or min(numbers) == 0:
        # Ranks that generate texts of different lengths, or have no batch to repeat, cannot stay in step.
        with full_weights(model):
            yield from loader
        return
    for batch in loader:
        yield batch
    device = next(model.parameters()).device
    for _ in range(max(numbers) - len(loader)):
        with autocast(device, precision):
            model(**batch.to(device).inputs)


def _now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    synchronize(device)
    return time.perf_counter()
