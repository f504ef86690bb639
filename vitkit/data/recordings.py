"""Which images belong together: frames of one recording by their names, bursts by their time, copies by their looks."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath

import cv2
import numpy as np
from PIL import Image

from vitkit.errors import DataError
from vitkit.ops.image_files import FORMATS, read_image

_MAX_DISTANCE = 0.035
"""Mean difference of two thumbnails, in standard deviations of their grey values, below which images are probably one
that was saved twice. Saved with JPEG's quality of 50, in half the size, brighter by 15 of 255 or with less contrast,
images of BCCD, COCO and CamVid differ by up to 0.035; different photos by 0.64 and more, and frames of CamVid, a second
apart, by 0.040 and more."""
_MIN_DEVIATION = 2.0
"""Of 255; a picture with less is of one plain colour, and looks like many."""
_THUMBNAIL_SIZE = 16
_BURST_SECONDS = 2.0
_EXIF_PART, _EXIF_TIME = 0x8769, 0x9003
_NUMBER = re.compile(r"\d+$")


def series_of(names: Sequence[str | PurePath]) -> list[str] | None:
    """Return the recording of each image, from names such as RECORDING_000123; None if the names tell none.

    A single series is a dataset's name, and almost as many series as images are no recordings.
    """
    series = [str(path.parent / _NUMBER.sub("", path.stem)) for path in map(PurePath, names)]
    kinds = set(series)
    if not 2 <= len(kinds) <= len(series) / 5 or not all(PurePath(s).name.strip("_-. ") for s in kinds):
        return None
    return series


def frame_number(name: str | PurePath) -> int | None:
    """Return the number at the end of a file's name; None if there is none."""
    match = _NUMBER.search(PurePath(name).stem)
    return int(match[0]) if match else None


def thumbnail(image: np.ndarray) -> np.ndarray:
    """Return (256,) uint8 grey values of an (H, W, 3) uint8 image."""
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return cv2.resize(grey, (_THUMBNAIL_SIZE, _THUMBNAIL_SIZE), interpolation=cv2.INTER_AREA).ravel()


def similar_pairs(a: np.ndarray, b: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """Yield a position in a and one in b for each thumbnail of b that hardly differs from one of a.

    Args:
        a, b: (N, 256) and (M, 256) grey values, whose brightness and contrast do not count. Without b the pairs are an
            earlier and a later position in a.
    """
    first = _standardised(a)
    for position, row in enumerate(first if b is None else _standardised(b)):
        others = first[:position] if b is None else first
        if len(others) and np.isfinite(row).all():  # of plain colours no distance is finite
            distances = np.abs(others - row).mean(axis=1)
            if distances.min() < _MAX_DISTANCE:
                yield int(distances.argmin()), position


def _standardised(thumbnails: np.ndarray) -> np.ndarray:
    """Return thumbnails with mean 0 and deviation 1, inf where they are of one plain colour."""
    thumbnails = thumbnails.astype(np.float32)
    deviations = thumbnails.std(axis=1, keepdims=True)
    standard = (thumbnails - thumbnails.mean(axis=1, keepdims=True)) / np.maximum(deviations, _MIN_DEVIATION)
    return np.where(deviations < _MIN_DEVIATION, np.inf, standard)


def group_images(paths: Sequence[Path], *, by_recording: bool, blocks: int = 1) -> tuple[np.ndarray, list[str]]:
    """Number images so that those which must not be parted have one number.

    Together are images that look the same, those of one burst (by the camera's time), and frames of one recording.

    Args:
        paths: of the images.
        by_recording: also by the recordings that names tell, if they do.
        blocks: parts of adjacent frames that a recording is cut into, of which each stays together.
    Returns:
        (N,) int64 group of each image, -1 for unreadable ones; and the errors of these.
    """
    groups = _Groups(len(paths))
    errors, thumbnails, readable, times = [], [], [], {}
    for k, path in enumerate(paths):
        try:
            thumbnails.append(thumbnail(read_image(path)))
        except DataError as error:
            errors.append(str(error))
            continue
        readable.append(k)
        if (time := _time_of(path)) is not None:
            times[k] = time
    stacked = np.array(thumbnails, np.uint8).reshape(-1, _THUMBNAIL_SIZE**2)
    for earlier, later in similar_pairs(stacked):
        groups.join(readable[earlier], readable[later])
    in_order = sorted(times, key=times.__getitem__)
    for a, b in pairwise(in_order):
        if paths[a].parent == paths[b].parent and times[b] - times[a] <= _BURST_SECONDS:
            groups.join(a, b)
    series = series_of(paths) if by_recording else None
    if series is not None:
        for name in set(series):
            frames = sorted((k for k in readable if series[k] == name), key=lambda k: frame_number(paths[k]) or 0)
            for block in np.array_split(frames, blocks) if frames else ():
                for a, b in pairwise(block.tolist()):
                    groups.join(a, b)
    numbers = np.full(len(paths), -1, np.int64)
    numbers[readable] = np.unique([groups.of(k) for k in readable], return_inverse=True)[1]
    return numbers, errors


class _Groups:
    """Sets of numbers that are joined two by two."""

    def __init__(self, count: int):
        self._parent = list(range(count))

    def of(self, k: int) -> int:
        while self._parent[k] != k:
            self._parent[k] = k = self._parent[self._parent[k]]
        return k

    def join(self, a: int, b: int) -> None:
        self._parent[self.of(b)] = self.of(a)


def _time_of(path: Path) -> float | None:
    """Return the camera's time in seconds from an image's EXIF tags; None if there is none."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            text = image.getexif().get_ifd(_EXIF_PART).get(_EXIF_TIME)
        return datetime.strptime(str(text), "%Y:%m:%d %H:%M:%S").timestamp()
    except (OSError, ValueError, SyntaxError, KeyError, TypeError):
        return None


def stratified(
    groups: np.ndarray, classes: Sequence[Counter[int]], fractions: dict[str, float], *, seed: int = 0
) -> dict[str, list[int]]:
    """Divide images among splits, whole groups at a time, so that each split has its share of every class.

    Greedy: groups of the class with the fewest groups left go first (Sechidis et al. 2011,
    https://doi.org/10.1007/978-3-642-23808-6_10), each to the split that lacks the largest part of what the group has.

    Args:
        groups: (N,) the group of each image, from 0; -1 for images that are in no split.
        classes: objects of each class in each image.
        fractions: the share of each split; their sum is 1.
        seed: of the order among equal choices.
    Returns:
        positions of the images of each split, sorted.
    Raises:
        DataError: a split gets no image.
    """
    labels = sorted(set().union(*classes)) if classes else []
    counts = np.zeros((int(groups.max(initial=-1)) + 1, len(labels) + 1))
    for group, of_image in zip(groups, classes):
        if group >= 0:
            counts[group] += [*(of_image[label] for label in labels), 1]  # the last column counts images
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(counts))
    counts /= np.maximum(counts.sum(axis=0), 1)  # each column has the same weight
    shares = np.array(list(fractions.values()))[:, None]
    lacking = np.ones((len(shares), counts.shape[1]))
    chosen = np.full(len(counts), -1)
    while (chosen < 0).any():
        left = order[chosen[order] < 0]
        num_groups = (counts[left] > 0).sum(axis=0).astype(float)
        column = int(np.where(num_groups > 0, num_groups, np.inf).argmin())
        for group in sorted(left[counts[left, column] > 0].tolist(), key=lambda g: -counts[g, -1]):
            chosen[group] = (lacking @ counts[group]).argmax()
            lacking[chosen[group]] -= counts[group] / shares[chosen[group]]
    splits = {name: np.flatnonzero((groups >= 0) & (chosen[groups] == k)).tolist() for k, name in enumerate(fractions)}
    empty = [name for name, positions in splits.items() if not positions]
    if empty:
        raise DataError(
            f"split: {empty[0]} gets none of the {len(counts)} groups of images that belong together. Give it a larger "
            "share, or name its images by patterns."
        )
    return splits
