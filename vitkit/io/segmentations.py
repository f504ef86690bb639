"""Masks in COCO's format: polygons and run lengths, checked before they reach the C code of pycocotools.

pycocotools trusts its input: run lengths that do not fill their image make it loop for ever or leave pixels undefined,
and a polygon with a very large coordinate ends the process.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

_MAX_REACH = 10
"""Largest coordinate of a polygon, in multiples of its image's size: pycocotools allocates memory per outline pixel."""
_MAX_OUTLINE = 1 << 22
"""Largest length of a polygon's outline in pixels: pycocotools takes 100 bytes for each."""
_MAX_PIXELS = 1 << 32
"""pycocotools counts pixels in 32 bits."""
_MAX_GROUPS = 7  # groups of 5 bits, enough for any 32-bit number and its sign
_CORNERS_OF_ELLIPSE = 32
_DECIMALS = 3
"""Decimals of a box's pixels: finer than any annotation, and integer pixels survive a detour via other formats."""
_NUMBERS = frozenset((int, float))

_EXPECTED_FORMS = "a list of polygons [x, y, x, y, ...] or run lengths {'size': [height, width], 'counts': ...}"
_EXPECTED_POLYGONS = "polygons that are each a flat list [x, y, x, y, ...] of at least three finite points"
_EXPECTED_RUNS = "run lengths that are whole numbers above 0 (the first may be 0)"


def describe_wrong_segmentation(segmentation: Any, height: int, width: int) -> str | None:
    """Check polygons, or compressed or uncompressed run lengths of an image.

    Returns:
        what was expected; None if the segmentation is valid.
    """
    if height * width >= _MAX_PIXELS:
        return f"an image of less than 2^32 pixels; it has {height * width}"
    if isinstance(segmentation, dict):
        return describe_wrong_run_lengths(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        return _EXPECTED_FORMS
    reach = _MAX_REACH * max(height, width)
    for polygon in segmentation:
        is_list = isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0
        if not is_list or not _NUMBERS.issuperset(map(type, polygon)):
            return _EXPECTED_POLYGONS
        try:
            # The length of the vector is at least the largest coordinate, and the comparison fails if a coordinate is
            # nan. This is the fastest test of all coordinates; few polygons are so long that they need the exact one.
            length = math.hypot(*polygon)
            is_near = length <= reach or all(-reach <= value <= reach for value in polygon)
        except OverflowError:
            is_near = False
        if not is_near:
            return f"finite coordinates of at most {_MAX_REACH} times the size of the image, {width}x{height}"
        # An edge is at most as long as the vectors of its two points, and n vectors are together at most sqrt(n) times
        # as long as the vector of all coordinates: nearly all polygons need no further test.
        if length * math.sqrt(2 * len(polygon)) > _MAX_OUTLINE and _outline(polygon) > _MAX_OUTLINE:
            return f"polygons whose outlines are at most {_MAX_OUTLINE} pixels long"
    return None


def _outline(polygon: list[float]) -> float:
    points = np.array(polygon, float).reshape(-1, 2)
    return float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())


def describe_wrong_run_lengths(segmentation: Any, height: int | None = None, width: int | None = None) -> str | None:
    """Check compressed or uncompressed run lengths.

    Args:
        height, width: size of the image; None: the size stated in the segmentation.
    Returns:
        what was expected; None if they are valid.
    """
    if not isinstance(segmentation, dict) or not {"size", "counts"} <= segmentation.keys():
        return _EXPECTED_FORMS if height else "run lengths {'size': [height, width], 'counts': ...}"
    size, counts = segmentation["size"], segmentation["counts"]
    if not isinstance(size, list) or len(size) != 2 or not all(map(is_side, size)) or size[0] * size[1] >= _MAX_PIXELS:
        return "run lengths with a size [height, width] of whole numbers above 0"
    if height is not None and size != [height, width]:
        return f"run lengths of the image's size [{height}, {width}]"
    try:
        runs = _decode_counts(counts) if isinstance(counts, str) else counts
    except ValueError as error:
        return f"counts as pycocotools compresses them: {error}"
    are_numbers = isinstance(runs, list) and {*map(type, runs)} == {int}
    if not are_numbers or runs[0] < 0 or min(runs[1:], default=1) <= 0:
        return _EXPECTED_RUNS
    if sum(runs) != size[0] * size[1]:
        return f"run lengths that fill the image's {size[0] * size[1]} pixels; their sum is {sum(runs)}"
    return None


def is_side(value: Any) -> bool:
    """Whether a value can be the height or width of an image, within OpenCV's limits."""
    return type(value) is int and 0 < value <= 1 << 20


def _decode_counts(counts: str) -> list[int]:
    """Decode COCO's compressed string of run lengths.

    Each number is a sequence of groups of 5 bits, lowest first; the sixth bit says that another group follows, and the
    highest bit of the last group is the sign. From the fourth number on, the difference to the number two before is
    stored.

    Raises:
        ValueError: the string is not one that pycocotools would write.
    """
    codes = np.frombuffer(counts.encode(errors="replace"), np.uint8).astype(np.int64) - 48
    if not codes.size or codes.min() < 0 or codes.max() > 63:
        raise ValueError("a character is not between '0' and 'o'" if codes.size else "it is empty")
    (ends,) = np.nonzero(codes < 32)
    if codes[-1] >= 32:
        raise ValueError("it ends within a number")
    num_groups = np.diff(ends, prepend=-1)
    if num_groups.max() > _MAX_GROUPS:
        raise ValueError("a number does not fit 32 bits")
    starts = ends + 1 - num_groups
    shifts = 5 * (np.arange(len(codes)) - np.repeat(starts, num_groups))
    values = np.add.reduceat((codes & 31) << shifts, starts)
    values -= np.where(codes[ends] & 16, 1 << 5 * num_groups, 0)
    values[1::2] = values[1::2].cumsum()
    values[2::2] = values[2::2].cumsum()
    return values.tolist()


def encode_segmentation(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """Encode polygons, compressed or uncompressed run lengths as compressed run lengths for pycocotools."""
    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return coco_mask.frPyObjects(segmentation, height, width)
    return segmentation


def decode_segmentation(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Decode polygons, compressed or uncompressed run lengths to a (height, width) uint8 mask of 0 and 1."""
    return coco_mask.decode(encode_segmentation(segmentation, height, width))


def shows_no_pixel(annotation: Mapping[str, Any], height: int, width: int) -> bool:
    """Whether the valid segmentation of an annotation has no pixel, as that of a polygon without an area."""
    segmentation = annotation["segmentation"]
    if isinstance(segmentation, list):
        # Drawing takes ten times as long as the area, and what is a pixel thick on average shows one.
        length = max(annotation["bbox"][2:])
        if any(polygon_area(polygon) >= length for polygon in segmentation):
            return False
    return not coco_mask.area(encode_segmentation(segmentation, height, width))


def visible_box(annotation: Mapping[str, Any], height: int, width: int) -> list[float]:
    """Return the box, xywh, of what an image shows of an object: its box cut at the border, or that of its polygons'
    visible part if its box is the polygons', which may be smaller."""
    x, y, box_width, box_height = annotation["bbox"]
    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + box_width, width), min(y + box_height, height)
    polygons = annotation.get("segmentation")
    if isinstance(polygons, list) and polygons and (x0, y0, x1, y1) != (x, y, x + box_width, y + box_height):
        points = np.concatenate([np.array(polygon, float).reshape(-1, 2) for polygon in polygons])
        whole = [*points.min(axis=0), *points.max(axis=0)]
        shown = [_find_shown_points(polygon, height, width) for polygon in polygons]
        if np.allclose(whole, (x, y, x + box_width, y + box_height), rtol=0, atol=1) and any(map(len, shown)):
            points = np.concatenate(shown)
            (x0, y0), (x1, y1) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    return [x0, y0, x1 - x0, y1 - y0]


def _find_shown_points(polygon: Sequence[float], height: int, width: int) -> np.ndarray:
    """Return points (N, 2) that span the part of a flat polygon in the image: the ends of the parts of its edges that
    lie in the image, and the image's corners in the polygon. All belong to it."""
    size = np.array([width, height], float)
    start = np.array(polygon, float).reshape(-1, 2)
    step = np.roll(start, -1, axis=0) - start
    # Where each edge enters and leaves the image, in fractions of its length, by axis.
    with np.errstate(divide="ignore", invalid="ignore"):
        enter, leave = np.sort(np.stack([-start, size - start]) / step, axis=0)
    inside = (start >= 0) & (start <= size)
    enter = np.where(step == 0, np.where(inside, 0, np.inf), enter).max(axis=1).clip(0)
    leave = np.where(step == 0, np.where(inside, 1, -np.inf), leave).min(axis=1).clip(None, 1)
    corners = size * [[0, 0], [1, 0], [0, 1], [1, 1]]
    crosses = (start[:, 1] > corners[:, 1:]) != ((start + step)[:, 1] > corners[:, 1:])  # (4, N)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = start[:, 0] + (corners[:, 1:] - start[:, 1]) / step[:, 1] * step[:, 0]
    in_polygon = (crosses & (at > corners[:, :1])).sum(axis=1) % 2 == 1
    is_shown = enter < leave
    start, step = start[is_shown], step[is_shown]
    ends = [(start + fraction[is_shown, None] * step).clip(0, size) for fraction in (enter, leave)]
    return np.concatenate([*ends, corners[in_polygon]])


def object_area(annotation: dict[str, Any]) -> float:
    """Return the area by which an object's size is judged: as annotated, or of its box if it has no mask.

    Exporters that have no masks write 0, 1 or the image's area; beside keypoints, only such an area is not used.
    """
    width, height = annotation["bbox"][2:]
    area = annotation.get("area", width * height)
    is_area = annotation.get("segmentation") or (annotation.get("keypoints") and 1 < area <= width * height)
    return area if is_area else width * height


def mask_annotation(mask: np.ndarray) -> dict[str, Any]:
    """Return the `segmentation` (compressed run lengths), `area` and `bbox` of an (H, W) bool mask in COCO's format."""
    return _rle_fields(coco_mask.encode(np.asfortranarray(mask).view(np.uint8)))


def region_annotation(region: np.ndarray, left: int, top: int, height: int, width: int) -> dict[str, Any]:
    """Return the fields of `mask_annotation` of a mask that is False outside a region, without making the whole mask.

    Time and memory depend on the region only, not on the size of the image, which a file may only claim.

    Args:
        region: (h, w) bool; parts outside the image are cut off.
        left, top: position of the region in the image, may be negative.
        height, width: size of the image.
    """
    region = region[max(0, -top) : max(0, height - top), max(0, -left) : max(0, width - left)]
    left, top = max(0, left), max(0, top)
    # With a row of background around every column, each run of True begins and ends within its column.
    columns = np.pad(region, ((1, 1), (0, 0))).T
    column, row = np.nonzero(columns[:, 1:] != columns[:, :-1])
    edges = (left + column) * height + top + row
    return _runs_annotation(edges[::2], edges[1::2], height, width)


def pixels_annotation(indices: np.ndarray, height: int, width: int) -> dict[str, Any]:
    """Return the fields of `mask_annotation` of a mask given by its pixels.

    Args:
        indices: (n,) int64, pixels counted down the columns of the image, in ascending order.
        height, width: size of the image.
    """
    is_first = np.diff(indices, prepend=-2) != 1
    is_last = np.append(is_first[1:], len(indices) > 0)[: len(indices)]
    return _runs_annotation(indices[is_first], indices[is_last] + 1, height, width)


def _runs_annotation(starts: np.ndarray, ends: np.ndarray, height: int, width: int) -> dict[str, Any]:
    """Return the fields of a mask that is True from each start to before each end, both in ascending order."""
    # A run that ends at the foot of a column and another that begins at the head of the next are the same.
    is_gap = starts[1:] != ends[:-1]
    starts, ends = np.append(starts[:1], starts[1:][is_gap]), np.append(ends[:-1][is_gap], ends[-1:])
    counts = np.diff(np.stack([starts, ends], axis=1).ravel(), prepend=0, append=height * width)
    counts = counts[:-1] if counts[-1] == 0 else counts
    return _rle_fields(coco_mask.frPyObjects({"size": [height, width], "counts": counts.tolist()}, height, width))


def _rle_fields(rle: dict[str, Any]) -> dict[str, Any]:
    segmentation = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
    return {"segmentation": segmentation, "area": int(coco_mask.area(rle)), "bbox": coco_mask.toBbox(rle).tolist()}


def round_pixels(value: float) -> float:
    """Round pixels; integral values become int."""
    value = round(float(value), _DECIMALS)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def polygon_box(polygons: Iterable[Sequence[float]]) -> list[float]:
    """Return the bounding box, xywh, of flat polygons."""
    xs = [x for polygon in polygons for x in polygon[::2]]
    ys = [y for polygon in polygons for y in polygon[1::2]]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def polygon_area(polygon: Sequence[float]) -> float:
    """Return the area enclosed by a flat polygon."""
    xs, ys = polygon[::2], polygon[1::2]
    pairs = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]])
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in pairs)) / 2


def polygon_fields(polygons: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the `bbox`, `segmentation` and `area` of an object given by flat polygons in pixels."""
    polygons = [[round_pixels(value) for value in polygon] for polygon in polygons]
    area = round_pixels(sum(map(polygon_area, polygons)))
    bbox = [round_pixels(value) for value in polygon_box(polygons)]
    return {"bbox": bbox, "segmentation": polygons, "area": area}


def rotate_box(x0: float, y0: float, x1: float, y1: float, degrees: float) -> dict[str, Any]:
    """Return the fields of `polygon_fields` of a box between two corners, turned clockwise around its center."""
    center = (x0 + x1) / 2, (y0 + y1) / 2
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    return polygon_fields([[value for corner in corners for value in rotate(corner, center, degrees)]])


def ellipse_polygon(center: tuple[float, float], radii: tuple[float, float], degrees: float = 0.0) -> list[float]:
    """Return a flat polygon with its corners on an ellipse, turned clockwise around its center."""
    angles = [k * math.tau / _CORNERS_OF_ELLIPSE for k in range(_CORNERS_OF_ELLIPSE)]
    edge = [(center[0] + radii[0] * math.cos(angle), center[1] + radii[1] * math.sin(angle)) for angle in angles]
    return [value for point in edge for value in rotate(point, center, degrees)]


def rotate(point: tuple[float, float], center: tuple[float, float], degrees: float) -> tuple[float, float]:
    """Rotate a point clockwise on the screen."""
    angle = math.radians(degrees)
    x, y = point[0] - center[0], point[1] - center[1]
    cos, sin = math.cos(angle), math.sin(angle)
    return center[0] + x * cos - y * sin, center[1] + x * sin + y * cos
