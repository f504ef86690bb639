"""Checkpoints: written whole or not at all, read without running code, and loaded into models with a report."""

import argparse
import json
import os
import pickle
import random
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.array_files import read_arrays, read_pickled_arrays
from vitkit.errors import CheckpointError
from vitkit.registry import nearest
from vitkit.shards import check_shards, join, sync_folder

TEMPORARY_SUFFIX = ".tmp"
"""Of files that are being written; one that is left over belongs to a run that was killed."""


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes `state` to a temporary name and renames it, so that `path` is always a whole checkpoint.

    Raises:
        CheckpointError: it cannot be written, such as on a full disk. What was at `path` before is still there.
    """
    path = Path(path)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    except (OSError, RuntimeError) as error:
        raise _not_saved(path, temporary, error) from error


def link_checkpoint(source: str | Path, target: str | Path) -> None:
    """Gives a checkpoint a second name, or copies it where the file system knows no links; `target` is always whole.

    Raises:
        CheckpointError: see `save_checkpoint`.
    """
    target = Path(target)
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        _rename(temporary, target)
    except OSError as error:
        raise _not_saved(target, temporary, error) from error


def _rename(temporary: Path, path: Path) -> None:
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # it stays if both are names of one file
    sync_folder(path.parent)  # the new name is on the disk once its folder is


def _not_saved(path: Path, temporary: Path, error: BaseException) -> CheckpointError:
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
    cause: BaseException | None = error  # torch reports a write that failed as an error of its own, during the write's
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
    kept = " The checkpoint that was there before is intact." if path.exists() else ""
    return CheckpointError(f"{path}: not saved ({reason}).{kept} Make room, or check the disk.")


def read_checkpoint(path: str | Path, *, whole: bool = True) -> dict[str, Any]:
    """Reads a PyTorch file, or arrays that numpy saved (.npz), on the CPU; tensors and plain values only.

    Args:
        whole: of a checkpoint in shards, put its divided tensors together, too; else they are left out, and "shards"
            says where they are.
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
        return read_arrays(path)
    if path.suffix == ".pkl":
        return read_pickled_arrays(path)
    _check_checksums(path)
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
    return _with_shards(path, state, whole=whole) if isinstance(state.get("shards"), Mapping) else dict(state)


def _with_shards(path: Path, state: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    check_shards(path, state["shards"], checksums=whole)
    if not whole:
        return dict(state)
    # Few read such files, and their reader takes a while to import.
    from vitkit.shard_files import read_whole

    tensors = read_whole(path, state["shards"])
    parts = {name: state.get(name, {}) for name in {key.partition("/")[0] for key in tensors}}
    return {key: value for key, value in state.items() if key != "shards"} | join(parts, tensors)


def shards_of(path: Path) -> str | None:
    """The name of the folder that holds the divided tensors of a checkpoint; None if it has none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        # Mapped, so that a whole checkpoint is not read for it.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({str(error).splitlines()[0]}).") from error
    shards = state.get("shards") if isinstance(state, Mapping) else None
    return shards.get("folder") if isinstance(shards, Mapping) else None


def _check_checksums(path: Path) -> None:
    """`torch.load` compares not all of them, so that damage could change weights unnoticed."""
    if not zipfile.is_zipfile(path):
        return  # of an older format, or truncated, which loading it tells
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (OSError, EOFError, RuntimeError, NotImplementedError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path}: truncated or damaged ({error}). Get the file again.") from error
    if damaged:
        raise CheckpointError(f"{path}: damaged: the checksum of {damaged} is wrong. Get the file again.")


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
    new_parts: list[str] = field(default_factory=list)
    """Prefixes of parts that were left as the model had them, because the checkpoint has nothing of them."""

    def __str__(self) -> str:
        parts = [f"loaded {self.source}"]
        if self.converter:
            parts.append(f"recognised as {self.converter}")
        if self.reinitialized:
            parts.append(f"classes differ, so these start anew: {', '.join(self.reinitialized)}")
        if self.new_parts:
            parts.append(f"not in it, so these start anew: {', '.join(part.rstrip('.') for part in self.new_parts)}")
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
        new_class_head: the weights are a start to train from: with other classes, keep the model's fresh class head
            instead of raising; likewise its `new_parts`, if the checkpoint has nothing of them.
        strict: raise on missing or unexpected keys instead of only reporting them.
    Raises:
        CheckpointError: the file cannot be read, or does not fit the model.
    """
    # The only import upwards: addresses and key names of official checkpoints lie beside the published figures.
    from vitkit import model_zoo
    from vitkit.model_zoo.converters import convert_official, describe

    if isinstance(source, str) and not Path(source).exists() and source in model_zoo.index():
        source = model_zoo.published_weights(source)
    name = "the given state dict" if isinstance(source, Mapping) else str(source)
    checkpoint = source if isinstance(source, Mapping) else read_checkpoint(source)
    state = stored = state_dict_of(checkpoint, name)
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
    what = describe(checkpoint, stored, converter)
    if strict and _is_of_another_model(state, expected):
        _note_differences(report, state, expected)
        raise CheckpointError(_misfit(name, model, state, expected, report, [], what))
    trained_classes = classes_of(checkpoint, name) or (converter and converter.classes)
    head_keys = _head_of_other_classes(model, state, expected, trained_classes, classes)
    if head_keys and not new_class_head:
        got = _classes(trained_classes) if trained_classes else _shapes(state, head_keys)
        wanted = _classes(classes) if classes else _shapes(expected, head_keys)
        raise CheckpointError(
            f"{name}: its class head is for other classes (checkpoint: {got}; model: {wanted})."
            f"{f' It seems to be {what}.' if what else ''} Use the config of its classes and task; or, to fine-tune "
            "it, load it with new_class_head=True (tools/train.py --init does), which starts only the class head anew."
        )
    if head_keys:
        _check_trainable(name, model, head_keys)
        report.reinitialized = head_keys
        state = {key: value for key, value in state.items() if key not in head_keys}
    new_parts = tuple(getattr(model, "new_parts", ()))
    if new_class_head and new_parts and not any(key.startswith(new_parts) for key in state):
        report.new_parts = list(new_parts)

    _note_differences(report, state, expected)
    wrong = [k for k in state if k in expected and state[k].shape != expected[k].shape]
    if wrong or (strict and (report.missing or report.unexpected)):
        raise CheckpointError(_misfit(name, model, state, expected, report, wrong, what))
    _check_kinds(name, state, expected)
    model.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=False)
    return report


def classes_of(checkpoint: Mapping[str, Any], name: str) -> list[str] | None:
    """The classes that a checkpoint was trained on; None if it does not say.

    Args:
        name: of the checkpoint, for errors.
    Raises:
        CheckpointError: what it says are no names.
    """
    classes = checkpoint.get("classes")
    if classes is None:
        return None
    if not isinstance(classes, list | tuple) or not all(isinstance(known, str) for known in classes):
        raise CheckpointError(f"{name}: its classes are {str(classes)[:100]}; expected a list of names.")
    return list(classes)


def _check_kinds(name: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Copying would turn whole or complex numbers into others without a word."""
    for key, value in state.items():
        if key not in expected:
            continue
        ours = expected[key]
        if value.layout != ours.layout or (value.is_floating_point(), value.is_complex()) != (
            ours.is_floating_point(), ours.is_complex(),
        ):  # fmt: skip
            raise CheckpointError(
                f"{name}: {key} holds {value.dtype} ({value.layout}), the model's {ours.dtype} ({ours.layout}). Get "
                "the file again, or convert it."
            )


def state_dict_of(checkpoint: Mapping[str, Any], name: str) -> dict[str, Tensor]:
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


def _head_of_other_classes(
    model: nn.Module,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    trained_classes: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> list[str]:
    """The keys of the checkpoint's class head, if it is for other classes than the model's."""
    head = tuple(getattr(model, "class_head", ()))
    keys = [key for key in state if key in expected and key.startswith(head)] if head else []
    differ = classes is not None and trained_classes is not None and list(trained_classes) != list(classes)
    # Other sizes than the first are the model's own: the report of misfits names them.
    return keys if differ or any(state[key].shape[:1] != expected[key].shape[:1] for key in keys) else []


def _note_differences(report: LoadReport, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    # Batch counters of batch norms mean nothing for frozen ones, and little for others.
    def counts(key: str) -> bool:
        return not key.endswith("num_batches_tracked")

    anew = (*report.reinitialized, *report.new_parts)
    report.missing = [k for k in expected if k not in state and not k.startswith(anew) and counts(k)]
    report.unexpected = [k for k in state if k not in expected and counts(k)]


def _is_of_another_model(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether most of what the model has besides its backbone is missing."""
    own = [key for key in expected if not key.startswith("backbone.")]
    return sum(key in state for key in own) < 0.5 * len(own)


def _check_trainable(name: str, model: nn.Module, keys: Sequence[str]) -> None:
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    frozen = [key for key in keys if not trained.get(key, True)]
    if frozen:
        raise CheckpointError(
            f"{name}: its classes differ from the model's, so that {_some(frozen)} would start anew, but are not "
            "trained. Start from a checkpoint of the model's classes, or train everything (model.freeze_detr=false)."
        )


def _misfit(
    name: str,
    model: nn.Module,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    report: LoadReport,
    wrong: list[str],
    what: str | None,
) -> str:
    common = len(state.keys() & expected.keys())
    lines = [f"{name} does not fit {type(model).__name__}: {common} of the model's {len(expected)} entries are in it."]
    if what:
        lines.append(f"It seems to be {what}.")
    if common < 0.5 * len(expected) or _is_of_another_model(state, expected):
        lines.append(
            "That is another model's checkpoint: use the config that it belongs to (model_zoo/README.md names those of "
            "official ones), or a checkpoint of this one."
        )
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
