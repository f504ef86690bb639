"""Compares a model's settings with those its weights were trained with, where neither names nor shapes differ.

A module declares as `hidden_settings` those for which its weights are wrong with another value, such as a backbone's
dilation: a difference is an error. Of other settings in the model's config, such as an activation, it is a warning.
"""

import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from vitkit.errors import CheckpointError, ConfigError
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import child
from vitkit.registry import BACKBONES, HEADS, NECKS, Spec, parameters_of
from vitkit.weights.contents import model_spec_of
from vitkit.weights.published import load_published_config

logger = logging.getLogger("vitkit")

PARTS = {"backbone": BACKBONES, "neck": NECKS, "head": HEADS}
WITHOUT_EFFECT = (
    "pretrained", "default_weights", "position_std",  # other initial values
    "frozen", "norm", "dropout", "drop_path", "look_forward_twice", "rotary_rescale",  # only in training
    "image_size", "num_frames",  # weights are converted for another
)  # fmt: skip
"""How the names of settings begin that are not compared, unless the module declares them as hidden."""


class _SettingDifference(NamedTuple):
    key: str
    ours: Any
    theirs: Any
    is_hidden: bool
    """Whether it is one of the module's `hidden_settings`."""


def check_hidden_settings(
    model: nn.Module,
    checkpoint: Mapping[str, Any],
    name: str,
    *,
    spec: Spec | None,
    zoo_name: str | None,
    only_start: bool,
) -> None:
    """Compare the settings of a model's backbone, neck and head with those that its new weights were trained with.

    These are known from the model zoo's config, from the config in a run's checkpoint, or from the settings in official
    ones; otherwise nothing is compared.

    Args:
        name: name of the checkpoint, for messages.
        spec: the `model` section of the model's config; None: only `hidden_settings` are compared.
        zoo_name: the checkpoint's name in the model zoo's index; None if it is not there.
        only_start: whether the weights are only a start for training, so that no difference is an error.
    Raises:
        CheckpointError: a hidden setting differs.
    """
    differences = list(_differences(model, _as_json(spec), checkpoint, zoo_name))
    texts = [f"{key}={theirs!r}, this model has {ours!r}" for key, ours, theirs, _ in differences]
    hidden = [f"{d.key}={json.dumps(d.theirs)}" for d in differences if d.is_hidden]
    if hidden and not only_start:
        raise CheckpointError(
            f"{name}: was trained with {'; '.join(texts)}. Names and shapes of the weights are the same, but results "
            f"would be wrong: use the config that belongs to it, or set {' '.join(hidden)}."
        )
    if differences:
        logger.warning(
            f"{name}: was trained with {'; '.join(texts)}. The weights fit, but the results will not be those of "
            "the training: use the config of that run, or set the same."
        )


def _differences(
    model: nn.Module, spec: Any, checkpoint: Mapping[str, Any], zoo_name: str | None
) -> Iterator[_SettingDifference]:
    trained = _trained_spec(checkpoint, zoo_name)
    for part, registry in PARTS.items():
        module = child(model, part)
        if module is None:
            continue
        hidden = with_defaults(module, Backbone).hidden_settings
        arguments = checkpoint.get("args")  # argparse's of DETR's official code, which many other projects have as well
        if not trained and isinstance(arguments, Namespace):
            for key in hidden.keys() & vars(arguments).keys():
                if bool(vars(arguments)[key]) != hidden[key]:
                    yield _SettingDifference(
                        f"model.{part}.{key}", hidden[key], bool(vars(arguments)[key]), is_hidden=True
                    )
            continue
        try:
            build, theirs = registry.resolve(trained[part])
        except (KeyError, TypeError, ValueError, ConfigError):
            continue  # a model without that part, or of code that is not imported
        if build is not type(module):
            continue  # then the names of the weights tell
        ours = dict(hidden)
        if isinstance(spec, Mapping) and isinstance(spec.get(part), str | Mapping):
            ours = registry.resolve(spec[part])[1] | ours
        defaults = {key: p.default for key, p in parameters_of(build).items() if p.default is not p.empty}
        ours, theirs, defaults = (_compare(settings, hidden) for settings in (ours, theirs, defaults))
        for key in {**ours, **theirs} if spec is not None else hidden:
            values = ours.get(key, defaults.get(key)), theirs.get(key, defaults.get(key))
            if values[0] != values[1]:
                yield _SettingDifference(f"model.{part}.{key}", *values, is_hidden=key in hidden)


def _trained_spec(checkpoint: Mapping[str, Any], zoo_name: str | None) -> Mapping[str, Any]:
    """Return the `model` section of the config that the weights were trained with; {} if it is unknown."""
    if zoo_name is None:
        return model_spec_of(checkpoint)
    spec = load_published_config(zoo_name, check=False)["model"]
    return spec if isinstance(spec, Mapping) else {}


def _compare(settings: Mapping[str, Any], hidden: Iterable[str]) -> dict[str, Any]:
    """Return the settings that are compared, with lists for tuples and timm's names without their tag."""
    settings = {
        key: value for key, value in _as_json(settings).items() if key in hidden or not key.startswith(WITHOUT_EFFECT)
    }
    if isinstance(settings.get("name"), str):
        settings["name"] = settings["name"].partition(".")[0]  # the tag is that of pretrained weights
    return settings


def _as_json(value: Any) -> Any:
    """Return a value as a config in a checkpoint has it."""
    return json.loads(json.dumps(value, default=str))
