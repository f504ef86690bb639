"""COCO annotation files: reading them, and finding what is wrong with them before training does."""

import gc
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from vitkit.errors import ConfigError, DataError

_REQUIRED = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}
_FARTHEST = 10
"""How far a polygon may reach, in sizes of its image."""


def read_coco_file(path: str | Path) -> dict[str, Any]:
    """The content of a detection annotation file, with every reference between its parts checked.

    Returns:
        The file's dict; `images`, `annotations` and `categories` are there, with the keys that detection needs.
    Raises:
        DataError: no such file, not JSON, a missing part or key, an id twice or unknown, no image, no category.
    """
    path = Path(path)
    content = read_json(path)
    missing = [part for part in _REQUIRED if not isinstance(content, dict) or not isinstance(content.get(part), list)]
    if missing:
        raise DataError(
            f"{path.name}: no list {' and no list '.join(map(repr, missing))} at the top level of '{path}'. "
            "Expected a COCO detection file: {'images': [...], 'annotations': [...], 'categories': [...]}."
        )
    for part, keys in _REQUIRED.items():
        for position, entry in enumerate(content[part]):
            for key in keys:
                # Annotation ids are never used to find anything, and some exporters leave them out.
                if not isinstance(entry, dict) or (key not in entry and (part, key) != ("annotations", "id")):
                    raise DataError(f"{path.name}: entry {position} of '{part}' has no {key!r}: got {_short(entry)}.")
    if not content["images"]:
        raise DataError(f"{path.name}: the list 'images' in '{path}' is empty; expected at least one image.")
    if not content["categories"]:
        raise DataError(f"{path.name}: the list 'categories' in '{path}' is empty; expected at least one class.")
    image_ids = unique_ids(content["images"], "image", path.name)
    category_ids = unique_ids(content["categories"], "category", path.name)
    check_image_entries(content["images"], path.name)
    for annotation in content["annotations"]:
        for key, known, part in (("image_id", image_ids, "images"), ("category_id", category_ids, "categories")):
            if not isinstance(annotation[key], int) or annotation[key] not in known:
                raise DataError(
                    f"{path.name}: annotation {annotation.get('id')} has {key} {annotation[key]!r}, which is not among "
                    f"the {len(known)} ids in '{part}'. Remove the annotation or add the entry."
                )
    return content


def check_image_entries(images: list[dict], file_name: str) -> None:
    """
    Raises:
        DataError: a picture's name is no text, or its size no size.
    """
    for image in images:
        check_file_name(image, f"{file_name}: image {image['id']}")
        if not all(isinstance(image[side], int) and 0 < image[side] < 2**31 for side in ("width", "height")):
            raise DataError(
                f"{file_name}: image {image['id']} ('{image['file_name']}') has width {image['width']!r} and height "
                f"{image['height']!r}; expected whole numbers above 0."
            )


def check_file_name(entry: Mapping[str, Any], where: str) -> None:
    """
    Raises:
        DataError: the `file_name` of an entry is no text.
    """
    if not isinstance(entry["file_name"], str) or not entry["file_name"]:
        raise DataError(f"{where} has file_name {entry['file_name']!r}; expected the name of a file.")


def first_images(content: dict[str, Any], count: int | None) -> dict[str, Any]:
    """The content of an annotation file without all but the first `count` images and what belongs to them.

    Raises:
        ConfigError: count is below 1.
    """
    if count is None:
        return content
    if count < 1:
        raise ConfigError(f"first: got {count}; expected at least 1, or none for all images.")
    images = content["images"][:count]
    kept = {image["id"] for image in images}
    annotations = [annotation for annotation in content["annotations"] if annotation["image_id"] in kept]
    return {**content, "images": images, "annotations": annotations}


def read_json(path: Path) -> Any:
    """
    Raises:
        DataError: no such file, or not JSON.
    """
    if not path.is_file():
        raise DataError(
            f"annotations: no file '{path}'. Download the dataset (see README, \"Data\"), "
            "or correct data.root or the `annotations` of this dataset."
        )
    collects = gc.isenabled()
    # Else the garbage collector looks through the millions of new objects again and again, for most of the time.
    gc.disable()
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path.name}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg} ('{path}', "
            f"{path.stat().st_size} bytes). A truncated download looks like this: fetch the file again."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path.name}: '{path}' is not text ({error}). Expected a COCO file in JSON.") from error
    finally:
        if collects:
            gc.enable()


def unique_ids(entries: list[dict], kind: str, file_name: str) -> set[int]:
    """The `id` of every entry.

    Raises:
        DataError: one is not a whole number, or there twice.
    """
    seen: set[int] = set()
    for entry in entries:
        if not isinstance(entry["id"], int) or not -(2**63) <= entry["id"] < 2**63:
            raise DataError(f"{file_name}: {kind} id {entry['id']!r} is not a whole number (of at most 64 bits).")
        if entry["id"] in seen:
            raise DataError(f"{file_name}: {kind} id {entry['id']} is there twice; ids must be unique.")
        seen.add(entry["id"])
    return seen


def box_fault(bbox: Any, image: Mapping[str, Any]) -> str | None:
    """What is wrong with an annotation's `bbox` ([x, y, width, height], pixels) in its image; None if nothing is."""
    try:
        x, y, width, height = bbox
        finite = all(math.isfinite(value) for value in bbox)
    except (TypeError, ValueError):
        return "expected four numbers [x, y, width, height]"
    if not finite:
        return "every number must be finite"
    if width <= 0 or height <= 0:
        return f"{'width' if width <= 0 else 'height'} must be positive"
    if x >= image["width"] or y >= image["height"] or x + width <= 0 or y + height <= 0:
        return f"it lies outside the image of {image['width']}x{image['height']} pixels"
    return None


def is_well_formed_box(bbox: Any) -> bool:
    """Whether a box is four finite numbers of no negative size, if perhaps empty or outside its image."""
    numbers = isinstance(bbox, list) and len(bbox) == 4 and all(isinstance(value, int | float) for value in bbox)
    return numbers and all(map(math.isfinite, bbox)) and min(bbox[2:]) >= 0


def segmentation_fault(segmentation: Any, image: Mapping[str, Any]) -> str | None:
    """What is wrong with an annotation's `segmentation` (polygons or run lengths); None if nothing is."""
    if segmentation is None:
        return "there is none, and masks=True needs one"
    if isinstance(segmentation, list):
        if not segmentation or not all(map(_is_polygon, segmentation)):
            return "expected a list of polygons, each a flat list [x, y, x, y, ...] of at least three finite points"
        # pycocotools takes memory for every pixel that an outline passes, and crashes on very large numbers.
        farthest = max(abs(value) for part in segmentation for value in part)
        if farthest > _FARTHEST * max(image["height"], image["width"]):
            return f"a polygon reaches to {farthest:g}, far outside the image of {image['width']}x{image['height']}"
        return None
    if not isinstance(segmentation, dict) or not {"size", "counts"} <= segmentation.keys():
        return "expected a list of polygons or run lengths {'size': [height, width], 'counts': ...}"
    size, counts = segmentation["size"], segmentation["counts"]
    if size != [image["height"], image["width"]]:
        return f"its size {size} is not the image's [{image['height']}, {image['width']}]"
    try:
        runs = counts if isinstance(counts, list) else _runs(counts)
        # pycocotools leaves what short run lengths do not reach uninitialised, so they must not get there.
        if min(runs, default=-1) >= 0 and sum(runs) == image["height"] * image["width"]:
            return None
    except (TypeError, ValueError, AttributeError, IndexError):
        return "its counts are not run lengths"
    return f"its run lengths cover {sum(runs)} pixels of the image's {image['height'] * image['width']}"


def _is_polygon(part: Any) -> bool:
    try:
        return len(part) >= 6 and len(part) % 2 == 0 and all(map(math.isfinite, part))
    except (TypeError, OverflowError):
        return False


def _runs(counts: str) -> list[int]:
    """The run lengths in COCO's compressed string: groups of 5 bits, lowest first, each a difference to the
    run before last from the fourth on."""
    runs: list[int] = []
    value = shift = 0
    for byte in counts.encode("ascii"):
        code = byte - 48
        if not 0 <= code < 64:
            raise ValueError(f"character {chr(byte)!r}")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:  # the last group, whose highest bit is the sign
            value -= (1 << shift) if code & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("the string ends within a number")
    return runs


def decode_segmentation(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Polygons, compressed or uncompressed run lengths to a mask.

    Returns:
        (height, width) uint8 of 0 and 1.
    """
    if isinstance(segmentation, list):
        encoded = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        encoded = coco_mask.frPyObjects(segmentation, height, width)
    else:
        encoded = segmentation
    return coco_mask.decode(encoded)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
