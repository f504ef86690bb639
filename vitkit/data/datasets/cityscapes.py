"""Cityscapes with instances (Cordts et al. 2016, https://arxiv.org/abs/1604.01685), read from the official folders."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitkit.data.datasets.panoptic_segments import SegmentationDataset, Task, keep_segments
from vitkit.data.datasets.semantic import pair_files
from vitkit.data.transforms.annotated_image import Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.io.image_files import read_header, read_label_map
from vitkit.ops.label_maps import count_values
from vitkit.registry import DATASETS, Spec
from vitkit.structures import PanopticMap, SegmentInfo
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

_ID_FACTOR = 1000


@DATASETS.register
class CityscapesPanoptic(SegmentationDataset):
    """Images of Cityscapes with their maps of instance ids.

    In a map, value v marks stuff of class v, or a group (crowd) of things of class v; 1000 v, 1000 v + 1, …
    mark individual objects. Other values are void. These are the segments that cityscapesScripts' `createPanopticImgs`
    writes. An image's id is its position among the sorted file names.

    Args:
        images: folder of a split's images, such as "leftImg8bit/train".
        labels: folder of the split's annotations, such as "gtFine/train".
        classes: names of the classes.
        values: the id of each class.
        things: names of the classes that have objects.
        image_suffix, label_suffix: endings of the file names.
        task, transforms: see `SegmentationDataset`.
    Raises:
        DataError: a folder is missing, there is no image, or an image has no annotation.
        ConfigError: the values or the things do not fit the classes.
    """

    def __init__(
        self,
        images: str | Path,
        labels: str | Path,
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
        if len(set(values)) != len(classes) or not all(0 < value < _ID_FACTOR for value in values) or unknown:
            raise ConfigError(
                f"dataset CityscapesPanoptic: {len(classes)} classes, values {list(values)} and things {list(things)}: "
                f"expected as many different values from 1 to {_ID_FACTOR - 1}, and things among the classes"
                f"{f' (not {unknown[0]!r})' if unknown else ''}."
            )
        categories = [
            dict(id=value, name=name, isthing=name in things) for name, value in zip(classes, values, strict=True)
        ]
        super().__init__(categories, task=task, transforms=transforms)
        pairs = pair_files(images, labels, image_suffix=image_suffix, label_suffix=label_suffix).values()
        self._images = [f"{images}/{pair.image}" for pair in pairs]
        self._labels = [f"{labels}/{pair.labels}" for pair in pairs]
        self.image_ids = np.arange(len(pairs))
        logger.info(
            f"'{images}': {pluralize(len(self), 'images')} of {pluralize(len(self.classes), 'classes')} "
            f"for task '{task}'"
        )

    def image_path(self, index: int) -> Path:
        return Path(self._images[index])

    def load_image(self, index: int) -> np.ndarray:
        """See `BaseImageDataset`.

        Raises:
            DataError: the file is missing or damaged, or differs in size from its annotation.
        """
        image = super().load_image(index)
        height, width = self.image_size(index)
        if image.shape[:2] != (height, width):
            raise DataError(
                f"image '{self._images[index]}' has {image.shape[1]}x{image.shape[0]} pixels (width x height) and its "
                f"annotation '{self._labels[index]}' {width}x{height}. Both must have the "
                "same size: get the files again."
            )
        return image

    def load_panoptic(self, index: int) -> PanopticMap:
        """See `SegmentationDataset`.

        Raises:
            DataError: the annotation is missing or damaged.
        """
        values = read_label_map(self._labels[index], max_pixels=self.max_image_pixels)
        segments = []
        for value in count_values(values)[0].tolist():
            label = self.label_of.get(value if value < _ID_FACTOR else value // _ID_FACTOR)
            if label is not None:
                crowd = value < _ID_FACTOR and self.things[label]
                segments.append(SegmentInfo(id=value, label=label, iscrowd=crowd))
        return PanopticMap(keep_segments(values, segments), segments)

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of a stored image, from the header of its annotation file."""
        header = read_header(self._labels[index], "labels", max_pixels=self.max_image_pixels)
        return header.height, header.width
