"""Complete models: backbone, neck and head."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vitkit.models import (  # noqa: F401
    classifier,
    deformable_detr,
    detr,
    detr_segmentation,
    dfine,
    dino,
    eomt,
    mask2former,
    maskformer,
    per_pixel,
    rf_detr,
    rt_detr,
    rt_detr_v2,
)
from vitkit.registry import MODELS, Spec, parameters_of
from vitkit.text.vocabulary import Vocabulary


def build_model(
    spec: Spec,
    *,
    classes: Sequence[str] | None = None,
    things: Sequence[bool] | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> nn.Module:
    """Build a config's `model` section.

    Args:
        spec: its `num_classes` and `things`, which official configs set to those of the published checkpoint, are used
            if `classes` is None.
        classes: the dataset's class names, whose number sets the size of the model's head; None leaves it to the spec.
        things: for each class, whether it has instances, for models with such an argument; None: those in the spec, or
            all.
        vocabularies: those of the text that the model reads ("source") and writes ("target"), for models with such
            arguments.
    Raises:
        ConfigError: the section is invalid.
    """
    if classes is None and not vocabularies:
        return MODELS.build(spec)
    parameters = parameters_of(MODELS.resolve(spec)[0])
    if vocabularies:
        named = {f"{side}_vocabulary": vocabulary for side, vocabulary in vocabularies.items()}
        return MODELS.build(spec, **{name: vocabulary for name, vocabulary in named.items() if name in parameters})
    stated = dict(spec) if isinstance(spec, Mapping) else {"type": spec}
    num_classes = stated.pop("num_classes", len(classes))
    # A model that takes a prompt has no classes.
    arguments: dict[str, Any] = {"num_classes": len(classes)} if "num_classes" in parameters else {}
    if "things" in parameters:
        same_classes = num_classes == len(classes)
        stated_things = stated.pop("things", None)
        arguments["things"] = list(things) if things is not None else stated_things if same_classes else None
    return MODELS.build(stated, **arguments)
