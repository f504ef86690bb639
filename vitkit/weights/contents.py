"""The contents of a checkpoint: its tensors, without the wrappers of other projects, and the classes that it states."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.weights.lora import merge_pairs

PIXELS = "pixel_statistics"
"""Entry of a backbone trained without labels: the `mean` and `std` by which its pixels were normalized."""
TEACHER = "teacher_fingerprint"
"""Entry of a checkpoint with a fingerprint of the frozen network that its model has learned from."""
LORA = "lora"
"""Entry of a checkpoint of LoRA, whose weights have pairs: their rank and alpha."""

_OF_DINO = {"backbone.cls_token", "head.last_layer.weight_v"}
"""Entries of DINO's or iBOT's teacher, of which a ViT's has the first and a ResNet's only the second."""


def state_dict_of(checkpoint: Mapping[str, Any], name: str, *, parts: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, removing wrappers: {"ema": {"module": ...}}, {"model": ...}, "model_state",
    "state_dict" or "teacher", the prefix "module.", in a file of Lightning "model.", and mmcv's second weights. If it
    was written in the training of DINO or iBOT, these are the teacher's backbone; what LoRA trained is merged into its
    layers.

    Args:
        name: name of the checkpoint, for errors.
        parts: names of state dicts; if it has them all, the result is their tensors, each with its part's name as
            prefix.
    Raises:
        CheckpointError: it contains no tensors, or LoRA trained layers whose weights are missing.
    """
    if parts and all(isinstance(checkpoint.get(part), Mapping) for part in parts):
        states = {part: checkpoint[part] for part in parts}
        return {
            f"{part}.{key}": x for part, state in states.items() for key, x in state.items() if isinstance(x, Tensor)
        }
    state = checkpoint
    for key in ("ema", "model", "model_state", "state_dict", "teacher"):
        if isinstance(state.get(key), Mapping):
            state = state[key]
            break
    if isinstance(state.get("module"), Mapping):  # a moving average that is stored with its own settings
        state = state["module"]
    tensors = {str(key).removeprefix("module."): value for key, value in state.items() if isinstance(value, Tensor)}
    if "meta" in checkpoint:
        # mmcv's moving averages: whoever stores them has already exchanged the weights for them.
        tensors = {key: value for key, value in tensors.items() if not key.startswith("ema_")}
    if "pytorch-lightning_version" in checkpoint and any(key.startswith("model.") for key in tensors):
        # The other entries are those of the losses.
        tensors = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    if "teacher" in checkpoint and not _OF_DINO.isdisjoint(tensors):
        # The other entries are those of the projection head, which only the training needs.
        backbone = "backbone."
        tensors = {k.removeprefix(backbone): value for k, value in tensors.items() if k.startswith(backbone)}
    if not tensors:
        keys = ", ".join(map(str, list(state)[:5])) + (", …" if len(state) > 5 else "")
        raise CheckpointError(f"{name}: contains no tensors (keys: {keys}). Expected a model's state dict.")
    about = checkpoint.get(LORA)
    return merge_pairs(tensors, about, name) if isinstance(about, Mapping) else tensors


def stated_classes(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes and things that a checkpoint of mmengine's runner states, or mmcv's, as vitkit's have them."""
    meta = checkpoint.get("meta")
    stated = meta.get("dataset_meta", meta) if isinstance(meta, Mapping) else None
    if not isinstance(stated, Mapping):
        return {}
    classes = stated.get("classes", stated.get("CLASSES"))
    things = stated.get("thing_classes", stated.get("THING_CLASSES"))
    if not isinstance(classes, list | tuple) or not isinstance(things, list | tuple):
        return {} if classes is None else {"classes": classes}
    return {"classes": classes, "things": [name in things for name in classes]}


def classes_of(checkpoint: Mapping[str, Any], name: str) -> list[str] | None:
    """Return the classes that a checkpoint was trained on, or None if it does not state them.

    Args:
        name: name of the checkpoint, for errors.
    Raises:
        CheckpointError: its classes are not a list of names.
    """
    classes = checkpoint.get("classes")
    if classes is None:
        return None
    if not isinstance(classes, list | tuple) or not all(isinstance(label, str) for label in classes):
        text = " ".join(str(classes).split())  # a tensor's has several lines
        raise CheckpointError(f"{name}: its classes are {text:.100}; expected a list of names.")
    return list(classes)


def model_spec_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `model` section of the config that a run's checkpoint has; {} for other files."""
    try:
        return dict(json.loads(checkpoint["config"])["model"])
    except (KeyError, TypeError, ValueError):
        return {}  # a bare state dict, a file of another project, or a damaged one


def describe_run(checkpoint: Mapping[str, Any]) -> str | None:
    """Describe the run that wrote a checkpoint, for error messages; None for other files."""
    model = model_spec_of(checkpoint)
    try:
        kind, tasks, classes = model["type"], model.get("tasks"), classes_of(checkpoint, "checkpoint") or ()
        task = f" for {' and '.join(tasks)} segmentation" if tasks else ""
    except (KeyError, TypeError, ValueError):
        return None
    return f"a run of {kind}{task}" + (f" on {len(classes)} classes" if classes else "")
