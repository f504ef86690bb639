"""Cityscapes with its objects (Cordts et al. 2016, https://arxiv.org/abs/1604.01685), from official folders."""

import logging
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vitkit.data.images import read_image
from vitkit.data.segments import SegmentationDataset, Task
from vitkit.data.semantic import paired_names, read_label_picture
from vitkit.data.transforms import Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.ops.label_maps import count_values, replace_values
from vitkit.registry import DATASETS, Spec
from vitkit.structures import PanopticMap, SegmentInfo

logger = logging.getLogger("vitkit")

_FIRST_OBJECT = 1000


@DATASETS.register
class CityscapesPanoptic(SegmentationDataset):
    """Images with a picture of instance ids each: of a class v the value v is its stuff, or a region of its things that
    nobody told apart (a crowd); 1000 v, 1000 v + 1, … are its objects. Other values are void.

    These are the segments that cityscapesScripts' `createPanopticImgs` writes. An image's id is its position in the
    order of the file names.

    Args:
        images: folder with the pictures of a split, "leftImg8bit/train".
        labels: folder with its annotations, "gtFine/train".
        classes: their names.
        values: the id of each class.
        things: the names of those that have objects.
        image_suffix, label_suffix: the endings of the file names.
        task, transforms: see `SegmentationDataset`.
    Raises:
        DataError: a folder is missing, there is no image, or one has no annotation.
        ConfigError: the values or the things do not fit the classes.
    """

    def __init__(
        self,
        images: str,
        labels: str,
        *,
        classes: Sequence[str],
        values: Sequence[int],
        things: Sequence[str],
        image_suffix: str = "_leftImg8bit.png",
        label_suffix: str = "_gtFine_instanceIds.png",
        task: Task = "panoptic",
        transforms: Spec | Transforms | None = None,
    ):
        unknown = sorted(set(things) - set(classes))
        if len(set(values)) != len(classes) or not all(0 < value < _FIRST_OBJECT for value in values) or unknown:
            raise ConfigError(
                f"dataset CityscapesPanoptic: {len(classes)} classes, values {list(values)} and things {list(things)}: "
                f"expected as many different values from 1 to {_FIRST_OBJECT - 1}, and things among the classes"
                f"{f' (not {unknown[0]!r})' if unknown else ''}."
            )
        categories = [
            dict(id=value, name=name, isthing=name in things) for name, value in zip(classes, values, strict=True)
        ]
        super().__init__(categories, task=task, transforms=transforms)
        names = paired_names(images, labels, image_suffix=image_suffix, label_suffix=label_suffix)
        self._images = [f"{images}/{name}{image_suffix}" for name in names]
        self._labels = [f"{labels}/{name}{label_suffix}" for name in names]
        self.image_ids = np.arange(len(names))
        logger.info(f"'{images}': {len(self)} images of {len(self.classes)} classes for task '{task}'")

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, before any transform.

        Raises:
            DataError: the file is missing, damaged, or of another size than its annotation.
        """
        image = read_image(self._images[index])
        height, width = self.image_size(index)
        if image.shape[:2] != (height, width):
            raise DataError(
                f"image '{self._images[index]}' has {image.shape[1]}x{image.shape[0]} pixels (width x height) and its "
                f"annotation '{self._labels[index]}' {width}x{height}. Both must have one size: get the files again."
            )
        return image

    def load_panoptic(self, index: int) -> PanopticMap:
        """
        Raises:
            DataError: the annotation is missing or damaged.
        """
        values = read_label_picture(self._labels[index])
        segments = []
        for value in count_values(values)[0].tolist():
            label = self.label_of.get(value if value < _FIRST_OBJECT else value // _FIRST_OBJECT)
            if label is not None:
                crowd = value < _FIRST_OBJECT and self.things[label]
                segments.append(SegmentInfo(id=value, label=label, iscrowd=crowd))
        kept = {segment["id"]: segment["id"] for segment in segments}
        return PanopticMap(replace_values(values, kept, dtype=np.int32), segments)

    def image_size(self, index: int) -> tuple[int, int]:
        with Image.open(self._labels[index]) as picture:
            return picture.height, picture.width

    def aspect_ratios(self) -> np.ndarray:
        """Width / height of every image, float64 (len(self),); the heads of all annotations are read."""
        return np.array([width / height for height, width in map(self.image_size, range(len(self)))])
