"""Find and load frozen networks from which models learn: a name -> a backbone's spec and its weights."""

from collections.abc import Mapping, Sequence
from os.path import isdir
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vitkit.errors import CheckpointError, ConfigError
from vitkit.protocols.model import child
from vitkit.registry import BACKBONES, Spec, nearest
from vitkit.weights.contents import model_spec_of, state_dict_of
from vitkit.weights.loading import load_weights
from vitkit.weights.locate import Located, find_weights
from vitkit.weights.pretrained import RANDOM_INSTEAD, load_pretrained, trained_backbone_spec
from vitkit.weights.published import load_published_config
from vitkit.weights.reading import read_checkpoint


class Teacher(NamedTuple):
    """The location of a teacher's spec and weights."""

    backbone: Mapping[str, Any]
    """The spec of its backbone."""
    checkpoint: Located | None
    """The checkpoint of vitkit that has its weights; None: the spec names them."""


def find_teacher(teacher: Spec) -> Teacher:
    """Find the network that a config's `teacher` names.

    Args:
        teacher: the name or spec of a backbone, whose `pretrained` is True unless it is set; a run's folder, a
            checkpoint of vitkit, or a name of the model zoo in the package: the backbone of that model.
    Raises:
        ConfigError: there is no such network, or it would have random weights.
        CheckpointError: the checkpoint does not say which backbone it has.
    """
    if isinstance(teacher, Mapping) or teacher in BACKBONES:
        spec = {"pretrained": True, **({"type": teacher} if isinstance(teacher, str) else teacher)}
        if not spec["pretrained"]:
            raise ConfigError(
                f"pretrained={spec['pretrained']!r}: random weights teach nothing. Leave it out for the default "
                "weights, or give a file."
            )
        return Teacher(spec, None)
    if isdir(teacher) and (trained := trained_backbone_spec(teacher)) is not None:
        return Teacher({**trained, "pretrained": teacher}, None)
    try:
        located = find_weights(teacher)
    except ConfigError as error:
        if Path(teacher).name != teacher:  # a path
            raise
        raise ConfigError(
            f"{teacher!r} is neither a backbone nor a run's folder, a checkpoint, or a model of the zoo or of the "
            "transformers library (its folder, or hf:OWNER/NAME). "
            f"{nearest(teacher, BACKBONES.names())}"
        ) from error
    model = model_spec_of(located.metadata)
    if not model and located.zoo_name is not None:
        model = load_published_config(located.zoo_name)["model"]
    spec = model.get("backbone")
    if not spec:
        raise CheckpointError(
            f"{located}: does not say which backbone its weights are for. Name it: "
            f"model.teacher=\"dict(type='resnet50', pretrained='{teacher}')\"."
        )
    return Teacher({**({"type": spec} if isinstance(spec, str) else spec), "pretrained": False}, located)


def load_teacher(network: nn.Module, teacher: Teacher, classes: Sequence[str] | None) -> str:
    """Load all weights of a teacher, which is a backbone, or a classifier of that; return where they came from.

    Args:
        classes: the student's classes, which a classifier must also have.
    Raises:
        CheckpointError: the weights are missing, or do not fit.
        ConfigError: the network would have random weights.
    """
    if teacher.checkpoint is None:
        try:
            source = load_pretrained(network, new_class_head=False)
        except CheckpointError as error:  # its remedies are those for the student's backbone
            message = str(error).replace(RANDOM_INSTEAD, "").replace("model.backbone", "model.teacher")
            raise CheckpointError(message) from error
        if source is None:
            raise ConfigError(f"{type(network).__name__} has random weights, which teach nothing.")
        return source
    path = teacher.checkpoint.path
    if child(network, "backbone") is not None:
        load_weights(network, teacher.checkpoint, classes=classes)
        return str(path)
    state = state_dict_of(read_checkpoint(path), str(path))
    of_backbone = {key.removeprefix("backbone."): x for key, x in state.items() if key.startswith("backbone.")}
    load_weights(network, of_backbone or state)
    return str(path)
