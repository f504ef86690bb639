"""Repairs annotations on request: boxes in another format, swapped sizes, classes with two names, corrected labels."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.formats.annotated import AnnotatedImages, class_names
from vitkit.data.formats.exporters import is_ignored
from vitkit.data.formats.sizes import MAX_FRACTION, two_sizes
from vitkit.errors import DataError
from vitkit.io.coco_schema import MAX_OUTSIDE, AnnotationChecks, is_box, is_number
from vitkit.io.folders import fold_name
from vitkit.io.image_files import is_rotated, upright_size
from vitkit.io.json_files import read_json
from vitkit.io.segmentations import polygon_area, round_pixels

ORDERS = ("xywh", "xyxy", "cxcywh")
"""What the four numbers of a box can stand for."""
_ORDER_TEXTS = {
    "xywh": "corner and size (x, y, width, height)",
    "xyxy": "two corners (x0, y0, x1, y1)",
    "cxcywh": "center and size (cx, cy, width, height)",
}
_MIN_WRONG, _MAX_RIGHT = 0.02, 0.005
"""Boxes are taken to be in another order if more than the first share of them do not fit their images as read, and less
than the second share do not fit in that order."""
_OUTSIDE_BOX = 0.25
"""Fraction of a box's width and height by which keypoints may lie outside."""
_SAME_BOX = 0.05
"""Pixels by which the box of an object may differ in a copy of the data: formats round."""


def wrong_scale(data: AnnotatedImages) -> bool:
    """Return whether the boxes seem to be fractions of their images: no coordinate of several boxes exceeds 1."""
    boxes = np.array([annotation["bbox"] for annotation in data.annotations], float).reshape(-1, 4)
    return bool(len(boxes) > 1 and 0 < boxes.max() <= MAX_FRACTION and (boxes % 1).any())


def likely_order(data: AnnotatedImages) -> str:
    """Return the order, one of ORDERS, that the boxes' numbers are most likely in, judged by how well they fit the
    images.

    YOLO's boxes are read as `cxcywh`, all others as `xywh`.
    """
    numbers, sides = _numbers_of(data), _image_sides(data)
    if not len(numbers):
        return prescribed_order(data)
    if wrong_scale(data):
        numbers = numbers * np.tile(sides, 2)
    misfits = {order: _misfits(_as_xyxy(numbers, order), sides) for order in ORDERS}
    best = min(ORDERS, key=misfits.__getitem__)
    is_wrong = misfits[prescribed_order(data)] > max(_MIN_WRONG, 2 / len(numbers)) and misfits[best] <= _MAX_RIGHT
    return best if is_wrong else prescribed_order(data)


def sizes_exchanged(data: AnnotatedImages) -> bool:
    """Return whether the boxes fit the images only with width and height swapped."""
    boxes_xyxy, sides = _as_xyxy(_numbers_of(data), prescribed_order(data)), _image_sides(data)
    if not len(boxes_xyxy) or wrong_scale(data):
        return False
    return _misfits(boxes_xyxy, sides) > _MIN_WRONG and _misfits(boxes_xyxy, sides[:, ::-1]) <= _MAX_RIGHT


def format_issues(data: AnnotatedImages) -> Iterator[tuple[str, list[str]]]:
    """Yield probable errors in the format of all boxes, each with the names of the fixes.

    The descriptions begin with "the boxes".
    """
    fractions, order, expected = wrong_scale(data), likely_order(data), prescribed_order(data)
    if sizes_exchanged(data) and order == expected:
        yield "the boxes fit their images only with width and height swapped", ["sizes"]
    if fractions or order != expected:
        what = f"{'fractions of the image, ' if fractions else ''}{_ORDER_TEXTS[order]}"
        text = f"the boxes seem to be {what}, where {data.format} has {_ORDER_TEXTS[expected]}"
        text += f"{' in pixels' if fractions else ''}; such as {data.annotations[0]['bbox']}"
        yield text, ["fractions"] * fractions + [order] * (order != expected)


def prescribed_order(data: AnnotatedImages) -> str:
    """Return the order that the format prescribes for the numbers of a box."""
    return "cxcywh" if data.format == "yolo" else "xywh"


def _numbers_of(data: AnnotatedImages) -> np.ndarray:
    """Return the numbers of the boxes, (N, 4), in the order of the format that they were read from."""
    boxes = np.array([annotation["bbox"] for annotation in data.annotations], float).reshape(-1, 4)
    if prescribed_order(data) == "cxcywh":
        boxes[:, :2] += boxes[:, 2:] / 2
    return boxes


def _as_xyxy(numbers: np.ndarray, order: str) -> np.ndarray:
    first, second = numbers[:, :2], numbers[:, 2:]
    if order == "xyxy":
        return numbers
    return np.hstack([first, first + second] if order == "xywh" else [first - second / 2, first + second / 2])


def _misfits(boxes_xyxy: np.ndarray, sides: np.ndarray) -> float:
    """Return the fraction of boxes that are empty, or extend beyond their image by more than a pixel."""
    start, end = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    return float(((start < -1) | (end > sides + 1) | (end <= start)).any(axis=1).mean())


def _image_sides(data: AnnotatedImages) -> np.ndarray:
    """Return the width and height of the image of each annotation, (N, 2)."""
    sizes = {image["id"]: (image["width"], image["height"]) for image in data.images}
    return np.array([sizes[annotation["image_id"]] for annotation in data.annotations], float).reshape(-1, 2)


def fix_fractions(data: AnnotatedImages) -> int:
    """Multiply the boxes, and polygons and keypoints that are fractions too, by the sizes of their images; return the
    number of boxes changed."""
    for annotation, (width, height) in zip(data.annotations, _image_sides(data).tolist()):
        _set_box(annotation, _multiply(annotation["bbox"], (width, height)))
        polygons, keypoints = annotation.get("segmentation"), annotation.get("keypoints")
        if polygons and isinstance(polygons, list) and all(_are_fractions(polygon, 2) for polygon in polygons):
            polygons = [_multiply(polygon, (width, height)) for polygon in polygons]
            annotation |= dict(segmentation=polygons, area=round_pixels(sum(map(polygon_area, polygons))))
        if _are_fractions(keypoints, 3):
            annotation["keypoints"] = _multiply(keypoints, (width, height, 1))
    return len(data.annotations)


def _are_fractions(numbers: Any, count: int) -> bool:
    """Return whether the first two of every `count` numbers are fractions; the third may be a visibility."""
    if not isinstance(numbers, list) or not all(map(is_number, numbers)):
        return False
    return all(value <= MAX_FRACTION for k, value in enumerate(numbers) if k % count < 2)


def _multiply(numbers: Sequence[float], factors: Sequence[float]) -> list[float]:
    """Multiply numbers by factors, which repeat."""
    return [round_pixels(value * factors[k % len(factors)]) for k, value in enumerate(numbers)]


def _fix_order(data: AnnotatedImages, order: str) -> int:
    """Reinterpret the numbers of the boxes in another order; return the number of boxes changed."""
    boxes_xyxy = _as_xyxy(_numbers_of(data), order).tolist()
    for annotation, (x0, y0, x1, y1) in zip(data.annotations, boxes_xyxy):
        if x1 < x0 or y1 < y0:
            raise DataError(
                f"annotation {annotation.get('id')}: {annotation['bbox']} is not a box as {order}. Correct it."
            )
        _set_box(annotation, [x0, y0, x1 - x0, y1 - y0])
    return len(data.annotations)


def _set_box(annotation: dict[str, Any], bbox: Sequence[float]) -> None:
    annotation["bbox"] = [round_pixels(value) for value in bbox]
    if not annotation.get("segmentation"):
        annotation["area"] = round_pixels(bbox[2] * bbox[3])


def fix_sizes(data: AnnotatedImages) -> int:
    """Set the width and height of each image to those of its file; return the number of images changed.

    Raises:
        DataError: an object of such an image does not lie in the file, so that more than the listed size is wrong; or
            the file is rotated by EXIF, and nothing tells whether its objects are.
    """
    sizes = {image["id"]: upright_size(data.folder / image["file_name"]) for image in data.images}
    wrong = {image["id"]: image for image in data.images if sizes[image["id"]] != (image["width"], image["height"])}
    rotated = {id_ for id_, image in wrong.items() if is_rotated(data.folder / image["file_name"])}
    are_upright = False
    for annotation in data.annotations:
        id_ = annotation["image_id"]
        if id_ not in wrong or not is_box(annotation["bbox"]):
            continue
        image, (width, height) = wrong[id_], sizes[id_]
        x, y, box_width, box_height = annotation["bbox"]
        if x + box_width > width + 1 or y + box_height > height + 1:
            raise DataError(
                f"{two_sizes(image, sizes[id_])}, and annotation {annotation.get('id')} with bbox "
                f"{annotation['bbox']} does not lie in the file: more than the listed size is wrong. Give the images "
                "as they were annotated."
            )
        are_upright |= id_ in rotated and (x + box_width > image["width"] + 1 or y + box_height > image["height"] + 1)
    if rotated and not are_upright:
        name = wrong[min(rotated)]["file_name"]
        raise DataError(
            f"image '{name}' is rotated by its EXIF tag, and its objects fit it both before and after: nothing tells "
            "in which of the two they were annotated. Save the images upright, without the tag, as they were annotated."
        )
    for id_, image in wrong.items():
        image["width"], image["height"] = sizes[id_]
    return len(wrong)


def similar_classes(data: AnnotatedImages) -> list[list[dict[str, Any]]]:
    """Return groups of categories whose names are the same, or differ only by case, blanks, hyphens or plural."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for category in data.categories:
        groups[fold_name(category["name"])].append(category)
    # Plurals only count where both words occur: "bus" is not taken for the plural of "bu".
    for key in sorted(groups, key=len):
        for plural in (f"{key}s", f"{key}es", f"{key[:-1]}ies" if key.endswith("y") else ""):
            if len(key) > 2 and plural in groups and key in groups:
                groups[key] += groups.pop(plural)
    return [group for group in groups.values() if len(group) > 1]


def fix_classes(data: AnnotatedImages) -> int:
    """Merge each group of `similar_classes` into its most frequent category; return how many were removed.

    Raises:
        DataError: they have other keypoints.
    """
    counts = Counter(annotation["category_id"] for annotation in data.annotations)
    target = {}
    for group in similar_classes(data):
        kept = max(group, key=lambda category: (counts[category["id"]], -category["id"]))
        for category in group:
            points = category.get("keypoints")
            if points and kept.setdefault("keypoints", points) != points:
                names = f"{', '.join(points)[:200]} and {', '.join(kept['keypoints'])[:200]}"
                raise DataError(
                    f"{data.source.name}: classes {category['name']!r} and {kept['name']!r} are not merged: their "
                    f"keypoints are {names}. Give them the same names in the same order."
                )
        target |= {category["id"]: kept["id"] for category in group if category is not kept}
    for annotation in data.annotations:
        annotation["category_id"] = target.get(annotation["category_id"], annotation["category_id"])
    data.categories[:] = [category for category in data.categories if category["id"] not in target]
    data.__post_init__()
    return len(target)


def fix_empty(data: AnnotatedImages) -> int:
    """Remove boxes without an area inside their image; return the number removed."""
    removed = {issue.position for issue in AnnotationChecks(data.content).bad_box_issues(data.annotations)}
    data.annotations[:] = [annotation for k, annotation in enumerate(data.annotations) if k not in removed]
    return len(removed)


def fix_crowds(data: AnnotatedImages) -> int:
    """Make crowd regions objects; return the number changed."""
    crowds = [annotation for annotation in data.annotations if annotation.get("iscrowd")]
    for annotation in crowds:
        annotation["iscrowd"] = 0
    return len(crowds)


def fix_ignored(data: AnnotatedImages) -> int:
    """Make objects that are marked as ignored or difficult crowd regions, which training leaves out and evaluation
    counts neither as missed nor, where they are detected, as wrong; return the number changed."""
    ignored = [annotation for annotation in data.annotations if is_ignored(annotation)]
    for annotation in ignored:
        annotation["iscrowd"] = 1
    return len(ignored)


def fix_ids(data: AnnotatedImages) -> int:
    """Number the annotations from 1; return the number whose id changed."""
    changed = 0
    for number, annotation in enumerate(data.annotations, start=1):
        changed += annotation.get("id") != number
        annotation["id"] = number
    return changed


def far_outside(points: np.ndarray, boxes_xywh: np.ndarray) -> np.ndarray:
    """Return which labeled points, (N, K, 3), lie outside the box of their object, (N, 4), by more than a quarter of
    its sides: (N, K) bool."""
    low, sides = boxes_xywh[:, None, :2], boxes_xywh[:, None, 2:]
    beyond = np.abs(points[..., :2] - low - sides / 2) > (0.5 + _OUTSIDE_BOX) * sides
    return (points[..., 2] > 0) & beyond.any(axis=-1)


def fix_keypoints(data: AnnotatedImages) -> int:
    """Make keypoints that are no numbers, or lie outside their image or far outside their box, points that are not
    labeled, with zeros as coordinates, and count the others again; return the number of objects changed.

    Lists of another length and other visibilities than 0, 1 and 2 stay as they are, as nothing tells what they mean.
    """
    counts = {category["id"]: len(category.get("keypoints") or ()) for category in data.categories}
    changed = 0
    for annotation, sides in zip(data.annotations, _image_sides(data)):
        values = annotation.get("keypoints")
        if not isinstance(values, list) or not values or len(values) != 3 * counts[annotation["category_id"]]:
            continue
        if not all(is_number(value) and value in (0, 1, 2) for value in values[2::3]):
            continue
        points = np.array([value if is_number(value) else np.nan for value in values], float).reshape(-1, 3)
        xy = points[:, :2]
        with np.errstate(invalid="ignore"):
            is_inside = ((xy >= -MAX_OUTSIDE) & (xy <= sides + MAX_OUTSIDE)).all(axis=1)
            is_inside &= ~far_outside(points[None], np.array([annotation["bbox"]], float))[0]
        is_labeled = (is_inside & (points[:, 2] > 0)).repeat(3).tolist()
        fixed = [value if kept else 0 for value, kept in zip(values, is_labeled)]
        num_labeled = sum(map(bool, fixed[2::3]))
        changed += fixed != values or annotation.get("num_keypoints", num_labeled) != num_labeled
        annotation |= dict(keypoints=fixed, num_keypoints=num_labeled)
    return changed


FIXES: dict[str, tuple[Callable[[AnnotatedImages], int], str]] = {
    "fractions": (fix_fractions, "boxes multiplied by the sizes of their images"),
    "xywh": (lambda data: _fix_order(data, "xywh"), "boxes read as x, y, width, height"),
    "xyxy": (lambda data: _fix_order(data, "xyxy"), "boxes read as x0, y0, x1, y1"),
    "cxcywh": (lambda data: _fix_order(data, "cxcywh"), "boxes read as center x, y, width, height"),
    "sizes": (fix_sizes, "sizes of images set to those of the files"),
    "classes": (fix_classes, "classes merged into one of nearly the same name"),
    "empty": (fix_empty, "boxes without an area inside their image removed"),
    "crowds": (fix_crowds, "crowd regions made objects"),
    "ignored": (fix_ignored, "objects marked as ignored or difficult made crowd regions"),
    "keypoints": (fix_keypoints, "objects with wrong keypoints, which are no longer labeled"),
    "ids": (fix_ids, "annotations given another id"),
}
"""Name -> (function that repairs a dataset and returns the number of changes, description of the change)."""


def fingerprints(data: AnnotatedImages) -> dict[int, int]:
    """Return a number for each image that changes if its size or one of its objects does."""
    objects: dict[int, list[str]] = defaultdict(list)
    for annotation in data.annotations:
        objects[annotation["image_id"]].append(repr(annotation))
    return {image["id"]: hash((repr(image), *objects[image["id"]])) for image in data.images}


def apply_corrections(data: AnnotatedImages, path: Path) -> Counter[str]:
    """Apply label corrections from a JSON list, and return the number of corrections per action.

    Entries: {"image": file name, "action": "add", "remove" or "change", "annotation_id": id or null,
    "bbox": [x, y, width, height] or null, "category": name or null}; "change" changes the fields that are not null.
    With "was": {"bbox": ..., "category": ...} an object is also found in data where it has another id, or none.

    Raises:
        DataError: an entry is invalid, or names an image, annotation or class that the dataset lacks; or annotations
            have no id, or share one, and an entry has nothing else to find one by.
    """
    corrections = read_json(path, key="--fix", remedy="Give the JSON file of corrections.")
    if not isinstance(corrections, list) or not all(isinstance(entry, dict) for entry in corrections):
        raise DataError(f"{path.name}: expected a list of corrections, [{{'image': …, 'action': …}}]. Export it again.")
    objects = _Objects(data, path)
    categories = {category["name"]: category["id"] for category in data.categories}
    done: Counter[str] = Counter()
    for number, entry in enumerate(corrections, start=1):
        context = f"{path.name}: correction {number}"
        action, bbox, name = (entry.get(key) for key in ("action", "bbox", "category"))
        image_id = objects.image_id(entry, context)
        if bbox is not None and not is_box(bbox):
            raise DataError(f"{context}: bbox is {bbox}; expected [x, y, width, height]. Correct it.")
        if name is not None and not (isinstance(name, str) and name in categories):
            raise DataError(f"{context}: no class is called {name!r}; they are {', '.join(categories)}. Correct it.")
        if action == "add" and bbox is not None and name is not None:
            data.add_object(image_id, categories[name], bbox)
            objects.added += 1
            data.annotations[-1]["id"] = objects.largest_id + objects.added
        elif action in ("remove", "change"):
            annotation = objects.find(entry, image_id, context)
            if action == "remove":
                objects.removed.add(id(annotation))
            else:
                annotation["category_id"] = annotation["category_id"] if name is None else categories[name]
                if bbox is not None:
                    annotation.pop("segmentation", None)  # it belongs to the old box
                    _set_box(annotation, bbox)
        else:
            raise DataError(
                f"{context}: action {action!r} with bbox {bbox} and category {name!r}; see `convert --help`."
            )
        done[action] += 1
    data.annotations[:] = [annotation for annotation in data.annotations if id(annotation) not in objects.removed]
    return done


class _Objects:
    """The images and objects that corrections name, as they were before any was corrected."""

    def __init__(self, data: AnnotatedImages, path: Path):
        self._source, self._corrections = data.source, path.name
        self._images = {image["file_name"]: image["id"] for image in data.images}
        self._paths = {(data.folder / name).resolve().as_posix(): id_ for name, id_ in self._images.items()}
        names = class_names(data.content)
        self._of_image: dict[int, list[tuple[dict[str, Any], str, list[float]]]] = defaultdict(list)
        for annotation in data.annotations:
            was = annotation, names[annotation["category_id"]], annotation["bbox"]
            self._of_image[annotation["image_id"]].append(was)
        ids = [annotation.get("id") for annotation in data.annotations]
        self._has_ids = None not in ids and len({*ids}) == len(ids)
        self.largest_id, self.added = max((id_ for id_ in ids if id_ is not None), default=0), 0
        self.removed: set[int] = set()

    def image_id(self, entry: Mapping[str, Any], context: str) -> int:
        """Return the id of a correction's image, which a copy of the data may list with the name of its folder."""
        name = entry.get("image")
        if isinstance(name, str) and name in self._images:
            return self._images[name]
        ids = [id_ for path, id_ in self._paths.items() if isinstance(name, str) and path.endswith(f"/{name}")]
        if len(ids) != 1:
            raise DataError(f"{context}: no image is called {name!r}. Does it belong to another dataset?")
        return ids[0]

    def find(self, entry: Mapping[str, Any], image_id: int, context: str) -> dict[str, Any]:
        """Return the annotation that a correction names, by its id and by what it was."""
        number, was = entry.get("annotation_id"), entry.get("was")
        candidates = [item for item in self._of_image[image_id] if id(item[0]) not in self.removed]
        if was is not None:
            if not isinstance(was, dict) or not is_box(was.get("bbox")):
                raise DataError(
                    f"{context}: was is {was!r:.100}; expected {{'bbox': …, 'category': …}}. Export it again."
                )
            candidates = [
                item
                for item in candidates
                if item[1] == was.get("category") and np.allclose(item[2], was["bbox"], rtol=0, atol=_SAME_BOX)
            ]
        elif not self._has_ids:
            raise DataError(
                f"'{self._source}' has annotations without an id, or with the same id, so that {self._corrections} "
                "cannot name them. Number them by `vitkit data convert … --fix ids`, and export the corrections of "
                "the result."
            )
        by_id = [item for item in candidates if type(number) is int and item[0].get("id") == number]
        for annotation, _, _ in by_id or (candidates if was is not None else ()):
            return annotation
        what = f" {number}" if was is None else f" of class {was.get('category')!r} with bbox {was['bbox']}"
        raise DataError(
            f"{context}: image {entry['image']!r} has no annotation{what}. Was it corrected before, or is it of "
            "another dataset?"
        )
