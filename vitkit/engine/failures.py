"""Error messages for running out of memory, and descriptions of the images with which something failed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vitkit.devices import OUT_OF_MEMORY, is_out_of_memory
from vitkit.distributed import world_size
from vitkit.engine.settings import TrainSettings
from vitkit.errors import TrainingError
from vitkit.structures import Batch

_MAX_IMAGES = 8


@contextmanager
def explain_out_of_memory(batch: Batch, remedies: Callable[[Batch], Sequence[str]]) -> Iterator[None]:
    """Replace an out-of-memory error by one that describes the batch and how to use less memory.

    Raises:
        TrainingError: there is not enough memory.
    """
    try:
        yield
    except OUT_OF_MEMORY as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(error, batch, remedies(batch)) from error


def out_of_memory_error(error: BaseException, batch: Batch, remedies: Sequence[str]) -> TrainingError:
    """Return an error that describes the batch for which there was not enough memory, and how to use less."""
    sizes = ", ".join(f"{name} {'x'.join(map(str, value.shape))}" for name, value in batch.inputs.items())
    counts = [len(target["labels"]) for target in batch.targets if "labels" in target]
    objects = f" with {' + '.join(map(str, counts))} objects" if counts else ""
    reason = str(error).split("\n")[0] or type(error).__name__
    return TrainingError(
        f"out of memory at a batch of {sizes}{objects}, {describe_images(batch.targets)} ({reason}). "
        f"To use less memory: {'; '.join(remedies)}. Resume a training run with --resume."
    )


def training_remedies(batch: Batch, settings: TrainSettings) -> list[str]:
    """Return the ways to make a training step use less memory."""
    keeping = ""
    if settings.images_per_step is None:
        keeping = f" and a train.accumulate (now {settings.accumulate}) larger by the same factor, which keeps the "
        keeping += "images per step"
    remedies = [
        f"a smaller data.images_per_gpu (this batch has {len(batch)}){keeping}",
        "smaller images (the sizes in data.train.transforms or data.squares)",
    ]
    if settings.precision == "fp32":
        remedies.append("train.precision=bf16")
    if not settings.activation_checkpointing:
        remedies.append("train.activation_checkpointing=true")
    if settings.strategy == "ddp" and world_size() > 1:
        remedies.append("train.strategy=fsdp")
    return remedies


def evaluation_remedies(batch: Batch, precision: str) -> list[str]:
    """Return the ways to make an evaluation use less memory."""
    if "images" not in batch.inputs:
        remedies = ["a smaller data.tokens_per_gpu"]
    else:
        fewer = [f"a smaller data.val_images_per_gpu (this batch has {len(batch)})"] if len(batch) > 1 else []
        remedies = [*fewer, "smaller images (the sizes in data.val.transforms)"]
    return remedies + (["train.precision=bf16"] if precision == "fp32" else [])


def describe_images(targets: Sequence[Mapping[str, Any]]) -> str:
    """Return the identifiers of a batch's images, as many as fit in a line."""
    ids = [str(target.get("image_id", target.get("index", "?"))) for target in targets]
    more = f" and {len(ids) - _MAX_IMAGES} others" if len(ids) > _MAX_IMAGES else ""
    return f"image {', '.join(ids[:_MAX_IMAGES])}{more}"
