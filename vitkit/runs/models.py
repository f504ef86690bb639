"""Builds the model that a config names, for the data that it runs on."""

from collections.abc import Mapping
from typing import Any

from vitkit.config import Config
from vitkit.config.check import COMMAND_LINE
from vitkit.errors import ConfigError
from vitkit.models import build_model
from vitkit.protocols import Criterion, Dataset, Model
from vitkit.registry import CRITERIA
from vitkit.seq2seq.vocabulary import Vocabulary


def build_model_for(config: Mapping[str, Any], dataset: Dataset, vocabularies: Mapping[str, Vocabulary]) -> Model:
    """Build a config's model for the classes, or the vocabularies, of a dataset.

    Raises:
        ConfigError: the `model` section is invalid, or the command line requests another number of classes.
    """
    classes = dataset.classes
    origins = config.origins if isinstance(config, Config) else {}
    if classes is not None and origins.get("model.num_classes") == COMMAND_LINE:
        num_classes = config["model"]["num_classes"]
        if num_classes != len(classes):
            raise ConfigError(
                f"model.num_classes={num_classes}, but the dataset has {len(classes)} classes "
                f"({', '.join(list(classes)[:5])}{', …' if len(classes) > 5 else ''}). Leave model.num_classes out: "
                "the dataset's classes size the model."
            )
    return build_model(config["model"], classes=classes, things=dataset.things, vocabularies=vocabularies)


def build_criterion_for(config: Mapping[str, Any], model: Model) -> Criterion:
    """Build a config's criterion, for a model.

    Raises:
        ConfigError: the `criterion` section is invalid, or its class loss is for other logits than the model's.
    """
    criterion = CRITERIA.build(config["criterion"])
    if None in (model.class_activation, criterion.class_activation):
        return criterion
    if criterion.class_activation != model.class_activation:
        logits, losses = {
            "softmax": ('a softmax with "no object"', "'cross_entropy'"),
            "sigmoid": ("a sigmoid per class", "'focal', 'varifocal' or 'mal'"),
        }[model.class_activation]
        raise ConfigError(
            f"criterion.class_loss={criterion.class_loss!r}: {type(model).__name__} predicts classes by {logits}. "
            f"Expected {losses}, or another model.type."
        )
    return criterion
