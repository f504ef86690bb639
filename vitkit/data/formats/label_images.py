"""Folders of label images, one for each image, read as objects with masks.

Instances in one label image: every value, or color, is an object, except 0 (black); values from 1000 on are CLASS
* 1000 + NUMBER, as in Cityscapes. Semantic label images: every connected region of a class is an object; 0 is the
background where no file names the classes and the values are two, or gray levels.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from vitkit.data.formats.annotated import UNREADABLE, AnnotatedImages
from vitkit.data.formats.class_files import (
    ClassFile,
    count_pixels,
    describe_255,
    find_class_file,
    has_gray_levels,
    has_one_channel,
    is_void,
    parse_class_file,
    read_class_values,
)
from vitkit.errors import DataError, LossyImageError
from vitkit.io.folders import IMAGE_SUFFIXES, ImageFiles, data_files
from vitkit.io.image_files import read_label_colors, read_label_map
from vitkit.io.parsing import check_count
from vitkit.io.segmentations import pixels_annotation
from vitkit.ops.label_maps import colors_to_ids

CLASS_FACTOR = 1000
_GRAY = 0x010101
"""R + 256 G + 65536 B of the darkest gray."""
_MAX_CLASSES = 1024
"""Maximum number of classes in one label image; each takes a pass over the image."""


class _MapObject(NamedTuple):
    """An object in a label image."""

    value: int
    """The number of its class."""
    indices: np.ndarray
    """(n,) int64, its pixels, counted down the columns of the image, in ascending order."""


def detect_label_images(folder: Path, num_opened: int) -> dict[str, str]:
    """Return the possible kinds of label images, each with a file: "semantic_maps" if a file names classes,
    "instance_maps" if values encode them.

    Args:
        num_opened: the number of images that are looked at.
    """
    files = (path for path in data_files(folder) if path.suffix.lower() in IMAGE_SUFFIXES)
    paths = list(islice(files, num_opened))
    if not paths:
        return {}
    evidence = paths[0].name
    if not all(map(_has_numbers, paths)):
        read_label_colors(paths[0])  # as JPEG, they are not label images
        class_file = find_class_file(folder)
        return {"semantic_maps": evidence} if class_file and parse_class_file(class_file).colors else {}
    if any(read_label_map(path).max() >= CLASS_FACTOR for path in paths):
        return {"instance_maps": evidence}
    if find_class_file(folder):
        return {"semantic_maps": evidence}
    return {"semantic_maps": evidence, "instance_maps": evidence}


def read_instance_maps(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read label images of instances.

    Args:
        annotations: folder of the label images, named like the images or with a suffix (`a_mask.png` for `a.jpg`).
        images: folder of the images.
    Raises:
        DataError: a folder is missing, or no label image belongs to an image.
    """
    return _read("instance_maps", annotations, images)


def read_semantic_maps(annotations: Path, images: Path | None, *, regions: bool = True) -> AnnotatedImages:
    """Read label images of classes; `is_void` says whether 255 is one. See `read_instance_maps`.

    Args:
        regions: make each connected region an object; otherwise each class of an image is one, which is faster.
    """
    return _read("semantic_maps", annotations, images, regions=regions)


def _read(format: str, annotations: Path, images: Path | None, *, regions: bool = True) -> AnnotatedImages:
    if images is None:
        raise DataError(f"images: label images in '{annotations}' also need the folder of their images. Give it.")
    labels, files = ImageFiles(annotations), ImageFiles(images)
    data = AnnotatedImages(format, annotations, images)
    class_file = find_class_file(annotations)
    names, colors, ignored = parse_class_file(class_file) if class_file else ClassFile({}, {}, None)
    takes_named = format == "semantic_maps" and bool(names)
    data.notes.append(f"classes from {class_file}" if class_file else "no classes.txt names the classes")
    data.categories.extend({"id": value, "name": name} for value, name in names.items())
    used: dict[str, str] = {}
    without, is_gray = set(), False
    if format == "semantic_maps":
        pixels = _count_pixels(annotations, labels.names, colors)
        is_gray = max(pixels, default=0) >= _GRAY and not any(value % _GRAY for value in pixels)
        if is_gray:
            pixels = {value // _GRAY: count for value, count in pixels.items()}
        without, notes = _values_without_objects(pixels, names)
        data.notes += notes
    for label_name in labels.names:
        name = _image_of(label_name, files)
        if name is None:
            data.leave_out("label images without an image", label_name)
            continue
        if used.setdefault(name, label_name) != label_name:
            raise DataError(
                f"'{annotations}': {used[name]} and {label_name} are both of the image {name}; expected one "
                "label image of each image, with all of its objects. Merge them, or move the others to another folder."
            )
        try:
            path = annotations / label_name
            values = _read_values(path, colors if format == "semantic_maps" else {}, is_gray=is_gray)
        except LossyImageError:
            raise
        except DataError as error:
            data.leave_out(UNREADABLE, str(error))
            continue
        height, width = values.shape
        if format == "semantic_maps" and (count := len(np.unique(values))) > _MAX_CLASSES:
            raise DataError(
                f"labels '{path}': {count} different values; expected at most {_MAX_CLASSES} classes. Is it a "
                "photograph, or a label image of instances?"
            )
        image_id = data.add_image(name, width, height)
        objects = _instances(values) if format == "instance_maps" else _regions(values, without, connected=regions)
        for count, (value, indices) in enumerate(objects, start=1):
            check_count(count, f"labels '{path}'")
            if value not in names:
                if value == ignored and format == "semantic_maps":
                    continue
                if takes_named:
                    data.leave_out("regions of values that are not a class", f"{label_name} value {value}")
                    continue
                names[value] = "object" if value == 0 and format == "instance_maps" else f"class_{value}"
                data.categories.append({"id": value, "name": names[value]})
            data.add_object(image_id, value, **pixels_annotation(indices, height, width))
    for name in files.names:
        if name not in used:
            data.leave_out("images without a label image", name)
    if not data.images:
        raise DataError(
            f"'{annotations}': no label image has its image below '{images}'. Give folders that belong together."
        )
    return data


def _image_of(label_name: str, files: ImageFiles) -> str | None:
    """Find the image of a label image: by its name, or by the part of it before an underscore."""
    name = Path(label_name).with_suffix("").as_posix()
    while True:
        if (image := files.find(name)) is not None or "_" not in Path(name).name:
            return image
        name = name.rpartition("_")[0]


def _read_values(path: Path, colors: dict[int, int], *, is_gray: bool = False) -> np.ndarray:
    """Read a label image as (H, W) numbers; a colored one as the values of its colors, or as R + 256 G + 65536 B.

    Args:
        is_gray: the channels of all label images are equal, and one of them is read.
    """
    if colors:
        return read_class_values(path, colors)
    if is_gray or has_one_channel(path):
        return read_label_map(path)
    return colors_to_ids(read_label_colors(path))


def _has_numbers(path: Path) -> bool:
    """Whether a label image has one channel, or several that are equal."""
    if has_one_channel(path):
        return True
    with suppress(DataError):
        read_label_map(path)
        return True
    return False


def _count_pixels(folder: Path, names: Iterable[str], colors: dict[int, int]) -> Counter[int]:
    """Return how many pixels of all label images have each value."""
    pixels: Counter[int] = Counter()
    for name in names:
        with suppress(DataError):  # named where it is read for its objects
            pixels.update(count_pixels(_read_values(folder / name, colors)))
        if len(pixels) > _MAX_CLASSES:  # which is an error of the image
            break
    return pixels


def _values_without_objects(pixels: Mapping[int, int], names: Mapping[int, str]) -> tuple[set[int], list[str]]:
    """Return the values whose regions are not objects, for no class or the background, and notes about them."""
    without = {value for value in pixels if is_void(value, pixels, names)}
    notes = describe_255(pixels, names)
    if 0 in pixels and not names and (has_gray_levels(pixels) or len(pixels.keys() - without) == 2):
        without.add(0)
        notes.append(f"0 is the background, without objects: {pixels[0] / sum(pixels.values()):.1%} of the pixels")
    return without, notes


def _objects(numbers: np.ndarray) -> Iterator[_MapObject]:
    """Yield the pixels of each number above 0 in (H, W) numbers, as an object whose value is the number."""
    flat = numbers.T.ravel()
    # Sorting finds all objects at once, where comparing with each number takes minutes for thousands of them. A small
    # type is sorted in linear time.
    flat = flat.astype(np.min_scalar_type(int(flat.max())))
    order = np.argsort(flat, kind="stable")
    present, starts = np.unique(flat[order], return_index=True)
    for number, indices in zip(present.tolist(), np.split(order, starts[1:])):
        if number > 0:
            yield _MapObject(number, indices)


def _instances(values: np.ndarray) -> Iterator[_MapObject]:
    """Yield each instance; its class is 0 where the value does not encode one."""
    has_classes = values.dtype == np.uint16 and values.max() >= CLASS_FACTOR
    for value, indices in _objects(values):
        if not has_classes:
            yield _MapObject(0, indices)
        elif value >= CLASS_FACTOR:  # lower values are classes without instances
            yield _MapObject(value // CLASS_FACTOR, indices)


def _regions(values: np.ndarray, without: Set[int], *, connected: bool) -> Iterator[_MapObject]:
    """Yield each connected region, or each class, but for the values in `without`."""
    for value in np.unique(values).tolist():
        if value not in without:
            regions = (values == value).astype(np.uint8)
            if connected:
                _, regions = cv2.connectedComponents(regions, connectivity=8)
            yield from (obj._replace(value=value) for obj in _objects(regions))
