"""Divides a dataset into training, validation and test images."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from vitkit.apps.datasets.image_groups import group_images, photo_names, series_of, stratify
from vitkit.data.formats.annotated import UNREADABLE, AnnotatedImages
from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import SPLITS, matches_any
from vitkit.text_format import pluralize

_BLOCKS = 10
"""Number of parts that a recording is cut into if there are too few recordings to keep each in one piece."""
_MIN_RECORDINGS = 5
_MIN_TOLD = 3
"""Number of recordings, if the annotations tell them, from which each is kept in one piece."""


def split_dataset(
    data: AnnotatedImages,
    sizes: Mapping[str, float] | None = None,
    *,
    patterns: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
) -> None:
    """Set the splits of a dataset, by patterns of file names or at random.

    A random split divides each class in the same proportions, and keeps together images that look the same, bursts,
    tiles of one photo, and frames of one recording, which is told by their names or, as CVAT's tasks and subsets, by
    the annotations. With fewer than five recordings by name, or fewer than three told, parts of adjacent frames are
    kept together instead. Images that cannot be read are put into no split and recorded in `left_out`.

    Args:
        data: the dataset whose splits are set.
        sizes: fractions of the images in val and test, or, as integers, numbers of images, such as {"val": 0.2,
            "test": 40}; the rest is train.
        patterns: patterns of file names for each split, such as {"val": ["0016E5_*"]}; the rest is train, or is divided
            by `sizes`.
        seed: seed of the random split.
    Raises:
        ConfigError: the sizes are invalid, or neither sizes nor patterns are given.
        DataError: a pattern matches no image or two splits, or a split would get no image.
    """
    sizes, patterns = dict(sizes or {}), dict(patterns or {})
    if not sizes and not patterns:
        raise ConfigError("split: give a fraction, a number or patterns of val or test.")
    fractions = [size for size in sizes.values() if not isinstance(size, int)]
    if not all(size > 0 for size in sizes.values()) or sum(fractions) >= 1:
        raise ConfigError(
            f"split: sizes {sizes}; expected fractions between 0 and 1 with a sum below 1, or numbers of images."
        )
    named = _find_named(data, patterns)
    rest = [k for k in range(len(data.images)) if k not in {p for positions in named.values() for p in positions}]
    splits = {"train": rest}
    if sizes:
        splits = _at_random(data, rest, sizes, seed)
    splits |= named
    if not splits["train"]:
        raise DataError("split: no image is left for training. Give patterns that match fewer images.")
    order = ("train", "val", "test")
    data.splits = {
        name: [data.images[k]["id"] for k in sorted(splits[name])]
        for name in sorted(splits, key=lambda name: order.index(name) if name in order else len(order))
    }


def _find_named(data: AnnotatedImages, patterns: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Return the indices of the images that match the patterns of each split."""
    named: dict[str, list[int]] = {}
    taken: dict[int, str] = {}
    for split, of_split in patterns.items():
        matched = [k for k, image in enumerate(data.images) if matches_any(image["file_name"], of_split)]
        if not matched:
            example = data.images[0]["file_name"]
            raise DataError(f"split: no image matches {', '.join(of_split)}; they are called '{example}' and so on.")
        twice = [k for k in matched if k in taken]
        if twice:
            name = data.images[twice[0]]["file_name"]
            raise DataError(f"split: '{name}' matches the patterns of {taken[twice[0]]} and of {split}. Change one.")
        taken |= dict.fromkeys(matched, split)
        named[split] = matched
    return named


def _find_recordings(data: AnnotatedImages) -> dict[int, str]:
    """Return the recording of each image according to the annotations: a task, or a subset that is not a split."""
    subsets = {name: ids for name, ids in data.splits.items() if name not in SPLITS}
    return {image_id: f"subset {name}" for name, ids in subsets.items() for image_id in ids} | data.recordings


def _at_random(
    data: AnnotatedImages, positions: list[int], sizes: Mapping[str, float], seed: int
) -> dict[str, list[int]]:
    paths = [data.folder / data.images[k]["file_name"] for k in positions]
    told = _find_recordings(data)
    series = [told.get(data.images[k]["id"]) for k in positions]
    is_told = len({*series} - {None}) > 1
    photos = photo_names(paths)
    series = series if is_told else series_of(photos)
    num_recordings = len({*series} - {None}) if series else 0
    blocks = 1 if num_recordings >= (_MIN_TOLD if is_told else _MIN_RECORDINGS) else _BLOCKS
    groups, errors = group_images(paths, recordings=series if is_told else None, blocks=blocks)
    if positions and len(errors) == len(positions):
        raise DataError(
            f"split: none of the {pluralize(len(positions), 'images')} can be read, the first because of: {errors[0]}"
        )
    for error in errors:
        data.leave_out(UNREADABLE, error)
    if series:
        kept = "each stays in one split" if blocks == 1 else f"of each, {blocks} parts of adjacent frames stay together"
        source = "tasks or subsets" if is_told else "recordings by their file names"
        data.notes.append(f"{num_recordings} {source}: {kept}")
    num_photos = len({photo for path, photo in zip(paths, photos) if photo != path})
    if num_photos:
        data.notes.append(f"tiles of {pluralize(num_photos, 'photos')} by their file names: those of one stay together")
    num_groups = len(np.unique(groups[groups >= 0]))
    num_joined = len(positions) - len(errors) - num_groups
    if num_joined:
        data.notes.append(
            f"{pluralize(num_joined, 'images', 'stay')} with others: copies, bursts, tiles of one photo or frames of "
            "one recording"
        )
    classes: dict[int, Counter[int]] = {data.images[k]["id"]: Counter() for k in positions}
    for annotation in data.annotations:
        if annotation["image_id"] in classes:
            classes[annotation["image_id"]][annotation["category_id"]] += 1
    num_images = len(positions) - len(errors)
    fractions = {name: size / num_images if isinstance(size, int) else size for name, size in sizes.items()}
    if sum(fractions.values()) >= 1:
        raise DataError(f"split: {sizes} of {pluralize(num_images, 'images')} leaves none for training. Give less.")
    fractions = {"train": 1 - sum(fractions.values()), **fractions}
    exact = any(isinstance(size, int) for size in sizes.values())
    splits = stratify(groups, [classes[data.images[k]["id"]] for k in positions], fractions, seed=seed, exact=exact)
    return {name: [positions[k] for k in chosen] for name, chosen in splits.items()}
