"""Fits annotations to the sizes of the image files: one rule for every format that states sizes.

Where an image was annotated at another scale than that of its file, its boxes, masks and keypoints are scaled. Swapped
widths and heights are left to `--fix sizes`, and other differences are errors: nothing tells where the objects lie.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from vitkit.errors import DataError
from vitkit.io.coco_schema import is_box, is_number
from vitkit.io.image_files import MAX_PIXELS, upright_size
from vitkit.io.segmentations import (
    decode_segmentation,
    describe_wrong_run_lengths,
    is_side,
    mask_annotation,
    round_pixels,
)
from vitkit.text_format import pluralize

_MAX_MEASURED = 2000
"""Number of images above which only some are measured, unless all are asked for: 2000 take about two seconds."""
_NUM_SAMPLED = 500
_SLACK = 0.1
"""How far an inexact box may extend beyond its listed image, as a fraction of the step to the file's size."""
_MIN_BEYOND = 0.05
"""Fraction of the boxes that must extend farther for all of them to be taken as the file's pixels."""
MAX_FRACTION = 1.01
"""Boxes without a larger number are fractions of their images, which computing may round up."""


class Scaling(NamedTuple):
    """The scaling of objects that fits them to the image files."""

    notes: list[str]
    sizes: dict[int, tuple[tuple[int, int], tuple[int, int]]]
    """Id of each image whose objects are scaled -> (width, height) as it was listed, and that of its file."""

    def apply(self, annotations: Iterable[Any]) -> None:
        """Scale objects, in place."""
        for annotation in annotations if self.sizes else ():
            if sizes := _sizes_of(annotation, self.sizes):
                _scale(annotation, *sizes)


def fit_images(
    images: Sequence[Any],
    folder: Path,
    annotations: Callable[[], Iterable[Any]],
    *,
    measure_all: bool = True,
    strict: bool = True,
) -> Scaling:
    """Set the sizes of images to those of their files, in place, and find out which objects have to be scaled.

    Files that cannot be read, and entries that are not as COCO defines them, are left to other checks.

    Args:
        images: `images` in COCO's format.
        folder: folder of the images.
        annotations: returns the annotations, which are only read if there is an image that may have to be scaled.
        measure_all: whether to read the size of every file; otherwise of a large dataset only some are read, and the
            others if one of these differs.
        strict: whether sizes that differ by more than a scale are errors.
    Raises:
        DataError: an image was annotated with another shape than its file has.
    """
    images = [image for image in images if _is_measurable(image)]
    sampled = images
    if not measure_all and len(images) > _MAX_MEASURED:
        sampled = images[:: len(images) // _NUM_SAMPLED]
    files = _other_sizes(sampled, folder)
    if files and len(sampled) < len(images):
        files = _other_sizes(images, folder)
    by_id = {image["id"]: image for image in images if image["id"] in files}
    listed = {id_: _read_listed_size(image) for id_, image in by_id.items()}
    sizes = {id_: (listed[id_], size) for id_, size in files.items() if is_scaled(listed[id_], size)}
    others = [image for id_, image in by_id.items() if id_ not in sizes and files[id_] != listed[id_][::-1]]
    if strict and others:
        raise DataError(size_difference(others[0], files[others[0]["id"]], len(others)))
    if not sizes:
        return Scaling([], {})
    are_of_files = _fit_files(sizes, annotations())
    example, ((width, height), (file_width, file_height)) = next(iter(sizes.items()))
    for id_, (_, size) in sizes.items():
        by_id[id_]["width"], by_id[id_]["height"] = size
    where = f"'{by_id[example]['file_name']}', {width}x{height} for a file of {file_width}x{file_height} pixels"
    text = f"{pluralize(len(sizes), 'images', 'are')} listed with another size than the file's, such as {where}"
    if are_of_files:
        return Scaling([f"{text}: the boxes fit the files, so only the sizes are corrected"], {})
    return Scaling([f"{text}: the boxes, masks and keypoints are scaled"], sizes)


def _sizes_of(annotation: Any, sizes: Mapping[int, Any]) -> Any:
    image_id = annotation.get("image_id") if isinstance(annotation, dict) else None
    return sizes.get(image_id) if isinstance(image_id, int) else None


def check_size(image: Mapping[str, Any], size: tuple[int, int]) -> None:
    """Raise DataError unless an image has the annotated size; `size` is the file's (width, height)."""
    if size != _read_listed_size(image):
        raise DataError(size_difference(image, size))


def size_difference(image: Mapping[str, Any], size: tuple[int, int], count: int = 1) -> str:
    """Return the error message for an image whose file has another (width, height) than annotated.

    Args:
        count: number of images with such differences.
    """
    more = f", and {count - 1} more images differ" if count > 1 else ""
    if size == _read_listed_size(image)[::-1]:
        return f"{two_sizes(image, size)}{more}. Fix it: vitkit data convert … --fix sizes"
    return (
        f"{two_sizes(image, size)}{more}: one is not the other at another scale, so nothing tells where the objects "
        "lie. Give the images as they were annotated; if only the listed sizes are wrong: vitkit data convert … "
        "--fix sizes"
    )


def two_sizes(image: Mapping[str, Any], size: tuple[int, int]) -> str:
    """Return "image 'a.jpg' is 96x64 pixels … and annotated as 192x128" for a file of that (width, height)."""
    return (
        f"image {image['file_name']!r} is {size[0]}x{size[1]} pixels (width x height, upright) and annotated as "
        f"{image['width']}x{image['height']}"
    )


def _is_measurable(image: Any) -> bool:
    if not isinstance(image, dict) or not isinstance(image.get("file_name"), str):
        return False
    return type(image.get("id")) is int and is_side(image.get("width")) and is_side(image.get("height"))


def _read_listed_size(image: Mapping[str, Any]) -> tuple[int, int]:
    return image["width"], image["height"]


def _other_sizes(images: Sequence[Mapping[str, Any]], folder: Path) -> dict[int, tuple[int, int]]:
    """Return the (width, height) of each file that has another size than listed, by the image's id."""
    sizes = {}
    for image in images:
        try:
            size = upright_size(folder / image["file_name"])
        except DataError:
            continue
        if size != _read_listed_size(image):
            sizes[image["id"]] = size
    return sizes


def is_scaled(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two sizes (width, height) are one image at two scales, within the rounding of the smaller one."""
    small, large = sorted((a, b))
    if small[0] == large[0] or small[1] == large[1]:
        return False
    # Sizes are rounded, or rounded down.
    low = max((side - 0.5) / full for side, full in zip(small, large))
    high = min((side + 1) / full for side, full in zip(small, large))
    return low < high and small[1] < large[1]


def _fit_files(
    sizes: Mapping[int, tuple[tuple[int, int], tuple[int, int]]], annotations: Iterable[Mapping[str, Any]]
) -> bool:
    """Whether the objects are in the pixels of the files, or are fractions, so that only the listed sizes are wrong."""
    beyond_listed = beyond_file = num_boxes = 0
    largest = 0.0
    for annotation in annotations:
        if not (of_image := _sizes_of(annotation, sizes)):
            continue
        (width, height), (file_width, file_height) = of_image
        segmentation = annotation.get("segmentation")
        if isinstance(segmentation, dict) and segmentation.get("size") == [file_height, file_width]:
            return True
        if is_box(annotation.get("bbox")):
            x, y, box_width, box_height = annotation["bbox"]
            right, bottom = width + 1 + _SLACK * (file_width - width), height + 1 + _SLACK * (file_height - height)
            largest = max(largest, *annotation["bbox"])
            num_boxes += 1
            beyond_listed += x + box_width > right or y + box_height > bottom
            beyond_file += x + box_width > file_width + 1 or y + box_height > file_height + 1
    return 0 < largest <= MAX_FRACTION or (beyond_listed > _MIN_BEYOND * num_boxes and not beyond_file)


def _scale(annotation: dict[str, Any], listed: tuple[int, int], size: tuple[int, int]) -> None:
    """Scale an object from the listed (width, height) of its image to that of the file."""
    scales = size[0] / listed[0], size[1] / listed[1]
    if is_box(annotation.get("bbox")):
        annotation["bbox"] = _scale_coordinates(annotation["bbox"], scales)
    if is_number(annotation.get("area")):
        annotation["area"] = round_pixels(annotation["area"] * scales[0] * scales[1])
    keypoints, segmentation = annotation.get("keypoints"), annotation.get("segmentation")
    if isinstance(keypoints, list) and all(map(is_number, keypoints)):
        points = zip(keypoints[::3], keypoints[1::3], keypoints[2::3])
        annotation["keypoints"] = [v for x, y, seen in points for v in (*_scale_coordinates([x, y], scales), seen)]
    if isinstance(segmentation, list):
        are_numbers = [isinstance(polygon, list) and all(map(is_number, polygon)) for polygon in segmentation]
        if all(are_numbers):
            annotation["segmentation"] = [_scale_coordinates(polygon, scales) for polygon in segmentation]
    elif describe_wrong_run_lengths(segmentation, listed[1], listed[0]) is None and listed[0] * listed[1] <= MAX_PIXELS:
        mask = decode_segmentation(segmentation, listed[1], listed[0])
        fields = mask_annotation(_resize_mask(mask, size))
        annotation |= {"segmentation": fields["segmentation"], "area": fields["area"]}


def _scale_coordinates(values: Sequence[float], scales: tuple[float, float]) -> list[float]:
    return [round_pixels(value * scales[k % 2]) for k, value in enumerate(values)]


def _resize_mask(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an (H, W) uint8 mask of 0 and 1; what is thinner than a pixel keeps the pixels that it touches."""
    if size[0] > mask.shape[1]:
        return cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST) > 0
    shares = cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_AREA)
    return shares >= 0.5 if (shares >= 0.5).any() else shares > 0
