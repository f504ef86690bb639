"""Loads the pretrained weights that a model's backbone names."""

import logging
from collections.abc import Mapping
from fnmatch import fnmatch
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo import listed_name
from vitkit.ops.images import pixel_statistics
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import Model, child
from vitkit.registry import BACKBONES, nearest
from vitkit.weights.contents import PIXELS, model_spec_of
from vitkit.weights.loading import LoadReport, load_weights
from vitkit.weights.locate import (
    BACKBONE_WEIGHTS,
    CHECKSUM,
    PRETRAINED_KINDS,
    RUN_WEIGHTS,
    TIMM,
    Located,
    Weights,
    locate,
)
from vitkit.weights.reading import read_metadata

logger = logging.getLogger("vitkit")
RANDOM_INSTEAD = ", or start from random weights (model.backbone.pretrained=False)"
"""The last remedy in errors about missing weights."""


def load_pretrained(model: nn.Module, *, new_class_head: bool = True) -> str | None:
    """Load the pretrained weights of a backbone, or of a model, by what `protocols.backbone.Backbone` lists.

    A run calls this at its start, unless a checkpoint follows anyway.

    Args:
        new_class_head: a classifier for other classes keeps its random head; otherwise it is an error.
    Returns:
        where the weights came from, or None if all stay random.
    Raises:
        ConfigError: there are no default weights.
        CheckpointError: the weights are not available, or are for another network.
    """
    stated = with_defaults(model, Backbone)
    if stated.load_pretrained is not None:
        return stated.load_pretrained()
    source, backbone = stated.pretrained_source(), child(model, "backbone")
    if source is None and backbone is not None and not isinstance(model, Backbone):
        source = load_pretrained(backbone, new_class_head=new_class_head)
        if source is not None and isinstance(model, Model):
            model.after_pretrained()
        if source is None and isinstance(model, Model) and model.freeze_backbone:
            logger.warning(
                "backbone: random and frozen, so it never learns. Set backbone.pretrained, or train it: "
                "freeze_backbone=False."
            )
        return source
    if source is None:
        _warn_if_frozen(stated)
        return None
    load_backbone(model, source, new_class_head=new_class_head)
    return source.partition(CHECKSUM)[0]


def _warn_if_frozen(backbone: Backbone) -> None:
    remedies = {"frozen_stages": "frozen_stages=0", "frozen_stem": "frozen_stem=false"}
    remedy = next((text for name, text in remedies.items() if getattr(backbone, name)), None)
    if remedy is not None:
        logger.warning(
            "backbone: its first stages are random and frozen, so they never learn. To train without pretrained "
            f"weights or a checkpoint set model.backbone.{remedy}."
        )


def load_backbone(backbone: Backbone, source: str, *, new_class_head: bool = True) -> None:
    """Load the weights that a value of `pretrained` refers to into a backbone; arguments and errors are those of
    `load_pretrained`."""
    weights = _find_backbone_weights(source)
    try:
        with with_defaults(backbone, Backbone).completing_state():
            # A backbone does not need the classifier, and a classifier for other classes cannot use it.
            report = load_weights(backbone, weights, new_class_head=new_class_head, strict=False)
        _check_complete(backbone, report, source, new_class_head=new_class_head)
    except CheckpointError as error:
        trained = None if isinstance(weights, Mapping) else trained_backbone_spec(weights.path)
        if trained is None:
            raise
        if weights.path.name != BACKBONE_WEIGHTS:
            raise CheckpointError(
                f"pretrained: {source} has all of a model that was trained without labels. Give the folder of its run, "
                f"'{weights.path.parent}', whose {BACKBONE_WEIGHTS} has the backbone."
            ) from error
        raise CheckpointError(
            f"pretrained: {source} has trained a backbone {_describe(trained)}, whose weights do not fit this model's "
            f"{_describe(backbone)}. Set model.backbone to the one that was trained, or train this one. ({error})"
        ) from error
    if isinstance(weights, Located) and weights.path.name == BACKBONE_WEIGHTS:
        _warn_of_other_pixels(backbone, weights.metadata.get(PIXELS), source)


def _find_backbone_weights(source: str) -> Located | Mapping[str, Any]:
    """Return the weights that a value of `pretrained` refers to, downloaded the first time; timm's are a state dict.
    Raise a CheckpointError if there are none, or they cannot be downloaded."""
    located = locate(source, PRETRAINED_KINDS)
    if located is None or (located.kind == "checkpoint" and not isfile(source)):
        published = " (a name of the model zoo is for --init, which loads a whole model)" if listed_name(source) else ""
        raise CheckpointError(
            f"pretrained: no file {source!r}{published}. Give a file of weights, the folder of a pretraining run, a "
            "URL ('https://...#sha256=PREFIX'), the name of timm's weights ('timm/NAME') or of a model of the "
            f"transformers library (its folder, or 'hf:OWNER/NAME'){RANDOM_INSTEAD}."
        )
    if located.kind == "timm":
        return _timm_weights(source.removeprefix(TIMM))
    if located.kind == "run":
        if not (path := Path(source) / BACKBONE_WEIGHTS).is_file():
            raise CheckpointError(
                f"pretrained: '{source}' is not the folder of a pretraining run: expected {BACKBONE_WEIGHTS}, as "
                "vitkit pretrain writes it. Of another model's run, give its checkpoint to --init or --init-partial."
            )
        return Located("checkpoint", str(path))
    try:
        located.fetch()
    except CheckpointError as error:
        if located.kind != "url":
            raise
        raise CheckpointError(
            f"pretrained: the weights are missing: {error} Or give a file (model.backbone.pretrained=FILE)"
            f"{RANDOM_INSTEAD}."
        ) from error
    return located


def _timm_weights(name: str) -> dict[str, Tensor]:
    import timm

    if not timm.is_model_pretrained(name):
        raise CheckpointError(
            f"pretrained: timm {timm.__version__} has no weights named {name!r}. "
            f"{nearest(name, timm.list_pretrained())}"
        )
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # whatever the hub and its libraries raise when they cannot be reached
        raise CheckpointError(
            f"pretrained: timm's weights {name!r} cannot be downloaded ({str(error).splitlines()[0]}). Give a file "
            f"(model.backbone.pretrained=FILE){RANDOM_INSTEAD}."
        ) from error


def _check_complete(backbone: Backbone, report: LoadReport, source: str, *, new_class_head: bool) -> None:
    stated = with_defaults(backbone, Backbone)
    missing = [name for name in report.missing if not any(fnmatch(name, p) for p in stated.optional_weights)]
    if new_class_head:
        missing = [name for name in missing if not name.startswith(tuple(stated.class_head))]
    if missing:
        raise CheckpointError(
            f"{source} does not fit this {type(backbone).__name__}: missing {', '.join(missing[:3])} ({len(missing)} "
            f"in all); not used: {', '.join(report.unexpected[:3]) or 'none'} ({len(report.unexpected)} in all). "
            "Are the weights for this variant?"
        )


def trained_backbone_spec(path: Weights) -> dict[str, Any] | None:
    """Return the spec, with its type, of the backbone whose weights a pretraining run has written; None for others.

    Args:
        path: the run's folder, or a checkpoint in it, see `pretraining_run`.
    """
    folder = Path(path) if isdir(path) else pretraining_run(path)
    spec = None if folder is None else _read_model_spec(folder / BACKBONE_WEIGHTS).get("backbone")
    if spec is None:
        return None
    try:
        constructor, arguments = BACKBONES.resolve(spec)
    except (TypeError, ValueError):
        return None  # a file of this name from elsewhere
    return {"type": getattr(constructor, "__name__", "backbone"), **arguments}


def pretraining_run(checkpoint: Weights) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, if other models start from the backbone that it has trained
    without labels; None for other weights, also if such a backbone lies beside them."""
    path = Path(checkpoint)
    if path.name not in (BACKBONE_WEIGHTS, *RUN_WEIGHTS):
        return None
    model = model_spec_of(checkpoint.metadata) if isinstance(checkpoint, Located) else _read_model_spec(path)
    return path.parent if model and model == _read_model_spec(path.parent / BACKBONE_WEIGHTS) else None


def _read_model_spec(checkpoint: Path) -> dict[str, Any]:
    """Return the model of the config that a run's checkpoint has; {} if there is no such file."""
    return model_spec_of(read_metadata(checkpoint)) if isfile(checkpoint) else {}


def _describe(backbone: Mapping[str, Any] | nn.Module) -> str:
    """Return "ResNet(depth=18)" for a spec, and "ResNet with 11.2 M parameters" for a module."""
    if isinstance(backbone, nn.Module):
        count = sum(parameter.numel() for parameter in backbone.parameters())
        return f"{type(backbone).__name__} with {count / 1e6:.1f} M parameters"
    arguments = (f"{key}={value!r}" for key, value in backbone.items() if key not in ("type", "pretrained"))
    return f"{backbone['type']}({', '.join(arguments)})"


def _warn_of_other_pixels(backbone: Backbone, trained: Mapping[str, Any] | None, source: str) -> None:
    """Warn if a backbone gets other pixels than those that its weights were trained with."""
    ours = {name: list(of_channels) for name, of_channels in pixel_statistics(backbone).items()}
    if trained is not None and dict(trained) != ours:
        logger.warning(
            "pretrained: %s has learned from pixels normalized by mean %s and std %s, and this model's backbone gets "
            "them by mean %s and std %s. Set model.backbone.pixel_mean and pixel_std to the former, or set them to the "
            "latter in vitkit pretrain.",
            source, trained.get("mean"), trained.get("std"), ours["mean"], ours["std"],
        )  # fmt: skip
