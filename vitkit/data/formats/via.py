"""VGG Image Annotator (VIA): its table or JSON of regions, each a shape and attributes, one of which is the class.

Rectangles, polygons, circles and ellipses are read; points and lines enclose nothing and are left out.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.data.formats.annotated import AnnotatedImages, add_image_file, single_file
from vitkit.errors import DataError
from vitkit.io.folders import ImageFiles
from vitkit.io.image_files import open_regular, size_of
from vitkit.io.json_files import read_json
from vitkit.io.parsing import class_name, coordinate
from vitkit.io.segmentations import ellipse_polygon, polygon_fields

SHAPES = "region_shape_attributes"
"""The column of VIA's table that holds the shapes."""
_CLASS_NAMES = ("class", "label", "category", "name", "type", "object", "class_name", "object_name")


class _ViaRegion(NamedTuple):
    """A region of an image, or an image without one."""

    listed: str
    """The name of the image's file."""
    size: Any
    """The number of bytes of the image's file, by which VIA tells files of one name apart."""
    shape: Any
    """None: the image has no region."""
    attributes: Any
    context: str
    """The file and where in it the region is, for messages."""


def is_via_file(path: Path) -> bool:
    """Whether a JSON file looks like one of VIA's."""
    return b'"shape_attributes"' in path.read_bytes()


def read_via(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read a project of VIA, or its annotations as JSON.

    Args:
        annotations: the file, or a folder with one JSON file.
        images: folder of the images; None: that of the file.
    Raises:
        DataError: the file is invalid, or its regions have no class.
    """
    path = single_file(annotations, "*.json")
    content = read_json(path)
    content = content.get("_via_img_metadata", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise DataError(f"annotations: '{path}': its images are {content!r:.80}; expected an object. Export it again.")
    regions = []
    for key, entry in content.items():
        listed, inside = (entry.get(k) for k in ("filename", "regions")) if isinstance(entry, dict) else (None, None)
        inside = list(inside.values()) if isinstance(inside, dict) else inside
        if not isinstance(listed, str) or not isinstance(inside, list):
            raise DataError(f"{path.name}: {key!r:.100} has no filename and regions. Export it again from VIA.")
        for number, region in enumerate(inside, start=1):
            context = f"{path.name}: region {number} of {listed!r:.100}"
            if not isinstance(region, dict):
                raise DataError(f"{context} is {str(region)[:80]!r}; expected an object. Export it again from VIA.")
            shape, attributes = (region.get(f"{part}_attributes") or {} for part in ("shape", "region"))
            regions.append(_ViaRegion(listed, entry.get("size"), shape, attributes, context))
        if not inside:
            regions.append(_ViaRegion(listed, entry.get("size"), None, None, path.name))
    return _read(regions, annotations, images or path.parent)


def read_via_rows(rows: Iterable[tuple[int, Mapping[str, str]]], annotations: Path, images: Path) -> AnnotatedImages:
    """Read the rows of VIA's table with their line numbers; raises like `read_via`."""
    regions = []
    for number, row in rows:
        context = f"{annotations.name} line {number}"
        shape, attributes = (_parse(row.get(name) or "{}", context) for name in (SHAPES, "region_attributes"))
        listed, size = row.get("filename") or row.get("#filename", ""), row.get("file_size")
        regions.append(_ViaRegion(listed, size, shape or None, attributes, context))
    return _read(regions, annotations, images)


def _parse(text: str, context: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{context}: {text[:80]!r} is not JSON. Export the table again from VIA.") from error


def _read(regions: list[_ViaRegion], annotations: Path, images: Path) -> AnnotatedImages:
    files = ImageFiles(images)
    data = AnnotatedImages("via", annotations, files.folder)
    by_name: dict[str, dict | None] = {}
    key = _class_key(regions)
    counts = Counter(listed for listed, _ in {(region.listed, str(region.size)) for region in regions})
    for region in regions:
        name = files.find(region.listed) if region.listed else None
        if name is not None and counts[region.listed] > 1:
            with open_regular(files.folder / name, "images") as file:
                name = name if str(region.size) == str(size_of(file)) else None
        if name is None:
            data.leave_out("images that the file lists but the folder does not have", region.listed or region.context)
            continue
        if name not in by_name:
            by_name[name] = add_image_file(data, files, name)
        image = by_name[name]
        if image is None or region.shape is None:
            continue
        kind = region.shape.get("name") if isinstance(region.shape, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            data.leave_out(f"regions of the shape {kind!r:.50}", region.context)
            continue
        data.add_object(image["id"], _label(region, key), **_FIELDS[kind](region))
    data.sort_classes()
    return data


def _class_key(regions: list[_ViaRegion]) -> str | None:
    """Return the attribute that is the class: the only one, or the one with a usual name."""
    counts = Counter(key for region in regions if isinstance(region.attributes, dict) for key in region.attributes)
    usual = [key for key in counts if key.lower() in _CLASS_NAMES]
    if len(counts) > 1 and len(usual) != 1:
        raise DataError(
            f"{regions[0].context}: the regions have the attributes {', '.join(counts)!r:.200}; expected one, or one "
            f"called {' or '.join(_CLASS_NAMES[:3])}, that is the class. Rename or remove attributes in VIA."
        )
    return next(iter(usual or counts), None)


def _label(region: _ViaRegion, key: str | None) -> str:
    if key is None:
        raise DataError(f"{region.context}: no region has attributes, and so a class. Add one in VIA, such as 'class'.")
    value = region.attributes.get(key) if isinstance(region.attributes, dict) else None
    if isinstance(value, dict):  # a checkbox: {"cat": true}
        chosen = [name for name, is_set in value.items() if is_set]
        value = chosen[0] if len(chosen) == 1 else value
    return class_name(value.strip() if isinstance(value, str) else value, f"{region.context}: attribute {key!r:.50}")


def _number(region: _ViaRegion, field: str) -> float:
    return coordinate(region.shape.get(field), f"{region.context}: {field}")


def _rectangle(region: _ViaRegion) -> dict[str, Any]:
    box = [_number(region, field) for field in ("x", "y", "width", "height")]
    if min(box[2:]) < 0:
        raise DataError(f"{region.context}: the size of {box} is negative. Correct it.")
    return {"bbox": box}


def _polygon(region: _ViaRegion) -> dict[str, Any]:
    xs, ys = (region.shape.get(f"all_points_{axis}") for axis in "xy")
    if not isinstance(xs, list) or not isinstance(ys, list) or len(xs) != len(ys) or len(xs) < 3:
        raise DataError(f"{region.context}: expected all_points_x and all_points_y, three or more. Correct it.")
    return polygon_fields([[coordinate(v, f"{region.context}: a point") for point in zip(xs, ys) for v in point]])


def _ellipse(region: _ViaRegion) -> dict[str, Any]:
    x, y = _number(region, "cx"), _number(region, "cy")
    fields = ("r", "r") if region.shape["name"] == "circle" else ("rx", "ry")
    radius_x, radius_y = (_number(region, field) for field in fields)
    degrees = math.degrees(_number(region, "theta")) if "theta" in region.shape else 0.0
    return polygon_fields([ellipse_polygon((x, y), (radius_x, radius_y), degrees)])


_FIELDS = {"rect": _rectangle, "polygon": _polygon, "circle": _ellipse, "ellipse": _ellipse}
