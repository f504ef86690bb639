"""Images with one label map each: folders such as those of ADE20K, Cityscapes and CamVid."""

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from vitkit.data.datasets.base import BaseImageDataset, new_labels, require_folders
from vitkit.data.datasets.panoptic_segments import check_number_of_classes, make_segmentation_sample
from vitkit.data.formats.class_files import parse_class_file, read_class_values
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import IMAGE_SUFFIXES, count_endings, data_files, is_hidden, one_form
from vitkit.io.image_files import ImageStore, read_header
from vitkit.io.text_files import read_lines
from vitkit.ops.label_maps import count_values
from vitkit.registry import DATASETS, Spec, nearest
from vitkit.structures import IGNORE_INDEX, Sample
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

_NUM_VALUES = 1 << 16
_UNKNOWN = -1


@DATASETS.register
class SemanticFolder(BaseImageDataset):
    """Images in one folder and label maps of the same names, except for their endings, in another.

    Folders may be nested; names that begin with a dot are left out. An image's id is its path in `images` without the
    ending. Label maps stay on disk until an image is loaded.

    Args:
        images: folder of the images.
        labels: folder of the label maps: one channel (gray or palette) whose values are classes; or RGB in the colors
            that the class file names.
        classes: names of the classes; or a file that lists them, shared by all splits (see `parse_class_file`).
        colors: the class file whose colors the label maps have, for `classes` that are listed.
        values: the pixel value of each class; None: the values in the class file, or 0, 1, 2, … in order, or 1, 2, 3, …
            with `zero_is_ignored`.
        ignore: pixel values without a class, which are neither trained on nor evaluated; values that are neither here
            nor in `values` are errors.
        zero_is_ignored: value 0 is also ignored, and the classes begin at 1 (as in ADE20K): in a file of names with
            colors, which numbers them, the class numbered 0 is left out.
        image_suffix, label_suffix: endings of the file names, such as "_leftImg8bit.png"; None: any that an image has.
        names: use only images whose ids match one of these patterns, such as "0001TP_*"; or a text file with one id per
            line, as `vitkit data split` writes it; None: all.
        transforms: see `BaseImageDataset`.
    Raises:
        DataError: a folder is missing, there is no image, no image matches `names`, or an image has no label map.
        ConfigError: the values do not fit the classes.
    """

    annotations = ("semantic",)

    def __init__(
        self,
        images: str | Path,
        labels: str | Path,
        *,
        classes: Sequence[str] | str | Path,
        colors: str | Path | None = None,
        values: Sequence[int] | None = None,
        ignore: Sequence[int] = (255,),
        zero_is_ignored: bool = False,
        image_suffix: str | None = ".jpg",
        label_suffix: str | None = ".png",
        names: Sequence[str] | str | Path | None = None,
        transforms: Spec | Transforms | None = None,
    ):
        self._value_of_color: dict[int, int] = {}
        if isinstance(classes, str | Path):
            numbered, self._value_of_color, ignored = parse_class_file(classes)
            if zero_is_ignored and self._value_of_color:
                numbered.pop(0, None)
            classes = list(numbered.values())
            # A plain list of names is numbered from 0, which `zero_is_ignored` changes; other numbers hold.
            if values is None and not (zero_is_ignored and list(numbered) == list(range(len(numbered)))):
                values = list(numbered)
            ignore = [*ignore, *([] if ignored is None else [ignored])]
        check_number_of_classes(classes)
        super().__init__(transforms)
        self.store, self.label_folder = ImageStore(images), Path(labels)
        self.classes = list(classes)
        first = int(zero_is_ignored)
        self.category_ids = list(range(first, first + len(classes))) if values is None else list(values)
        self._ignored = sorted({*ignore, 0} if zero_is_ignored else set(ignore))
        if colors is not None:
            # By name, as an export of the file with other numbers has the same colors.
            names_of, numbers = parse_class_file(colors)[:2]
            if lacking := [name for name in self.classes if name not in names_of.values()]:
                raise DataError(f"colors: '{colors}' has no {lacking[0]!r}. {nearest(lacking[0], names_of.values())}")
            values = dict(zip(self.classes, self.category_ids))
            self._value_of_color = {c: values.get(names_of.get(n), IGNORE_INDEX) for c, n in numbers.items()}
        self._label_of_value = self._label_table()
        self._files = pair_files(images, labels, image_suffix=image_suffix, label_suffix=label_suffix)
        self.image_ids = list(self._files)
        if names is not None:
            self.image_ids = _choose(self.image_ids, names, images)
        logger.info(
            f"'{images}': {pluralize(len(self), 'images')} with label maps of {pluralize(len(self.classes), 'classes')}"
        )

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[int] | None = None) -> None:
        """See `Dataset`; pixels of other classes are ignored."""
        labels = new_labels(self.classes, classes)
        value_of = dict(zip(labels.tolist(), self.category_ids))
        if lacking := [name for label, name in enumerate(classes) if label not in value_of]:
            raise DataError(f"classes: no pixel value stands for {lacking[0]!r}. {nearest(lacking[0], self.classes)}")
        values = [value_of[label] for label in range(len(classes))]
        self._ignored = sorted({*self._ignored, *self.category_ids} - {*values})
        self.classes, self.category_ids = list(classes), values
        self._label_of_value = self._label_table()

    def _label_table(self) -> np.ndarray:
        """Return the contiguous label of each pixel value: (65536,) int16, 255 if ignored, -1 if unknown."""
        values, ignored_values = self.category_ids, self._ignored
        invalid = [value for value in [*values, *ignored_values] if not 0 <= value < _NUM_VALUES]
        if len(set(values)) != len(self.classes) or invalid:
            raise ConfigError(
                f"dataset SemanticFolder: values {invalid or values} do not fit "
                f"{pluralize(len(self.classes), 'classes')}; expected as many different numbers from 0 to "
                f"{_NUM_VALUES - 1}."
            )
        if ambiguous := sorted(set(values) & set(ignored_values)):
            name = self.classes[values.index(ambiguous[0])]
            raise ConfigError(
                f"dataset SemanticFolder: value {ambiguous[0]} is class {name!r} and in "
                f"ignore={ignored_values}. Choose one; where classes begin at 1 set zero_is_ignored=true."
            )
        table = np.full(_NUM_VALUES, _UNKNOWN, np.int16)
        table[ignored_values] = IGNORE_INDEX
        table[values] = np.arange(len(values))
        return table

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load an image with a mask for each visible class; see `BaseImageDataset`."""
        image, labels = self.load_image(index), self.load_semantic(index)
        if image.shape[:2] != labels.shape:
            raise DataError(
                f"labels '{self._label_path(index)}' has {labels.shape[1]}x{labels.shape[0]} pixels (width x height) "
                f"and image '{self.image_path(index)}' {image.shape[1]}x{image.shape[0]}. Both must have the same "
                "size: save the label image again, without interpolation."
            )
        # Class 0 becomes segment 1, and 255 (ignored) wraps around to 0, "no segment".
        annotated = self.transform(AnnotatedImage(image, segment_map=labels + np.uint8(1)), seed)
        return make_segmentation_sample(
            annotated, range(len(self.classes)), image_id=self.image_ids[index], original_size=image.shape[:2]
        )

    def load_semantic(self, index: int) -> np.ndarray:
        """Load the class of every pixel of an image before any transform.

        Returns:
            (H, W) uint8, 255 = ignored.
        Raises:
            DataError: the label map is missing or damaged, or contains a value that is neither a class nor ignored.
        """
        path = self._label_path(index)
        values = read_class_values(path, self._value_of_color, max_pixels=self.max_image_pixels)
        labels = self._label_of_value[values]
        if labels.min() == _UNKNOWN:
            unknown, counts = count_values(values[labels == _UNKNOWN])
            raise DataError(
                f"labels '{path}': value {unknown[0]} at {counts[0]} pixels is not one of the {len(self.classes)} "
                f"classes ({_ranges(self.category_ids)}) and not ignored ({_ranges(self._ignored)})"
                f"{f', nor are {len(unknown) - 1} more values' if len(unknown) > 1 else ''}. Correct the image, "
                "`classes` or `values`, or add the value to `ignore`."
            )
        return labels.astype(np.uint8)

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of a stored image, from the header of its label map's file."""
        header = read_header(self._label_path(index), "labels", max_pixels=self.max_image_pixels)
        return header.height, header.width

    def file_name(self, index: int) -> str:
        return self._files[self.image_ids[index]].image

    def _label_path(self, index: int) -> Path:
        return self.label_folder / self._files[self.image_ids[index]].labels


def _choose(image_ids: list[str], names: Sequence[str] | str | Path, images: str | Path) -> list[str]:
    """Return the ids that match a pattern, or that a file lists."""
    if isinstance(names, str | Path):
        lines = read_lines(names, "names", remedy="Give a file with an image's id in each line.")
        listed = {one_form(line) for _, line in lines if not is_hidden(line)}
        if missing := sorted(listed - set(image_ids)):
            raise DataError(
                f"names: '{names}' lists {pluralize(len(missing), 'images')} that '{images}' lacks, such as "
                f"{missing[0]!r}."
            )
        if not listed:
            raise DataError(f"names: '{names}' lists no image. Write an image's id in each line.")
        return [image_id for image_id in image_ids if image_id in listed]
    chosen = [image_id for image_id in image_ids if any(fnmatchcase(image_id, pattern) for pattern in names)]
    if not chosen:
        raise DataError(f"images: no file of '{images}' matches any of names={list(names)}.")
    return chosen


class Pair(NamedTuple):
    """An image and its label map, each a path in its folder."""

    image: str
    labels: str


def pair_files(
    images: str | Path, labels: str | Path, *, image_suffix: str | None, label_suffix: str | None
) -> dict[str, Pair]:
    """List the images that have label maps, by id, sorted; an id is the path below `images` without `image_suffix`.

    Args:
        image_suffix, label_suffix: endings of the file names; None: any that an image has.
    Raises:
        DataError: a folder is missing, there is no image, two have one id, or an image has no label map of the same
            path below `labels`.
    """
    require_folders(images=images, labels=labels)
    images, labels = Path(images), Path(labels)
    image_of, labels_of = _by_id(images, image_suffix, "image"), _by_id(labels, label_suffix, "label")
    if not image_of:
        kind = "image" if image_suffix is None else f"file that ends in '{image_suffix}'"
        raise DataError(f"images: '{images}' contains no {kind}. Set image_suffix.")
    if unlabeled := sorted(image_of.keys() - labels_of.keys()):
        name = unlabeled[0]
        raise DataError(
            f"labels: {len(unlabeled)} of {len(image_of)} images have no label image, such as "
            f"'{images / image_of[name]}', which needs '{labels / name}{label_suffix or '.png'}'. Add the files, "
            "or set label_suffix."
        )
    if others := labels_of.keys() - image_of.keys():
        logger.warning(f"'{labels}': {len(others)} label images have no image; left out")
    return {name: Pair(image_of[name], labels_of[name]) for name in sorted(image_of)}


def _by_id(folder: Path, suffix: str | None, what: str) -> dict[str, str]:
    """Return the files of a folder by their paths without the ending; log the images that have another one."""
    names = [path.relative_to(folder).as_posix() for path in data_files(folder)]
    readable = [name for name in names if PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES]
    chosen = readable if suffix is None else [name for name in names if name.endswith(suffix)]
    if chosen and what == "image" and (rest := count_endings(map(PurePosixPath, {*readable} - {*chosen}))):
        logger.warning("'%s': left out images that do not end in '%s': %s", folder, suffix, rest)
    files: dict[str, str] = {}
    for name in chosen:
        key = one_form(name.removesuffix(PurePosixPath(name).suffix if suffix is None else suffix))
        if key in files:
            raise DataError(
                f"{what}s: '{folder}' has both '{files[key]}' and '{name}'. Remove one, or set {what}_suffix."
            )
        files[key] = name
    return files


def _ranges(values: Sequence[int]) -> str:
    """Format integers as text: "0, 7 to 9"."""
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and value == ranges[-1][-1] + 1:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in ranges) or "none"
