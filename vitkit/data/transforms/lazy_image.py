"""Images whose crops, margins, flips and colors are applied together, once the final size is known."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import cv2
import numpy as np

from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.data.transforms.crops import pad_value_of, resize_image
from vitkit.io.image_files import OPENCV_CHANNELS

ChangeColors = Callable[[np.ndarray], np.ndarray]
_IDENTITY = np.eye(2, 3)
_ROUNDING = 1e-6
_THUMBNAIL_STEP = 4
_LINEAR_FROM = 0.5
"""The scale from which linear interpolation is an average of enough pixels."""


@dataclass(frozen=True, eq=False)
class LazyImage:
    """An image whose transforms only record their changes; `render` computes the pixels, once and at their final size.

    A sequence of transforms writes and reads each pixel several times, and most pixels of an image that was zoomed out
    are margin, nearly all of which the last resize drops. Here the visible part of the source is resized once, and its
    colors change at the smaller of the two sizes.

    Args:
        source: (H, W, C) uint8 or uint16.
        matrix: (2, 3), moves points of the source to this image, in pixels from the corner of the top left one; None:
            the image is the source.
        size: (height, width) of this image; None: that of the source.
        fill: value, in 0..255, of what lies outside the source.
        first_colors: changes of the source's colors, which leave the fill as it is.
        last_colors: changes of the colors of this image, the fill's included.
    """

    source: np.ndarray
    matrix: np.ndarray | None = None
    size: tuple[int, int] | None = None
    fill: int = 0
    first_colors: tuple[ChangeColors, ...] = ()
    last_colors: tuple[ChangeColors, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, channels), as of an array."""
        return (*(self.size or self.source.shape[:2]), self.source.shape[2])

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype

    def move(self, matrix: np.ndarray, size: tuple[int, int], fill: int | None = None) -> "LazyImage":
        """Move all points by a (2, 3) matrix onto a canvas of (height, width).

        Args:
            fill: value of what lies outside the image; None: nothing of it becomes visible.
        """
        if fill is not None and (self.matrix is not None or self.last_colors):
            # Otherwise what a crop has cut off would be visible again, or earlier changes of colors apply to the fill.
            return LazyImage(self.render()).move(matrix, size, fill)
        if self.matrix is not None:
            matrix = matrix @ np.vstack([self.matrix, [0, 0, 1]])
        return replace(self, matrix=matrix, size=size, fill=self.fill if fill is None else fill)

    def crop(self, box: tuple[int, int, int, int], fill: int = 0) -> "LazyImage":
        """Crop to a box (x0, y0, x1, y1), which may extend beyond the image."""
        x0, y0, x1, y1 = box
        height, width = self.shape[:2]
        is_inside = x0 >= 0 and y0 >= 0 and x1 <= width and y1 <= height
        return self.move(np.array([[1.0, 0, -x0], [0, 1, -y0]]), (y1 - y0, x1 - x0), None if is_inside else fill)

    def flip(self) -> "LazyImage":
        """Mirror left and right."""
        height, width = self.shape[:2]
        return self.move(np.array([[-1.0, 0, width], [0, 1, 0]]), (height, width))

    def recolor(self, change: ChangeColors) -> "LazyImage":
        """Change the colors by a function of (H, W, C) pixels that changes each pixel by itself."""
        name = "first_colors" if self.matrix is None else "last_colors"
        return replace(self, **{name: (*getattr(self, name), change)})

    def thumbnail(self) -> np.ndarray:
        """Compute a small version, whose mean is about that of all pixels."""
        if self.matrix is None:
            return _recolor(self.source[::_THUMBNAIL_STEP, ::_THUMBNAIL_STEP].copy(), self.first_colors)
        return self.render(tuple(-(-side // _THUMBNAIL_STEP) for side in self.shape[:2]))

    def render(self, size: tuple[int, int] | None = None) -> np.ndarray:
        """Compute the pixels, resized to (height, width) whatever the proportions; None: without a resize."""
        size = size or self.shape[:2]
        ratios = np.array(size[::-1]) / self.shape[1::-1]
        matrix = (_IDENTITY if self.matrix is None else self.matrix) * ratios[:, None]
        low, high = _visible_box(matrix, size)
        limits = np.array(self.source.shape[1::-1])
        is_aligned = matrix[0, 1] == 0 and matrix[1, 0] == 0
        is_aligned &= all(np.abs(ends - np.rint(ends)).max() < _ROUNDING for ends in (low, high))
        if is_aligned and (low > -_ROUNDING).all() and (high < limits + _ROUNDING).all():
            part = _slice(self.source, np.rint(low), np.rint(high))
            image = self._resize(_mirror(part) if matrix[0, 0] < 0 else part, size)
        else:
            image = self._warp(matrix, size, low, high, shrink=np.where(ratios < _LINEAR_FROM, ratios, 1.0))
        return _recolor(image, self.last_colors)

    def _resize(self, part: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Resize a part of the source, and change its colors where there are fewer pixels."""
        if size[0] * size[1] < part.shape[0] * part.shape[1]:
            return _recolor(resize_image(part, size), self.first_colors)
        part = _recolor(part, self.first_colors)
        return part if part.shape[:2] == size else resize_image(part, size)

    def _warp(
        self, matrix: np.ndarray, size: tuple[int, int], low: np.ndarray, high: np.ndarray, *, shrink: np.ndarray
    ) -> np.ndarray:
        """Move the source by a matrix, with its fill around it, and change its own colors.

        Args:
            low, high: (x, y) of the corners of the box of the source's points that are visible.
            shrink: factors of (x, y), from 1 down, of a resize with averages before the linear interpolation.
        """
        border = pad_value_of(self.source, self.fill)
        image = np.full((*size, self.source.shape[2]), border, self.source.dtype)
        limits = np.array(self.source.shape[1::-1])
        margin = np.ceil(1 / shrink) + 1  # what pixels at a crop's edge are interpolated with
        low, high = (np.clip(ends, 0, limits) for ends in (np.floor(low) - margin, np.ceil(high) + margin))
        if (low >= high).any():
            return image
        extent = high - low
        new_extent = np.rint(extent * shrink).clip(1)
        part = _slice(self.source, low, high)
        if (new_extent < extent).any():
            part = resize_image(part, (int(new_extent[1]), int(new_extent[0])))
        part = _recolor(part, self.first_colors)
        matrix = np.column_stack([matrix[:, :2] * (extent / new_extent), matrix @ [*low, 1]])

        # Only the box of the image that the part is moved to.
        corners = matrix @ [[0, new_extent[0], 0, new_extent[0]], [0, 0, new_extent[1], new_extent[1]], [1, 1, 1, 1]]
        x0, y0 = np.floor(corners.min(axis=1)).clip(0, size[::-1]).astype(int)
        x1, y1 = np.ceil(corners.max(axis=1)).clip(0, size[::-1]).astype(int)
        if x0 >= x1 or y0 >= y1:
            return image
        matrix = opencv_matrix(matrix - [[0, 0, x0], [0, 0, y0]])
        # OpenCV takes at most four channels.
        planes = [part] if part.shape[2] <= 3 else np.moveaxis(part, 2, 0)
        moved = [
            cv2.warpAffine(plane, matrix, (x1 - x0, y1 - y0), flags=cv2.INTER_LINEAR, borderValue=(border,) * 3)
            for plane in planes
        ]
        image[y0:y1, x0:x1] = np.dstack(moved)
        return image

    def render_masks(self, masks: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Move (N, H, W) masks of the source as its pixels, by the nearest one and 0 outside; nothing may be rotated.

        They equal masks that are padded, cropped, flipped and last resized to (height, width) by INTER_NEAREST_EXACT.
        """
        matrix = _IDENTITY if self.matrix is None else self.matrix
        targets, sources = [], []
        for axis, extent in enumerate(size):
            # Of this image, before the resize.
            positions = np.arange(self.shape[axis], dtype=np.int32)[None]
            positions = cv2.resize(positions, (extent, 1), interpolation=cv2.INTER_NEAREST_EXACT)[0]
            of_source = np.floor((positions + 0.5 - matrix[1 - axis, 2]) / matrix[1 - axis, 1 - axis]).astype(int)
            inside = np.flatnonzero((of_source >= 0) & (of_source < self.source.shape[axis]))
            targets.append(inside)
            sources.append(of_source[inside])
        result = np.zeros((len(masks), *size), masks.dtype)
        for new, mask in zip(result, masks):
            new[np.ix_(*targets)] = mask[np.ix_(*sources)]
        return result


def opencv_matrix(matrix: np.ndarray) -> np.ndarray:
    """Return a (2, 3) matrix as OpenCV needs it, which counts from the center of the top left pixel."""
    return np.column_stack([matrix[:, :2], matrix[:, 2] + matrix[:, :2].sum(axis=1) / 2 - 0.5])


def _visible_box(matrix: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners (x, y) of the box of points that a matrix moves into an image of (height, width)."""
    height, width = size
    corners = np.array([[0, 0], [width, 0], [0, height], [width, height]]) - matrix[:, 2]
    corners = np.linalg.solve(matrix[:, :2], corners.T)
    return corners.min(axis=1), corners.max(axis=1)


def _slice(image: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    (x0, y0), (x1, y1) = low.astype(int), high.astype(int)
    return image[y0:y1, x0:x1]


def _mirror(image: np.ndarray) -> np.ndarray:
    if image.shape[2] > OPENCV_CHANNELS:
        return np.ascontiguousarray(image[:, ::-1])
    return cv2.flip(image, 1).reshape(image.shape)  # OpenCV drops the axis of a single channel


def _recolor(pixels: np.ndarray, changes: tuple[ChangeColors, ...]) -> np.ndarray:
    for change in changes:
        pixels = change(pixels)
    return pixels


def make_lazy(sample: AnnotatedImage, transforms: Transforms | None) -> AnnotatedImage:
    """Make an image lazy, if transforms, or none, take and return such an image."""
    return sample._replace(image=LazyImage(sample.image)) if takes_lazy_images(transforms) else sample


def render(sample: AnnotatedImage, size: tuple[int, int] | None = None) -> AnnotatedImage:
    """Compute the pixels, and masks, of a lazy image, and resize any to (height, width); None: without a resize."""
    image, size = sample.image, size or sample.image.shape[:2]
    if not isinstance(image, LazyImage):
        return sample if size == image.shape[:2] else sample.resize(resize_image(image, size))
    result = sample._replace(masks=None).resize(image.render(size))
    return result if sample.masks is None else result._replace(masks=image.render_masks(sample.masks, size))


def apply_transforms(transforms: Transforms | None, sample: AnnotatedImage, seed: int | None) -> AnnotatedImage:
    """Transform an image, a lazy one only by transforms that take it; None leaves it unchanged."""
    if transforms is None:
        return sample
    return transforms(sample if takes_lazy_images(transforms) else render(sample), seed=seed)


@runtime_checkable
class TakesLazyImages(Protocol):
    """Transforms that may take an image that is a `LazyImage`, and return one."""

    takes_lazy_images: bool


def takes_lazy_images(transforms: Transforms | None) -> bool:
    """Whether transforms, or none, take and return an image that is a `LazyImage`."""
    return transforms is None or (isinstance(transforms, TakesLazyImages) and transforms.takes_lazy_images)
