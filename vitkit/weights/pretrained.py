"""Loads the pretrained weights that a model's backbone names."""

import logging
from contextlib import nullcontext
from fnmatch import fnmatch

from torch import nn

from vitkit.errors import CheckpointError
from vitkit.protocols import Backbone, child
from vitkit.weights.loading import load_weights
from vitkit.weights.sources import find_source

logger = logging.getLogger("vitkit")


def load_pretrained(model: nn.Module) -> str | None:
    """Load the pretrained weights of a backbone, or of a model, by the hooks that `vitkit.protocols.Backbone` lists.

    A run calls this at its start, unless a checkpoint follows anyway.

    Returns:
        where the weights came from, or None if all stay random.
    Raises:
        ConfigError: there are no default weights.
        CheckpointError: the weights are not available, or are for another network.
    """
    if hasattr(model, "load_pretrained"):
        return model.load_pretrained()
    if not hasattr(model, "pretrained_source"):
        backbone = child(model, "backbone")
        source = None if backbone is None else load_pretrained(backbone)
        if source is None and getattr(model, "freeze_backbone", False):
            logger.warning(
                "backbone: random and frozen, so it never learns. Set backbone.pretrained, or train it: "
                "freeze_backbone=False."
            )
        return source
    source = model.pretrained_source()
    if source is None:
        _warn_if_frozen(model)
        return None
    _load_backbone(model, source)
    return source.partition("#sha256=")[0]


def _warn_if_frozen(backbone: Backbone) -> None:
    remedies = {"frozen_stages": "frozen_stages=0", "frozen_stem": "frozen_stem=false"}
    remedy = next((text for name, text in remedies.items() if getattr(backbone, name, False)), None)
    if remedy is not None:
        logger.warning(
            "backbone: its first stages are random and frozen, so they never learn. To train without pretrained "
            "weights or a checkpoint set model.backbone.%s.",
            remedy,
        )


def _load_backbone(backbone: Backbone, source: str) -> None:
    with getattr(backbone, "completing_state", nullcontext)():
        # A backbone does not need the classifier, and a classifier for other classes cannot use it.
        report = load_weights(backbone, find_source(source), new_class_head=True, strict=False)
    optional, class_head = getattr(backbone, "optional_weights", ()), tuple(getattr(backbone, "class_head", ()))
    missing = [name for name in report.missing if not any(fnmatch(name, pattern) for pattern in optional)]
    missing = [name for name in missing if not name.startswith(class_head)]
    if missing:
        raise CheckpointError(
            f"{source} does not fit this {type(backbone).__name__}: missing {', '.join(missing[:3])} ({len(missing)} "
            f"in all); not used: {', '.join(report.unexpected[:3]) or 'none'} ({len(report.unexpected)} in all). "
            "Are the weights for this variant?"
        )
