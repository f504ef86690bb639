"""LabelMe: one JSON file per image with rectangles, polygons, circles and masks (https://github.com/wkentaro/labelme).

Shapes of the same class and `group_id` form one object. Points and lines are not objects and are left out, and so is
what LabelMe's own converters take for no object: `__ignore__` and `_background_`.
"""

import base64
import io
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitkit.data.formats.annotated import AnnotatedImages, add_image_file, check_mask_size, note_other_images
from vitkit.errors import DataError
from vitkit.io.folders import ImageFiles, data_files
from vitkit.io.json_files import read_json
from vitkit.io.parsing import check_count, class_name, coordinate
from vitkit.io.segmentations import ellipse_polygon, polygon_fields, region_annotation

_NO_OBJECTS = ("__ignore__", "_background_")
_FOUR_POINTS = ("oriented_rectangle", "rotation", "quadrilateral")
"""Types of shapes with four corners; the last two are X-AnyLabeling's."""
_POINTS = ("point", "points", "line", "linestrip")
"""Types of shapes that enclose nothing."""


def is_labelme_file(path: Path) -> bool:
    """Whether a JSON file looks like one of LabelMe's."""
    data = path.read_bytes()
    return b'"shapes"' in data and b'"points"' in data


def read_labelme(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read LabelMe's files.

    Args:
        annotations: the folder of the files, or one file.
        images: folder of the images; None: the folder of the files.
    Raises:
        DataError: a file is invalid.
    """
    single = annotations if annotations.is_file() else None
    folder = annotations.parent if single else annotations
    files = ImageFiles(images or folder)
    data = AnnotatedImages("labelme", annotations, files.folder)
    names: dict[Path, tuple[str, str]] = {}
    contents = {}
    for path in [single] if single else [p for p in data_files(folder) if p.suffix.lower() == ".json"]:
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
            data.leave_out("JSON files without shapes", path.name)
            continue
        inside = path.relative_to(folder).parent.as_posix()
        names[path] = f"{inside}/{path.stem}", f"{inside}/{content.get('imagePath') or '?'}"
        contents[path] = content
    files.expect(names.values())
    note_other_images(data, files, names)
    for path, content in contents.items():
        name = files.find(*names[path])
        if name is None:
            data.leave_out("JSON files without an image", path.name)
            continue
        _add_file(data, files, name, path, content)
    used = {image["file_name"] for image in data.images}
    if single is None:
        data.leave_out("images without a JSON file", *(name for name in files.names if name not in used))
    data.sort_classes()
    return data


def _add_file(data: AnnotatedImages, files: ImageFiles, name: str, path: Path, content: Mapping[str, Any]) -> None:
    image = add_image_file(data, files, name, size=(content.get("imageWidth"), content.get("imageHeight")))
    if image is None:
        return
    check_count(len(content["shapes"]), f"annotations: '{path}'")
    groups: dict[Any, list[list[float]]] = {}
    flags: dict[Any, dict[str, int]] = {}
    for number, shape in enumerate(content["shapes"], start=1):
        context = f"annotations: '{path}': shape {number}"
        if not isinstance(shape, dict):
            raise DataError(f"{context} is {reprlib.repr(shape)}; expected an object, {{...}}. Correct it.")
        label, kind = class_name(shape.get("label"), f"{context}: its label"), shape.get("shape_type") or "polygon"
        points = _points(shape.get("points"), context)
        flag = {"difficult": 1} if shape.get("difficult") is True else {}  # X-AnyLabeling's
        if label in _NO_OBJECTS:
            data.leave_out(f"shapes labeled {label}", f"{path.name} shape {number}")
        elif kind == "mask":
            data.add_object(image["id"], label, **_mask(shape, points, image, context), **flag)
        elif kind == "rectangle" and len(points) == 2 and shape.get("group_id") is None:
            (x0, y0), (x1, y1) = points
            data.add_object(image["id"], label, [min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)], **flag)
        elif (polygon := _polygon(kind, points)) is not None:
            group = shape.get("group_id")
            key = label, f"shape {number}" if group is None else repr(group)
            groups.setdefault(key, []).append(polygon)
            flags.setdefault(key, {}).update(flag)
        else:
            shown = kind if kind in _POINTS else f"{kind!r:.50}"
            data.leave_out(f"shapes of type {shown}", f"{path.name} shape {number}")
    for key, polygons in groups.items():
        data.add_object(image["id"], key[0], **polygon_fields(polygons), **flags[key])


def _points(points: Any, context: str) -> list[tuple[float, float]]:
    pairs = points if isinstance(points, list) else [None]
    if not all(isinstance(p, list) and len(p) == 2 and {*map(type, p)} <= {int, float} for p in pairs):
        raise DataError(f"{context} has points {str(points)[:80]!r}; expected [[x, y], ...]. Correct it.")
    return [(coordinate(x, f"{context}: x"), coordinate(y, f"{context}: y")) for x, y in pairs]


def _polygon(kind: str, points: list[tuple[float, float]]) -> list[float] | None:
    """Return the outline of a shape as a flat polygon; None if it encloses no area."""
    if kind == "circle" and len(points) == 2:
        radius = math.dist(*points)
        return ellipse_polygon(points[0], (radius, radius))
    if kind == "rectangle" and len(points) == 2:
        (x0, y0), (x1, y1) = points
        points = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    elif kind not in ("polygon", "rectangle", *_FOUR_POINTS) or len(points) < 3:
        return None
    return [value for point in points for value in point]


def _mask(
    shape: Mapping[str, Any], points: list[tuple[float, float]], image: Mapping[str, Any], context: str
) -> dict[str, Any]:
    """Return the annotation fields of a mask that is stored as a PNG between two corners."""
    check_mask_size(image, context)
    try:
        with Image.open(io.BytesIO(base64.b64decode(shape["mask"])), formats=("PNG",)) as mask:
            if mask.width > image["width"] or mask.height > image["height"]:
                raise ValueError(f"it has {mask.width}x{mask.height} pixels, more than the image")
            part = np.asarray(mask.convert("L")) > 0
        (left, top), _ = [(round(x), round(y)) for x, y in points]
    # Pillow raises a SyntaxError for some damaged PNGs.
    except (KeyError, TypeError, ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{context}: its mask is not a PNG between two points ({error}). Save the file again."
        ) from error
    return region_annotation(part, left, top, image["height"], image["width"])
