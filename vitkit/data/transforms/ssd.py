"""The augmentation of SSD (Liu et al. 2016, https://arxiv.org/abs/1512.02325) as torchvision has it in its second
version of transforms, with which RT-DETR, D-FINE and DEIM are trained. All are albumentations."""

from collections.abc import Sequence
from typing import Any

import albumentations as A
import cv2
import numpy as np

from vitkit.data.transforms.annotated_image import check_rgb
from vitkit.data.transforms.color_distortion import to_levels
from vitkit.data.transforms.crops import MOVED_TARGETS, move_points, pad_image
from vitkit.data.transforms.lazy_image import LazyImage
from vitkit.registry import ALBUMENTATIONS

Sides = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""
_GRAY = np.array([[0.2989, 0.587, 0.114]])
"""Weights of R, G and B in a pixel's brightness, as in torchvision."""


@ALBUMENTATIONS.register
class RandomZoomOut(A.DualTransform):
    """Place the image at random on a larger canvas of one value, so that objects become small.

    Args:
        side_range: range of the canvas's width and height, relative to the image's.
        fill: value of all three channels of the canvas.
    Raises:
        ValueError: `side_range` starts below 1, or is not ascending.
    """

    _targets = MOVED_TARGETS

    def __init__(self, *, side_range: tuple[float, float] = (1.0, 4.0), fill: int = 0, p: float = 0.5):
        super().__init__(p=p)
        if not 1 <= side_range[0] <= side_range[1]:
            raise ValueError(f"side_range is {side_range}; expected (minimum, maximum) from 1.")
        self.side_range = tuple(side_range)
        self.fill = fill

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """Draw the (left, top, right, bottom) margins of one image."""
        height, width = params["shape"][:2]
        low, high = self.side_range
        scale = low + (high - low) * self.py_random.random()
        right, bottom = int(width * scale) - width, int(height * scale) - height
        left, top = int(right * self.py_random.random()), int(bottom * self.py_random.random())
        return {"margins": (left, top, right - left, bottom - top)}

    def apply(self, img: np.ndarray | LazyImage, *, margins: Sides, **params: Any) -> np.ndarray | LazyImage:
        """Add the margins to an image."""
        if isinstance(img, LazyImage):
            left, top, right, bottom = margins
            return img.crop((-left, -top, img.shape[1] + right, img.shape[0] + bottom), self.fill)
        return pad_image(img, margins, self.fill)

    def apply_to_mask(self, mask: np.ndarray, *, margins: Sides, **params: Any) -> np.ndarray:
        """Add empty margins to a mask or segment map."""
        return pad_image(mask, margins, 0)

    def apply_to_bboxes(self, bboxes: np.ndarray, *, margins: Sides, **params: Any) -> np.ndarray:
        """Move (N, 4 or more) boxes, xyxy in 0..1 of the image."""
        left, top, right, bottom = margins
        height, width = params["shape"][:2]
        moved = bboxes.copy()
        moved[:, [0, 2]] = (bboxes[:, [0, 2]] * width + left) / (width + left + right)
        moved[:, [1, 3]] = (bboxes[:, [1, 3]] * height + top) / (height + top + bottom)
        return moved

    def apply_to_keypoints(self, keypoints: np.ndarray, *, margins: Sides, **params: Any) -> np.ndarray:
        """Move (N, 2 or more) points, in pixels."""
        return move_points(keypoints, margins[:2])


@ALBUMENTATIONS.register
class RandomIoUCrop(A.DualTransform):
    """Crop a part of the image that overlaps an object by at least a drawn IoU.

    Objects whose center lies outside the crop are removed. An image without objects is left as it is.

    Args:
        scale_range: range of the crop's width and height, relative to the image's.
        aspect_range: range of the width divided by the height, both relative to the image's.
        min_ious: the minimum IoU of the crop with any of the objects whose centers it contains; one of them is drawn
            for each attempt, and 1 or more means no crop.
        trials: crops that are drawn before the next attempt.
    Raises:
        ValueError: a range is impossible, or no value of `min_ious` ends the attempts.
    """

    _targets = MOVED_TARGETS

    def __init__(
        self,
        *,
        scale_range: tuple[float, float] = (0.3, 1.0),
        aspect_range: tuple[float, float] = (0.5, 2.0),
        min_ious: Sequence[float] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
        trials: int = 40,
        p: float = 1.0,
    ):
        super().__init__(p=p)
        if not 0 < scale_range[0] <= scale_range[1] <= 1:
            raise ValueError(f"scale_range is {scale_range}; expected (minimum, maximum) in 0..1.")
        if not 0 < aspect_range[0] <= aspect_range[1]:
            raise ValueError(f"aspect_range is {aspect_range}; expected (minimum, maximum) above 0.")
        if trials < 1 or max(min_ious, default=0) < 1:
            raise ValueError(
                f"min_ious is {list(min_ious)} and trials is {trials}; expected a value of at least 1 "
                "among min_ious, which means no crop, and at least 1 trial."
            )
        self.scale_range = tuple(scale_range)
        self.aspect_range = tuple(aspect_range)
        self.min_ious = tuple(min_ious)
        self.trials = trials

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """Draw the (x0, y0, x1, y1) of one image's crop in pixels, and the (N,) bool objects inside."""
        height, width = params["shape"][:2]
        boxes = np.asarray(data["bboxes"], np.float64)[..., :4].reshape(-1, 4) * (width, height, width, height)
        whole = {"crop": (0, 0, width, height), "inside": np.ones(len(boxes), bool)}
        while len(boxes):
            min_iou = self.py_random.choice(self.min_ious)
            if min_iou >= 1:
                break
            for _ in range(self.trials):
                crop = self._draw_crop(height, width)
                if crop is None:
                    continue
                inside = _centers_inside(boxes, crop)
                if inside.any() and _ious(boxes[inside], crop).max() >= min_iou:
                    return {"crop": crop, "inside": inside}
        return whole

    def _draw_crop(self, height: int, width: int) -> Sides | None:
        low, high = self.scale_range
        new_width, new_height = (int(side * (low + (high - low) * self.py_random.random())) for side in (width, height))
        if not new_width or not new_height:
            return None
        if not self.aspect_range[0] <= new_width / new_height <= self.aspect_range[1]:
            return None
        left = int((width - new_width) * self.py_random.random())
        top = int((height - new_height) * self.py_random.random())
        return left, top, left + new_width, top + new_height

    def apply(self, img: np.ndarray | LazyImage, *, crop: Sides, **params: Any) -> np.ndarray | LazyImage:
        """Crop an image, mask or segment map."""
        if isinstance(img, LazyImage):
            return img.crop(crop)
        x0, y0, x1, y1 = crop
        return np.ascontiguousarray(img[y0:y1, x0:x1])

    def apply_to_bboxes(self, bboxes: np.ndarray, *, crop: Sides, inside: np.ndarray, **params: Any) -> np.ndarray:
        """Move (N, 4 or more) boxes, xyxy in 0..1 of the image, and remove those outside."""
        x0, y0, x1, y1 = crop
        height, width = params["shape"][:2]
        moved = bboxes[inside]
        moved[:, [0, 2]] = (moved[:, [0, 2]] * width - x0) / (x1 - x0)
        moved[:, [1, 3]] = (moved[:, [1, 3]] * height - y0) / (y1 - y0)
        return moved

    def apply_to_keypoints(self, keypoints: np.ndarray, *, crop: Sides, **params: Any) -> np.ndarray:
        """Move (N, 2 or more) points, in pixels."""
        return move_points(keypoints, (-crop[0], -crop[1]))


def _centers_inside(boxes_xyxy: np.ndarray, crop: Sides) -> np.ndarray:
    centers = (boxes_xyxy[:, :2] + boxes_xyxy[:, 2:]) / 2
    return ((centers > crop[:2]) & (centers < crop[2:])).all(axis=1)


def _ious(boxes_xyxy: np.ndarray, crop: Sides) -> np.ndarray:
    sides = np.minimum(boxes_xyxy[:, 2:], crop[2:]) - np.maximum(boxes_xyxy[:, :2], crop[:2])
    shared = sides.clip(0).prod(axis=1)
    area = (crop[2] - crop[0]) * (crop[3] - crop[1])
    return shared / ((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).prod(axis=1) + area - shared)


@ALBUMENTATIONS.register
class PhotometricDistort(A.ImageOnlyTransform):
    """Scale brightness, contrast and saturation, rotate the hue, and permute the channels.

    Each of the five happens with probability `p_each`; contrast changes either before or after saturation and hue.

    Args:
        brightness, contrast, saturation: range of the factor.
        hue: largest rotation, in turns.
        p_each: probability of each change.
    """

    def __init__(
        self,
        *,
        brightness: tuple[float, float] = (0.875, 1.125),
        contrast: tuple[float, float] = (0.5, 1.5),
        saturation: tuple[float, float] = (0.5, 1.5),
        hue: float = 0.05,
        p_each: float = 0.5,
        p: float = 1.0,
    ):
        super().__init__(p=p)
        self.brightness = tuple(brightness)
        self.contrast = tuple(contrast)
        self.saturation = tuple(saturation)
        self.hue = hue
        self.p_each = p_each

    def get_params(self) -> dict[str, Any]:
        """Draw the parameters for one image."""

        def sometimes(low: float, high: float, neutral: float) -> float:
            return self.py_random.uniform(low, high) if self.py_random.random() < self.p_each else neutral

        # Every seeded run depends on the order of these draws.
        return {
            "brightness": sometimes(*self.brightness, 1),
            "contrast": sometimes(*self.contrast, 1),
            "saturation": sometimes(*self.saturation, 1),
            "hue": sometimes(-self.hue, self.hue, 0),
            "contrast_first": self.py_random.random() < 0.5,
            "channels": self.py_random.sample(range(3), 3) if self.py_random.random() < self.p_each else [0, 1, 2],
        }

    def apply(self, img: np.ndarray | LazyImage, **params: Any) -> np.ndarray | LazyImage:
        """Apply the drawn parameters to an (H, W, 3) uint8 RGB image."""
        check_rgb(img, "PhotometricDistort")
        if isinstance(img, LazyImage):
            reference = img.thumbnail() if params["contrast"] != 1 else None
            return img.recolor(lambda pixels: self._distort(pixels, reference, **params))
        return self._distort(img, None, **params)

    def _distort(
        self,
        img: np.ndarray,
        reference: np.ndarray | None,
        *,
        brightness: float,
        contrast: float,
        saturation: float,
        hue: float,
        contrast_first: bool,
        channels: list[int],
        **params: Any,
    ) -> np.ndarray:
        """Apply the drawn parameters. If `img` is only a part of the image, contrast changes around the mean of
        `reference`, pixels of the same mean as the whole image's."""
        levels = np.arange(256, dtype=np.float32)
        images = [img] if reference is None else [img, reference]

        def scale_contrast(images: list[np.ndarray]) -> list[np.ndarray]:
            mean = float(cv2.transform(images[-1], _GRAY).mean())
            table = to_levels(contrast * levels + (1 - contrast) * mean)
            return [cv2.LUT(image, table) for image in images]

        if brightness != 1:
            images = [cv2.LUT(image, to_levels(brightness * levels)) for image in images]
        if contrast != 1 and contrast_first:
            images = scale_contrast(images)
        if saturation != 1:
            images = [_blend_with_gray(image, saturation) for image in images]
        if hue:
            images = [_rotate_hue(image, hue) for image in images]
        if contrast != 1 and not contrast_first:
            images = scale_contrast(images)
        return images[0] if channels == [0, 1, 2] else np.ascontiguousarray(images[0][..., channels])


def _blend_with_gray(image: np.ndarray, share: float) -> np.ndarray:
    return cv2.addWeighted(image, share, cv2.transform(image, np.repeat(_GRAY, 3, axis=0)), 1 - share, 0)


def _rotate_hue(image: np.ndarray, turns: float) -> np.ndarray:
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)  # a full turn is 256 levels
    hsv[..., 0] += np.uint8(round(256 * turns) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
