"""The synthetic world: overlapping shapes on textured grounds, drawn only from an index.

It needs no download and its annotations are exact, so quickstarts and tests run on it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import cv2
import numpy as np

from vitkit.errors import ConfigError
from vitkit.registry import nearest
from vitkit.structures import KeypointInfo

THINGS = ("circle", "square", "triangle", "star", "ring", "cross")
GROUNDS = ("plain", "striped", "checkered", "cloudy")
"""Stuff classes: every image has one ground. In maps and category ids they come after the things."""
COLORS = {
    "red": (214, 45, 45),
    "orange": (240, 140, 30),
    "yellow": (240, 220, 50),
    "green": (50, 165, 70),
    "cyan": (60, 205, 215),
    "blue": (50, 80, 215),
    "purple": (140, 60, 180),
    "pink": (245, 140, 190),
}
SPLITS = ("train", "val", "test")

_MIN_VISIBLE = 0.4  # fraction of a shape that must stay visible
_MAX_TRIES = 10
_SHIFT = 4  # cv2 draws with a precision of 1/16 of a pixel


def split_pair(name: str) -> tuple[str, int]:
    """Return the color and the index into THINGS of a name such as "red star".

    Raises:
        ConfigError: there is no such color or thing.
    """
    color, _, thing = name.partition(" ")
    if color not in COLORS or thing not in THINGS:
        raise ConfigError(f"pairs: got {name!r}. {nearest(name, [f'{c} {t}' for c in COLORS for t in THINGS])}")
    return color, THINGS.index(thing)


def thing_categories() -> list[dict[str, Any]]:
    """Return the `categories` of a COCO instances file."""
    return [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(THINGS)]


def panoptic_categories() -> list[dict[str, Any]]:
    """Return the `categories` of a COCO panoptic file: the things, then the grounds."""
    things = [{**category, "isthing": 1} for category in thing_categories()]
    grounds = [
        {"id": i, "name": f"{name} ground", "supercategory": "ground", "isthing": 0}
        for i, name in enumerate(GROUNDS, start=len(THINGS) + 1)
    ]
    return things + grounds


def _regular(points: int) -> np.ndarray:
    angles = np.arange(points) * (2 * math.pi / points)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _contours() -> dict[str, tuple[np.ndarray, ...]]:
    """Return the contours of each kind of thing within the unit circle; a second contour is a hole."""
    circle = _regular(48)
    star = _regular(10)
    star[1::2] *= 0.42
    arm = 0.36
    quarter = np.array([[1, -arm], [1, arm], [arm, arm]])
    turns = [np.linalg.matrix_power(np.array([[0, 1], [-1, 0]]), k) for k in range(4)]
    cross = np.concatenate([quarter @ turn for turn in turns]) / math.hypot(1, arm)
    return {
        "circle": (circle,),
        "square": (_regular(4),),
        "triangle": (_regular(3),),
        "star": (star,),
        "ring": (circle, circle * 0.55),
        "cross": (cross,),
    }


_CONTOURS = _contours()
SHAPE_KEYPOINTS = KeypointInfo(
    ("top", "right", "bottom", "left"), ((0, 1), (1, 2), (2, 3), (3, 0)), flip_pairs=((1, 3),), sigmas=(0.05,) * 4
)
"""The points of every thing: where its outline is straight above its center, to the right of it, and so on. Unlike
numbered corners, they can be told apart on each kind of thing, however it is turned; and unlike its highest point and
so on, they never jump from one corner to another."""
_DIRECTIONS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Where each of these points lies from the center, x and y."""
Color = float | tuple[float, float, float]


@dataclass(frozen=True)
class Shape:
    """A thing in a scene, entirely inside the image."""

    label: int
    """Index into THINGS."""
    color: str
    """Name in COLORS."""
    rgb: tuple[int, int, int]
    """The color as drawn, R, G and B in 0..255."""
    x: float
    """Center, in pixels; y likewise."""
    y: float
    radius: float
    """Radius of the circle around the shape, in pixels."""
    angle: float
    """Rotation, in radians."""

    def contours(self, left: int = 0, top: int = 0) -> list[np.ndarray]:
        """Return closed outlines, each (K, 2) int32 in 1/16 pixel from (left, top), the second one a hole."""
        c, s = math.cos(self.angle) * self.radius, math.sin(self.angle) * self.radius
        turn = np.array([[c, s], [-s, c]])
        return [
            np.rint((points @ turn + (self.x - left, self.y - top)) * (1 << _SHIFT)).astype(np.int32)
            for points in _CONTOURS[THINGS[self.label]]
        ]

    def keypoints(self) -> np.ndarray:
        """Return the `SHAPE_KEYPOINTS`, (4, 2) float32, in pixels from the image's top left corner."""
        center = np.array([self.x, self.y])
        begins = self.contours()[0] / (1 << _SHIFT) - center
        ends = np.roll(begins, -1, axis=0)
        points = []
        for x, y in _DIRECTIONS:
            side, next_side = begins @ (y, -x), ends @ (y, -x)
            crosses = (side > 0) != (next_side > 0)  # the line through the center, once in front and once behind
            share = (side / np.where(crosses, side - next_side, 1))[crosses, None]
            crossings = begins[crosses] + share * (ends - begins)[crosses]
            points.append(crossings[(crossings @ (x, y)).argmax()])
        # Outlines count from the center of the first pixel.
        return (np.array(points) + center + 0.5).astype(np.float32)

    def mask(self, height: int, width: int) -> tuple[tuple[slice, slice], np.ndarray]:
        """Return a mask of the shape, occluded parts included, in a window of an (H, W) image.

        Returns:
            the rows and columns of the window, and an (h, w) bool mask in it.
        """
        left, top = max(0, int(self.x - self.radius) - 1), max(0, int(self.y - self.radius) - 1)
        right, bottom = min(width, int(self.x + self.radius) + 3), min(height, int(self.y + self.radius) + 3)
        coverage = np.zeros((bottom - top, right - left), np.uint8)
        _paint(coverage, self.contours(left, top), 255, 255)
        return (slice(top, bottom), slice(left, right)), coverage > 127


@dataclass(frozen=True)
class Scene:
    """One image with its annotations. The N things are in drawing order, the frontmost last."""

    image: np.ndarray
    """(H, W, 3) uint8 RGB."""
    panoptic: np.ndarray
    """(H, W) int32 segment ids: 1 to N for the things, N + 1 for the ground."""
    shapes: tuple[Shape, ...]
    boxes_xyxy: np.ndarray
    """(N, 4) float32, in pixels, around the visible part."""
    ground: int
    """Index into GROUNDS."""

    @cached_property
    def labels(self) -> np.ndarray:
        """(N,) int64 index into THINGS."""
        return np.array([shape.label for shape in self.shapes], np.int64)

    @cached_property
    def masks(self) -> np.ndarray:
        """(N, H, W) bool, the visible part of each thing."""
        return self.panoptic[None] == np.arange(1, len(self.shapes) + 1)[:, None, None]

    @cached_property
    def keypoints(self) -> np.ndarray:
        """(N, 4, 3) float32 `SHAPE_KEYPOINTS`: x and y in pixels, and 2, or 1 where a thing in front occludes it."""
        points = np.array([shape.keypoints() for shape in self.shapes], np.float32).reshape(-1, 4, 2)
        x, y = points.astype(int).T
        front, own = self.panoptic[y, x].T, np.arange(1, len(points) + 1)[:, None]
        is_hidden = (front > own) & (front <= len(points))  # the ground, whose id is the highest, hides nothing
        return np.dstack([points, np.where(is_hidden, 1, 2)]).astype(np.float32)

    @cached_property
    def semantic(self) -> np.ndarray:
        """(H, W) uint8: index into THINGS + GROUNDS."""
        return np.append(self.labels, len(THINGS) + self.ground).astype(np.uint8)[self.panoptic - 1]

    @cached_property
    def segments_info(self) -> list[dict[str, Any]]:
        """The `segments_info` of a COCO panoptic file, things first, then the ground."""
        category_ids = [*(self.labels + 1).tolist(), len(THINGS) + self.ground + 1]
        segments = []
        for segment_id in np.unique(self.panoptic).tolist():
            mask = (self.panoptic == segment_id).view(np.uint8)
            shape = {"area": int(np.count_nonzero(mask)), "bbox": list(cv2.boundingRect(mask))}
            segments.append({"id": segment_id, "category_id": category_ids[segment_id - 1], **shape, "iscrowd": 0})
        return segments

    @cached_property
    def caption(self) -> str:
        """The things from left to right, each related to the next: "a red ring above a blue star on a plain ground"."""
        shapes = sorted(self.shapes, key=lambda shape: shape.x)
        words = []
        for shape, following in zip(shapes, [*shapes[1:], None]):
            words.append(f"{_article(shape.color)} {THINGS[shape.label]}")
            if following is None:
                words.append("on")
            elif following.x - shape.x >= abs(following.y - shape.y):
                words.append("left of")
            else:
                words.append("above" if following.y > shape.y else "below")
        return " ".join([*words, _article(GROUNDS[self.ground]), "ground"])


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


@dataclass(frozen=True)
class World:
    """Settings of scenes; the same settings and index produce the same scene on any machine."""

    image_size: int = 128
    """Height and width, in pixels."""
    max_image_size: int | None = None
    """If set, height and width vary independently from `image_size` to this."""
    min_objects: int = 1
    max_objects: int = 4
    min_size: float = 0.15
    """Smallest diameter of a shape, as a fraction of the image's shorter side."""
    max_size: float = 0.45
    seed: int = 0
    split: str = "train"
    """"train", "val" or "test", each of which has different scenes."""
    pairs: tuple[str, ...] | None = None
    """The only shapes that scenes have, such as "red star", all equally often; None: any shape in any color."""

    def __post_init__(self):
        largest = self.image_size if self.max_image_size is None else self.max_image_size
        if self.split not in SPLITS:
            raise ConfigError(f"split: got {self.split!r}. {nearest(str(self.split), SPLITS)}")
        if not 16 <= self.image_size <= largest:
            raise ConfigError(
                f"image_size: got {self.image_size} with max_image_size {self.max_image_size}; "
                f"expected 16 <= image_size <= max_image_size."
            )
        if not 0 <= self.min_objects <= self.max_objects:
            raise ConfigError(
                f"max_objects: got {self.max_objects} with min_objects {self.min_objects}; "
                f"expected 0 <= min_objects <= max_objects."
            )
        if not 0 < self.min_size <= self.max_size <= 0.9:
            raise ConfigError(
                f"max_size: got {self.max_size} with min_size {self.min_size}; "
                f"expected 0 < min_size <= max_size <= 0.9 of the image's side."
            )
        if self.pairs is not None and not self.pairs:
            raise ConfigError("pairs: none are left to draw; expected at least one, such as 'red star'.")
        for name in self.pairs or ():
            split_pair(name)

    def size(self, index: int) -> tuple[int, int]:
        """Return the (height, width) of an image without drawing it."""
        return self._size(self._random(index))

    def scene(self, index: int) -> Scene:
        """Draw one image."""
        return _render(*self._layout(index))

    def slide(self, index: int, num_frames: int, direction: tuple[int, int]) -> list[np.ndarray]:
        """Draw the scene of that index with its last shape moving along an axis, by half of the image's shorter side.

        The opposite direction gives the same frames in reverse order.

        Args:
            direction: (x, y) of -1, 0 or 1.
        Returns:
            `num_frames` images, (H, W, 3) uint8 RGB.
        """
        ground, backdrop, grain, shapes = self._layout(index)
        sides, moving = np.array(backdrop.shape[1::-1]), shapes[-1]
        path = np.abs(direction) * 0.5 * sides.min()
        room = np.maximum(sides - 1 - 2 * moving.radius - path, 0)
        start = moving.radius + self._random(index, 2).uniform(size=2) * room
        order = 1 if sum(direction) > 0 else -1
        moments = np.linspace(0, 1, num_frames)[::order, None]
        return [
            _render(ground, backdrop, grain, [*shapes[:-1], replace(moving, x=x, y=y)]).image
            for x, y in (start + moments * path).tolist()
        ]

    def _random(self, index: int, stream: int = 0) -> np.random.Generator:
        return np.random.default_rng((self.seed, SPLITS.index(self.split), index, stream))

    def _size(self, rng: np.random.Generator) -> tuple[int, int]:
        if self.max_image_size is None:
            return self.image_size, self.image_size
        height, width = rng.integers(self.image_size, self.max_image_size, size=2, endpoint=True).tolist()
        return height, width

    def _layout(self, index: int) -> tuple[int, np.ndarray, np.ndarray, list[Shape]]:
        """Draw the ground class, its image, the grain to add (both (H, W, 3) uint8), and the shapes, front one last."""
        rng = self._random(index)
        height, width = self._size(rng)
        ground = int(rng.integers(len(GROUNDS)))
        backdrop = _draw_ground(rng, GROUNDS[ground], height, width)
        grain = rng.integers(0, 16, (height, width, 3), np.uint8)
        shapes: list[Shape] = []
        front_shape = np.zeros((height, width), np.int32)  # 1 for the first shape, 0 for the ground
        areas, visible = np.zeros(self.max_objects + 1), np.zeros(self.max_objects + 1)
        for _ in range(rng.integers(self.min_objects, self.max_objects, endpoint=True)):
            for _ in range(_MAX_TRIES):
                shape = self._random_shape(rng, height, width)
                window, mask = shape.mask(height, width)
                occluded = np.bincount(front_shape[window][mask], minlength=len(areas))
                occluded[0] = 0  # the ground may be occluded anywhere
                if np.all(visible - occluded >= _MIN_VISIBLE * areas):
                    visible -= occluded
                    shapes.append(shape)
                    areas[len(shapes)] = visible[len(shapes)] = np.count_nonzero(mask)
                    front_shape[window][mask] = len(shapes)
                    break
        return ground, backdrop, grain, shapes

    def _random_shape(self, rng: np.random.Generator, height: int, width: int) -> Shape:
        radius = 0.5 * min(height, width) * rng.uniform(self.min_size, self.max_size)
        if self.pairs is None:
            color, label = tuple(COLORS)[rng.integers(len(COLORS))], None
        else:
            color, label = split_pair(self.pairs[rng.integers(len(self.pairs))])
        rgb = np.clip(np.array(COLORS[color]) + rng.integers(-12, 13, 3), 0, 240).tolist()
        return Shape(
            label=int(rng.integers(len(THINGS))) if label is None else label,
            color=color,
            rgb=tuple(rgb),
            x=rng.uniform(radius, width - 1 - radius),
            y=rng.uniform(radius, height - 1 - radius),
            radius=radius,
            angle=rng.uniform(0, 2 * math.pi),
        )


def _draw_ground(rng: np.random.Generator, name: str, height: int, width: int) -> np.ndarray:
    """Draw a ground as a blend of two grayish colors, from which any shape stands out: (H, W, 3) uint8."""
    gray, contrast = rng.uniform(70, 150), rng.uniform(25, 50)
    tint = rng.uniform(-18, 18, 3)
    angle = rng.uniform(0, 2 * math.pi)
    side = min(height, width)
    period = side * rng.uniform(0.08, 0.2)
    x = np.arange(width, dtype=np.float32)[None, :] / period
    y = np.arange(height, dtype=np.float32)[:, None] / period
    along = x * math.cos(angle) + y * math.sin(angle)
    if name == "plain":
        blend = cv2.normalize(along, None, 0, 1, cv2.NORM_MINMAX)
    elif name == "striped":
        blend = np.floor(along).astype(np.int32) & 1
    elif name == "checkered":
        across = y * math.cos(angle) - x * math.sin(angle)
        blend = (np.floor(along) + np.floor(across)).astype(np.int32) & 1
    else:
        coarse = rng.random((height * 8 // side + 1, width * 8 // side + 1), np.float32)
        blend = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)
    palette = gray + tint + contrast * np.linspace(0, 1, 256)[:, None]
    level = (blend * 255).astype(np.uint8)
    return cv2.LUT(cv2.merge([level] * 3), palette.astype(np.uint8)[None])


def _paint(canvas: np.ndarray, contours: list[np.ndarray], fill: Color, outline: Color) -> None:
    """Draw a shape in place. Both masks and images are painted here, so that they agree at the edges."""
    cv2.fillPoly(canvas, contours, fill, cv2.LINE_AA, _SHIFT)
    cv2.polylines(canvas, contours, True, outline, 1, cv2.LINE_AA, _SHIFT)


def _render(ground: int, backdrop: np.ndarray, grain: np.ndarray, shapes: Sequence[Shape]) -> Scene:
    image = backdrop.copy()
    height, width = image.shape[:2]
    panoptic = np.full((height, width), len(shapes) + 1, np.int32)
    windows = []
    for segment_id, shape in enumerate(shapes, start=1):
        # The darker outline separates overlapping shapes of the same color.
        _paint(image, shape.contours(), shape.rgb, tuple(0.55 * channel for channel in shape.rgb))
        window, mask = shape.mask(height, width)
        panoptic[window][mask] = segment_id
        windows.append(window)
    boxes_xyxy = np.zeros((len(shapes), 4), np.float32)
    for k, (rows, columns) in enumerate(windows):
        x, y, w, h = cv2.boundingRect((panoptic[rows, columns] == k + 1).view(np.uint8))
        boxes_xyxy[k] = x, y, x + w, y + h
        boxes_xyxy[k] += (columns.start, rows.start) * 2
    return Scene(cv2.add(image, grain), panoptic, tuple(shapes), boxes_xyxy, ground)
