"""Merges several datasets into one, with their classes mapped, and cuts images into tiles."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np

from vitkit.apps.datasets.writing import check_images, image_file, link_image
from vitkit.data.formats.annotated import AnnotatedImages, class_names
from vitkit.data.formats.sizes import check_size
from vitkit.data.transforms.annotated_image import keep_inside
from vitkit.errors import DataError
from vitkit.io.channel_files import narrow, read_channels
from vitkit.io.coco_schema import ANNOTATED_CLASSES
from vitkit.io.image_files import path_inside, read_image
from vitkit.io.keypoints import points_fields
from vitkit.io.output import write_bytes
from vitkit.io.segmentations import decode_segmentation, mask_annotation
from vitkit.registry import nearest

_LOSSLESS = (".png", ".bmp", ".tif", ".tiff")


def merge_datasets(datasets: Sequence[AnnotatedImages], classes: Mapping[str, str], out: Path) -> AnnotatedImages:
    """Merge datasets: classes of the same name become one, and images are linked into OUT/images/NUMBER_NAME.

    Splits are kept if every dataset has them.

    Args:
        classes: class name -> its new name; objects of a class that is mapped to "" are left out.
        out: folder for the images.
    Raises:
        DataError: `classes` names a class that no dataset has.
    """
    class_set = {category["name"] for data in datasets for category in data.categories}
    unknown = [name for name in classes if name not in class_set]
    if unknown:
        raise DataError(f"--map {unknown[0]}: no dataset has this class. {nearest(unknown[0], class_set)}")
    merged = AnnotatedImages("coco", out, out / "images")
    with_splits = all(data.splits for data in datasets)
    for data in datasets:
        check_images(data)
    for number, data in enumerate(datasets):
        names = class_names(data.content)
        splits_of = _splits_of(data) if with_splits else {}
        for category in data.categories:
            if name := classes.get(category["name"], category["name"]):
                _add_keypoints(merged, merged.category_id(name), category, data.source.name)
        ids = {}
        for image in data.images:
            source = image_file(data, image)
            name = f"{number}_{data.source.stem}/{_relative(source, data.folder)}"
            link_image(source, out, f"images/{name}")
            ids[image["id"]] = merged.add_image(name, image["width"], image["height"])
            _note_annotated_classes(image, merged)
            for split in splits_of.get(image["id"], ()):
                merged.splits.setdefault(split, []).append(ids[image["id"]])
        for annotation in data.annotations:
            name = names[annotation["category_id"]]
            if not classes.get(name, name):
                merged.leave_out("objects of classes that are mapped to nothing", f"{name} {annotation.get('id')}")
                continue
            category_id, new_id = merged.category_id(classes.get(name, name)), len(merged.annotations) + 1
            changed = {"id": new_id, "image_id": ids[annotation["image_id"]], "category_id": category_id}
            merged.annotations.append({**annotation, **changed})
    return merged


def _note_annotated_classes(image: Mapping[str, Any], written: AnnotatedImages) -> None:
    """Note that LVIS's lists of an image are lost: without them, all classes count as annotated in it."""
    if any(field in image for field in ANNOTATED_CLASSES):
        written.leave_out("lists of the classes that an image is annotated for", image["file_name"])


def _add_keypoints(merged: AnnotatedImages, category_id: int, category: Mapping[str, Any], source: str) -> None:
    """Give a merged class the keypoints of a dataset's.

    Raises:
        DataError: it has others of an earlier dataset.
    """
    (entry,) = (each for each in merged.categories if each["id"] == category_id)
    if not (names := category.get("keypoints")):
        return
    if entry.setdefault("keypoints", names) != names:
        raise DataError(
            f"{source}: class {category['name']!r} has the keypoints {', '.join(names)[:200]}, and that of an earlier "
            f"dataset {', '.join(entry['keypoints'])[:200]}. Give them the same names in the same order."
        )
    for field in ("skeleton", "flip_pairs", "sigmas"):
        if field in category:
            entry.setdefault(field, category[field])


class Rectangle(Protocol):
    """A rectangular part of an image, in pixels."""

    top: int
    left: int
    bottom: int
    right: int


class _Part(NamedTuple):
    """The part of an object that a tile shows."""

    fields: dict[str, Any]
    visible: float
    """Visible fraction of the object's area."""


def tile_dataset(
    data: AnnotatedImages,
    tiles_of: Callable[[int, int], Sequence[Rectangle]],
    out: Path,
    *,
    min_visible: float = 0.25,
    keep_empty: bool = False,
    channels: int | None = None,
) -> AnnotatedImages:
    """Cut images into tiles, each with the visible parts of the objects, and write the tiles into OUT/images.

    Args:
        tiles_of: (height, width) of an image -> its tiles.
        min_visible: objects are left out of tiles that show less than this fraction of them.
        keep_empty: also keep tiles without an object if their image has objects.
        channels: the number of channels of the images, of 8 or 16 bits, which become .npy files; None: RGB of 8 bits.
    Returns:
        the tiled dataset; `left_out` has the objects that are in no tile.
    Raises:
        DataError: an image cannot be read, or its size differs from the annotated one.
    """
    content = {"images": [], "annotations": [], "categories": list(data.categories)}
    tiled = AnnotatedImages("coco", out, out / "images", content)
    splits_of = _splits_of(data)
    names_of: dict[str, list[str]] = {}
    for image in data.images:
        names_of.setdefault(_tile_name(image["file_name"], "", channels), []).append(image["file_name"])
    if repeated := [names for names in names_of.values() if len(names) > 1]:
        a, b = repeated[0][:2]
        which = f"'{a}' is listed twice, and its tiles" if a == b else f"the tiles of '{a}' and '{b}'"
        raise DataError(f"{which} would have one file. List each image once, under a unique name.")
    check_images(data)
    for image, annotations in data.each_image():
        source = image_file(data, image)
        pixels = read_image(source) if channels is None else read_channels(source, channels)
        check_size(image, (pixels.shape[1], pixels.shape[0]))
        file_name = _relative(source, data.folder)
        _note_annotated_classes(image, tiled)
        shown = set()
        tiles = tiles_of(image["height"], image["width"])
        parts = [_parts(annotation, tiles, image) for annotation in annotations]
        for number, tile in enumerate(tiles):
            of_tile = [(annotation, part.get(number)) for annotation, part in zip(annotations, parts)]
            kept = [(annotation, part) for annotation, part in of_tile if part and part.visible >= min_visible]
            if annotations and not kept and not keep_empty:
                tiled.leave_out("tiles without an object", f"{image['file_name']} at {tile.left}, {tile.top}")
                continue
            name = _tile_name(file_name, f"_{tile.left}_{tile.top}", channels)
            part = pixels[tile.top : tile.bottom, tile.left : tile.right]
            encoded = _encode(part, PurePosixPath(name).suffix)
            write_bytes(path_inside(tiled.folder, name, file_name), encoded, below=out)
            height, width = part.shape[:2]
            image_id = tiled.add_image(name, width, height)
            for split in splits_of.get(image["id"], ()):
                tiled.splits.setdefault(split, []).append(image_id)
            for annotation, part in kept:
                shown.add(id(annotation))
                more = {k: v for k, v in annotation.items() if k not in ("id", "image_id", "category_id", "area")}
                more |= _points_in(annotation, tile)
                tiled.add_object(image_id, annotation["category_id"], **{**more, **part.fields})
        for annotation in annotations:
            if id(annotation) not in shown:
                tiled.leave_out("objects that no tile shows enough of", str(annotation.get("id")))
    return tiled


def _points_in(annotation: Mapping[str, Any], tile: Rectangle) -> dict[str, Any]:
    """Return the fields of an object's keypoints, if it has any, in a tile; those outside are no longer labeled."""
    if annotation.get("keypoints") is None:
        return {}
    keypoints = np.array(annotation["keypoints"], np.float64).reshape(-1, 3) - [tile.left, tile.top, 0]
    return points_fields(keep_inside(keypoints[None], (0, 0, tile.right - tile.left, tile.bottom - tile.top))[0])


def _splits_of(data: AnnotatedImages) -> dict[int, list[str]]:
    """Return the splits that each image is in."""
    splits: dict[int, list[str]] = {}
    for split, image_ids in data.splits.items():
        for image_id in dict.fromkeys(image_ids):
            splits.setdefault(image_id, []).append(split)
    return splits


def _parts(annotation: dict[str, Any], tiles: Sequence[Rectangle], image: Mapping[str, Any]) -> dict[int, _Part]:
    """Return the parts of an object that tiles show, in the tiles' pixels, by the tiles' indices."""
    x, y, width, height = annotation["bbox"]
    parts: dict[int, _Part] = {}
    mask = None
    for number, tile in enumerate(tiles):
        x0, y0 = max(x, tile.left), max(y, tile.top)
        x1, y1 = min(x + width, tile.right), min(y + height, tile.bottom)
        if x1 <= x0 or y1 <= y0:
            continue
        if not annotation.get("segmentation"):
            bbox = [x0 - tile.left, y0 - tile.top, x1 - x0, y1 - y0]
            parts[number] = _Part({"bbox": bbox}, (x1 - x0) * (y1 - y0) / (width * height))
            continue
        if mask is None:  # decoded once for all tiles
            mask = decode_segmentation(annotation["segmentation"], image["height"], image["width"])
            area = mask.sum()
        part = mask[tile.top : tile.bottom, tile.left : tile.right]
        if part.any():
            parts[number] = _Part(mask_annotation(part.astype(bool)), float(part.sum() / area))
    return parts


def _encode(pixels: np.ndarray, suffix: str) -> bytes:
    """Return pixels as the content of a file with this suffix, .npy, .png or .jpg."""
    if suffix == ".npy":
        file = io.BytesIO()
        np.save(file, narrow(pixels))
        return file.getvalue()
    options = [cv2.IMWRITE_JPEG_QUALITY, 95] if suffix == ".jpg" else []
    return cv2.imencode(suffix, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), options)[1].tobytes()


def _tile_name(file_name: str, position: str, channels: int | None) -> str:
    """Return the name of a tile of an image: an array if it has `channels`, a PNG if it was lossless, else a JPEG."""
    path = PurePosixPath(file_name)
    suffix = ".png" if path.suffix.lower() in _LOSSLESS else ".jpg"
    return f"{path.with_suffix('')}{position}{suffix if channels is None else '.npy'}"


def _relative(path: Path, folder: Path) -> str:
    """Return the name of a file below a folder, which annotations may give as an absolute path."""
    return path.relative_to(os.path.abspath(folder)).as_posix()
