"""Export a model to one file that runs without its code: ONNX, or a program of torch.export.

A file gets its final name only after it has been run on images and its outputs have matched the model's.
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
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from vitkit.apps.export_reading.graphs import Axes, ExportGraph, image_graph
from vitkit.apps.export_reading.loading import METADATA, open_exported, read_onnx_metadata
from vitkit.apps.export_reading.runtimes import OnnxFile, import_optional_module
from vitkit.apps.export_reading.settings import FORMATS, TOLERANCES, ExportSettings
from vitkit.apps.export_writing.checks import (
    NUM_TOKENS,
    Inputs,
    OutputDifference,
    announce,
    differences,
    image_inputs,
    image_size,
    run_graph,
    seconds_in_turn,
    text_inputs,
    yield_decoded_inputs,
)
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.export_writing.own_code import place_in_own_code
from vitkit.apps.export_writing.prompted import list_known_phrases, prompt_inputs, prompted_graphs, with_text_features
from vitkit.apps.export_writing.text import text_graphs
from vitkit.apps.inference.card import card_path, make_card, read_metrics, zoo_entry
from vitkit.apps.inference.fused import fused_copy
from vitkit.apps.inference.inputs import find_images
from vitkit.apps.inference.language import LanguageModel
from vitkit.apps.inference.load import Loaded, check_not_exported, find_trained, load
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.translator import Translator
from vitkit.config import Config
from vitkit.config.trust import ProgramCode, remember
from vitkit.data.synthetic.world import World
from vitkit.devices import processor_name
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.io.output import write_bytes, write_text
from vitkit.logging import print_line
from vitkit.text_format import pluralize
from vitkit.weights import LoadReport

MAX_ONNX_BYTES = 2**31 - 2**24
"""The weights of an ONNX file, in bytes, beside 16 MiB for its graph: it is one message of protobuf, of 2 GiB."""
TRACED_SIZE = (259, 515)
"""Height and width of the traced images. At strides 4 to 32 they are not multiples of a window, and at strides 4 to 16
they are odd, so that all padding is recorded."""


@dataclass(frozen=True)
class Part:
    """A part of a model that becomes one file: a model; the encoder or the decoding step of a model that writes text;
    or the detector or the text encoder of a text-prompted one."""

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
    differences: list[OutputDifference]
    shapes: list[tuple[int, ...]]
    """The shape of the first input in each batch of the comparison."""
    seconds: tuple[float, float]
    """Median run times for the first batch: the file's, and PyTorch's."""
    unquantized_seconds: float | None = None
    """With precision int8 that of the same file in float32, which is less on some processors."""


@dataclass(frozen=True)
class Export:
    """The results of `export`."""

    parts: list[ExportedPart]
    """The model's file; for a model that writes text, the encoder and the step of the decoder; for a text-prompted one,
    the detector and the text encoder."""
    runner: Path | None
    """The program beside an ONNX file that runs it without PyTorch; None for other formats."""
    card: Path
    """The model card."""
    report: LoadReport | None
    """The report of loading the weights."""

    @property
    def path(self) -> Path:
        """The model's file, which `load` takes."""
        return self.parts[0].path


def export(
    model: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    format: Literal["onnx", "torch"] = "onnx",
    precision: Literal["fp32", "fp16", "int8"] = "fp32",
    size: tuple[int, int] | None = None,
    images: Any = None,
    max_images: int = 2,
    opset: int = 20,
    tolerance: float | None = None,
    license: str | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    trust: bool = False,
) -> Export:
    """Write a model as one file that runs without its code, as `vitkit export` does.

    `export("runs/detr", "detr.onnx").path`

    Args:
        model: see `find_model`.
        out: the file; None: NAME.onnx or NAME.pt2 in the current folder. A model that writes text has a second file
            beside it, the step of the decoder, and a text-prompted one its text encoder and its tokenizer's file. A
            model card lies beside them, see `card_path`, and beside an ONNX file a program that runs it without
            PyTorch.
        weights: weights for a config; None: those of `model`.
        format, precision, size, opset, tolerance, overwrite: see `ExportSettings`.
        images: images on which the file is compared with the model, see `find_images`; None: synthetic ones.
        max_images: only the first of these images.
        license: license of the weights, noted in the file and the card; None: for models of the zoo, the one that it
            lists.
        overrides, trust: see `load`.
    Raises:
        ConfigError: the settings are invalid, the format cannot represent the model, a package is missing, or the
            file's outputs differ from the model's by more than the tolerance. In these cases, nothing is written.
        CheckpointError: the weights cannot be read, or do not fit the model.
        DataError: there are no such images.
    """
    if torch.__version__ < (2, 7):
        raise ConfigError(
            f"export: PyTorch {torch.__version__} cannot export these models; expected 2.7 or newer: "
            "pip install -U torch torchvision."
        )
    settings = ExportSettings(format, precision, size, opset, tolerance, overwrite)
    name = name_of(model)
    out = Path(name + FORMATS[format] if out is None else out)
    check_out(out, settings)
    with announce(f"loading   {model if isinstance(model, str | Path) else name}"):
        config, weights = find_trained(model, weights, overrides=overrides, trust=trust)
        predictor = load(config, weights)
    check_not_exported(predictor, "export")
    license, measured = license or zoo_entry(weights).get("license"), read_metrics(weights)
    metadata = describe(predictor, config, name=name, license=license)
    arrays = read_images(images, predictor, max_images) if isinstance(predictor, Predictor) else []
    parts = export_model(predictor, out, settings, images=arrays, metadata=metadata)
    runner, card = runner_path(out) if format == "onnx" else None, card_path(out.parent, out.stem)
    usage, library = card_usage(predictor, out, runner), "onnx" if format == "onnx" else "pytorch"
    about = dict(name=out.stem, license=license, library=library, usage=usage, measured=measured)
    write_text(card, make_card(predictor, config, weights, **about))
    return Export(parts, runner, card, predictor.report)


def card_usage(predictor: Loaded, out: Path, runner: Path | None) -> str:
    """Return instructions for using an exported file, in Markdown."""
    is_prompted = isinstance(predictor, Predictor) and "text" in predictor.model.takes
    given = "street.jpg" if isinstance(predictor, Predictor) else "one sentence"
    text = ', text="cat . dog ."' if is_prompted else ""
    python = f'```python\nimport vitkit\n\nprint(vitkit.load("{out.name}")("{given}"{text}))\n```'
    if runner is None:
        return python
    packages = f"onnxruntime numpy pillow{' tokenizers' if is_prompted else ''}"
    prompt = ' --text "cat . dog ."' if is_prompted else ""
    command = f"python {runner.name} '{given}'{prompt}"
    return f"```bash\npip install {packages}\n{command}\n```\n\nOr, where vitkit is installed:\n\n{python}"


def name_of(model: str | Path | Mapping[str, Any]) -> str:
    """Return the name of a model's file without extension: that of its folder, checkpoint, config or zoo entry."""
    path = Path(model if isinstance(model, str | Path) else model.path if isinstance(model, Config) else "model")
    return path.resolve().name if path.is_dir() else path.stem


def read_images(source: Any, predictor: Predictor, max_images: int) -> list[np.ndarray]:
    """Return the first `max_images` of a source; without a source, two images of the synthetic world.

    Raises:
        DataError: the source has no images.
    """
    if source is None:
        images = [World(image_size=size).scene(0).image for size in (480, 320)]
        if predictor.channels is not None:
            images = [np.tile(image, -(-predictor.channels // 3))[:, :, : predictor.channels] for image in images]
        return [predictor.to_array(image) for image in images]
    named = list(islice(find_images(source, channels=predictor.channels).named, max_images))
    if not named:
        raise DataError(f"export: {source}: has no images to compare on.")
    return [predictor.to_array(image, name) for name, image in named]


def export_model(
    predictor: Loaded, out: Path, settings: ExportSettings, *, images: Sequence[np.ndarray], metadata: Mapping[str, Any]
) -> list[ExportedPart]:
    """Write a loaded model to a file; see `export`.

    Args:
        images: (H, W, 3) uint8 RGB, at least one, on which the file is compared with the model; with other channels,
            (H, W, C) uint16.
        metadata: see `describe`.
    """
    check_out(out, settings)
    if isinstance(predictor, Predictor):
        settings = replace(settings, size=image_size(predictor, settings.size))
    if settings.format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_optional_module(package)
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = parts_of(predictor, settings, images)
    names = [f"{out.stem}{part.suffix}{out.suffix}" for part in parts]
    tokenizer = metadata.get("tokenizer") and tokenizer_path(out)
    check_free([*(out.with_name(name) for name in names), *filter(None, [tokenizer])], settings)
    exported = []
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        for part, name in zip(parts, names):
            about = dict(
                metadata,
                inputs=list(part.graph.axes),
                outputs=list(part.graph.outputs),
                size=settings.size,
                precision=settings.precision,
            )
            if part is parts[0] and len(parts) > 1:
                about[parts[1].suffix[1:]] = names[1]
            if tokenizer:
                about["tokenizer"] = {**about["tokenizer"], "file": tokenizer.name}
            path = Path(folder) / name
            write_part(part, path, settings, about)
            exported.append(compare_part(part, path, out.with_name(name), settings))
        for part in exported:
            (Path(folder) / part.path.name).replace(part.path)
    if tokenizer:
        write_bytes(tokenizer, predictor.model.vocabulary.content.encode())
    if settings.format == "onnx":
        shutil.copyfile(find_spec("vitkit.apps.export_reading.onnx_runner").origin, runner_path(out))
    return exported


def runner_path(out: Path) -> Path:
    """Return the path of the program that is written beside an ONNX file."""
    return out.with_name(f"run_{out.stem}.py")


def tokenizer_path(out: Path) -> Path:
    """Return the path of the tokenizer's file that is written beside the file of a text-prompted model."""
    return out.with_name(f"{out.stem}.tokenizer.json")


def check_out(out: Path, settings: ExportSettings) -> None:
    """Check the path of a file that is to be written.

    Raises:
        ConfigError: its extension is that of another format, its folder cannot be made, or a file is in the way that
            must not be replaced.
    """
    suffix = FORMATS[settings.format]
    if out.suffix != suffix:
        raise ConfigError(f"export: got out {out}; expected a name that ends in {suffix}, or another format.")
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"export: out {out}: {parent} is a file; expected a folder. Choose another name.")
    check_free([out, runner_path(out)] if settings.format == "onnx" else [out], settings)


def check_free(paths: Sequence[Path], settings: ExportSettings) -> None:
    """Check that nothing is at the paths, or that it may be replaced.

    Raises:
        ConfigError: a path is a folder, or a file that may not be replaced.
    """
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"export: {path} is a folder; expected a file. Choose another name (out).")
        if path.exists() and not settings.overwrite:
            raise ConfigError(f"export: {path} exists already. Choose another name (out), or set overwrite.")


def parts_of(predictor: Loaded, settings: ExportSettings, images: Sequence[np.ndarray]) -> list[Part]:
    """Return the parts of a model with the inputs for tracing and comparing them.

    Raises:
        ConfigError: the model cannot be exported.
    """
    model = fused_copy(predictor.model)
    if isinstance(predictor, LanguageModel):
        raise ConfigError(f"export: no graph is defined for {type(model).__name__}. Choose another model.")
    if isinstance(predictor, Predictor) and predictor.sampling is not None:
        raise ConfigError(
            "export: the model classifies clips of videos, but exported files take single images. Choose another model."
        )
    if "text" in model.takes:
        detector, encoder = prompted_graphs(model)
        phrases = list_known_phrases(model, predictor.classes)
        predictor = predictor.with_text(phrases)
    if isinstance(predictor, Translator):
        batches = text_inputs(len(predictor.vocabularies["source"]))
        example = batches[-1]
    else:
        batches = image_inputs(predictor, images, settings.size)
        example = make_image_example(settings.size or TRACED_SIZE, predictor.channels)
    if "text" in model.takes:
        prompts = prompt_inputs(model, phrases)
        pairs = [with_text_features(*pair, encoder) for pair in zip(batches, prompts)]
        traced = with_text_features(example, prompts[1], encoder)
        return [Part("", detector, pairs, traced), Part(".text", encoder, prompts, prompts[1])]
    if "text" not in model.returns:
        return [Part("", image_graph(model), batches, example)]
    encoder, step = text_graphs(model)
    steps = list(yield_decoded_inputs(encoder, step, batches))
    several = [inputs for inputs in steps if len(inputs["tokens"]) > 1]
    return [Part("", encoder, batches, example), Part(".step", step, steps, several[NUM_TOKENS - 1])]


def make_image_example(size: tuple[int, int], channels: int | None = None) -> Inputs:
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
        ConfigError: the format cannot represent the part.
    """
    graph = part.graph
    if settings.precision == "fp16":
        graph = copy.deepcopy(graph).half()
    num_bytes = sum(tensor.nbytes for tensor in (*graph.parameters(), *graph.buffers()))
    if settings.format == "onnx" and num_bytes > MAX_ONNX_BYTES:
        halved = settings.precision == "fp32" and num_bytes <= 2 * MAX_ONNX_BYTES
        raise ConfigError(
            f"export: the weights of {path.name} have {num_bytes / 2**30:.1f} GiB; an ONNX file has 2 GiB at most. "
            f"Choose format torch{', or precision fp16' * halved}."
        )
    example = {name: part.example[name] for name in graph.axes}
    with announce(f"tracing   {path.name}"):
        outputs = list(run_graph(part.graph, example))
        program = trace(graph, example, fixed_size=settings.size is not None)
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    if settings.format == "torch":
        torch.export.save(program, path, extra_files={METADATA: json.dumps(texts)})
        remember([ProgramCode(str(path))])
    else:
        with announce(f"writing   {path.name}, opset {settings.opset}, {settings.precision}"):
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
        raise not_supported("torch.export", error) from error


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
        ConfigError: ONNX does not support one of the program's operations.
    """
    onnx = import_optional_module("onnx")
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
        raise not_supported("ONNX", error) from error
    converted.save(path)
    if settings.precision == "int8":
        path.replace(unquantized_path(path))
        quantize(unquantized_path(path), path)
    model = onnx.load(path)
    name_axes(model.graph, axes)
    del model.metadata_props[:]  # entries that the quantizer adds
    onnx.helper.set_model_props(model, texts)
    onnx.save(model, path)


def unquantized_path(path: Path) -> Path:
    """Return where the float32 form of an int8 file lies until both have been timed."""
    return path.with_name(f"unquantized_{path.name}")


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


def quantize(source: Path, path: Path) -> None:
    """Quantize an ONNX file's matrix products with weights to int8: weights per channel, activations dynamically by
    their range."""
    onnx, quantization = import_optional_module("onnx"), import_optional_module("onnxruntime.quantization")
    graph = onnx.load(source).graph
    vectors = {weight.name for weight in graph.initializer if len(weight.dims) != 2}
    # ONNX Runtime scales the product with a vector as if it had an axis of channels, and cannot open the file then.
    with_vectors = [node.name for node in graph.node if node.op_type == "MatMul" and vectors & set(node.input)]
    # It advises steps of its own by the root logger, which prints them if nobody has set it up.
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        quantization.quantize_dynamic(
            source,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_exclude=with_vectors,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            # Weights of 7 bits, as processors without VNNI sum pairs of products in 16 bits, which would overflow.
            reduce_range=True,
        )
    finally:
        root.removeHandler(silent)


_OPERATION = re.compile(r"\b(?:aten|torchvision|vitkit|prims|prim)(?:\.|::)\w+(?:\.\w+)?")


def not_supported(format_name: str, error: BaseException) -> ConfigError:
    """Return an error that names the operation that a format does not support."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    operations = [match[0] for message in reversed(messages) for match in [_OPERATION.search(message)] if match]
    first_line = next((line for line in messages[-1].splitlines() if line.strip()), type(error).__name__)
    unsupported = f"the operation {operations[0]}" if operations else "the model"
    place = place_in_own_code(error)
    where = f" ({place})" if place else ""
    return ConfigError(f"export: {format_name} does not support {unsupported}: {first_line.strip()[:300]}{where}")


def compare_part(part: Part, path: Path, final: Path, settings: ExportSettings) -> ExportedPart:
    """Run a file on the part's batches and compare its outputs with the model's.

    Raises:
        ConfigError: the file cannot be run, or an output differs by more than the tolerance.
    """
    tolerance = TOLERANCES[settings.precision] if settings.tolerance is None else settings.tolerance
    try:
        # On the CPU, as the model: a GPU rounds in another way, and its times would not be this processor's.
        is_onnx = settings.format == "onnx"
        file = OnnxFile(path, read_onnx_metadata(path), on_cpu=True) if is_onnx else open_exported(path)
        compared = differences(part.graph, file, part.batches, tolerance)
    except (CheckpointError, DataError) as error:
        # Such as ONNX Runtime's attention of opset 23, which takes no mask that all queries share.
        remedy = "Choose another opset, such as 20." if settings.format == "onnx" else "Choose format onnx."
        reason = str(error).replace(str(path), final.name)
        raise ConfigError(f"export: {final.name} is not written, as it cannot be run. {reason} {remedy}") from error
    beyond = [difference for difference in compared if not difference.is_within]
    if beyond:
        remedy = "If that is enough for you, set" if settings.precision == "fp32" else "Choose precision fp32, or set"
        raise ConfigError(
            f"export: {final.name} is not written, as it differs from the model in {'; '.join(map(str, beyond))}. "
            f"Differences are relative to the largest value. {remedy} a larger tolerance."
        )
    first = part.batches[0]
    timed = [lambda: file.run(first), lambda: run_graph(part.graph, first)]
    if settings.precision == "int8":
        unquantized = OnnxFile(unquantized_path(path), {}, on_cpu=True)
        timed.append(lambda: unquantized.run(first))
    with announce(f"timing    {final.name}"):
        by_file, by_pytorch, *in_float32 = seconds_in_turn(timed)
    for seconds in in_float32:
        note_speed(path, final, by_file, seconds)
    shapes = [tuple(next(iter(batch.values())).shape) for batch in part.batches]
    return ExportedPart(final, compared, shapes, (by_file, by_pytorch), *in_float32)


def note_speed(path: Path, final: Path, in_int8: float, in_float32: float) -> None:
    """Note in an int8 file how long it takes on this processor, and say so if float32 takes no longer."""
    onnx = import_optional_module("onnx")
    model, threads = onnx.load(path), torch.get_num_threads()
    speed = dict(processor=processor_name(), threads=threads, seconds=in_int8, seconds_in_fp32=in_float32)
    entry = model.metadata_props.add()
    entry.key, entry.value = "speed", json.dumps(speed)
    onnx.save(model, path)
    if in_int8 >= in_float32:
        print_line(
            f"note: int8 is not faster on this processor ({speed['processor']}, {pluralize(threads, 'threads')}): "
            f"{final.name} takes {1e3 * in_int8:.1f} ms, and {1e3 * in_float32:.1f} ms in float32 (--precision fp32)."
        )
