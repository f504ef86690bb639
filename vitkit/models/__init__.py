"""Whole models: backbone, neck and head."""

from collections.abc import Mapping, Sequence

from torch import nn

from vitkit.errors import ConfigError
from vitkit.models import (  # noqa: F401
    classifier,
    deformable_detr,
    detr,
    detr_segmentation,
    mask_classification,
    per_pixel,
)
from vitkit.registry import MODELS, Spec, parameters_of
from vitkit.vocabulary import Vocabulary


def build_model(
    spec: Spec,
    *,
    classes: Sequence[str] | None = None,
    things: Sequence[bool] | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> nn.Module:
    """Builds a config's `model` section.

    Args:
        classes: the dataset's class names, which size the model's head; None leaves the model's own default.
        things: of each class whether it has instances, for models that ask; None: as the model's default.
        vocabularies: of text that the model reads and writes, "source" and "target"; it takes those that it asks for.
    Raises:
        ConfigError: the section is wrong, or states another number of classes than the dataset has.
    """
    if vocabularies:
        known = parameters_of(MODELS.resolve(spec)[0])
        named = {f"{side}_vocabulary": vocabulary for side, vocabulary in vocabularies.items()}
        return MODELS.build(spec, **{name: vocabulary for name, vocabulary in named.items() if name in known})
    if classes is None:
        return MODELS.build(spec)
    stated = spec.get("num_classes") if isinstance(spec, Mapping) else None
    if stated is not None and stated != len(classes):
        raise ConfigError(
            f"model.num_classes={stated}, but the dataset has {len(classes)} classes "
            f"({', '.join(list(classes)[:5])}{', …' if len(classes) > 5 else ''}). Leave model.num_classes out: "
            "the dataset's classes size the model."
        )
    arguments = {} if stated is not None else {"num_classes": len(classes)}
    if things is not None and "things" in parameters_of(MODELS.resolve(spec)[0]) and "things" not in spec:
        arguments["things"] = list(things)
    return MODELS.build(spec, **arguments)
