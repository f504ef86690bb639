"""Open exported files: their metadata, and models that run them in place of their own layers."""

import hashlib
import inspect
import json
import os
import reprlib
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.apps.export_reading.graphs import FROM_MODEL
from vitkit.apps.export_reading.runtimes import (
    ONNX_FILES,
    ExportedFile,
    first_line,
    read_onnx,
    refusal,
    require_file,
    select_inputs,
)
from vitkit.apps.export_reading.settings import ONNX_SUFFIX, PROGRAM_SUFFIX, RUNTIMES, Runtime
from vitkit.config.trust import ProgramCode, remember, require_trust
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.heads.grounding_dino import EncodedPrompts
from vitkit.models.text_prompted import TextPrompted, TextReading
from vitkit.ops.images import unpadded_sizes
from vitkit.protocols.model import DenseModel, Model
from vitkit.seq2seq.decoding import State, TextGenerator
from vitkit.structures import PAD, PromptTokens
from vitkit.text.vocabulary import VOCABULARY_FORMAT
from vitkit.weights.locate import METADATA_READERS

NEW = "new_"
"""Prefix of the outputs of a step that replace its inputs, as ONNX requires inputs and outputs to differ by name."""
METADATA = "vitkit.json"
"""The name under which a program of torch.export stores its metadata."""
_MAX_METADATA = 256 * 2**20
"""The most bytes of metadata that are read; vocabularies may take a few megabytes."""

_NUM_KEPT = 64
"""The number of batches of prompts whose features are kept, those that were read last."""
_MAX_SIDE = 1 << 15
"""The largest side of the images of a file, in pixels."""


class ProgramFile:
    """A program of torch.export, which the user has exported or trusted.

    Raises:
        ConfigError: the user has neither exported nor trusted the file.
        CheckpointError: torch.export cannot read the file.
    """

    def __init__(self, path: str | Path):
        self.path = path
        self.metadata = read_program_metadata(path)
        # torch.export unpickles inputs and constants, evaluates the text of shapes, and calls functions by their names,
        # so that a file cannot be shown to be harmless by its content.
        require_trust([ProgramCode(str(path))], path, kind="exported program")
        try:
            program = torch.export.load(path)
        except Exception as error:  # from reading archives, JSON or pickles, depending on where the file is damaged
            raise CheckpointError(f"{path}: torch.export cannot read it ({first_line(error)}).") from error
        self.inputs = list(self.metadata["inputs"])
        # The tracer's guards reject sizes that need no padding, although the graph computes them correctly.
        has_guards = "check_guards" in inspect.signature(program.module).parameters  # since PyTorch 2.9
        self._module = program.module(**({"check_guards": False} if has_guards else {}))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str] | None = None) -> dict[str, Tensor]:
        try:
            # The types of its operations are recorded: an autocast around it would mix others in.
            with torch.autocast("cpu", enabled=False):
                values = self._module(**{name: value.cpu() for name, value in select_inputs(self, inputs).items()})
        except (RuntimeError, AssertionError) as error:
            raise refusal(self.path, inputs, first_line(error)) from error
        return {name: value for name, value in values.items() if outputs is None or name in outputs}


def read_program_metadata(path: str | Path) -> dict[str, Any]:
    """Read the metadata of a program of torch.export, without running anything in the file.

    Raises:
        CheckpointError: the file does not exist, was not written by `vitkit export`, or is damaged.
    """
    require_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            # PyTorch up to 2.7 names the folder "extra_files".
            members = [
                m for m in archive.infolist() if m.filename.endswith((f"extra/{METADATA}", f"extra_files/{METADATA}"))
            ]
            if len(members) != 1 or members[0].file_size > _MAX_METADATA:
                raise ValueError(f"{len(members)} entries named {METADATA}")
            texts = json.loads(archive.read(members[0]))
    except (
        OSError,
        ValueError,
        RecursionError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
    ) as error:
        raise CheckpointError(
            f"{path}: was not written by `vitkit export`, or is damaged ({first_line(error)}). Export the model again."
        ) from error
    return _parse(texts, path)


def trust_program(path: str | Path) -> None:
    """Record that the user trusts a program, and that of its decoding step or text encoder."""
    metadata = read_program_metadata(path)
    programs = [Path(path), *(beside(path, metadata[name]) for name in ("step", "text") if name in metadata)]
    remember([ProgramCode(str(program)) for program in programs if program.is_file()])


def beside(path: str | Path, name: Any) -> Path:
    """Return the path of another file in the same folder.

    Raises:
        CheckpointError: the name is not that of a file.
    """
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{path}: its metadata names {name!r} beside it; expected the name of a file.")
    return Path(path).with_name(name)


def open_exported(path: str | Path, runtime: Runtime = "onnxruntime") -> ExportedFile:
    """Open an exported file.

    Args:
        runtime: what runs an ONNX file.
    Raises:
        CheckpointError: the file does not exist, or cannot be read.
        ConfigError: the runtime is not installed.
    """
    is_onnx = Path(path).suffix == ONNX_SUFFIX
    return ONNX_FILES[runtime](path, read_onnx_metadata(path)) if is_onnx else ProgramFile(path)


def check_runtime(runtime: Runtime, weights: str | os.PathLike[str], device: str | torch.device) -> None:
    """Check that a runtime can run a model's weights on a device.

    Raises:
        ConfigError: there is no such runtime, or OpenVINO is to run something else than an ONNX file on the CPU.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(f"got runtime {runtime!r}; expected {' or '.join(RUNTIMES)}.")
    if runtime == "openvino" and Path(weights).suffix != ONNX_SUFFIX:
        raise ConfigError(f"{weights}: runtime openvino is for ONNX files. Write one by `vitkit export`.")
    if runtime == "openvino" and torch.device(device).type != "cpu":
        raise ConfigError(f"{weights}: runtime openvino computes on the CPU; got device {device}. Set device cpu.")


def read_onnx_metadata(path: str | Path) -> dict[str, Any]:
    """Read the metadata of an exported ONNX file, without running anything in the file.

    Raises:
        CheckpointError: see `read_onnx`; or the file was not written by `vitkit export`, or is damaged.
    """
    require_file(path)
    return _read_onnx_metadata(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=1)
def _read_onnx_metadata(path: str | Path, modified: int) -> dict[str, Any]:
    """Read a file once for its config, its classes and the model in its place, unless it was `modified`."""
    return _parse({entry.key: entry.value for entry in read_onnx(path).metadata_props}, path)


def _parse(texts: Mapping[str, str], path: str | Path) -> dict[str, Any]:
    try:
        metadata = {name: json.loads(value) for name, value in texts.items()}
        is_ours = {"config", "inputs", "size", "postprocessing"} <= metadata.keys()
    except (AttributeError, TypeError, ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise CheckpointError(f"{path}: was not written by `vitkit export`, so its model is not known.")
    for name, is_right in _ENTRIES.items():
        if not is_right(metadata.get(name)):
            raise CheckpointError(
                f"{path}: damaged: its metadata has {name}={reprlib.repr(metadata.get(name))}. Export the model again."
            )
    return metadata


def _is_size(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and len(value) == 2
        and all(type(side) is int and 0 < side <= _MAX_SIDE for side in value)
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_postprocessing(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    multiple = value.get("mask_multiple", 1)
    return type(multiple) is int and 0 < multiple <= _MAX_SIDE


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "config": lambda value: isinstance(value, dict),
    "inputs": _are_names,
    "outputs": lambda value: value is None or _are_names(value),
    "size": _is_size,
    "postprocessing": _is_postprocessing,
}
"""Entry of the metadata -> whether its value is one that `vitkit export` writes."""


def read_as_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return an exported file's metadata in the form of a run's checkpoint without weights.

    Raises:
        CheckpointError, ConfigError: see `open_exported`.
    """
    is_program = Path(path).suffix == PROGRAM_SUFFIX
    metadata = read_program_metadata(path) if is_program else read_onnx_metadata(path)
    measured = {"score_thresholds": metadata.get("thresholds"), "image_sizes": metadata.get("image_sizes")}
    things = (metadata.get("postprocessing") or {}).get("things")
    names = ("classes", "category_ids", "keypoints", "vocabularies")
    if isinstance(metadata.get("tokenizer"), dict):
        metadata = metadata | {"vocabularies": {"target": read_tokenizer(path, metadata["tokenizer"])}}
    return {name: metadata[name] for name in names if metadata.get(name) is not None} | {
        "config": json.dumps(metadata["config"]),
        **({} if things is None else {"things": things}),
        "measured": measured,
    }


METADATA_READERS["exported"] = read_as_checkpoint


def read_tokenizer(path: str | Path, entry: Mapping[str, Any]) -> str:
    """Return the JSON of the vocabulary whose tokenizer's file lies beside an exported one.

    Args:
        entry: "tokenizer" of the exported file's metadata.
    Raises:
        CheckpointError: the file is missing, or is another one than was exported.
    """
    file = beside(path, entry.get("file"))
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: its tokenizer's file {file.name} cannot be read beside it ({error!s:.100}). Copy it there, or "
            "export the model again."
        ) from error
    if hashlib.sha256(content.encode()).hexdigest() != entry.get("sha256"):
        raise CheckpointError(f"{file}: is not the tokenizer's file that was exported with {Path(path).name}.")
    special = {"special": entry.get("special"), "tokenizer": content}
    return json.dumps({"format": VOCABULARY_FORMAT, "kind": "tokenizer", **special})


def open_exported_model(path: str | Path, model: nn.Module, runtime: Runtime = "onnxruntime") -> nn.Module:
    """Open an exported file in place of a model that was built from the same config.

    Args:
        runtime: see `open_exported`.
    Raises:
        CheckpointError, ConfigError: see `open_exported`.
    """
    file = open_exported(path, runtime)
    if "text" in model.takes:
        return ExportedPromptedModel(file, model, runtime)
    return ExportedGenerator(file, model, runtime) if "text" in model.returns else ExportedModel(file, model)


class ExportedModel(Model):
    """An exported image model in place of the model itself; its outputs are on the CPU.

    Args:
        file: the opened file.
        model: a model built from the same config, for its `postprocess`; its weights do not matter.
    """

    def __init__(self, file: ExportedFile, model: nn.Module):
        super().__init__()
        assert isinstance(model, DenseModel)
        self.file = file
        self.model = model
        self.takes, self.returns, self.tasks = model.takes, model.returns, model.tasks
        self.score_threshold = model.score_threshold

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Return the outputs that `postprocess` reads; the arguments are those of the model."""
        return self.run_file(images, padding_mask)

    def fused_copy(self) -> Model:
        """Return this model: what the file computes was fused when it was exported."""
        return self

    def run_file(self, images: Tensor, padding_mask: Tensor | None, **others: Tensor) -> dict[str, Any]:
        """Return the outputs of `forward` for images and the file's other inputs by name."""
        if padding_mask is None:
            padding_mask = images.new_zeros(images.shape[0], *images.shape[-2:], dtype=torch.bool)
        image_sizes = unpadded_sizes(images, padding_mask)
        inputs = dict(images=images, padding_mask=padding_mask, image_sizes=image_sizes, **others)
        size = self.file.metadata["size"]
        if size is not None:
            inputs = inputs | self._pad(images, padding_mask, size)
        # Files written before they listed outputs are of vitkit's own models.
        outputs = self.file.run(inputs, self.file.metadata.get("outputs", FROM_MODEL) or None)
        self._check_classes(outputs)
        multiple = (self.file.metadata["postprocessing"] or {}).get("mask_multiple", 1)
        input_size = tuple(side + -side % multiple for side in size or images.shape[-2:])
        return dict(outputs, input_size=input_size, image_sizes=image_sizes)

    def _check_classes(self, outputs: Mapping[str, Tensor]) -> None:
        """Check that the file's scores are for the classes that its metadata names.

        Raises:
            CheckpointError: the number of classes differs.
        """
        prefixes = tuple(self.model.class_head)
        sizes = {value.shape[0] for key, value in self.model.state_dict().items() if key.startswith(prefixes)}
        for name in ("logits", "pred_logits"):
            if name in outputs and sizes and outputs[name].shape[-1] not in sizes:
                raise CheckpointError(
                    f"{self.file.path}: damaged: its {name} have {outputs[name].shape[-1]} entries for a prediction, "
                    f"but its classes need {' or '.join(map(str, sorted(sizes)))}. Export the model again."
                )

    def _pad(self, images: Tensor, padding_mask: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
        """Pad images and mask at the right and bottom to the size that the file takes."""
        down, right = (limit - side for limit, side in zip(size, images.shape[-2:]))
        if min(down, right) < 0:
            raise DataError(
                f"{self.file.path}: was exported for images of {size[0]}x{size[1]} pixels (--size), but got "
                f"{images.shape[-2]}x{images.shape[-1]}. Resize them to less (data.val.transforms), or export without."
            )
        margins = (0, right, 0, down)
        return dict(images=F.pad(images, margins), padding_mask=F.pad(padding_mask, margins, value=True))

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return each image's predictions as the model does."""
        return self.model.postprocess(outputs, image_sizes)

    def postprocess_lazily(
        self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]
    ) -> Sequence[Mapping[str, Any]]:
        return self.model.postprocess_lazily(outputs, image_sizes)

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Return the model's semantic scores."""
        return self.model.semantic_scores(outputs, index, original, within=within)


@dataclass
class ExportedState(State):
    """The decoding state of N rows: tensors by name, with the rows as first axis."""

    tensors: dict[str, Tensor]

    def select(self, rows: Tensor) -> "ExportedState":
        """Return the state of the rows with these indices."""
        return ExportedState({name: value[rows] for name, value in self.tensors.items()})


class ExportedGenerator(TextGenerator):
    """An exported captioner or translator in place of the model itself; its outputs are on the CPU.

    Args:
        encoder: the opened encoder; the file of the decoding step lies beside it.
        model: a model built from the same config, for its vocabulary and decoding settings; its weights do not matter.
        runtime: what runs the decoding step.
    """

    def __init__(self, encoder: ExportedFile, model: TextGenerator, runtime: Runtime = "onnxruntime"):
        super().__init__(target_vocabulary=model.vocabulary, target_size=model.target_size, decoding=model.decoding)
        self.model = model
        self.takes = model.takes
        self.encoder = encoder
        self.stepper = open_exported(beside(encoder.path, encoder.metadata.get("step")), runtime)

    def fused_copy(self) -> Model:
        """Return this model: what the files compute was fused when they were exported."""
        return self

    def start(self, **inputs: Tensor) -> ExportedState:
        """Encode a batch's inputs."""
        return ExportedState(self.encoder.run(inputs))

    def step(
        self, tokens: Tensor, state: ExportedState, *, with_attention: bool = False
    ) -> tuple[Tensor, ExportedState, None]:
        """Advance every row by one token.

        Raises:
            ConfigError: attention is requested, which the file does not return.
        """
        if with_attention:
            raise ConfigError(f"{self.encoder.path}: an exported model returns no attention. Use its checkpoint.")
        outputs = self.stepper.run({"tokens": tokens, **state.tensors})
        logits = outputs.pop("logits")
        return logits, ExportedState(state.tensors | {k.removeprefix(NEW): v for k, v in outputs.items()}), None


class ExportedPromptedModel(TextPrompted, ExportedModel):
    """An exported text-prompted detector in place of the model itself; its outputs are on the CPU.

    The model reads the prompts and returns its outputs as it always does, but its parts are the files.

    Args:
        file: the opened file of the detector; that of the text encoder lies beside it.
        model: a model built from the same config, whose parts are replaced.
        runtime: what runs the text encoder.
    Raises:
        CheckpointError: the file of the text encoder is missing, or was exported from another model.
    """

    def __init__(self, file: ExportedFile, model: nn.Module, runtime: Runtime = "onnxruntime"):
        super().__init__(file, model)
        path = beside(file.path, file.metadata.get("text"))
        if not path.is_file():
            raise CheckpointError(
                f"{file.path}: there is no {path.name} beside it, its text encoder. Copy both files, or export the "
                "model again."
            )
        self.text_file = open_exported(path, runtime)
        if self.text_file.metadata.get("text_id") != file.metadata.get("text_id"):
            raise CheckpointError(
                f"{path}: was exported from another model than {Path(file.path).name}. Copy both files of one export."
            )
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        # The file normalizes and pads the images itself.
        model.prepare = lambda images, padding_mask: (images, padding_mask)
        model.backbone_maps = lambda images, padding_mask: {"images": images}
        model.text_encoder = model.text_projection = nn.Identity()
        model.encode_prompts = self._encode_prompts
        model.neck, model.head = _Unchanged(), _DetectorFile(self)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None, **prompts: Any) -> dict[str, Any]:
        """Return the model's outputs; the arguments are those of the model."""
        return self.model(images.cpu(), None if padding_mask is None else padding_mask.cpu(), **prompts)

    def read_text(self, text: Any) -> TextReading:
        """Read a text as the model does."""
        return self.model.read_text(text)

    def text_parts(self) -> Sequence[nn.Module]:
        """Return the module that runs the text encoder's file."""
        return (self.model.text_encoder,)

    def encode_text(self, reading: TextReading, num_images: int, device: torch.device) -> Any:
        """Encode a text for a number of images, on the CPU."""
        return self.model.encode_text(reading, num_images, torch.device("cpu"))

    def _encode_prompts(self, prompt: PromptTokens) -> EncodedPrompts:
        """Return the features of prompts, each of which is encoded once."""
        tokens, phrase_ids, is_word = prompt.to("cpu")
        distinct, rows = torch.unique(torch.stack((tokens, phrase_ids), dim=1), dim=0, return_inverse=True)
        key = distinct.numpy().tobytes()
        if key not in self._features:
            inputs = dict(zip(("tokens", "blocks"), (part.contiguous() for part in distinct.unbind(1))))
            self._features[key] = self.text_file.run(inputs)["text_features"]
            if len(self._features) > _NUM_KEPT:
                self._features.popitem(last=False)
        self._features.move_to_end(key)
        return EncodedPrompts(self._features[key][rows], tokens == PAD, phrase_ids, is_word)


class _Unchanged(nn.Module):
    """Returns its first input."""

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None) -> Mapping[str, Tensor]:
        return features


class _DetectorFile(nn.Module):
    """The detector's file in the place of a head, which takes the images themselves."""

    def __init__(self, model: ExportedPromptedModel):
        super().__init__()
        self.run = model.run_file

    def forward(
        self, features: Mapping[str, Tensor], padding_mask: Tensor | None, *, text: EncodedPrompts
    ) -> dict[str, Tensor]:
        inputs = dict(text_features=text.features, blocks=text.phrase_ids)
        return self.run(features["images"], padding_mask, **inputs) | {"text_padding": text.padding_mask}
