"""Folders of label images, one for each image, read as objects with masks.

Instances in one label image: every value, or color, is an object, except 0 (black) and void; values from 1000 on are
CLASS * 1000 + NUMBER, as in Cityscapes. Semantic label images: every connected region of a class is an object, except
the background: the class of this name or, where no file names the classes and the values are two, or gray levels, 0.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path

import cv2
import numpy as np

from vitkit.data.formats.annotated import UNREADABLE, AnnotatedImages
from vitkit.data.formats.class_files import (
    ClassFile,
    check_palettes,
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
from vitkit.structures import IGNORE_INDEX

CLASS_FACTOR = 1000
_BACKGROUND = ("background", "_background_")  # names of a class without objects, in lower case
_GRAY = 0x010101
"""R + 256 G + 65536 B of the darkest gray."""
_MAX_CLASSES = 1024
"""Maximum number of classes in one label image; each takes a pass over the image."""


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
    class_file = find_class_file(folder)
    try:
        has_classes = max(read_label_map(path).max() for path in paths) >= CLASS_FACTOR
    except DataError:
        if all(map(has_one_channel, paths)):
            raise
        read_label_colors(paths[0])  # as JPEG, they are not label images
        return {"semantic_maps": evidence} if class_file and parse_class_file(class_file).colors else {}
    if has_classes or class_file:
        return {"instance_maps" if has_classes else "semantic_maps": evidence}
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
    if images is None or images.resolve() == annotations.resolve():
        raise DataError(f"images: label images in '{annotations}' also need the folder of their photos. Give it.")
    labels, files = ImageFiles(annotations), ImageFiles(images)
    data = AnnotatedImages(format, annotations, images)
    class_file = find_class_file(annotations)
    names, colors, ignored = parse_class_file(class_file) if class_file else ClassFile({}, {}, None)
    is_semantic, is_gray, has_classes = format == "semantic_maps", False, False
    if is_semantic:
        if not colors:
            check_palettes(annotations / name for name in labels.names)
        without, is_gray, notes = _rule_of_classes(annotations, labels.names, names, colors)
    else:
        without, has_classes, notes = _rule_of_instances(annotations, labels.names)
        names, colors, ignored = (names, {}, ignored) if has_classes else ClassFile({}, {}, None)
    takes_named = is_semantic and bool(names)
    source = f"classes from {class_file}" if names else f"{class_file} is not used: values are objects without a class"
    data.notes += [source if class_file else "no classes.txt names the classes", *notes]
    data.categories.extend({"id": value, "name": names[value]} for value in names if value not in without)
    used: dict[str, str] = {}
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
            values = _read_values(path, colors, is_gray=is_gray)
        except LossyImageError:
            raise
        except DataError as error:
            data.leave_out(UNREADABLE, str(error))
            continue
        height, width = values.shape
        if is_semantic and (count := len(np.unique(values))) > _MAX_CLASSES:
            raise DataError(
                f"labels '{path}': {count} different values; expected at most {_MAX_CLASSES} classes. Is it a "
                "photograph, or a label image of instances?"
            )
        image_id = data.add_image(name, width, height)
        if is_semantic:
            objects = _regions(values, without, connected=regions)
        else:
            objects = _instances(values, without, has_classes=has_classes)
        for count, (value, indices) in enumerate(objects, start=1):
            check_count(count, f"labels '{path}'")
            if value not in names:
                if value == ignored:
                    continue
                if takes_named:
                    data.leave_out("regions of values that are not a class", f"{label_name} value {value}")
                    continue
                names[value] = "object" if value == 0 and not is_semantic else f"class_{value}"
                data.categories.append({"id": value, "name": names[value]})
            data.add_object(image_id, value, **pixels_annotation(indices, height, width))
    for name in files.names:
        if name not in used:
            data.leave_out("images without a label image", name)
    if not data.images:
        if UNREADABLE in data.left_out:
            raise DataError(data.left_out[UNREADABLE][0])
        raise DataError(
            f"'{annotations}': no label image has its image below '{images}'. Give folders that belong together."
        )
    return data


def _image_of(label_name: str, files: ImageFiles) -> str | None:
    """Find the image of a label image: by its name, or by the part of it before an underscore and not only digits."""
    name = stem = Path(label_name).with_suffix("").as_posix()
    while True:
        is_other_number = name != stem and not any(map(str.isalpha, stem[len(name) :]))  # s_2 is not of s.jpg
        image = None if is_other_number else files.find(name)
        if image is not None or "_" not in Path(name).name:
            return image
        name = name.rpartition("_")[0]


def _read_values(path: Path, colors: dict[int, int], *, is_gray: bool = False) -> np.ndarray:
    """Read a label image as (H, W) numbers; a colored one as the values of its colors, or as R + 256 G + 65536 B, or if
    `is_gray`, one of its channels, which are equal in all label images."""
    if colors or is_gray or has_one_channel(path):
        return read_class_values(path, colors)
    return colors_to_ids(read_label_colors(path))


def _count_pixels(folder: Path, names: Iterable[str], colors: dict[int, int], limit: int) -> Counter[int]:
    """Return how many pixels of all label images have each value; stop where the number of values exceeds a limit."""
    pixels: Counter[int] = Counter()
    for name in names:
        with suppress(DataError):  # named where it is read for its objects
            pixels.update(count_pixels(_read_values(folder / name, colors)))
        if len(pixels) > limit:
            break
    return pixels


def _rule_of_classes(
    folder: Path, files: Iterable[str], names: dict[int, str], colors: dict[int, int]
) -> tuple[set[int], bool, list[str]]:
    """Return the values that are not objects, whether all label images are gray in several channels, and notes."""
    pixels = _count_pixels(folder, files, colors, _MAX_CLASSES)  # more are an error of the image
    is_gray = max(pixels, default=0) >= _GRAY and not any(value % _GRAY for value in pixels)
    if is_gray:
        pixels = Counter({value // _GRAY: count for value, count in pixels.items()})
    # In colors, 255 is red.
    is_colored = not colors and not is_gray and not all(has_one_channel(folder / name) for name in files)
    without = {value for value in pixels if not is_colored and is_void(value, pixels, names)}
    background = {value for value, name in names.items() if name.lower() in _BACKGROUND}
    if not names and (has_gray_levels(pixels) or len(pixels.keys() - without) == 2):
        background = {0}
    what = f"{', '.join(map(str, background))} is the background, without objects"
    about_255 = [] if is_colored else describe_255(pixels, names)
    return without | background, is_gray, about_255 + _describe(what, pixels, background)


def _rule_of_instances(folder: Path, files: Iterable[str]) -> tuple[set[int], bool, list[str]]:
    """Return the values that are not objects, whether values from 1000 on encode classes, and notes."""
    pixels = _count_pixels(folder, (name for name in files if has_one_channel(folder / name)), {}, limit=1 << 16)
    lower = {value for value in pixels if 0 < value < CLASS_FACTOR}
    # The numbers of more than 999 objects also reach 1000, but include those between the values of classes and 1000.
    if max(pixels, default=0) >= CLASS_FACTOR and max(lower, default=0) <= IGNORE_INDEX:
        return set(), True, _describe("values below 1000 are classes without instances, left out", pixels, lower)
    # Void is drawn around objects, whose numbers are consecutive and far below it.
    has_void = max(pixels, default=0) == IGNORE_INDEX and IGNORE_INDEX - 1 not in pixels
    without = {value for value in pixels if has_void and is_void(value, pixels, {})}
    return without, False, _describe("255 is no object, left out", pixels, without)


def _describe(what: str, pixels: Counter[int], values: Set[int]) -> list[str]:
    """Return a note about values that are not objects, if there are any."""
    count = sum(pixels[value] for value in values)
    return [f"{what}: {count / pixels.total():.1%} of the pixels"] if count else []


def _objects(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each number above 0 in (H, W) numbers, and its pixels: (n,) int64, counted down the columns, ascending."""
    flat = numbers.T.ravel()
    # Sorting finds all objects at once, where comparing with each number takes minutes for thousands of them. A small
    # type is sorted in linear time.
    flat = flat.astype(np.min_scalar_type(int(flat.max())))
    order = np.argsort(flat, kind="stable")
    present, starts = np.unique(flat[order], return_index=True)
    for number, indices in zip(present.tolist(), np.split(order, starts[1:])):
        if number > 0:
            yield number, indices


def _instances(values: np.ndarray, without: Set[int], *, has_classes: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the class of each instance, 0 if values do not encode it, and its pixels; not for values in `without`."""
    for value, indices in _objects(values):
        if not has_classes and value not in without:
            yield 0, indices
        elif has_classes and value >= CLASS_FACTOR:  # lower values are classes without instances
            yield value // CLASS_FACTOR, indices


def _regions(values: np.ndarray, without: Set[int], *, connected: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the class and the pixels of each connected region, or of each class, but for the values in `without`."""
    for value in np.unique(values).tolist():
        if value not in without:
            regions = (values == value).astype(np.uint8)
            if connected:
                _, regions = cv2.connectedComponents(regions, connectivity=8)
            yield from ((value, indices) for _, indices in _objects(regions))
