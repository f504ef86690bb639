"""CVAT's "CVAT for images 1.1": one XML file with the boxes, polygons, ellipses and masks of all images.

Points, lines, cuboids and tags are not objects and are left out. Rotated boxes become polygons. The points of a
skeleton become keypoints, with the limbs that its label draws; its box is the one of the same group and label, or the
one around its points.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from vitkit.data.formats.annotated import AnnotatedImages, check_mask_size, read_head, single_file
from vitkit.errors import DataError
from vitkit.io.folders import ImageFiles, split_of
from vitkit.io.parsing import check_count, coordinate, read_xml
from vitkit.io.segmentations import (
    ellipse_polygon,
    is_side,
    polygon_fields,
    region_annotation,
    rotate_box,
    round_pixels,
)
from vitkit.text_format import pluralize


def is_cvat_file(path: Path) -> bool:
    """Whether an XML file looks like CVAT's."""
    return b"<annotations" in read_head(path).replace(b"\0", b"")  # UTF-16


def read_cvat(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read CVAT's annotations.xml.

    Args:
        annotations: the file, or the folder that contains it.
        images: folder of the images; None: `images` beside the file, or the file's folder.
    Raises:
        DataError: the file is invalid, or is of videos.
    """
    path = single_file(annotations, "*.xml")
    root = read_xml(path)
    if root.find("track") is not None:
        raise DataError(f"'{path}' has tracks of a video. Export it from CVAT as 'CVAT for images 1.1'.")
    beside = path.parent / "images"
    files = ImageFiles(images or (beside if beside.is_dir() else path.parent))
    data = AnnotatedImages("cvat", annotations, files.folder)
    keypoints = _read_labels(data, root, path)
    drawn = _read_limbs(root, keypoints, path)
    entries: dict[str, dict[str, Any]] = {}
    shared: list[str] = []
    files.expect([_path_of(element, files.folder)] for element in root.iterfind("image"))
    for element in root.iterfind("image"):
        listed = _path_of(element, files.folder)
        name = files.find(listed)
        if name is None:
            data.leave_out("images that the XML lists but the folder does not have", listed)
            continue
        width, height = (int(_number(element, side, path)) for side in ("width", "height"))
        if not is_side(width) or not is_side(height):
            raise DataError(f"annotations: '{path}': image {listed!r} is {width}x{height} pixels. Correct its size.")
        subset, task = element.get("subset", ""), element.get("task_id", "")
        recording = f"task {task}" if task else f"subset {subset}"
        split = split_of(subset)
        if name not in entries:
            data.add_image(name, width, height)
            entries[name] = data.images[-1]
        image = entries[name]
        if (image["width"], image["height"]) != (width, height):
            raise DataError(
                f"annotations: '{path}': image {listed!r} is listed as {width}x{height} pixels and as "
                f"{image['width']}x{image['height']}. Correct one."
            )
        if split is not None:
            data.add_to_split(image["id"], split)
        if task and data.recordings.get(image["id"], recording) != recording:
            shared.append(name)
        if task or (subset and split is None):
            data.recordings[image["id"]] = recording
        check_count(len(element), f"annotations: '{path}': {name!r}")
        _add_shapes(data, image, element, keypoints, path)
    if shared:
        data.notes.append(
            f"{pluralize(len(shared), 'images', 'are')} of the name of another task's, such as {shared[0]}: their "
            "objects are on one file. If they are others: give the folder and the XML file of each task"
        )
    for category in data.categories:
        if keypoints.get(category["name"]):
            category["keypoints"] = names = keypoints[category["name"]]
            if limbs := drawn.get(category["name"]):
                category["skeleton"] = [[names.index(point) + 1 for point in limb] for limb in limbs]
            _complete(data.annotations, category)
    return data


def _path_of(element: ElementTree.Element, folder: Path) -> str:
    """Return an image's name, in the folder of its subset if it is there: a project's subsets share names."""
    subset, name = element.get("subset", ""), element.get("name", "")
    return f"{subset}/{name}" if subset and (folder / subset / name).is_file() else name


def _group(shape: ElementTree.Element) -> tuple[str | None, str | None]:
    return shape.get("group_id"), shape.get("label")


def _read_labels(data: AnnotatedImages, root: ElementTree.Element, path: Path) -> dict[str, list[str]]:
    """Add the labels as classes, and return the names of the points of each label, which are labels with a parent."""
    keypoints: dict[str, list[str]] = {}
    for label in root.iterfind("meta//labels/label"):
        name = data.strip_name(label.findtext("name") or "", f"annotations: '{path}': the name of a label")
        if parent := (label.findtext("parent") or "").strip():
            keypoints.setdefault(parent, []).append(name)
        else:
            data.category_id(name)
    return keypoints


def _read_limbs(
    root: ElementTree.Element, keypoints: Mapping[str, list[str]], path: Path
) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of points between which the SVG of each label of skeletons draws lines."""
    limbs: dict[str, list[tuple[str, str]]] = {}
    for label in root.iterfind("meta//labels/label"):
        name, svg = (label.findtext("name") or "").strip(), label.findtext("svg") or ""
        where = f"annotations: '{path}': the SVG of the skeleton {name!r:.100}"
        try:
            drawing = ElementTree.fromstring(f"<svg>{svg}</svg>")
        except ElementTree.ParseError as error:
            raise DataError(f"{where} is not XML ({error}). Export it again.") from None
        points = {circle.get("data-node-id"): circle.get("data-label-name", "") for circle in drawing.iter("circle")}
        if not all(points.values()):
            continue  # the file of a label's constructor has the numbers of a server in place of the names
        for line in drawing.iter("line"):
            ends = [points.get(line.get(f"data-node-{end}"), "") for end in ("from", "to")]
            if not {*ends} <= {*keypoints.get(name, ())}:
                missing = next(end for end in ends if end not in keypoints.get(name, ()))
                raise DataError(
                    f"{where} draws a line to {f'the point {missing!r:.100}' if missing else 'a circle'} that it does "
                    "not have. Correct the label in CVAT, and export it again."
                )
            limbs.setdefault(name, []).append((ends[0], ends[1]))
    return limbs


def _add_shapes(
    data: AnnotatedImages,
    image: Mapping[str, Any],
    element: ElementTree.Element,
    keypoints: dict[str, list[str]],
    path: Path,
) -> None:
    """Add the objects of an image: a box and a skeleton that are alone in their group are one."""
    boxes = {_group(shape): shape for shape in element.iterfind("box") if shape.get("group_id")}
    counts = Counter((shape.tag, _group(shape)) for shape in element)
    for shape in element:
        group = _group(shape)
        is_pair = counts["box", group] == 1 == counts["skeleton", group]
        if shape.tag == "skeleton":
            _add_skeleton(data, image, shape, boxes.get(group) if is_pair else None, keypoints, path)
        elif shape.tag == "box" and group in boxes and counts["skeleton", group]:
            if not is_pair:
                data.leave_out("boxes of a group of several skeletons or boxes of one label", image["file_name"])
        else:
            _add_shape(data, image, shape, path)


def _add_skeleton(
    data: AnnotatedImages,
    image: Mapping[str, Any],
    skeleton: ElementTree.Element,
    box: ElementTree.Element | None,
    keypoints: dict[str, list[str]],
    path: Path,
) -> None:
    """Add an object with keypoints; points that are outside are not labeled, occluded ones hidden."""
    label = data.strip_name(skeleton.get("label") or "", f"annotations: '{path}': the label of a skeleton")
    names = keypoints.setdefault(label, [])
    points: dict[str, list[float]] = {}
    for point in skeleton.iterfind("points"):
        name = (point.get("label") or "").strip()
        where = f"annotations: '{path}': point {name!r:.100} of a skeleton of {image['file_name']!r}"
        xy = [coordinate(text, where) for text in point.get("points", "").split(",")]
        if name in points or len(xy) != 2:
            raise DataError(f"{where} is {'there twice' if name in points else 'not x,y'}. Correct it.")
        if name not in names:
            names.append(name)
        seen = 0 if point.get("outside") == "1" else 1 if point.get("occluded") == "1" else 2
        points[name] = [*map(round_pixels, xy), seen] if seen else [0, 0, 0]
    labeled = [point for point in points.values() if point[2]]
    if box is None and not labeled:
        data.leave_out("skeletons without a point in the image", image["file_name"])
        return
    fields = _fields(box, image, path) if box is not None else {"bbox": _box_around(labeled)}
    data.add_object(image["id"], label, **fields, **_score(skeleton), keypoints=points, num_keypoints=len(labeled))


def _box_around(points: list[list[float]]) -> list[float]:
    """Return the box around points, xywh, at least a pixel wide and high."""
    low, high = (np.array(points)[:, :2].min(axis=0), np.array(points)[:, :2].max(axis=0))
    return [*low.tolist(), *np.maximum(high - low, 1).tolist()]


def _complete(annotations: list[dict[str, Any]], category: Mapping[str, Any]) -> None:
    """Put the points of a class's skeletons, which are by name, in the order of its keypoints."""
    for annotation in annotations:
        if annotation["category_id"] == category["id"] and isinstance(annotation.get("keypoints"), dict):
            by_name = annotation["keypoints"]
            annotation["keypoints"] = [v for name in category["keypoints"] for v in by_name.get(name, [0, 0, 0])]


def _add_shape(data: AnnotatedImages, image: Mapping[str, Any], shape: ElementTree.Element, path: Path) -> None:
    fields = _fields(shape, image, path)
    if fields is None:
        data.leave_out(f"shapes of type {shape.tag[:50]}", f"{image['file_name']}")
        return
    label = data.strip_name(shape.get("label") or "", f"annotations: '{path}': the label of a {shape.tag}")
    flags = {"occluded": 1} if shape.get("occluded") == "1" else {}
    if shape.findtext("attribute[@name='difficult']") in ("1", "true"):
        flags["difficult"] = 1
    data.add_object(image["id"], label, **fields, **flags, **_score(shape))


def _score(shape: ElementTree.Element) -> dict[str, float]:
    """Return the `score` that a model's object was written with; one that a person has drawn only has its default."""
    text = shape.findtext("attribute[@name='score']") if shape.get("source") != "manual" else None
    try:
        score = float(text or "nan")
    except ValueError:  # the user's own attribute
        return {}
    return {"score": score} if 0 <= score <= 1 else {}


def _fields(shape: ElementTree.Element, image: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the `bbox`, and `segmentation` if it has one, of a shape; None if the shape is not an object."""

    def number(name: str) -> float:
        return _number(shape, name, path)

    if shape.tag == "box":
        x0, y0, x1, y1 = map(number, ("xtl", "ytl", "xbr", "ybr"))
        degrees = _number(shape, "rotation", path, default=0.0)
        if not degrees:
            return {"bbox": [min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)]}
        return rotate_box(x0, y0, x1, y1, degrees)
    if shape.tag == "polygon":
        texts = [value for point in shape.get("points", "").split(";") for value in point.split(",")]
        points = [coordinate(text, f"annotations: '{path}': a point of {image['file_name']!r}") for text in texts]
        if len(points) < 6 or len(points) % 2:
            raise DataError(f"annotations: '{path}': a polygon of {image['file_name']!r} needs at least three points.")
        return polygon_fields([points])
    if shape.tag == "ellipse":
        x, y, radius_x, radius_y = map(number, ("cx", "cy", "rx", "ry"))
        degrees = _number(shape, "rotation", path, default=0.0)
        return polygon_fields([ellipse_polygon((x, y), (radius_x, radius_y), degrees)])
    return _mask(shape, image, path) if shape.tag == "mask" else None


def _mask(shape: ElementTree.Element, image: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Decode a mask of run lengths, row by row starting with background, that covers part of the image."""
    check_mask_size(image, f"annotations: '{path}'")
    left, top, width, height = (int(_number(shape, name, path)) for name in ("left", "top", "width", "height"))
    try:
        runs = np.array((shape.get("rle") or "").split(","), np.int64)
    except (ValueError, OverflowError):
        runs = np.array([-1])
    fits = left >= 0 and top >= 0 and left + width <= image["width"] and top + height <= image["height"]
    if not fits or runs.min() < 0 or runs.max() > width * height or runs.sum() != width * height:
        raise DataError(
            f"annotations: '{path}': a mask of {image['file_name']!r} does not fill its rectangle. Export it again."
        )
    region = np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)
    return region_annotation(region, left, top, image["height"], image["width"])


def _number(element: ElementTree.Element, name: str, path: Path, default: float | None = None) -> float:
    if default is not None and not element.get(name):
        return default
    return coordinate(element.get(name, ""), f"annotations: '{path}': {name} of {element.tag}")
