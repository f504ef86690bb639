"""`vitkit.analyze`: the cost of a model by part, and the memory of its attention matrices and its training."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.apps.analysis.activations import Activations, choose_countable_device, count_activations
from vitkit.apps.analysis.fvcore_macs import count_macs_by_fvcore
from vitkit.apps.analysis.macs import Macs, count_macs
from vitkit.apps.analysis.memory import (
    OPTIMIZER_STATES,
    attention_matrices,
    count_parameters,
    measure,
    parts,
    training_memory,
)
from vitkit.apps.analysis.reports.subject import find_subject
from vitkit.apps.analysis.reports.text import TextCosts, text_costs
from vitkit.apps.analysis.reports.training import TrainingMacs, epochs_of, training_dataset, training_macs_of
from vitkit.backbones.base import check_at_least_1
from vitkit.errors import ConfigError
from vitkit.nn.lora import LoRA
from vitkit.protocols.model import Model
from vitkit.structures import Batch

FLOAT32 = 4


@dataclass(frozen=True)
class Counted:
    """The model and the input of a report."""

    model: str
    input: tuple[int, ...]
    """(N, C, [T,] H, W), the input of all counts."""
    size_from: str
    """Where the height and width come from, such as "data.val.transforms"; "" if they were given."""


@dataclass(frozen=True)
class ImageCosts(Counted):
    """The costs of a model of images or clips."""

    parts: dict[str, dict[str, float]]
    """Part -> its numbers: parameters in "total" and "trainable", "macs", and where they were measured "seconds",
    "peak_bytes" and "saved_bytes"; "" is the whole model."""
    types: dict[str, str]
    """Part -> the name of its class."""
    by_operator: dict[str, int] | None = None
    """Operator -> its MACs; None where none were counted."""
    not_counted: dict[str, int] | None = None
    """Operator -> number of its calls that are not counted, as in papers."""
    unknown: dict[str, int] = field(default_factory=dict)
    """The same for operators that may have MACs."""
    macs_by_fvcore: int | None = None
    training: TrainingMacs | None = None
    default_classes: int | None = None
    """The model's number of classes if it is only a default; None if it is set, or the model has none."""


@dataclass(frozen=True)
class AttentionMemory(Counted):
    """The memory of a model's attention matrices in float32."""

    layers: dict[str, dict[str, Any]]
    """Layer -> the "shapes" of its matrices, whether they are "fused", and their "bytes" when stored."""
    stored_bytes: int
    """All layers', as a backward pass without a fused kernel needs them."""
    largest_layer_bytes: int
    """The largest layer's, as inference needs them."""
    fused_bytes: int
    """With fused kernels, which store a number per row, and what no kernel fuses."""


@dataclass(frozen=True)
class StepMemory(Counted):
    """The memory of a training step on each of several GPUs."""

    gpus: int
    optimizer: str
    precision: str
    activation_checkpointing: bool
    kernels: str
    """The device whose kernels were counted: "cpu" or "cuda"."""
    saved_bytes: int
    """What is saved for the backward pass, without losses."""
    recomputed_bytes: int
    """What activation checkpointing recomputes of its largest block."""
    ddp: dict[str, int]
    """Bytes of replicated "weights", "gradients", states of the "optimizer" and "gathered" blocks; the "total" includes
    the above."""
    fsdp: dict[str, int]
    """The same, sharded."""


def analyze(
    model: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    size: int | tuple[int, int] | None = None,
    frames: int | None = None,
    lengths: Sequence[int] | None = None,
    batch_size: int = 1,
    depth: int = 2,
    macs: bool = True,
    fvcore: bool = False,
    time: bool = False,
    repeats: int = 5,
    device: str = "cpu",
    training_macs: bool = False,
    samples: int | None = None,
    trust: bool = False,
) -> ImageCosts | TextCosts:
    """Count what a model costs by part, as `vitkit analyze` does: parameters, MACs, and optionally time and memory.

    `vitkit.analyze("detr_r50").parts["head"]["macs"]`

    Args:
        model: a backbone's name, or see `find_model`. Its weights are not loaded.
        weights: a checkpoint, of which the classes or vocabularies are read; None: those of `model`.
        overrides: `key.sub=value` for a config, `key=value` for a backbone.
        size: height and width of the images in pixels, or the side of squares; None: those of the published figures
            of a backbone, those of the validation images of a config, see `Subject.input_shape`.
        frames: frames of a clip, for backbones that take clips.
        lengths: lengths of texts in tokens, for models of text; None: 16, 32 and 64.
        batch_size: images in the input.
        depth: depth of the parts: 2 includes head.encoder.
        macs: count MACs, for which the model runs once.
        fvcore: also count them by fvcore, for models of images.
        time: also measure time and memory by part, for models of images.
        repeats: runs that are measured.
        device: the device of these runs.
        training_macs: also count the MACs of the training that the config describes.
        samples: images or texts of an epoch for that; None: those of data.train. A number implies `training_macs`.
        trust: let a saved config import the code that it names, see `load_config`.
    Raises:
        ConfigError: there is no such model, an option does not apply to it, or it is unknown how long it is trained.
        DataError: the size or a length does not suit the model, or the training data cannot be read.
    """
    check_at_least_1(repeats=repeats, samples=1 if samples is None else samples)
    subject = find_subject(model, weights, overrides=overrides, trust=trust)
    training_macs |= samples is not None
    if training_macs:
        epochs_of(subject)
    of_images = {"--fvcore": fvcore, "--time": time, "--frames": frames, "--batch-size": batch_size != 1}
    if given := [option for option, value in of_images.items() if value]:
        subject.of_images(", ".join(given))
    if subject.takes_text:
        return text_costs(
            subject, lengths=lengths, size=size, depth=depth, macs=macs, training_macs=training_macs, samples=samples
        )
    if lengths:
        raise ConfigError("--lengths: only for models of text. Give the --size of images.")
    if training_macs and samples is None:
        samples = len(training_dataset(subject).training_indices())
    macs |= training_macs
    module = subject.build("cpu" if macs or time or fvcore else "meta")
    shape, size_from = subject.input_shape(module, size=size, frames=frames, batch_size=batch_size)
    prompts = _example_prompts(module, batch_size, "cpu")
    if prompts and (time or fvcore):
        raise ConfigError("--time, --fvcore: not for models that take a prompt. Leave them out.")
    counted = count_macs(module, torch.zeros(shape), **prompts) if macs else None
    by_fvcore = count_macs_by_fvcore(module, torch.zeros(shape)).total if fvcore else None
    rows = _rows_of_parts(module, depth, counted, shape=shape, repeats=repeats if time else 0, device=device)
    training = training_macs_of(subject, counted.total // batch_size, samples) if training_macs else None
    return ImageCosts(
        subject.name,
        shape,
        size_from,
        rows,
        {name: type(module.get_submodule(name)).__name__ for name in rows},
        by_operator=None if counted is None else dict(counted.by_operator),
        not_counted=None if counted is None else dict(counted.uncounted),
        unknown={} if counted is None else dict(counted.unknown),
        macs_by_fvcore=by_fvcore,
        training=training,
        default_classes=subject.default_classes,
    )


def _rows_of_parts(
    module: nn.Module, depth: int, counted: Macs | None, *, shape: tuple[int, ...], repeats: int, device: str
) -> dict[str, dict[str, float]]:
    """Return the cost of each part of a model, without those that cost nothing; see `ImageCosts.parts`.

    Args:
        counted: the MACs; None: they are not counted.
        repeats: runs by which time and memory are measured; 0: they are not.
    """
    names, parameters = parts(module, depth), count_parameters(module)
    measured = {}
    if repeats:
        images = torch.zeros(shape, device=device)
        measured = measure(module.to(device), images, names=names, repeats=repeats)
    rows = {}
    for name in names:
        row = asdict(parameters[name]) | ({} if counted is None else {"macs": counted.by_module[name]})
        row |= asdict(measured[name]) if name in measured else {}
        if any(row.values()):
            rows[name] = row
    return rows


def attention_memory(
    model: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    size: int | tuple[int, int] | None = None,
    frames: int | None = None,
    batch_size: int = 1,
    trust: bool = False,
) -> AttentionMemory:
    """Count the memory of a model's attention matrices on the meta device, which allocates none of it.

    Arguments and errors are those of `analyze`.
    """
    subject = find_subject(model, weights, overrides=overrides, trust=trust).of_images("--attention-matrices")
    module = subject.build("meta")
    shape, size_from = subject.input_shape(module, size=size, frames=frames, batch_size=batch_size)
    prompts = _example_prompts(module, batch_size, "meta")
    matrices = attention_matrices(module, torch.zeros(shape, device="meta"), **prompts)
    stored = {name: FLOAT32 * matrix.elements() for name, matrix in matrices.items()}
    return AttentionMemory(
        subject.name,
        shape,
        size_from,
        {name: {"shapes": m.shapes, "fused": m.fused, "bytes": stored[name]} for name, m in matrices.items()},
        stored_bytes=sum(stored.values()),
        largest_layer_bytes=max(stored.values(), default=0),
        fused_bytes=sum(FLOAT32 * m.rows() if m.fused else stored[name] for name, m in matrices.items()),
    )


def step_memory(
    model: str | Path | Mapping[str, Any],
    weights: str | Path | None = None,
    *,
    gpus: int,
    overrides: Sequence[str] = (),
    size: int | tuple[int, int] | None = None,
    frames: int | None = None,
    batch_size: int = 1,
    activations: bool = True,
    trust: bool = False,
) -> StepMemory:
    """Count the memory of a training step on each of several GPUs; nothing is run, and no GPU is needed.

    Args:
        gpus: number of GPUs, with `batch_size` images each.
        activations: count what is saved for the backward pass.
        model, weights, overrides, size, frames, batch_size, trust: see `analyze`, also for errors.
    """
    subject = find_subject(model, weights, overrides=overrides, trust=trust).of_images("--training")
    module = subject.build("meta")
    if _example_prompts(module, 1, "meta"):
        raise ConfigError("--training: not for models that take a prompt, whose memory is not counted. Leave it out.")
    shape, size_from = subject.input_shape(module, size=size, frames=frames, batch_size=batch_size)
    spec, settings = subject.config.get("optimizer", "AdamW"), subject.config.get("train", {})
    optimizer = spec if isinstance(spec, str) else spec.get("type", "AdamW")
    # A GPU for training has bfloat16, which "auto" chooses then.
    precision = settings.get("precision", "fp32").replace("auto", "bf16")
    checkpointing = settings.get("activation_checkpointing", False)
    if settings.get("lora") is not None:
        LoRA(**settings["lora"]).add_to(module)
    counted = Activations(0)
    if activations:
        counted = count_activations(module, shape, precision=precision, checkpointing=checkpointing)
    strategies = {}
    for strategy in ("ddp", "fsdp"):
        states = OPTIMIZER_STATES.get(optimizer, 2)
        memory = training_memory(module, states=states, gpus=gpus, sharded=strategy == "fsdp")
        strategies[strategy] = asdict(memory) | {"total": memory.total + counted.saved + counted.recomputed}
    return StepMemory(
        subject.name,
        shape,
        size_from,
        gpus,
        optimizer,
        precision,
        checkpointing,
        choose_countable_device(),
        saved_bytes=counted.saved,
        recomputed_bytes=counted.recomputed,
        **strategies,
    )


def _example_prompts(module: nn.Module, batch_size: int, device: str) -> dict[str, Any]:
    """Return example prompts as inputs for a text-prompted model; nothing for others."""
    if not isinstance(module, Model) or "text" not in module.takes:
        return {}
    return Batch(module.example_prompts(batch_size), []).to(device).inputs
