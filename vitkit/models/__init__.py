"""Whole models: backbone, neck and head."""

from collections.abc import Mapping, Sequence

from torch import nn

from vitkit.errors import ConfigError
from vitkit.models import classifier, deformable_detr, detr, detr_segmentation, mask_classification, per_pixel  # noqa: F401
from vitkit.registry import MODELS, Spec, parameters_of
from vitkit.vocabulary import Vocabulary


def build_model(
    spec: Spec,
    *,
    classes: Sequence[str] | None = None,
    things: Sequence[bool] | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> nn.Module:
    """Build a config's `model` section.

    Args:
        classes: the dataset's class names, which size the model's head; None leaves the model's default.
        things: for each class, whether it has instances, for models with such an argument; None: the model's default.
        vocabularies: of the text that the model reads ("source") and writes ("target"), for models with such arguments.
    Raises:
        ConfigError: the section is wrong, or states another number of classes than the dataset has.
    """
    if classes is None and not vocabularies:
        return MODELS.build(spec)
    parameters = parameters_of(MODELS.resolve(spec)[0])
    if vocabularies:
        named = {f"{side}_vocabulary": vocabulary for side, vocabulary in vocabularies.items()}
        return MODELS.build(spec, **{name: vocabulary for name, vocabulary in named.items() if name in parameters})
    num_classes = spec.get("num_classes") if isinstance(spec, Mapping) else None
    if num_classes is not None and num_classes != len(classes):
        raise ConfigError(
            f"model.num_classes={num_classes}, but the dataset has {len(classes)} classes "
            f"({', '.join(list(classes)[:5])}{', …' if len(classes) > 5 else ''}). Leave model.num_classes out: "
            "the dataset's classes size the model."
        )
    arguments = {} if num_classes is not None else {"num_classes": len(classes)}
    if things is not None and "things" in parameters and "things" not in spec:
        arguments["things"] = list(things)
    return MODELS.build(spec, **arguments)
