"""A mosaic of four whole images in a grid that is turned, moved and scaled, with boxes and masks."""

import math
from typing import Any, NamedTuple

import cv2
import numpy as np

from vitkit.data.transforms.annotated_image import AnnotatedImage, ImageSource, Transforms, build_transforms, join
from vitkit.data.transforms.crops import compute_resized_size, pad_value_of, resize_image
from vitkit.data.transforms.lazy_image import LazyImage, apply_transforms, opencv_matrix, render
from vitkit.data.transforms.mosaic_mixup import Visibility, load_another_image, place
from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS, Spec

_MIN_BOX_SIDE = 1e-3
_MAX_TILE = 16383
"""The longest side of a tile: OpenCV moves images of less than 32767 pixels a side, and two tiles lie side by side."""


class Affine(NamedTuple):
    """A rotation and scaling around the center of a canvas, then a shift."""

    degrees: float
    """Clockwise."""
    shift: tuple[int, int]
    """Pixels to the right and down."""
    scale: float

    def matrix(self, height: int, width: int) -> np.ndarray:
        """Return the (2, 3) matrix that moves points of a canvas, in pixels from the corner of the top left one."""
        cosine, sine = (self.scale * f(math.radians(self.degrees)) for f in (math.cos, math.sin))
        turned = np.array([[cosine, -sine], [sine, cosine]])
        center = np.array([width / 2, height / 2])
        return np.column_stack([turned, center + self.shift - turned @ center])


@TRANSFORMS.register
class GridMosaic:
    """Put an image and three others in a grid of two by two, then rotate, move and scale it, as DEIM trains (Huang et
    al. 2024, https://arxiv.org/abs/2412.04234).

    Unlike in the original, the rotated image is interpolated linearly, not by the nearest pixel.

    Args:
        transforms: spec of the transforms of a mosaic; None: no transforms.
        otherwise: spec of those of an image that does not become a mosaic, which may crop and zoom more; None: none.
        probability: fraction of the images that become mosaics.
        tile: short side of each of the four images, in pixels; each cell is as large as the largest of them.
        rotation: largest rotation, in degrees.
        translation: largest shift, relative to the grid's width and height.
        scale: range of the factor of the grid's scaling.
        min_visible, min_box_side: remove what the grid's edge leaves of objects, see `MultiImageTransforms`.
        pad_value: value of all three channels of pixels outside the images.
    Raises:
        ConfigError: a value is out of range, or a spec is wrong.
    """

    def __init__(
        self,
        *,
        transforms: Spec | Transforms | None = None,
        otherwise: Spec | Transforms | None = None,
        probability: float = 0.5,
        tile: int = 320,
        rotation: float = 10.0,
        translation: float = 0.1,
        scale: tuple[float, float] = (0.5, 1.5),
        min_visible: float = 0.0,
        min_box_side: float = 1.0,
        pad_value: int = 0,
    ):
        for argument, value in {"probability": probability, "min_visible": min_visible}.items():
            if not 0 <= value <= 1:
                raise ConfigError(f"GridMosaic: {argument} is {value}; expected 0 to 1.")
        if not 0 < scale[0] <= scale[1]:
            raise ConfigError(f"GridMosaic: scale is {scale}; expected (minimum, maximum) above 0.")
        if tile < 1:
            raise ConfigError(f"GridMosaic: tile is {tile}; expected at least 1 pixel.")
        for argument, value in {"rotation": rotation, "translation": translation, "min_box_side": min_box_side}.items():
            if value < 0:
                raise ConfigError(f"GridMosaic: {argument} is {value}; expected at least 0.")
        self.transforms = build_transforms(transforms)
        self.otherwise = build_transforms(otherwise)
        self.probability = probability
        self.tile = tile
        self.rotation = rotation
        self.translation = translation
        self.scale = tuple(scale)
        self.visibility = Visibility(min_visible, max(min_box_side, _MIN_BOX_SIDE))
        self.pad_value = pad_value
        self.takes_lazy_images = type(self).mix is GridMosaic.mix

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Check a config's arguments, including those of both specs; raises like the constructor."""
        cls(**arguments)

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Raise an error: a single image is not enough, see `mix`."""
        raise ConfigError("GridMosaic is for a dataset's training images. For a single image use its `otherwise`.")

    def check_source(self, source: ImageSource) -> None:
        """Every source of images with boxes will do."""

    def mix(self, sample: AnnotatedImage, source: ImageSource, *, seed: int | None = None) -> AnnotatedImage:
        """Make a mosaic or not, and transform it; see `vitkit.data.transforms.annotated_image.MixesImages`."""
        random = np.random.default_rng(seed)
        is_lazy, transforms = isinstance(sample.image, LazyImage), self.otherwise
        if random.random() < self.probability:
            transforms = self.transforms
            samples = [render(sample), *(load_another_image(source, random) for _ in range(3))]
            grid = make_grid(samples, self.tile, self.pad_value)
            sample = move(grid, self._draw(*grid.image.shape[:2], random), self.visibility, self.pad_value)
            if not is_lazy:
                sample = render(sample)
        return apply_transforms(transforms, sample, int(random.integers(2**63)))

    def _draw(self, height: int, width: int, random: np.random.Generator) -> Affine:
        degrees = random.uniform(-self.rotation, self.rotation)
        reach = self.translation * width, self.translation * height
        shift = round(random.uniform(-reach[0], reach[0])), round(random.uniform(-reach[1], reach[1]))
        return Affine(degrees, shift, random.uniform(*self.scale))


def make_grid(samples: list[AnnotatedImage], tile: int, pad_value: int) -> AnnotatedImage:
    """Put four images of a short side of `tile` pixels at the top left of the cells of a grid, row by row."""
    tiles = []
    for sample in samples:
        size = compute_resized_size(*sample.image.shape[:2], short_side=tile, max_size=_MAX_TILE)
        tiles.append(sample.resize(resize_image(sample.image, size)))
    height, width = (max(each.image.shape[axis] for each in tiles) for axis in (0, 1))
    first = tiles[0].image
    canvas = np.full((2 * height, 2 * width, first.shape[2]), pad_value_of(first, pad_value), first.dtype)
    parts = []
    for each, (top, left) in zip(tiles, [(0, 0), (0, width), (height, 0), (height, width)]):
        tile_height, tile_width = each.image.shape[:2]
        canvas[top : top + tile_height, left : left + tile_width] = each.image
        parts.append(place(each, canvas.shape[:2], (left, top), Visibility(0.0, 0.0)))
    return join(canvas, parts)


def move(sample: AnnotatedImage, affine: Affine, visibility: Visibility, pad_value: int) -> AnnotatedImage:
    """Rotate, scale and shift an image on a canvas of its own size; a box becomes the one around its moved corners.

    Returns:
        a sample whose image is a `LazyImage`, unless it has masks.
    """
    height, width = sample.image.shape[:2]
    matrix = affine.matrix(height, width)
    image = LazyImage(sample.image).move(matrix, (height, width), pad_value)

    corners = sample.boxes_xyxy[:, [[0, 1], [2, 1], [2, 3], [0, 3]]] @ matrix[:, :2].T + matrix[:, 2]
    boxes, rows = visibility.cut(np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1), height, width)
    masks = None
    if sample.masks is not None:
        image = image.render()
        masks = np.zeros((len(sample.masks), height, width), np.uint8)
        in_pixels = opencv_matrix(matrix)
        for row in np.flatnonzero(rows):
            masks[row] = cv2.warpAffine(sample.masks[row], in_pixels, (width, height), flags=cv2.INTER_NEAREST)
        rows &= masks.any(axis=(1, 2))
        masks = masks[rows]
    moved = sample._replace(image=image, boxes_xyxy=boxes.astype(np.float32), masks=None).select(rows)
    return moved._replace(masks=masks).move_keypoints(matrix, (0, 0, width, height))
