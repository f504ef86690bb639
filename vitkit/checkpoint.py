"""Checkpoints: written whole or not at all, read without running code, and loaded into models with a report."""

import argparse
import json
import os
import pickle
import random
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.registry import nearest


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes `state` to a temporary name and renames it, so that `path` is always a whole checkpoint."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a PyTorch file, or arrays that numpy saved (.npz), on the CPU; tensors and plain values only.

    Raises:
        CheckpointError: the file is missing, damaged, or holds pickled code (which is not run).
    """
    path = Path(path)
    if not path.is_file():
        # Of a run's folder its own checkpoints are meant, else those beside the missing file.
        folder = path if path.is_dir() else path.parent
        near = [p.name for p in folder.glob("*.pth")]
        raise CheckpointError(
            f"no checkpoint {str(path)!r}, nor is it a name in model_zoo/index.json. In {str(folder)!r}: "
            f"{nearest(path.name, near)}"
        )
    if path.suffix == ".npz":
        return _read_arrays(path)
    if path.suffix == ".pkl":
        return _read_pickled_arrays(path)
    try:
        # Official training checkpoints hold their argparse settings, which are plain values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        if "Unsupported global" in str(error) or "GLOBAL" in str(error):
            raise CheckpointError(
                f"{path}: refused, because it holds pickled code and not only tensors ({_globals_named(str(error))}). "
                "Loading it could run anything. If you trust it, load it yourself with torch.load(..., "
                "weights_only=False), save its state dict with torch.save, and load that."
            ) from error
        raise CheckpointError(f"{path}: damaged or not a PyTorch checkpoint ({reason}). Get the file again.") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path}: truncated, damaged or not a PyTorch checkpoint ({reason}). Get the file again."
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected a dict of tensors.")
    return dict(state)


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of an .npz file by name, such as the original Vision Transformers are published in."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _tensor(arrays[name]) for name in arrays.files}
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path}: damaged, or holds more than numbers ({str(error).splitlines()[0]}). Get the file again."
        ) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Makes arrays, numbers, text and containers, and calls nothing else, so that a file cannot run code."""

    ALLOWED = frozenset(
        (f"{package}.{module}", name)
        for package in ("numpy.core", "numpy._core")
        for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
    ) | {("numpy", "ndarray"), ("numpy", "dtype"), ("collections", "OrderedDict"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core") if _NUMPY_2 else module, name)


_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


def _read_pickled_arrays(path: Path) -> dict[str, Any]:
    """The arrays of a .pkl file, as detectron2 publishes its models: {"model": {name: array}, ...}."""
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused or damaged ({error}). A .pkl file may hold arrays, numbers and text only: loading "
            "anything else could run code. Get the file again, or save its state dict with torch.save and load that."
        ) from error
    except Exception as error:  # a damaged file can make the unpickler raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise CheckpointError(
            f"{path}: truncated, damaged or not a file of arrays ({reason}). Get the file again."
        ) from error
    state = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not any(isinstance(value, np.ndarray) for value in state.values()):
        raise CheckpointError(f"{path}: holds no arrays by name. Expected a model of detectron2.")
    arrays = {str(name): value for name, value in state.items() if isinstance(value, np.ndarray)}
    bad = [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]
    if bad:
        raise CheckpointError(f"{path}: {bad[0]} is no array of numbers ({arrays[bad[0]].dtype}). Get the file again.")
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.dtype("V2"):  # numpy does not know bfloat16, in which some arrays were saved
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _globals_named(message: str) -> str:
    marker = "GLOBAL "
    return message.split(marker, 1)[1].split(" was not", 1)[0] if marker in message else "an unsupported object"


@dataclass
class LoadReport:
    """What `load_weights` did."""

    source: str
    converter: str | None = None
    """The official format that was recognised; None for vitkit's own names."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reinitialized: list[str] = field(default_factory=list)
    """Class-head entries that were left as the model had them, because the classes differ."""

    def __str__(self) -> str:
        parts = [f"loaded {self.source}"]
        if self.converter:
            parts.append(f"recognised as {self.converter}")
        if self.reinitialized:
            parts.append(f"classes differ, so these start anew: {', '.join(self.reinitialized)}")
        for what, keys in (("missing", self.missing), ("unexpected", self.unexpected)):
            if keys:
                parts.append(f"{len(keys)} {what}: {_some(keys)}")
        return "; ".join(parts)


def load_weights(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    classes: Sequence[str] | None = None,
    new_class_head: bool = False,
    strict: bool = True,
) -> LoadReport:
    """Loads weights into `model`, whichever names they were published under.

    Args:
        source: a checkpoint file, a name of the model zoo's index ("detr_r50", downloaded once), or a state dict (also
            wrapped as {"model": ...}). Of vitkit's own checkpoints the moving average is taken when there is one.
        classes: the model's class names. A vitkit checkpoint that was trained on others does not fit then, even if
            it has as many.
        new_class_head: with other classes, keep the model's fresh class head instead of raising.
        strict: raise on missing or unexpected keys instead of only reporting them.
    Raises:
        CheckpointError: the file cannot be read, or does not fit the model.
    """
    # The only import upwards: addresses and key names of official checkpoints lie beside the published figures.
    from vitkit import model_zoo
    from vitkit.model_zoo.converters import convert_official

    if isinstance(source, str) and not Path(source).exists() and source in model_zoo.index():
        source = model_zoo.published_weights(source)
    name = "the given state dict" if isinstance(source, Mapping) else str(source)
    checkpoint = source if isinstance(source, Mapping) else read_checkpoint(source)
    state = _state_dict(checkpoint, name)
    report = LoadReport(name)
    converter = None
    if not _fits(model, state) and not getattr(model, "renames_itself", False):
        state, converter = convert_official(state, model, classes)
    report.converter = converter and converter.name
    for prefix, module in model.named_modules():
        if hasattr(module, "adapt_state"):
            module.adapt_state(state, f"{prefix}." if prefix else "")

    expected = model.state_dict()
    if hasattr(model, "variant_of"):
        theirs, ours = model.variant_of(state), model.variant_of(expected)
        if theirs != ours:
            raise CheckpointError(
                f"{name}: a checkpoint of a {type(model).__name__} {theirs} does not fit a model {ours}. Use the "
                "config of its variant."
            )
    head = tuple(getattr(model, "class_head", ()))
    trained_classes = checkpoint.get("classes") or (converter and converter.classes)
    other_classes = classes is not None and trained_classes is not None and list(trained_classes) != list(classes)
    head_keys = [key for key in state if key in expected and key.startswith(head)] if head else []
    # Other sizes than the first are the model's own: the report of misfits below names them.
    if other_classes or any(state[key].shape[:1] != expected[key].shape[:1] for key in head_keys):
        if not new_class_head:
            got = _classes(trained_classes) if trained_classes else _shapes(state, head_keys)
            wanted = _classes(classes) if classes else _shapes(expected, head_keys)
            raise CheckpointError(
                f"{name}: its class head is for other classes (checkpoint: {got}; model: {wanted}). "
                "To fine-tune, load it with new_class_head=True (tools/train.py --init does), which starts only "
                "the class head anew."
            )
        report.reinitialized = head_keys
        state = {key: value for key, value in state.items() if key not in head_keys}

    # Batch counters of batch norms mean nothing for frozen ones, and little for others.
    report.missing = [
        k
        for k in expected
        if k not in state and k not in report.reinitialized and not k.endswith("num_batches_tracked")
    ]
    report.unexpected = [k for k in state if k not in expected and not k.endswith("num_batches_tracked")]
    wrong = [k for k in state if k in expected and state[k].shape != expected[k].shape]
    if wrong or (strict and (report.missing or report.unexpected)):
        raise CheckpointError(_misfit(name, model, state, expected, report, wrong))
    model.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=False)
    return report


def _state_dict(checkpoint: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without the wrappings that are around them."""
    state = checkpoint
    for key in ("ema", "model", "model_state", "state_dict"):
        if isinstance(state.get(key), Mapping):
            state = state[key]
            break
    tensors = {str(key).removeprefix("module."): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{name}: holds no tensors (keys: {_some(list(state))}). Expected a model's state dict.")
    return tensors


def _fits(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    # Batch counters and class heads come and go; anything else that is missing may have another name.
    head = tuple(getattr(model, "class_head", ()))
    needed = [
        k for k in model.state_dict() if not k.endswith("num_batches_tracked") and not (head and k.startswith(head))
    ]
    return all(key in state for key in needed)


def _misfit(
    name: str,
    model: nn.Module,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    report: LoadReport,
    wrong: list[str],
) -> str:
    common = len(state.keys() & expected.keys())
    lines = [f"{name} does not fit {type(model).__name__}: {common} of the model's {len(expected)} entries are in it."]
    if common < 0.5 * len(expected):
        lines.append("It looks like another model's checkpoint; check that config and checkpoint belong together.")
    lines += [f"{key}: checkpoint {tuple(state[key].shape)}, model {tuple(expected[key].shape)}" for key in wrong[:5]]
    if report.missing:
        lines.append(f"missing ({len(report.missing)}): {_some(report.missing)}")
    if report.unexpected:
        lines.append(f"unexpected ({len(report.unexpected)}): {_some(report.unexpected)}")
    lines.append("With strict=False missing and unexpected entries are only reported.")
    return "\n  ".join(lines)


def _some(items: Sequence) -> str:
    return ", ".join(str(item) for item in items[:5]) + (", …" if len(items) > 5 else "")


def _classes(names: Sequence[str]) -> str:
    return f"{len(names)} classes {_some(names)}"


def _shapes(state: Mapping[str, Tensor], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {tuple(state[key].shape)}" for key in keys)


def rng_state() -> dict[str, Any]:
    """The state of every global random number generator of this process, as tensors and plain values."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": json.dumps(random.getstate()),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts back what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
