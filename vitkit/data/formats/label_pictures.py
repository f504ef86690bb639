"""Folders of label images, one for each image, read as objects with masks.

Instances in one label image: every value, or colour, is an object and 0 (black) is none; values from 1000 on are CLASS
* 1000 + NUMBER, as in Cityscapes. Semantic label images: every connected region of a class is an object.
"""

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from vitkit.data.formats.annotated import UNREADABLE, AnnotatedImages, ImageFiles
from vitkit.data.formats.class_files import ClassFile, class_file_near, parse_class_file, read_colored_labels
from vitkit.data.io.image_files import ONE_CHANNEL_MODES, read_header, read_image, read_label_map
from vitkit.data.io.segmentations import mask_annotation
from vitkit.errors import DataError
from vitkit.ops.label_maps import colors_to_ids
from vitkit.structures import IGNORE_INDEX

CLASS_FACTOR = 1000


def read_instance_pictures(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read label images of instances.

    Args:
        annotations: folder of the label images, named like the images or with a suffix (`a_mask.png` for `a.jpg`).
        images: folder of the images.
    Raises:
        DataError: a folder is missing, or no label image belongs to an image.
    """
    return _read("instance_pictures", annotations, images)


def read_semantic_pictures(annotations: Path, images: Path | None, *, regions: bool = True) -> AnnotatedImages:
    """Read label images of classes, with 255 for no class. See `read_instance_pictures`.

    Args:
        regions: make each connected region an object; otherwise each class of an image is one, which is faster.
    """
    return _read("semantic_pictures", annotations, images, regions=regions)


def has_one_channel(path: Path) -> bool:
    """Return whether a label image holds numbers rather than colours."""
    try:
        return read_header(path, "labels").mode in ONE_CHANNEL_MODES
    except DataError:
        return False


def _read(format: str, annotations: Path, images: Path | None, *, regions: bool = True) -> AnnotatedImages:
    if images is None:
        raise DataError(f"images: label images in '{annotations}' also need the folder of their images. Give it.")
    labels, files = ImageFiles(annotations), ImageFiles(images)
    data = AnnotatedImages(format, annotations, images)
    class_file = class_file_near(annotations)
    names, colors, ignored = parse_class_file(class_file) if class_file else ClassFile({}, {}, None)
    data.notes.append(f"classes from {class_file}" if class_file else "no classes.txt names the classes")
    data.categories.extend({"id": value, "name": name} for value, name in names.items())
    used = set()
    for label_name in labels.names:
        name = _image_of(label_name, files)
        if name is None:
            data.leave_out("label images without an image", label_name)
            continue
        used.add(name)
        try:
            path = annotations / label_name
            if colors and format == "semantic_pictures" and not has_one_channel(path):
                values = read_colored_labels(path, colors)
            else:
                values = _read_values(path)
        except DataError as error:
            data.leave_out(UNREADABLE, str(error))
            continue
        height, width = values.shape
        image_id = data.add_image(name, width, height)
        objects = _instances(values) if format == "instance_pictures" else _regions(values, connected=regions)
        for value, mask in objects:
            if value not in names:
                if value == ignored and format == "semantic_pictures":
                    continue
                if format == "semantic_pictures" and names:
                    data.leave_out("regions of values that are not a class", f"{label_name} value {value}")
                    continue
                names[value] = "object" if value == 0 else f"class_{value}"
                data.categories.append({"id": value, "name": names[value]})
            data.add_object(image_id, value, **mask_annotation(mask))
    for name in files.names:
        if name not in used:
            data.leave_out("images without a label image", name)
    if not data.images:
        raise DataError(
            f"'{annotations}': no label image has its image below '{images}'. Give folders that belong together."
        )
    return data


def _image_of(label_name: str, files: ImageFiles) -> str | None:
    """Find the image of a label image: by its name, or by its name without what follows an underscore."""
    name = Path(label_name).with_suffix("").as_posix()
    while True:
        if (image := files.find(name)) is not None or "_" not in Path(name).name:
            return image
        name = name.rpartition("_")[0]


def _read_values(path: Path) -> np.ndarray:
    """Read a label image as (H, W) numbers; a coloured one as R + 256 G + 65536 B."""
    if has_one_channel(path):
        return read_label_map(path)
    return colors_to_ids(read_image(path, "labels"))


def _instances(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the class and the (H, W) bool mask of each instance; class 0 where the value does not encode one."""
    present = np.unique(values)
    has_classes = values.dtype == np.uint16 and present[-1] >= CLASS_FACTOR
    for value in present[present > 0].tolist():
        if not has_classes:
            yield 0, values == value
        elif value >= CLASS_FACTOR:  # lower values are classes without instances
            yield value // CLASS_FACTOR, values == value


def _regions(values: np.ndarray, *, connected: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the class and the (H, W) bool mask of each connected region, or of each class."""
    for value in np.unique(values).tolist():
        if value != IGNORE_INDEX and not connected:
            yield value, values == value
        elif value != IGNORE_INDEX:
            number, regions = cv2.connectedComponents((values == value).view(np.uint8), connectivity=8)
            yield from ((value, regions == k) for k in range(1, number))
