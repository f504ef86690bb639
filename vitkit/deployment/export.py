"""Export a model to one file that runs without its code: ONNX, or a program of torch.export.

A file gets its final name only after it has been run on pictures and its outputs have matched the model's.
"""

import copy
import json
import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from vitkit.config.trust import ProgramCode, remember
from vitkit.deployment.checks import (
    NUM_TOKENS,
    Difference,
    Inputs,
    decoded_inputs,
    differences,
    image_inputs,
    image_size,
    run_graph,
    seconds,
    text_inputs,
)
from vitkit.deployment.exported import METADATA, ONNX_SUFFIX, PROGRAM_SUFFIX, open_exported, optional_module
from vitkit.deployment.graphs import Axes, ExportGraph, image_graph
from vitkit.deployment.text import text_graphs
from vitkit.errors import ConfigError, place_in_own_code
from vitkit.inference.language import LanguageModel
from vitkit.inference.load import Loaded
from vitkit.inference.predictor import Predictor
from vitkit.inference.translator import Translator
from vitkit.seq2seq.decoding import TextGenerator

FORMATS = {"onnx": ONNX_SUFFIX, "torch": PROGRAM_SUFFIX}
OPSETS = range(18, 24)
TRACED_SIZE = (259, 515)
"""Height and width of the traced images. At strides 4 to 32 they are not multiples of a window, and at strides 4 to 16
they are odd, so that all padding is recorded."""
TOLERANCES = {"fp32": 1e-3, "fp16": 5e-2, "int8": 0.5}
"""Precision -> the largest tolerated difference from the model in float32, relative to the largest absolute value if
that is above 1."""


@dataclass(frozen=True)
class ExportSettings:
    """The kind of file to write.

    Raises:
        ConfigError: the settings exclude each other, or a number is out of range.
    """

    format: Literal["onnx", "torch"] = "onnx"
    half: bool = False
    """Store weights and compute in float16."""
    quantize: Literal["int8"] | None = None
    """Compute matrix products with weights in int8; ONNX files only."""
    size: tuple[int, int] | None = None
    """Height and width of all images in pixels; None: any size."""
    opset: int = 20
    """The ONNX operator set; ONNX files only."""
    tolerance: float | None = None
    """The largest tolerated difference from the model; None: that of `TOLERANCES`."""
    overwrite: bool = False
    """Replace existing files."""

    def __post_init__(self) -> None:
        if self.half and self.quantize:
            raise ConfigError("export: got --half and --quantize; expected one of them.")
        if self.quantize and self.format != "onnx":
            raise ConfigError("export: --quantize is only possible for ONNX files. Add --format onnx.")
        if self.opset not in OPSETS:
            raise ConfigError(f"export: got --opset {self.opset}; expected {OPSETS[0]} to {OPSETS[-1]}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ConfigError(f"export: got --tolerance {self.tolerance:g}; expected 0 or more.")

    @property
    def precision(self) -> str:
        """The precision as a key of `TOLERANCES`."""
        return "fp16" if self.half else self.quantize or "fp32"


@dataclass(frozen=True)
class Part:
    """What becomes one file: a model, or the encoder or the decoding step of a model that writes text."""

    suffix: str
    """Text between the model's name and the file's extension."""
    graph: ExportGraph
    batches: Sequence[Inputs]
    """Inputs on which the file is compared with the model."""
    example: Inputs
    """Inputs with which the graph is traced."""


@dataclass(frozen=True)
class ExportedPart:
    """A file that was written, and how it compares with the model."""

    path: Path
    differences: list[Difference]
    shapes: list[tuple[int, ...]]
    """The shape of the first input in each batch of the comparison."""
    seconds: tuple[float, float]
    """Median run times for the first batch: the file's, and PyTorch's."""


def export_model(
    predictor: Loaded,
    out: Path,
    *,
    pictures: Sequence[np.ndarray],
    metadata: Mapping[str, Any],
    format: Literal["onnx", "torch"] = "onnx",
    half: bool = False,
    quantize: Literal["int8"] | None = None,
    size: tuple[int, int] | None = None,
    opset: int = 20,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> list[ExportedPart]:
    """Write a model to a file; beside an ONNX file, also write a program that runs it without torch.

    Args:
        out: the file; for a model that writes text, a second file beside it holds the step of the decoder.
        pictures: (H, W, 3) uint8 RGB, at least one, on which the file is compared with the model.
        metadata: see `describe`.
        The other arguments: see `ExportSettings`.
    Raises:
        ConfigError: the settings are invalid, the format cannot represent the model, a package is missing, or the
            file's outputs differ from the model's by more than the tolerance. In these cases, `out` is unchanged.
    """
    settings = ExportSettings(format, half, quantize, size, opset, tolerance, overwrite)
    check_out(out, settings)
    if isinstance(predictor, Predictor):
        settings = replace(settings, size=image_size(predictor, settings.size))
    if settings.format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            optional_module(package)
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = parts_of(predictor, settings, pictures)
    names = [f"{out.stem}{part.suffix}{out.suffix}" for part in parts]
    check_free([out.with_name(name) for name in names], settings)
    exported = []
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        for part, name in zip(parts, names):
            about = dict(metadata, inputs=list(part.graph.axes), size=settings.size, precision=settings.precision)
            if part is parts[0] and len(parts) > 1:
                about["step"] = names[1]
            path = Path(folder) / name
            write_part(part, path, settings, about)
            exported.append(compare_part(part, path, out.with_name(name), settings))
        for part in exported:
            (Path(folder) / part.path.name).replace(part.path)
    if settings.format == "onnx":
        shutil.copyfile(Path(__file__).with_name("onnx_runner.py"), runner_path(out))
    return exported


def runner_path(out: Path) -> Path:
    """Return the path of the program that is written beside an ONNX file."""
    return out.with_name(f"{out.stem}.py" if out.stem.startswith("run") else f"run_{out.stem}.py")


def check_out(out: Path, settings: ExportSettings) -> None:
    """Check the path of a file that is to be written.

    Raises:
        ConfigError: its extension is that of another format, its folder cannot be made, or a file is in the way that
            must not be replaced.
    """
    suffix = FORMATS[settings.format]
    if out.suffix != suffix:
        raise ConfigError(f"export: got --out {out}; expected a name that ends in {suffix} (--format).")
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"export: --out {out}: {parent} is a file; expected a folder. Choose another name.")
    check_free([out, runner_path(out)] if settings.format == "onnx" else [out], settings)


def check_free(paths: Sequence[Path], settings: ExportSettings) -> None:
    """Check that nothing is at the paths, or that it may be replaced.

    Raises:
        ConfigError: a path is a folder, or a file that may not be replaced.
    """
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"export: {path} is a folder; expected a file. Choose another name by --out.")
        if path.exists() and not settings.overwrite:
            raise ConfigError(f"export: {path} exists already. Choose another name by --out, or add --overwrite.")


def parts_of(predictor: Loaded, settings: ExportSettings, pictures: Sequence[np.ndarray]) -> list[Part]:
    """Return the parts of a model with the inputs for tracing and comparing them.

    Raises:
        ConfigError: no parts are defined for this kind of model.
    """
    model = predictor.model
    if isinstance(predictor, LanguageModel):
        raise ConfigError(f"export: no graph is defined for {type(model).__name__}. Choose another model.")
    if isinstance(predictor, Predictor) and predictor.sampling is not None:
        raise ConfigError(
            "export: the model classifies clips of videos, and a file takes pictures. Choose another model."
        )
    if isinstance(predictor, Translator):
        batches = text_inputs(len(predictor.vocabularies["source"]))
        example = batches[-1]
    else:
        batches = image_inputs(predictor, pictures, settings.size)
        example = image_example(settings.size or TRACED_SIZE, predictor.channels)
    if not isinstance(model, TextGenerator):
        return [Part("", image_graph(model), batches, example)]
    encoder, step = text_graphs(model)
    steps = list(decoded_inputs(encoder, step, batches))
    several = [inputs for inputs in steps if len(inputs["tokens"]) > 1]
    return [Part("", encoder, batches, example), Part(".step", step, steps, several[NUM_TOKENS - 1])]


def image_example(size: tuple[int, int], channels: int | None = None) -> Inputs:
    """Return two images of zeros, one of them padded: uint8 RGB, or with `channels` uint16."""
    padding_mask = torch.zeros(2, *size, dtype=torch.bool)
    padding_mask[1, :, size[1] // 2 :] = True
    return {
        "images": torch.zeros(2, channels or 3, *size, dtype=torch.uint8 if channels is None else torch.uint16),
        "padding_mask": padding_mask,
        "image_sizes": torch.tensor([size, size]),
    }


def write_part(part: Part, path: Path, settings: ExportSettings, metadata: Mapping[str, Any]) -> None:
    """Trace a part and write its file.

    Raises:
        ConfigError: the format cannot carry the part.
    """
    graph = part.graph
    if settings.half:
        graph = type(graph)(copy.deepcopy(graph.model).half())
    example = {name: part.example[name] for name in graph.axes}
    outputs = list(run_graph(part.graph, example))
    program = trace(graph, example, fixed_size=settings.size is not None)
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    if settings.format == "torch":
        torch.export.save(program, path, extra_files={METADATA: json.dumps(texts)})
        remember([ProgramCode(str(path))])
    else:
        write_onnx(program, path, settings, texts, axes=graph.axes, outputs=outputs)


def trace(graph: ExportGraph, example: Inputs, *, fixed_size: bool) -> ExportedProgram:
    """Record a graph with torch.export; its named axes may have any length.

    Raises:
        ConfigError: the graph cannot be recorded.
    """
    fixed = ("height", "width") if fixed_size else ()
    dynamic = {
        name: {i: Dim.DYNAMIC for i, axis in enumerate(axes) if axis is not None and axis not in fixed}
        for name, axes in graph.axes.items()
    }
    try:
        with torch.no_grad():
            return torch.export.export(graph, (), kwargs=example, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch.export raises many kinds, most of them internal
        raise not_carried("torch.export", error) from error


def write_onnx(
    program: ExportedProgram,
    path: Path,
    settings: ExportSettings,
    texts: Mapping[str, str],
    *,
    axes: Axes,
    outputs: Sequence[str],
) -> None:
    """Convert a program to an ONNX file with the metadata `texts`.

    Raises:
        ConfigError: ONNX cannot express one of the program's operations.
    """
    onnx = optional_module("onnx")
    # It warns of each node that it leaves as it is.
    logging.getLogger("onnxscript.optimizer._constant_folding").setLevel(logging.ERROR)
    try:
        # With gradients, a learned bias would select another attention implementation than the traced one, whose
        # strides differ.
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            converted = torch.onnx.export(
                program,
                input_names=list(axes),
                output_names=list(outputs),
                opset_version=settings.opset,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter's own, and whatever its passes over the graph raise
        raise not_carried("ONNX", error) from error
    converted.save(path)
    if settings.quantize:
        quantize(path)
    model = onnx.load(path)
    name_axes(model.graph, axes)
    del model.metadata_props[:]  # entries that the quantiser adds
    for name, text in texts.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = name, text
    onnx.save(model, path)


def name_axes(graph: Any, axes: Axes) -> None:
    """Name the axes of inputs, and those of other values with the same length, in place of the tracer's symbols."""
    names = {}
    for value in graph.input:
        for dim, name in zip(value.type.tensor_type.shape.dim, axes[value.name]):
            if dim.dim_param and name is not None:
                names[dim.dim_param] = name
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), dim.dim_param)


def quantize(path: Path) -> None:
    """Quantise matrix products with weights to int8: weights per channel, activations dynamically by their range."""
    quantization = optional_module("onnxruntime.quantization")
    unquantized = path.with_name(f"unquantized_{path.name}")
    path.replace(unquantized)
    quantization.quantize_dynamic(
        unquantized,
        path,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
    )
    unquantized.unlink()


_OPERATION = re.compile(r"\b(?:aten|torchvision|vitkit|prims|prim)(?:\.|::)\w+(?:\.\w+)?")


def not_carried(format_name: str, error: BaseException) -> ConfigError:
    """Return an error that names the operation that a format cannot express."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    operations = [match[0] for message in reversed(messages) for match in [_OPERATION.search(message)] if match]
    first_line = next((line for line in messages[-1].splitlines() if line.strip()), type(error).__name__)
    operation = f" the operation {operations[0]}" if operations else ""
    place = place_in_own_code(error)
    where = f" ({place})" if place else ""
    return ConfigError(
        f"export: {format_name} cannot carry{operation or ' the model'}: {first_line.strip()[:300]}{where}"
    )


def _more_exact(settings: ExportSettings) -> str:
    """Return the advice to leave out an option that was used and costs precision."""
    used = [option for option, is_used in (("--half", settings.half), ("--quantize", settings.quantize)) if is_used]
    return f"Leave {' and '.join(used)} out, or " if used else "If that is enough for you, "


def compare_part(part: Part, path: Path, final: Path, settings: ExportSettings) -> ExportedPart:
    """Run a file on the part's batches and compare its outputs with the model's.

    Raises:
        ConfigError: an output differs by more than the tolerance.
    """
    file = open_exported(path)
    tolerance = TOLERANCES[settings.precision] if settings.tolerance is None else settings.tolerance
    compared = differences(part.graph, file, part.batches, tolerance)
    beyond = [difference for difference in compared if not difference.is_within]
    if beyond:
        raise ConfigError(
            f"export: {final.name} is not written, as it differs from the model in {'; '.join(map(str, beyond))}. "
            f"Differences are relative to the largest value. {_more_exact(settings)}set a larger --tolerance."
        )
    first = part.batches[0]
    times = seconds(lambda: file.run(first)), seconds(lambda: run_graph(part.graph, first))
    return ExportedPart(final, compared, [tuple(next(iter(batch.values())).shape) for batch in part.batches], times)
