"""Reads what exporters add to COCO's fields or write in another form: rotations, texts as ids, paths, addresses."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from vitkit.errors import DataError
from vitkit.io.coco_schema import ANNOTATED_CLASSES, FileIssue, is_box, is_number
from vitkit.io.folders import ImageFiles, is_hidden
from vitkit.io.image_files import ImageStore
from vitkit.io.segmentations import polygon_box, rotate_box
from vitkit.text_format import pluralize

_FLOATS = "whole numbers written as 1.0, such as ids"
_CHECKPOINTS = ".ipynb_checkpoints"
TURNS = ("rotation", "angle", "theta", "rotated_bbox", "bbox_rotated", "rbbox", "obb")
"""Fields that turn a box in ways that tools do not agree on."""
UNSET = (None, 0, "", "0", "false", "False")
"""The values of a flag in other tools' JSON that do not set it."""
IGNORED = (
    "objects marked as `ignore` or `difficult`, learned and scored like others unless `vitkit data convert --fix "
    "ignored` makes them crowd regions"
)


def read_exporters_fields(content: Any) -> list[str]:
    """Convert exporters' deviations from COCO's fields, in place, and describe them.

    Entries that are not objects, and values that mean nothing, are left to the checks of the schema.
    """
    if not has_lists(content):
        return []
    fields = ExportersFields(content, has_text_ids=any(map(has_text_id, content["annotations"])))
    (content["annotations"],) = fields.read([content["annotations"]])
    return fields.notes()


def has_lists(content: Any) -> bool:
    """Whether a file has lists of images and annotations."""
    return isinstance(content, dict) and all(isinstance(content.get(k), list) for k in ("images", "annotations"))


def has_text_id(annotation: Any) -> bool:
    return isinstance(annotation, dict) and isinstance(annotation.get("id"), str)


class ExportersFields:
    """Converts exporters' deviations from COCO's fields: in the images at once, in annotations as they are read.

    Args:
        content: the file, whose images are changed in place, and whose annotations are not read.
        has_text_ids: whether an annotation has a text as its id.
    """

    def __init__(self, content: dict[str, Any], *, has_text_ids: bool):
        debris = [image for image in content["images"] if _is_debris(image)]
        self._ids_of_debris = _ids_of(debris)
        self._has_debris, self._has_text_ids = bool(debris), has_text_ids
        self._of_images: Counter[str] = Counter()
        if debris:
            self._of_images["images whose names begin with a dot, left out"] += len(debris)
            left_out = {*map(id, debris)}
            content["images"] = [image for image in content["images"] if id(image) not in left_out]
        for image in content["images"]:
            # LVIS puts COCO's images into other parts, and names them only by their addresses:
            # HOST/train2017/NUMBER.jpg.
            if isinstance(image, dict) and ANNOTATED_CLASSES[0] in image and isinstance(image.get("coco_url"), str):
                image["file_name"] = "/".join(PurePosixPath(image["coco_url"]).parts[-2:])
        for part, keys in (("images", ("id", "width", "height")), ("categories", ("id",))):
            entries = content.get(part)
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict):
                    self._of_images[_FLOATS] += _make_whole(entry, keys)
        self._ids = {
            key: _ids_of(content.get(part)) for key, part in (("image_id", "images"), ("category_id", "categories"))
        }
        self._counts, self._number = self._of_images, 0

    def read(self, parts: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Change the annotations in place, and yield those that are used, part by part."""
        self._counts, self._number = Counter(self._of_images), 0
        for annotations in parts:
            if self._has_debris:
                annotations = [a for a in annotations if not self._is_of_debris(a)]
            for annotation in annotations:
                if isinstance(annotation, dict):
                    self._read(annotation)
            yield annotations

    def notes(self) -> list[str]:
        """Describe what was changed since `read` began."""
        numbered = {"annotations with texts as ids, numbered from 1": self._number} if self._number else {}
        return [f"{what}: {count}" for what, count in {**self._counts, **numbered}.items() if count]

    def _is_of_debris(self, annotation: Any) -> bool:
        image_id = annotation.get("image_id") if isinstance(annotation, dict) else None
        return isinstance(image_id, int) and image_id in self._ids_of_debris

    def _read(self, annotation: dict[str, Any]) -> None:
        counts = self._counts
        counts[_FLOATS] += _make_whole(annotation, ("id", "image_id", "category_id", "iscrowd"))
        for key, of_part in self._ids.items():
            value = annotation.get(key)
            if isinstance(value, str) and value.isdecimal() and int(value) in of_part:
                annotation[key] = int(value)
                counts["ids of images and classes that are texts, read as numbers"] += 1
        segmentation = annotation.get("segmentation")
        if isinstance(segmentation, list) and len(segmentation) >= 6 and all(map(is_number, segmentation)):
            annotation["segmentation"] = [segmentation]
            counts["flat segmentations, as VIA writes them, read as one polygon"] += 1
        if _rotate(annotation):
            counts["boxes turned by attributes.rotation, as CVAT writes it, which became polygons"] += 1
        for key in TURNS:
            if annotation.get(key):
                counts[f"objects with a field {key!r}, which is not read although it may turn their boxes"] += 1
        counts[IGNORED] += is_ignored(annotation)
        if self._has_text_ids:
            self._number += 1
            annotation["id"] = self._number


def is_ignored(annotation: Mapping[str, Any]) -> bool:
    """Whether an object has a flag by which VOC's and other evaluations leave it out, and is not a crowd region yet."""
    return not annotation.get("iscrowd") and any(annotation.get(flag) not in UNSET for flag in ("ignore", "difficult"))


def _make_whole(entry: dict[str, Any], keys: Iterable[str]) -> int:
    """Make whole numbers of floats such as 1.0, in place; return how many."""
    floats = [
        key for key in keys if type(value := entry.get(key)) is float and value.is_integer() and abs(value) < 2**53
    ]
    entry.update({key: int(entry[key]) for key in floats})
    return len(floats)


def _is_debris(image: Any) -> bool:
    """Whether a listed file is a copy that a notebook or macOS made; other hidden folders may hold data."""
    name = image.get("file_name") if isinstance(image, dict) else None
    if not isinstance(name, str) or not (name.startswith(".") or "/." in name or "\\." in name):
        return False
    path = PurePosixPath(name.replace("\\", "/"))
    return is_hidden(path.name) or _CHECKPOINTS in path.parts


def _ids_of(entries: Any) -> set[int]:
    entries = entries if isinstance(entries, list) else ()
    return {entry["id"] for entry in entries if isinstance(entry, dict) and type(entry.get("id")) is int}


def _rotate(annotation: dict[str, Any]) -> bool:
    """Turn a box by the rotation that CVAT writes beside it; return whether it has one."""
    attributes = annotation.get("attributes")
    degrees = attributes.get("rotation") if isinstance(attributes, dict) else None
    if not is_number(degrees) or not degrees % 360 or not is_box(annotation.get("bbox")):
        return False
    x, y, width, height = annotation["bbox"]
    segmentation = annotation.get("segmentation")
    # A polygon that is not the unturned box shows where the object lies.
    if segmentation and not _is_box_outline(segmentation, annotation["bbox"]):
        return False
    annotation |= rotate_box(x, y, x + width, y + height, degrees)
    # What is written from here must not be turned again.
    annotation["attributes"] = {key: value for key, value in attributes.items() if key != "rotation"}
    return True


def _is_box_outline(segmentation: Any, bbox: list[float]) -> bool:
    if not isinstance(segmentation, list) or len(segmentation) != 1 or not isinstance(segmentation[0], list):
        return False
    polygon = segmentation[0]
    if len(polygon) not in (8, 10) or not all(map(is_number, polygon)):
        return False
    corners = {*zip(polygon[::2], polygon[1::2])}
    x, y, width, height = polygon_box(segmentation)
    outline = {(x, y), (x + width, y), (x, y + height), (x + width, y + height)}
    return corners == outline and all(abs(a - b) <= 1 for a, b in zip((x, y, width, height), bbox))


def find_listed_files(content: Any, folder: Path) -> list[str]:
    """Change names of files to those that the folder has, in place, where they were written on another system.

    Windows separates folders by backslashes, and macOS writes letters with accents as two characters.
    """
    entries = content.get("images") if isinstance(content, dict) else None
    files, counts = None, Counter()
    for image in entries if isinstance(entries, list) else ():
        name = image.get("file_name") if isinstance(image, dict) else None
        if not isinstance(name, str) or (name.isascii() and "\\" not in name) or not _is_missing(folder, name):
            continue
        try:
            files = files or ImageFiles(folder)
            found = files.find(name)
        except DataError:  # no images, or several of that name; the name is reported as it is
            continue
        if found is not None:
            image["file_name"] = found
            counts["backslashes" if "\\" in name else "another Unicode form than its file"] += 1
    return [f"{pluralize(count, 'file names', 'have')} {what}" for what, count in counts.items()]


def _is_missing(folder: Path, name: str) -> bool:
    try:
        return not (os.path.exists(folder / name) or ImageStore(folder).has(name))
    except ValueError:  # half a character
        return False


def explain_issues(issues: Sequence[FileIssue], name: str) -> None:
    """Raise a DataError that names the cause, if the issues of a file are those of a known exporter."""
    without_class = [issue for issue in issues if issue.part == "annotations" and issue.field == "category_id"]
    if without_class and all(issue.is_null for issue in without_class):
        count = sum(issue.count for issue in without_class)
        raise DataError(
            f"{name}: {pluralize(count, 'annotations', 'have')} category_id null: VIA writes so where a "
            "region's class is free text, or an option whose id is not a number. Export VIA's annotations as CSV or "
            "JSON, which keep the class and are read too."
        )
