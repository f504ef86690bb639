"""Finds data that a horizontal flip makes wrong: texts that say left or right, keypoints that nothing exchanges."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.data.transforms.annotated_image import AnnotatedImage, MixesImages, Transforms
from vitkit.protocols.dataset import Dataset

_SIDES = re.compile(
    r"(?<![A-Za-z])(?i:left|right)(?i:most|ward|wards|hand|handed|s)?(?![a-z])|(?<=[a-z])(Left|Right)(?![a-z])"
    # Of other languages, the words that do not mean anything else.
    r"|(?i:\b(rechts|gauche|droite|izquierd[ao]|derecha|esquerd[ao]|direita|sinistra|destra|слева|справа)\b)"
    r"|[左右]|왼쪽|오른쪽"
)
_OTHER_SIDE = {"left": "right", "right": "left"}
_MAX_TEXTS, _NUM_TRIES = 20_000, 16
UNPAIRED = (
    "the transforms flip images, and no keypoints are exchanged: none are known as left and right. Give them as "
    "keypoints=dict(flip_pairs=[['NAME', 'NAME'], …]) of the dataset, or set flip_probability=0.0"
)
"""What is said of a dataset that `has_unpaired_points`."""


def find_mirrored_texts(dataset: Dataset) -> list[str]:
    """Return up to two captions, phrases or names of classes that say left or right, if the dataset's transforms flip
    images; otherwise none."""
    texts = sided_names(dataset.classes or ())
    texts += islice(filter(_SIDES.search, islice(_texts(dataset), _MAX_TEXTS)), 50)
    texts = list(dict.fromkeys(texts))[:2]
    return texts if texts and isinstance(dataset, BaseImageDataset) and _flips(dataset) else []


def sided_names(classes: Iterable[str]) -> list[str]:
    """Return the names of classes that say left or right, or come in pairs such as turnleft and turnright."""
    names = {name.lower(): name for name in classes}
    others = {name: re.sub("left|right", lambda side: _OTHER_SIDE[side[0]], name) for name in names}
    return [text for name, text in names.items() if _SIDES.search(text) or others[name] in names.keys() - {name}]


def has_unpaired_points(dataset: Dataset) -> bool:
    """Whether the dataset's transforms flip images, which exchange none of its several keypoints."""
    points = dataset.keypoints
    is_open = points is not None and len(points.names) > 1 and not points.flip_pairs
    return is_open and isinstance(dataset, BaseImageDataset) and _flips(dataset)


def _texts(dataset: Dataset) -> Iterator[str]:
    yield from dataset.phrases() or ()
    if "captions" in dataset.annotations:
        yield from (caption for index in range(len(dataset)) for caption in dataset.references(index))


def _flips(dataset: BaseImageDataset) -> bool:
    """Whether a ramp that rises to the right falls after the transforms of some epoch, for some seed."""
    ramp = np.tile(np.linspace(0, 255, 256).astype(np.uint8)[None, :, None], (256, 1, dataset.channels or 3))
    ramp = ramp if dataset.channels is None else ramp.astype(np.uint16)
    nothing = {}
    if "semantic" in dataset.annotations:
        nothing = {"segment_map": np.zeros(ramp.shape[:2], np.uint8)}
    elif {"objects", "regions"} & {*dataset.annotations}:
        nothing = {"boxes_xyxy": np.zeros((0, 4), np.float32), "labels": np.zeros(0, np.int64)}
    by_epoch = dataset.transforms_by_epoch
    for transforms in _of_single_images([dataset.transforms] if by_epoch is None else by_epoch.stages):
        for seed in range(_NUM_TRIES):
            image = transforms(AnnotatedImage(ramp, **nothing), seed=seed).image
            columns = np.asarray(image, np.float64).mean(axis=(0, 2))
            if len(columns) > 1 and np.polyfit(np.arange(len(columns)), columns, 1)[0] < 0:
                return True
    return False


def _of_single_images(stages: Iterable[Transforms | None]) -> Iterator[Transforms]:
    """Yield the transforms of single images among them and in those that mix images."""
    for stage in stages:
        if isinstance(stage, MixesImages):
            yield from _of_single_images(getattr(stage, name, None) for name in ("transforms", "otherwise"))
        elif stage is not None:
            yield stage
