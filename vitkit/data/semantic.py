"""Images with a label picture each: folders of ADE20K, Cityscapes, CamVid and the like."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.data.images import read_image
from vitkit.data.segments import check_number_of_classes, segmentation_sample
from vitkit.data.transforms import Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.ops.label_maps import count_values
from vitkit.registry import DATASETS, TRANSFORMS, Spec
from vitkit.structures import IGNORED, Sample

logger = logging.getLogger("vitkit")

_MOST_VALUES = 1 << 16
_UNKNOWN = -1


@DATASETS.register
class SemanticFolder:
    """Pictures in one folder and their label pictures in another, under the same names but for their endings.

    Folders may hold folders. An image's id is its path in `images` without the ending. Label pictures stay on disk
    until an image is loaded.

    Args:
        images: folder with the pictures.
        labels: folder with the label pictures: one channel (grey or palette), a pixel's value being its class.
        classes: their names.
        values: the pixel value of each class; None: 0, 1, 2, … in order, or 1, 2, 3, … with `zero_is_ignored`.
        ignore: pixel values of no class, which neither train nor count; other values than these and the classes' are
            errors.
        zero_is_ignored: value 0 is ignored, too, and the classes begin at 1 (as in ADE20K).
        image_suffix, label_suffix: the endings of the names, such as "_leftImg8bit.png".
        transforms: spec of the transforms (see vitkit.data.transforms); None returns the images as they are.
    Raises:
        DataError: a folder is missing, there is no image, or one has no label picture.
        ConfigError: the values do not fit the classes.
    """

    def __init__(
        self,
        images: str,
        labels: str,
        *,
        classes: Sequence[str],
        values: Sequence[int] | None = None,
        ignore: Sequence[int] = (255,),
        zero_is_ignored: bool = False,
        image_suffix: str = ".jpg",
        label_suffix: str = ".png",
        transforms: Spec | Transforms | None = None,
    ):
        check_number_of_classes(classes)
        self.folder, self.label_folder = Path(images), Path(labels)
        self.image_suffix, self.label_suffix = image_suffix, label_suffix
        self.classes = list(classes)
        first = int(zero_is_ignored)
        self.category_ids = list(range(first, first + len(classes))) if values is None else list(values)
        self._ignored = sorted({*ignore, 0} if zero_is_ignored else set(ignore))
        self._table = self._make_table()
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        self.image_ids = paired_names(images, labels, image_suffix=image_suffix, label_suffix=label_suffix)
        logger.info(f"'{images}': {len(self)} images with label pictures of {len(self.classes)} classes")

    def _make_table(self) -> np.ndarray:
        """(65536,) int16: pixel value -> contiguous label, 255 for ignored values, -1 for all others."""
        values, ignored = self.category_ids, self._ignored
        wrong = [value for value in [*values, *ignored] if not 0 <= value < _MOST_VALUES]
        if len(set(values)) != len(self.classes) or wrong:
            raise ConfigError(
                f"dataset SemanticFolder: values {wrong or values} do not fit {len(self.classes)} classes; expected as "
                f"many different numbers from 0 to {_MOST_VALUES - 1}."
            )
        both = sorted(set(values) & set(ignored))
        if both:
            raise ConfigError(
                f"dataset SemanticFolder: value {both[0]} is class {self.classes[values.index(both[0])]!r} and in "
                f"ignore={ignored}. Choose one; where classes begin at 1 set zero_is_ignored=true."
            )
        table = np.full(_MOST_VALUES, _UNKNOWN, np.int16)
        table[ignored] = IGNORED
        table[values] = np.arange(len(values))
        return table

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """One transformed image with a mask for each class that is seen in it.

        Args:
            index: position in the dataset; or (position, seed), and the transforms are drawn from that seed alone.
        Raises:
            DataError: the image or its label picture is missing, damaged or wrong.
        """
        index, seed = index if isinstance(index, tuple) else (index, None)
        index = range(len(self))[index]
        image, labels = self.load_image(index), self.load_semantic(index)
        if image.shape[:2] != labels.shape:
            raise DataError(
                f"labels '{self._label_path(index)}' has {labels.shape[1]}x{labels.shape[0]} pixels (width x height) "
                f"and image '{self._image_path(index)}' {image.shape[1]}x{image.shape[0]}. Both must have one size: "
                "save the label picture anew, without interpolation."
            )
        # Class 0 becomes number 1, and 255 wraps around to 0, "none".
        return segmentation_sample(
            image,
            labels + np.uint8(1),
            range(len(self.classes)),
            image_id=self.image_ids[index],
            transforms=self.transforms,
            seed=seed,
        )

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, before any transform."""
        return read_image(self._image_path(index))

    def load_semantic(self, index: int) -> np.ndarray:
        """The class of every pixel of an image before any transform.

        Returns:
            (H, W) uint8, 255 = ignored.
        Raises:
            DataError: the label picture is missing or damaged, or holds a value that is no class and not ignored.
        """
        path = self._label_path(index)
        values = read_label_picture(path)
        labels = self._table[values]
        if labels.min() == _UNKNOWN:
            unknown, counts = count_values(values[labels == _UNKNOWN])
            raise DataError(
                f"labels '{path}': value {unknown[0]} at {counts[0]} pixels is none of the {len(self.classes)} classes "
                f"({_ranges(self.category_ids)}) and not ignored ({_ranges(self._ignored)})"
                f"{f', nor are {len(unknown) - 1} more values' if len(unknown) > 1 else ''}. Correct the picture, "
                "`classes` or `values`, or add the value to `ignore`."
            )
        return labels.astype(np.uint8)

    def _image_path(self, index: int) -> Path:
        return self.folder / f"{self.image_ids[index]}{self.image_suffix}"

    def _label_path(self, index: int) -> Path:
        return self.label_folder / f"{self.image_ids[index]}{self.label_suffix}"

    def aspect_ratios(self) -> np.ndarray:
        """Width / height of every image, float64 (len(self),); the heads of all label pictures are read."""
        ratios = []
        for index in range(len(self)):
            with Image.open(self._label_path(index)) as picture:
                ratios.append(picture.width / picture.height)
        return np.array(ratios)


def paired_names(images: str | Path, labels: str | Path, *, image_suffix: str, label_suffix: str) -> list[str]:
    """The paths below `images`, without the ending, of the files that end in `image_suffix`, sorted.

    Raises:
        DataError: a folder is missing, there is no image, or one has no label picture of that path below `labels`.
    """
    images, labels = Path(images), Path(labels)
    for name, folder in (("images", images), ("labels", labels)):
        if not folder.is_dir():
            raise DataError(
                f"{name}: no folder '{folder}'. Download the dataset (see README, \"Data\"), "
                f"or correct data.root or the `{name}` of this dataset."
            )
    names, label_names = (
        {path.relative_to(folder).as_posix().removesuffix(suffix) for path in folder.rglob(f"*{suffix}")}
        for folder, suffix in ((images, image_suffix), (labels, label_suffix))
    )
    if not names:
        raise DataError(f"images: '{images}' holds no file that ends in '{image_suffix}'. Set image_suffix.")
    without = sorted(names - label_names)
    if without:
        raise DataError(
            f"labels: {len(without)} of {len(names)} images have no label picture, such as "
            f"'{images / without[0]}{image_suffix}', which needs '{labels / without[0]}{label_suffix}'. Add the files, "
            "or set label_suffix."
        )
    if label_names - names:
        logger.warning(f"'{labels}': {len(label_names - names)} label pictures have no image; left out")
    return sorted(names)


def read_label_picture(path: str | Path) -> np.ndarray:
    """The values of a picture of one channel: grey of 1, 8 or 16 bits, or the indices of a palette.

    Returns:
        (H, W) uint8 or uint16.
    Raises:
        DataError: the file is missing, damaged, or has several channels.
    """
    try:
        with Image.open(io.BytesIO(Path(path).read_bytes())) as picture:
            mode, values = picture.mode, np.asarray(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not a picture of a known format"
        raise DataError(f"labels: cannot read '{path}' ({why}). Download or export the file again.") from error
    if values.ndim != 2 or mode not in ("1", "L", "P", "I", "I;16", "I;16B"):
        raise DataError(
            f"labels '{path}': the picture is of mode {mode} with shape {values.shape}; expected one channel whose "
            "values are classes. Convert colours to class numbers first."
        )
    if values.dtype not in (np.uint8, np.uint16):
        if values.min() < 0 or values.max() >= _MOST_VALUES:
            raise DataError(f"labels '{path}': values reach {values.min()} to {values.max()}; expected 0 to 65535.")
        values = values.astype(np.uint16)
    return values


def _ranges(values: Sequence[int]) -> str:
    """Numbers as text: "0, 7 to 9"."""
    ordered = sorted(values)
    parts: list[list[int]] = []
    for value in ordered:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts) or "none"
