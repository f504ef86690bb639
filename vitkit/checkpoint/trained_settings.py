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
WITHOUT_EFFECT = ("pretrained", "frozen", "dropout", "drop_path", "norm", "image_size")
"""How the names of settings begin that do not matter in prediction, or that the weights are converted for."""


def warn_of_other_settings(spec: Spec, checkpoint: Mapping[str, Any], name: str) -> None:
    """Warn of each setting of the backbone, the neck or the head that differs, if the checkpoint has its config.

    Args:
        spec: the `model` section of the model's config.
        name: name of the checkpoint's file.
    """
    try:
        trained = json.loads(checkpoint["config"])["model"]
    except (KeyError, TypeError, ValueError):
        return  # a bare state dict, or a file of another project
    if not isinstance(spec, Mapping) or not isinstance(trained, Mapping):
        return
    differences = [
        f"{key}={theirs!r}, this model has {ours!r}" for key, ours, theirs in _differences(_as_json(spec), trained)
    ]
    if differences:
        logger.warning(
            f"{name}: was trained with {'; '.join(differences)}. Names and shapes are the same, but results would not "
            "be those of the training: use the config of that run, or set the same."
        )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key of each setting that differs, with both values."""
    for part, registry in PARTS.items():
        try:
            (build, own), (trained, other) = (registry.resolve(spec[part]) for spec in (ours, theirs))
        except (KeyError, TypeError, ValueError, ConfigError):
            continue  # a model without that part, or of code that is not imported
        if build is not trained:
            continue  # a difference of the weights' names and shapes, if any
        defaults = _as_json({key: parameter.default for key, parameter in parameters_of(build).items()})
        for key in {**own, **other}:
            values = own.get(key, defaults.get(key)), other.get(key, defaults.get(key))
            if values[0] != values[1] and not key.startswith(WITHOUT_EFFECT):
                yield f"model.{part}.{key}", *values


def _as_json(settings: Mapping[str, Any]) -> Any:
    """Return settings as a config in a checkpoint has them, with lists for tuples."""
    return json.loads(json.dumps(settings, default=str))
