"""Checks whether a checkpoint's backbone was dilated, which its weights' names and shapes do not reveal."""

import json
import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vitkit.errors import CheckpointError
from vitkit.protocols import child

logger = logging.getLogger("vitkit")


def check_dilation(
    model: nn.Module, checkpoint: Mapping[str, Any], name: str, *, zoo_name: str | None, only_start: bool
) -> None:
    """Compare the dilation of a model's backbone with what is known about the checkpoint's, if the model has a
    backbone.

    Args:
        name: name of the checkpoint's file, for messages.
        zoo_name: the checkpoint's name in the model zoo's index, if it is listed there.
        only_start: whether the weights are only a start for training.
    Raises:
        CheckpointError: only one of the two is dilated, according to the model zoo or the checkpoint's own settings. A
            warning is logged instead if only the file's name says so, or if the weights are only a start.
    """
    backbone = child(model, "backbone")
    if not hasattr(backbone, "is_dilated"):
        return
    theirs, is_certain = _dilation_of(checkpoint), True
    if zoo_name is not None:
        theirs = _names_dc5(zoo_name)
    elif theirs is None and _names_dc5(Path(name).name):
        theirs, is_certain = True, False
    if theirs is None or theirs == backbone.is_dilated:
        return
    origin = "seems, by its name, to be" if not is_certain else "is"
    message = (
        f"{name}: {origin} of a backbone that is {'' if theirs else 'not '}dilated (DC5), and this model's is "
        f"{'dilated' if backbone.is_dilated else 'not'}. Names and shapes are the same, but results would be wrong: "
        f"use the config that belongs to it, or set model.backbone.dilation={str(theirs).lower()}."
    )
    if is_certain and not only_start:
        raise CheckpointError(message)
    logger.warning(message)


def _dilation_of(checkpoint: Mapping[str, Any]) -> bool | None:
    """Return the dilation set in the config of a run's checkpoint, or in official settings; None if unknown."""
    arguments = checkpoint.get("args")
    if isinstance(arguments, Namespace) and "dilation" in arguments:
        return bool(arguments.dilation)
    try:
        backbone = json.loads(checkpoint["config"])["model"]["backbone"]
    except (KeyError, TypeError, ValueError):
        return None  # a bare state dict, or a file of another project
    return bool(backbone.get("dilation", False)) if isinstance(backbone, Mapping) else False


def _names_dc5(name: str) -> bool:
    return re.search(r"(?<![a-z0-9])dc5(?![a-z0-9])", name.lower()) is not None
