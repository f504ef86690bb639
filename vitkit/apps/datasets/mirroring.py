"""Finds data that a horizontal flip makes wrong: texts that say "left" or "right", keypoints that nothing exchanges."""

import re
from collections.abc import Iterator
from itertools import islice

import numpy as np

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.data.transforms.annotated_image import AnnotatedImage, MixesImages
from vitkit.protocols.dataset import Dataset

_SIDES = re.compile(r"(?<![a-z])(left|right)(most|ward|wards|hand|handed|s)?(?![a-z])", re.IGNORECASE)
_MAX_TEXTS, _NUM_TRIES = 20_000, 16
UNPAIRED = (
    "the transforms flip images, and no keypoints are exchanged: none are known as left and right. Give them as "
    "keypoints=dict(flip_pairs=[['NAME', 'NAME'], …]) of the dataset, or set flip_probability=0.0"
)
"""What is said of a dataset that `has_unpaired_points`."""


def find_mirrored_texts(dataset: Dataset) -> list[str]:
    """Return up to two captions, phrases or names of classes that say left or right, if the dataset's transforms flip
    images; otherwise none."""
    texts = list(dict.fromkeys(islice(filter(_SIDES.search, islice(_texts(dataset), _MAX_TEXTS)), 50)))[:2]
    return texts if texts and isinstance(dataset, BaseImageDataset) and _flips(dataset) else []


def has_unpaired_points(dataset: Dataset) -> bool:
    """Whether the dataset's transforms flip images, which exchange none of its several keypoints."""
    points = dataset.keypoints
    is_open = points is not None and len(points.names) > 1 and not points.flip_pairs
    return is_open and isinstance(dataset, BaseImageDataset) and _flips(dataset)


def _texts(dataset: Dataset) -> Iterator[str]:
    yield from dataset.classes or ()
    yield from dataset.phrases() or ()
    if "captions" in dataset.annotations:
        yield from (caption for index in range(len(dataset)) for caption in dataset.references(index))


def _flips(dataset: BaseImageDataset) -> bool:
    """Whether a ramp that rises to the right falls after the transforms, for some seed."""
    if dataset.transforms is None or isinstance(dataset.transforms, MixesImages) or dataset.channels is not None:
        return False
    ramp = np.tile(np.linspace(0, 255, 256).astype(np.uint8)[None, :, None], (256, 1, 3))
    nothing = {}
    if "semantic" in dataset.annotations:
        nothing = {"segment_map": np.zeros(ramp.shape[:2], np.uint8)}
    elif {"objects", "regions"} & {*dataset.annotations}:
        nothing = {"boxes_xyxy": np.zeros((0, 4), np.float32), "labels": np.zeros(0, np.int64)}
    for seed in range(_NUM_TRIES):
        image = dataset.transform(AnnotatedImage(ramp, **nothing), seed).image
        columns = np.asarray(image, np.float64).mean(axis=(0, 2))
        if len(columns) > 1 and np.polyfit(np.arange(len(columns)), columns, 1)[0] < 0:
            return True
    return False
