"""The classes that weights were trained on, and a checkpoint's entries for each of them."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

from timm.data import ImageNetInfo

from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES, COCO_PANOPTIC_CATEGORY_IDS, COCO_PANOPTIC_CLASSES
from vitkit.registry import MODELS
from vitkit.structures import KeypointInfo
from vitkit.weights.class_rows import match_class_rows
from vitkit.weights.contents import classes_of

T = TypeVar("T")
_NUMBERS_WITH_NAMES = (80, 91, 133, 250, 1000)
"""Numbers of classes whose names are known: COCO's, with and without stuff and as raw ids, and ImageNet's."""


class TrainedOn(NamedTuple):
    """The classes of a checkpoint."""

    classes: Sequence[str]
    things: Sequence[bool] | None
    """Whether each class has instances; None if unknown."""
    named: bool = True
    """Whether their names are known; otherwise they are numbers."""

    def pick(self, values: Sequence[T] | None, classes: Sequence[str]) -> list[T] | None:
        """Return the values of some classes, of those that each has here, by name; None if one has none."""
        if values is None:
            return None
        sources = match_class_rows(self.classes, classes).sources
        return [values[rows[0]] for rows in sources] if all(sources) else None


def read_trained_classes(checkpoint: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> TrainedOn:
    """Return the classes that weights were trained on.

    A run's checkpoint holds them. For official files, which do not, they are the classes that the config's validation
    data states, or else none for a text-prompted model, ImageNet's for a classifier, and COCO's for all other models,
    panoptic or not as that data is.
    Classes are named by their numbers if the config's model has a different number of classes.

    Args:
        checkpoint: what it holds besides the weights; {} for official files.
        name: its name, for errors.
        config: the model's config.
    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    classes = classes_of(checkpoint, name)
    if classes:
        return TrainedOn(classes, _by_class(checkpoint, "things", name, len(classes)))
    data = config.get("data")
    val = data.get("val") if isinstance(data, Mapping) else None
    val = val if isinstance(val, Mapping) else {}
    if val.get("classes"):
        return _stated_classes(val)
    model = config["model"] if isinstance(config["model"], Mapping) else {"type": config["model"]}
    num_classes = model.get("num_classes")
    if num_classes not in (None, *_NUMBERS_WITH_NAMES):
        return TrainedOn([f"class {k}" for k in range(num_classes)], model.get("things"), named=False)
    constructor, _ = MODELS.resolve(model, "model")
    if "text" in getattr(constructor, "takes", ()):
        return TrainedOn([], None)
    if "class_scores" in getattr(constructor, "returns", ()):
        names = ImageNetInfo("imagenet-1k")
        return TrainedOn([names.index_to_description(k) for k in range(names.num_classes())], None)
    if val.get("type") == "CocoPanoptic" and val.get("task") != "instance":
        return TrainedOn(list(COCO_PANOPTIC_CLASSES), [name in COCO_CLASSES for name in COCO_PANOPTIC_CLASSES])
    return TrainedOn(list(COCO_CLASSES), None)


def category_ids_of(checkpoint: Mapping[str, Any], name: str, classes: Sequence[str]) -> Sequence[int | str] | None:
    """Return each class's category id in the annotations: a run's own, or COCO's for its classes; None: unknown.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    coco = {COCO_CLASSES: COCO_CATEGORY_IDS, COCO_PANOPTIC_CLASSES: COCO_PANOPTIC_CATEGORY_IDS}
    return _by_class(checkpoint, "category_ids", name, len(classes)) or coco.get(tuple(classes))


def keypoints_of(checkpoint: Mapping[str, Any], name: str) -> KeypointInfo | None:
    """Return the keypoints that a run's checkpoint was trained on; None: none, or official weights.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    try:
        return None if checkpoint.get("keypoints") is None else KeypointInfo.from_json(checkpoint["keypoints"])
    except ValueError as error:
        raise CheckpointError(
            f"{name}: damaged: its keypoints cannot be read ({error}). Get the file again."
        ) from error


def _by_class(checkpoint: Mapping[str, Any], key: str, name: str, num_classes: int) -> list[int] | list[str] | None:
    """Return a checkpoint's entry with a value for each class, or None if it has no such entry.

    Raises:
        CheckpointError: the entry is not a list of as many numbers or names.
    """
    values = checkpoint.get(key)
    if values is None:
        return None
    is_list = isinstance(values, list | tuple) and all(isinstance(value, Integral | str) for value in values)
    if not is_list or len(values) != num_classes or (key == "things" and not set(values) <= {True, False}):
        expected = "true or false" if key == "things" else "an id"
        raise CheckpointError(
            f"{name}: damaged: its {key} are {str(values)[:100]}; expected {expected} for each of {num_classes} "
            "classes. Get the file again."
        )
    return list(values)


def _stated_classes(val: Mapping[str, Any]) -> TrainedOn:
    """Return the classes that a dataset's config names; for instance segmentation, only those with instances."""
    classes, things = list(val["classes"]), val.get("things")
    if things is None:
        return TrainedOn(classes, None)
    if val.get("task") == "instance":
        classes = [name for name in classes if name in things]
    return TrainedOn(classes, [name in things for name in classes])
