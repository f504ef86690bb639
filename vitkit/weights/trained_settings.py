"""Compares a model's settings with those that a run's checkpoint was trained with.

Some change the results but neither names nor shapes of the weights, such as an activation or the number of windows.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vitkit.errors import ConfigError
from vitkit.registry import BACKBONES, HEADS, NECKS, Spec, parameters_of

logger = logging.getLogger("vitkit")

PARTS = {"backbone": BACKBONES, "neck": NECKS, "head": HEADS}
WITHOUT_EFFECT = (
    "pretrained", "default_weights", "position_std",  # other initial values
    "frozen", "norm", "dropout", "drop_path", "look_forward_twice", "rotary_rescale",  # only in training
    "image_size", "num_frames",  # weights are converted for another
    "dilation",  # see dilation.py
)  # fmt: skip
"""How the names of settings begin that are not compared."""


def warn_of_other_settings(spec: Spec, checkpoint: Mapping[str, Any], name: str) -> None:
    """Warn of each setting of the backbone, the neck or the head that differs, if the checkpoint has its config.

    Args:
        spec: the `model` section of the model's config.
        name: name of the checkpoint's file.
    """
    try:
        trained, own = json.loads(checkpoint["config"])["model"], _as_json(spec)
    except (KeyError, TypeError, ValueError):
        return  # a bare state dict, a file of another project, or parts that are built
    if not isinstance(own, Mapping) or not isinstance(trained, Mapping):
        return
    differences = [f"{key}={theirs!r}, this model has {ours!r}" for key, ours, theirs in _differences(own, trained)]
    if differences:
        logger.warning(
            f"{name}: was trained with {'; '.join(differences)}. The weights fit, but the results will not be those of "
            "the training: use the config of that run, or set the same."
        )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key of each setting that differs, with both values."""
    for part, registry in PARTS.items():
        try:
            (build, own), (trained, other) = (registry.resolve(spec[part]) for spec in (ours, theirs))
        except (KeyError, TypeError, ValueError, ConfigError):
            continue  # a model without that part, or of code that is not imported
        if build is not trained:
            continue  # then the names of the weights tell
        own, other = _compared(own), _compared(other)
        defaults = _compared({key: p.default for key, p in parameters_of(build).items() if p.default is not p.empty})
        for key in {**own, **other}:
            values = own.get(key, defaults.get(key)), other.get(key, defaults.get(key))
            if values[0] != values[1]:
                yield f"model.{part}.{key}", *values


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that are compared, with lists for tuples and timm's names without their tag."""
    settings = {key: value for key, value in _as_json(settings).items() if not key.startswith(WITHOUT_EFFECT)}
    if isinstance(settings.get("name"), str):
        settings["name"] = settings["name"].partition(".")[0]  # the tag is that of pretrained weights
    return settings


def _as_json(value: Any) -> Any:
    """Return a value as a config in a checkpoint has it."""
    return json.loads(json.dumps(value, default=str))
