"""Finds images that belong together: frames of a recording by name, bursts by time, copies by appearance."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath

import cv2
import numpy as np
from PIL import Image, TiffImagePlugin
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vitkit.errors import DataError
from vitkit.io.channel_files import as_rgb, read_channels
from vitkit.io.image_files import (
    FORMATS,
    TIFF_STARTS,
    decoding,
    open_regular,
    read_image,
    read_npy_shape,
    read_tiff_pages,
    size_of,
)

_MAX_DISTANCE = 0.035
"""Mean difference of two thumbnails, in standard deviations of their gray values, below which two images are probably
the same one saved twice. Saved with a JPEG quality of 50, at half the size, brighter by 15 of 255 or with less
contrast, images of BCCD, COCO and CamVid differ from the original by up to 0.035; different photos differ by 0.64 or
more, and frames of CamVid, a second apart, by 0.040 or more."""
_MIN_DEVIATION = 2.0
"""Standard deviation of gray values (0 to 255) below which an image is of one plain color, like many others."""
_THUMBNAIL_SIZE = 16
_BURST_SECONDS = 2.0
_EXIF_PART, _EXIF_TIME = 0x8769, 0x9003
_NUMBER = re.compile(r"\d+$")
_TILE = re.compile(r"(.*[^\W_].*)_(0|[1-9]\d*)_(0|[1-9]\d*)")
_MIN_STEP = 8
"""Pixels between the positions of three or more tiles."""
_MAX_SIDE = 1 << 20
_FRAME = re.compile(r"(.*[^a-zA-Z])?frames?[-_. ]*", re.IGNORECASE)
"""Names of which a single series is a recording, as CVAT writes them."""


def series_of(names: Sequence[str | PurePath]) -> list[str] | None:
    """Return the recording of each image, from names such as RECORDING_000123; None if the names do not tell it.

    If all images share a single series, that is just the dataset's name; nearly as many series as images are not
    recordings. Neither holds where the names say "frame".
    """
    series = [str(path.parent / _NUMBER.sub("", path.stem)) for path in map(PurePath, names)]
    kinds = set(series)
    if len(kinds) < len(series) and all(_FRAME.fullmatch(PurePath(kind).name) for kind in kinds):
        return series
    if not 2 <= len(kinds) <= len(series) / 5 or not all(PurePath(s).name.strip("_-. ") for s in kinds):
        return None
    return series


def photo_names(names: Sequence[str | PurePath]) -> list[PurePath]:
    """Return the name of the photo that each image was cut from, PHOTO for tiles PHOTO_LEFT_TOP as `vitkit data tile`
    names them; other images have their own name.

    Phones and cameras write names of this form too: those whose numbers are not a grid of positions from 0 are not
    tiles. If all images are tiles of a single photo, they have their own names, as it must be divided.
    """
    paths = [PurePath(name) for name in names]
    positions: dict[PurePath, list[tuple[int, int]]] = {}
    matches = [_TILE.fullmatch(path.stem) for path in paths]
    for path, match in zip(paths, matches):
        if match:
            positions.setdefault(path.parent / match[1], []).append((int(match[2]), int(match[3])))
    grids = {photo for photo, corners in positions.items() if all(map(_is_grid_axis, zip(*corners)))}
    lefts, tops = ({corner[k] for photo in grids for corner in positions[photo]} for k in range(2))
    if 0 not in lefts or 0 not in tops or {*lefts, *tops} == {0}:
        return paths
    photos = [path.parent / match[1] if match else path for path, match in zip(paths, matches)]
    photos = [photo if photo in grids else path for photo, path in zip(photos, paths)]
    return photos if len({*photos}) > 1 else paths


def _is_grid_axis(values: Sequence[int]) -> bool:
    """Whether numbers may be positions of tiles: evenly spaced, except that two of them can be near each other."""
    different = sorted({*values})
    near = min((b - a for a, b in pairwise(different)), default=_MIN_STEP)
    return max(different) < _MAX_SIDE and (len(different) < 3 or near >= _MIN_STEP)


def frame_number(name: str | PurePath) -> int | None:
    """Return the number at the end of a file's name, or None without one."""
    match = _NUMBER.search(PurePath(name).stem)
    return int(match[0]) if match else None


def thumbnail(image: np.ndarray) -> np.ndarray:
    """Return a thumbnail of an (H, W, 3) uint8 image: (256,) uint8 gray values."""
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return cv2.resize(gray, (_THUMBNAIL_SIZE, _THUMBNAIL_SIZE), interpolation=cv2.INTER_AREA).ravel()


def similar_pairs(a: np.ndarray, b: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """Yield the pairs (index in a, index in b) of thumbnails that hardly differ, the nearest first for each of b.

    Args:
        a, b: (N, 256) and (M, 256) gray values, compared regardless of brightness and contrast. Without b, the pairs
            are an earlier and a later index in a.
    """
    first = _standardize(a)
    for position, row in enumerate(first if b is None else _standardize(b)):
        others = first[:position] if b is None else first
        if len(others) and np.isfinite(row).all():  # plain-colored images have no finite distance
            distances = np.abs(others - row).mean(axis=1)
            near = np.flatnonzero(distances < _MAX_DISTANCE)
            yield from ((int(other), position) for other in near[distances[near].argsort()])


def _standardize(thumbnails: np.ndarray) -> np.ndarray:
    """Return thumbnails with mean 0 and standard deviation 1; inf for those of one plain color."""
    thumbnails = thumbnails.astype(np.float32)
    deviations = thumbnails.std(axis=1, keepdims=True)
    standard = (thumbnails - thumbnails.mean(axis=1, keepdims=True)) / np.maximum(deviations, _MIN_DEVIATION)
    return np.where(deviations < _MIN_DEVIATION, np.inf, standard)


def group_images(
    paths: Sequence[Path], *, recordings: Sequence[str | None] | None = None, blocks: int = 1
) -> tuple[np.ndarray, list[str]]:
    """Group images, giving the same number to images that must not be separated.

    Images that look the same, those of one burst (by the camera's time), tiles of one photo, and frames of one
    recording form one group.

    Args:
        paths: files of the images.
        recordings: the recording of each image, None for none; None: by `series_of`.
        blocks: number of blocks of adjacent frames that a recording is cut into, each of which stays together.
    Returns:
        (N,) int64 group of each image, -1 for unreadable ones; and the error messages of the unreadable ones.
    """
    errors, thumbnails, readable, times = [], [], [], {}
    for k, path in enumerate(paths):
        try:
            thumbnails.append(thumbnail(read_shown(path)))
        except DataError as error:
            errors.append(str(error))
            continue
        readable.append(k)
        if (time := _time_of(path)) is not None:
            times[k] = time
    stacked = np.array(thumbnails, np.uint8).reshape(-1, _THUMBNAIL_SIZE**2)
    pairs = [(readable[earlier], readable[later]) for earlier, later in similar_pairs(stacked)]
    for a, b in pairwise(sorted(times, key=lambda k: (paths[k].parent, times[k]))):
        if paths[a].parent == paths[b].parent and times[b] - times[a] <= _BURST_SECONDS:
            pairs.append((a, b))
    photos = photo_names(paths)
    first_of: dict[PurePath, int] = {}
    pairs += [(first_of.setdefault(photos[k], k), k) for k in readable]
    series = series_of(photos) if recordings is None else recordings
    if series is not None:
        for name in {*series} - {None}:
            frames = sorted((k for k in readable if series[k] == name), key=lambda k: frame_number(photos[k]) or 0)
            for block in np.array_split(frames, blocks) if frames else ():
                pairs += pairwise(block.tolist())
    a, b = np.array(pairs, np.int64).reshape(-1, 2).T
    joined = coo_array((np.ones(len(pairs)), (a, b)), shape=(len(paths), len(paths)))
    _, groups = connected_components(joined, directed=False)
    numbers = np.full(len(paths), -1, np.int64)
    numbers[readable] = np.unique(groups[readable], return_inverse=True)[1]
    return numbers, errors


def _time_of(path: Path) -> float | None:
    """Return the time when an image was taken, in seconds, from its EXIF tags; None if they do not tell it."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            text = image.getexif().get_ifd(_EXIF_PART).get(_EXIF_TIME)
        return datetime.strptime(str(text), "%Y:%m:%d %H:%M:%S").timestamp()
    except (OSError, ValueError, SyntaxError, KeyError, TypeError):
        return None


def stratify(
    groups: np.ndarray,
    classes: Sequence[Counter[int]],
    fractions: dict[str, float],
    *,
    seed: int = 0,
    exact: bool = False,
) -> dict[str, list[int]]:
    """Divide images among splits, keeping groups together, so that each split gets its fraction of every class.

    Greedy: groups of the class with the fewest groups left go first (Sechidis et al. 2011,
    https://doi.org/10.1007/978-3-642-23808-6_10), each to the split that lacks the largest part of what the group
    contains.

    Args:
        groups: (N,) the group of each image, from 0; -1 for images that go into no split.
        classes: for each image, the number of objects of each class.
        fractions: the fraction of images for each split; their sum is 1.
        seed: seed of the order among equal choices.
        exact: put a group only into a split that still lacks images, so that the fractions of images are met as far as
            groups allow, rather than those of objects.
    Returns:
        indices of the images of each split, sorted.
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
    counts /= np.maximum(counts.sum(axis=0), 1)  # every column gets the same weight
    shares = np.array(list(fractions.values()))[:, None]
    lacking = np.ones((len(shares), counts.shape[1]))
    chosen = np.full(len(counts), -1)
    while (chosen < 0).any():
        left = order[chosen[order] < 0]
        num_groups = (counts[left] > 0).sum(axis=0).astype(float)
        column = int(np.where(num_groups > 0, num_groups, np.inf).argmin())
        for group in sorted(left[counts[left, column] > 0].tolist(), key=lambda g: -counts[g, -1]):
            has_room = lacking[:, -1] * shares[:, 0] > 0.5 * counts[group, -1]
            is_open = has_room | ~has_room.any() | (not exact)
            chosen[group] = np.where(is_open, lacking @ counts[group], -np.inf).argmax()
            lacking[chosen[group]] -= counts[group] / shares[chosen[group]]
    splits = {name: np.flatnonzero((groups >= 0) & (chosen[groups] == k)).tolist() for k, name in enumerate(fractions)}
    empty = [name for name, positions in splits.items() if not positions]
    if empty:
        raise DataError(
            f"split: {empty[0]} gets none of the {len(counts)} groups of images that belong together. Give it a larger "
            "share, or name its images by patterns."
        )
    return splits


def read_shown(path: Path, what: str = "images") -> np.ndarray:
    """Read an image whose number of channels is not known, for drawing or comparison.

    Returns:
        (H, W, 3) uint8 RGB: of a .npy file and of a TIFF whose samples are not colors see `as_rgb`, of others
        `read_image`.
    Raises:
        DataError: see `read_channels`.
    """
    if path.suffix.lower() != ".npy":
        try:
            return read_image(path, what)
        except DataError:
            channels = _tiff_channels(path)
            if channels is None:
                raise
        return as_rgb(read_channels(path, channels, what))
    with open_regular(path, what) as file, decoding(path, what, size_of(file)):
        _, _, *channels = read_npy_shape(file)
    return as_rgb(read_channels(path, *channels or [1], what))


def _tiff_channels(path: Path) -> int | None:
    """Return the number of channels of a TIFF with several samples, or None if a file is not a valid one."""
    with suppress(Exception), open_regular(path, "images") as file:  # a damaged file can make Pillow raise anything
        pages = list(read_tiff_pages(file)) if file.read(4) in TIFF_STARTS else []
        samples = pages[0].get(TiffImagePlugin.SAMPLESPERPIXEL, 1) if pages else 1
        return samples * len(pages) if samples > 1 else None
    return None
