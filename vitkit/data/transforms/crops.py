"""Cropping and resizing of images with their boxes and masks, as albumentations transforms that resize only once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import albumentations as A
import cv2
import numpy as np
from albumentations.core.type_definitions import Targets
from PIL import Image

from vitkit.registry import ALBUMENTATIONS

MOVED_TARGETS = (Targets.IMAGE, Targets.MASK, Targets.BBOXES, Targets.KEYPOINTS)
_CROP_TRIES = 10


def compute_resized_size(height: int, width: int, *, short_side: int, max_size: int | None) -> tuple[int, int]:
    """Return the size after resizing the short side to `short_side`, or less where the long one would exceed
    `max_size`.

    The rounding is that of the original DETR (`get_size_with_aspect_ratio`).

    Returns:
        (height, width).
    """
    short, long = min(height, width), max(height, width)
    if max_size is not None and long / short * short_side > max_size:
        short_side = round(max_size * short / long)
    if short_side == 0:  # so long an image that its proportions cannot be kept
        return (1, max_size) if height < width else (max_size, 1)
    if short == short_side:
        return height, width
    if width < height:
        return int(short_side * height / width), short_side
    return short_side, int(short_side * width / height)


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image to (height, width), averaging pixels when it shrinks and interpolating bilinearly otherwise."""
    shrinks = size[0] * size[1] < image.shape[0] * image.shape[1]
    interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    if image.shape[2] <= 3:
        return cv2.resize(image, size[::-1], interpolation=interpolation).reshape(*size, image.shape[2])
    # OpenCV averages at most four channels.
    return np.dstack([cv2.resize(plane, size[::-1], interpolation=interpolation) for plane in np.moveaxis(image, 2, 0)])


def resize_antialiased(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image to (height, width) bilinearly by Pillow, antialiased."""
    if image.dtype == np.uint8:
        return np.array(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    # Pillow's only type of more than 8 bits that it can resize is float32, which holds 16 bits exactly.
    planes = (Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(image, 2, 0))
    resized = [np.asarray(plane.resize(size[::-1], Image.Resampling.BILINEAR)) for plane in planes]
    return np.dstack(resized).round().clip(0, 65535).astype(image.dtype)


class Crop(NamedTuple):
    """A crop, the size that it is resized to, and the size that it is padded to."""

    box: tuple[int, int, int, int]
    """(x0, y0, x1, y1) in pixels of the original image."""
    size: tuple[int, int]
    """(height, width) after resizing."""
    padded_size: tuple[int, int]
    """(height, width) after padding at the right and bottom."""


class _CropAndResize(A.DualTransform):
    """Crops and resizes in one step, then pads images with `pad_value` and masks with 0. A subclass draws the crop.

    A crop drawn in a resized image is converted to one of the original image, rounded to its pixels; boxes follow the
    rounded crop and so match the pixels exactly.
    """

    _targets = MOVED_TARGETS
    pad_value = 0

    def draw_crop(self, height: int, width: int, segment_map: np.ndarray | None) -> Crop:
        """Draw the crop for an image of that size."""
        raise NotImplementedError

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """Draw the parameters for one image, as albumentations calls it."""
        return {"crop": self.draw_crop(*params["shape"][:2], data.get("mask"))}

    def apply(self, img: np.ndarray, *, crop: Crop, **params: Any) -> np.ndarray:
        """Crop, resize and pad an image."""
        # Cropped first, so that only the pixels that remain are resized.
        x0, y0, x1, y1 = crop.box
        return _pad(resize_image(img[y0:y1, x0:x1], crop.size), crop, self.pad_value)

    def apply_to_mask(self, mask: np.ndarray, *, crop: Crop, **params: Any) -> np.ndarray:
        """Crop, resize and pad a mask or segment map with nearest-neighbor interpolation."""
        x0, y0, x1, y1 = crop.box
        return _pad(cv2.resize(mask[y0:y1, x0:x1], crop.size[::-1], interpolation=cv2.INTER_NEAREST_EXACT), crop, 0)

    def apply_to_bboxes(self, bboxes: np.ndarray, *, crop: Crop, **params: Any) -> np.ndarray:
        """Transform (N, 4 or more) boxes, xyxy in 0..1 of the image; they may extend beyond the result."""
        x0, y0, x1, y1 = crop.box
        height, width = params["shape"][:2]
        moved = bboxes.copy()
        moved[:, [0, 2]] = (bboxes[:, [0, 2]] * width - x0) / (x1 - x0) * (crop.size[1] / crop.padded_size[1])
        moved[:, [1, 3]] = (bboxes[:, [1, 3]] * height - y0) / (y1 - y0) * (crop.size[0] / crop.padded_size[0])
        return moved

    def apply_to_keypoints(self, keypoints: np.ndarray, *, crop: Crop, **params: Any) -> np.ndarray:
        """Move (N, 2 or more) points, see `move_points`."""
        x0, y0, x1, y1 = crop.box
        return move_points(keypoints, (-x0, -y0), (crop.size[1] / (x1 - x0), crop.size[0] / (y1 - y0)))


def move_points(points: np.ndarray, shift: tuple[float, float], scale: tuple[float, float] = (1, 1)) -> np.ndarray:
    """Return (N, 2 or more) points, x and y in albumentations' pixels, shifted and then scaled.

    In albumentations a pixel's center has whole coordinates, as in its flips and rotations; elsewhere in vitkit its
    top left corner has.
    """
    moved = points.copy()
    moved[:, :2] = (points[:, :2] + 0.5 + shift) * scale - 0.5
    return moved


def _pad(image: np.ndarray, crop: Crop, value: int) -> np.ndarray:
    bottom, right = crop.padded_size[0] - crop.size[0], crop.padded_size[1] - crop.size[1]
    return pad_image(image, (0, 0, right, bottom), value) if bottom or right else image


def pad_image(image: np.ndarray, margins: tuple[int, int, int, int], value: int) -> np.ndarray:
    """Add margins (left, top, right, bottom) to an image, mask or segment map; for `value`, see `pad_value_of`."""
    left, top, right, bottom = margins
    if image.ndim == 2 or image.dtype == np.uint8:
        return cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(value,) * 3)
    height, width, channels = image.shape
    padded = np.full((top + height + bottom, left + width + right, channels), pad_value_of(image, value), image.dtype)
    padded[top : top + height, left : left + width] = image
    return padded


def pad_value_of(image: np.ndarray, value: int) -> int:
    """Return the value of padding in an image's type, for one in 0..255."""
    return value * 257 if image.dtype == np.uint16 else value


@ALBUMENTATIONS.register
class MultiScaleCrop(_CropAndResize):
    """The size augmentation of DETR, with a single resize.

    The image is resized to one of `scales`; or it is resized to one of `crop_scales`, cropped, and the crop is resized
    to one of `scales`. Here the second case resizes once; see `_CropAndResize`.

    Args:
        scales: sizes of the short side, in pixels.
        max_size: upper bound of the long side of the result.
        crop_scales: sizes of the short side before the crop, for which the long side is unbounded.
        crop_range: range of the crop's width and height, in pixels (at most the resized image).
        crop_probability: probability of the second case.
    """

    def __init__(
        self,
        *,
        scales: Sequence[int] = tuple(range(480, 801, 32)),
        max_size: int = 1333,
        crop_scales: Sequence[int] = (400, 500, 600),
        crop_range: tuple[int, int] = (384, 600),
        crop_probability: float = 0.5,
        p: float = 1.0,
    ):
        super().__init__(p=p)
        self.scales = tuple(scales)
        self.max_size = max_size
        self.crop_scales = tuple(crop_scales)
        self.crop_range = tuple(crop_range)
        self.crop_probability = crop_probability

    def draw_crop(self, height: int, width: int, segment_map: np.ndarray | None) -> Crop:
        crop_height, crop_width = height, width
        box = (0, 0, width, height)
        if self.py_random.random() < self.crop_probability:
            short_side = self.py_random.choice(self.crop_scales)
            resized = compute_resized_size(height, width, short_side=short_side, max_size=None)
            crop_width, crop_height = (self._draw_extent(resized[axis]) for axis in (1, 0))
            top = self.py_random.randint(0, resized[0] - crop_height)
            left = self.py_random.randint(0, resized[1] - crop_width)
            x0, x1 = _to_pixels(left, left + crop_width, resized[1], width)
            y0, y1 = _to_pixels(top, top + crop_height, resized[0], height)
            box = (x0, y0, x1, y1)
        short_side = self.py_random.choice(self.scales)
        size = compute_resized_size(crop_height, crop_width, short_side=short_side, max_size=self.max_size)
        return Crop(box, size, padded_size=size)

    def _draw_extent(self, limit: int) -> int:
        low, high = self.crop_range
        return self.py_random.randint(min(low, limit), min(high, limit))


def _to_pixels(start: int, stop: int, length: int, new_length: int) -> tuple[int, int]:
    """Scale a range of `length` pixels to the nearest integer range of `new_length` pixels, at least one pixel long."""
    new_start = min(round(start * new_length / length), new_length - 1)
    return new_start, max(round(stop * new_length / length), new_start + 1)


class _FixedSizeCrop(_CropAndResize):
    """Draws a size to resize the image to, and crops or pads the result to a fixed size.

    Args:
        crop_size: (height, width) of every result.
        pad_value: value of padded pixels.
        max_class_area: the crop is drawn again, up to ten times, as long as a single region of the segment map covers
            more than this fraction of all regions' pixels; 1: any crop is accepted.
    """

    def __init__(self, *, crop_size: tuple[int, int], pad_value: int, max_class_area: float = 1.0):
        super().__init__(p=1.0)
        self.crop_size = crop_size
        self.pad_value = pad_value
        self.max_class_area = max_class_area

    def draw_size(self, height: int, width: int) -> tuple[int, int]:
        """Draw the (height, width) to resize an image to before the crop."""
        raise NotImplementedError

    def draw_crop(self, height: int, width: int, segment_map: np.ndarray | None) -> Crop:
        resized = self.draw_size(height, width)
        size = min(resized[0], self.crop_size[0]), min(resized[1], self.crop_size[1])
        for _ in range(_CROP_TRIES):
            top, left = (self.py_random.randint(0, resized[axis] - size[axis]) for axis in (0, 1))
            x0, x1 = _to_pixels(left, left + size[1], resized[1], width)
            y0, y1 = _to_pixels(top, top + size[0], resized[0], height)
            if segment_map is None or self.max_class_area >= 1 or self._is_varied(segment_map[y0:y1, x0:x1]):
                break
        return Crop((x0, y0, x1, y1), size, self.crop_size)

    def _is_varied(self, segment_map: np.ndarray) -> bool:
        counts = np.bincount(segment_map.ravel())[1:]
        return np.count_nonzero(counts) > 1 and counts.max() < self.max_class_area * counts.sum()


class JitteredCrop(_FixedSizeCrop):
    """Large-scale jitter (Ghiasi et al. 2021, https://arxiv.org/abs/2012.07177).

    The image is fitted into `crop_size` times a factor drawn from `scale_range`.
    """

    def __init__(self, *, scale_range: tuple[float, float], **crop: Any):
        super().__init__(**crop)
        self.scale_range = scale_range

    def draw_size(self, height: int, width: int) -> tuple[int, int]:
        fit = min(self.crop_size[0] / height, self.crop_size[1] / width)
        ratio = fit * self.py_random.uniform(*self.scale_range)
        return max(1, round(height * ratio)), max(1, round(width * ratio))


class ShortSideCrop(_FixedSizeCrop):
    """Crop an image whose short side was resized to one of `short_sides`; see `compute_resized_size`."""

    def __init__(self, *, short_sides: Sequence[int], max_size: int, **crop: Any):
        super().__init__(**crop)
        self.short_sides = tuple(short_sides)
        self.max_size = max_size

    def draw_size(self, height: int, width: int) -> tuple[int, int]:
        short_side = self.py_random.choice(self.short_sides)
        return compute_resized_size(height, width, short_side=short_side, max_size=self.max_size)
