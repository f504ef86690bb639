"""Augmentation and resizing of images with their boxes and masks, through albumentations."""

import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# albumentations asks the network for a newer version when it is imported; loading data must not.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import cv2
import numpy as np
from albumentations.core.type_definitions import Targets
from PIL import Image

from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS, check_names, nearest

# Boxes thinner than this (pixels) are left out: rounding errors of boxes that end where a crop begins.
_VANISHED = 1e-3

_CROP_TRIES = 10


class Transformed(NamedTuple):
    """An image and its objects; rows of boxes, labels and masks belong together."""

    image: np.ndarray
    """(H, W, 3) uint8 RGB."""
    boxes_xyxy: np.ndarray
    """(N, 4) float32, pixels of `image`, inside it."""
    labels: np.ndarray
    """(N,) int64."""
    masks: np.ndarray | None
    """(N, H, W) uint8 of 0 and 1. Or (1, H, W) uint8 or uint16: a map of numbered regions that do not overlap, 0 being
    none, under one box as large as the image; all regions move at once, however many there are."""


class Transforms(Protocol):
    """What `TRANSFORMS.build` returns."""

    def __call__(
        self,
        image: np.ndarray,
        boxes_xyxy: np.ndarray,
        labels: np.ndarray,
        masks: np.ndarray | None = None,
        seed: int | None = None,
    ) -> Transformed:
        """Args and result as in `Transformed`; objects that leave the image are left out of the result.

        Args:
            seed: with it the result depends on the arguments alone; None draws fresh random numbers.
        """


def resized_size(height: int, width: int, *, short_side: int, max_size: int | None) -> tuple[int, int]:
    """The size after the short side became `short_side`, or less where the long one would exceed `max_size`.

    The rounding is that of the original DETR (`get_size_with_aspect_ratio`), which decides each image's size.

    Returns:
        (height, width).
    """
    short, long = min(height, width), max(height, width)
    if max_size is not None and long / short * short_side > max_size:
        short_side = round(max_size * short / long)
    if short == short_side:
        return height, width
    if width < height:
        return int(short_side * height / width), short_side
    return short_side, int(short_side * width / height)


class _CropAndResize(A.DualTransform):
    """Crops and resizes at once, then pads. A subclass draws, in `get_params_dependent_on_data`,

    place: of the crop, (x0, y0, x1, y1) in pixels of the given image,
    size: (height, width) that it is resized to,
    canvas: if given, (height, width) that is reached by padding at the right and bottom: images with `pad_value`, masks
        with 0.

    What is drawn in sizes of a resized image becomes a place in the given one, rounded to its pixels, so that only the
    pixels that stay are resized; boxes follow the rounded place and fit the pixels exactly.
    """

    _targets = (Targets.IMAGE, Targets.MASK, Targets.BBOXES)
    pad_value = 0

    def apply(
        self,
        img: np.ndarray,
        *,
        place: tuple[int, ...],
        size: tuple[int, int],
        canvas: tuple[int, int] | None = None,
        **params: Any,
    ) -> np.ndarray:
        x0, y0, x1, y1 = place
        shrinks = size[0] * size[1] < (y1 - y0) * (x1 - x0)
        interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        resized = cv2.resize(img[y0:y1, x0:x1], size[::-1], interpolation=interpolation)
        return _pad(resized, canvas or size, self.pad_value)

    def apply_to_mask(
        self,
        mask: np.ndarray,
        *,
        place: tuple[int, ...],
        size: tuple[int, int],
        canvas: tuple[int, int] | None = None,
        **params: Any,
    ) -> np.ndarray:
        x0, y0, x1, y1 = place
        resized = cv2.resize(mask[y0:y1, x0:x1], size[::-1], interpolation=cv2.INTER_NEAREST_EXACT)
        return _pad(resized, canvas or size, 0)

    def apply_to_bboxes(
        self,
        bboxes: np.ndarray,
        *,
        place: tuple[int, ...],
        size: tuple[int, int],
        canvas: tuple[int, int] | None = None,
        **params: Any,
    ) -> np.ndarray:
        x0, y0, x1, y1 = place
        canvas = canvas or size
        height, width = params["shape"][:2]
        moved = bboxes.copy()
        moved[:, [0, 2]] = (bboxes[:, [0, 2]] * width - x0) / (x1 - x0) * (size[1] / canvas[1])
        moved[:, [1, 3]] = (bboxes[:, [1, 3]] * height - y0) / (y1 - y0) * (size[0] / canvas[0])
        return moved


def _pad(picture: np.ndarray, canvas: tuple[int, int], value: int) -> np.ndarray:
    bottom, right = canvas[0] - picture.shape[0], canvas[1] - picture.shape[1]
    if not bottom and not right:
        return picture
    return cv2.copyMakeBorder(picture, 0, bottom, 0, right, cv2.BORDER_CONSTANT, value=(value,) * 3)


class MultiScaleCrop(_CropAndResize):
    """The size augmentation of DETR in one resize.

    Either the image is resized to one of `scales`; or it is resized to one of `crop_scales`, a part of it is cropped,
    and the part is resized to one of `scales`. Here the second way resizes once; see `_CropAndResize`.

    Args:
        scales: sizes of the short side, pixels.
        max_size: bound of the long side of the result.
        crop_scales: sizes of the short side before the crop; the long side has no bound here.
        crop_range: least and greatest width and height of the crop, pixels (at most the resized image).
        crop_probability: of the second way.
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

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        height, width = params["shape"][:2]
        crop_height, crop_width = height, width
        place = (0, 0, width, height)
        if self.py_random.random() < self.crop_probability:
            middle = resized_size(height, width, short_side=self.py_random.choice(self.crop_scales), max_size=None)
            crop_width, crop_height = (self._draw_extent(middle[axis]) for axis in (1, 0))
            top = self.py_random.randint(0, middle[0] - crop_height)
            left = self.py_random.randint(0, middle[1] - crop_width)
            x0, x1 = _to_pixels(left, left + crop_width, middle[1], width)
            y0, y1 = _to_pixels(top, top + crop_height, middle[0], height)
            place = (x0, y0, x1, y1)
        short_side = self.py_random.choice(self.scales)
        size = resized_size(crop_height, crop_width, short_side=short_side, max_size=self.max_size)
        return {"place": place, "size": size}

    def _draw_extent(self, limit: int) -> int:
        least, greatest = self.crop_range
        return self.py_random.randint(min(least, limit), min(greatest, limit))


def _to_pixels(start: int, stop: int, length: int, new_length: int) -> tuple[int, int]:
    """A range of `length` pixels as the nearest whole range of `new_length` pixels, at least one pixel long."""
    new_start = min(round(start * new_length / length), new_length - 1)
    return new_start, max(round(stop * new_length / length), new_start + 1)


class _FixedSizeCrop(_CropAndResize):
    """Draws a size that the image is resized to, and crops or pads the result to one fixed size.

    Args:
        crop_size: (height, width) of every result.
        pad_value: of images.
        max_class_area: a crop is drawn again, up to ten times, while one region of the map (see `Transformed`) takes a
            larger part of all regions' pixels; 1: any crop will do.
    """

    def __init__(self, *, crop_size: tuple[int, int], pad_value: int, max_class_area: float = 1.0):
        super().__init__(p=1.0)
        self.crop_size = crop_size
        self.pad_value = pad_value
        self.max_class_area = max_class_area

    def draw_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that an image is resized to before the crop."""
        raise NotImplementedError

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        height, width = params["shape"][:2]
        whole = self.draw_size(height, width)
        size = min(whole[0], self.crop_size[0]), min(whole[1], self.crop_size[1])
        for _ in range(_CROP_TRIES):
            top, left = (self.py_random.randint(0, whole[axis] - size[axis]) for axis in (0, 1))
            x0, x1 = _to_pixels(left, left + size[1], whole[1], width)
            y0, y1 = _to_pixels(top, top + size[0], whole[0], height)
            if self._is_varied(data.get("masks", ()), slice(y0, y1), slice(x0, x1)):
                break
        return {"place": (x0, y0, x1, y1), "size": size, "canvas": self.crop_size}

    def _is_varied(self, masks: Sequence[np.ndarray], rows: slice, columns: slice) -> bool:
        if self.max_class_area >= 1 or len(masks) != 1:
            return True
        counts = np.bincount(masks[0][rows, columns].ravel())[1:]
        return np.count_nonzero(counts) > 1 and counts.max() < self.max_class_area * counts.sum()


class _JitteredCrop(_FixedSizeCrop):
    """Large-scale jitter (Ghiasi et al. 2021, https://arxiv.org/abs/2012.07177): the image is fitted into `crop_size`
    times a factor drawn from `scale_range`."""

    def __init__(self, *, scale_range: tuple[float, float], crop_size: tuple[int, int], pad_value: int):
        super().__init__(crop_size=crop_size, pad_value=pad_value)
        self.scale_range = scale_range

    def draw_size(self, height: int, width: int) -> tuple[int, int]:
        fit = min(self.crop_size[0] / height, self.crop_size[1] / width)
        ratio = fit * self.py_random.uniform(*self.scale_range)
        return max(1, round(height * ratio)), max(1, round(width * ratio))


class _ShortSideCrop(_FixedSizeCrop):
    """The short side is resized to one of `short_sides`; see `resized_size`."""

    def __init__(
        self,
        *,
        short_sides: Sequence[int],
        max_size: int,
        crop_size: tuple[int, int],
        pad_value: int,
        max_class_area: float,
    ):
        super().__init__(crop_size=crop_size, pad_value=pad_value, max_class_area=max_class_area)
        self.short_sides = tuple(short_sides)
        self.max_size = max_size

    def draw_size(self, height: int, width: int) -> tuple[int, int]:
        short_side = self.py_random.choice(self.short_sides)
        return resized_size(height, width, short_side=short_side, max_size=self.max_size)


class ColorDistortion(A.ImageOnlyTransform):
    """The colour augmentation of SSD (Liu et al. 2016, https://arxiv.org/abs/1512.02325).

    Brightness is shifted, contrast and saturation are scaled and the hue is turned, each with probability one half;
    contrast changes before the colours or after them.

    Args:
        brightness: greatest shift, of 255.
        contrast: range of the factor.
        saturation: range of the factor.
        hue: greatest turn, degrees.
    """

    def __init__(
        self,
        *,
        brightness: float = 32,
        contrast: tuple[float, float] = (0.5, 1.5),
        saturation: tuple[float, float] = (0.5, 1.5),
        hue: float = 36,
        p: float = 1.0,
    ):
        super().__init__(p=p)
        self.brightness = brightness
        self.contrast = tuple(contrast)
        self.saturation = tuple(saturation)
        self.hue = hue

    def get_params(self) -> dict[str, Any]:
        def sometimes(low: float, high: float, neutral: float) -> float:
            return self.py_random.uniform(low, high) if self.py_random.random() < 0.5 else neutral

        return {
            "shift": sometimes(-self.brightness, self.brightness, 0),
            "contrast": sometimes(*self.contrast, 1),
            "contrast_first": self.py_random.random() < 0.5,
            "saturation": sometimes(*self.saturation, 1),
            "turn": sometimes(-self.hue, self.hue, 0),
        }

    def apply(
        self,
        img: np.ndarray,
        *,
        shift: float,
        contrast: float,
        contrast_first: bool,
        saturation: float,
        turn: float,
        **params: Any,
    ) -> np.ndarray:
        levels = np.arange(256, dtype=np.float32)
        img = cv2.LUT(img, _levels((levels + shift).clip(0, 255) * (contrast if contrast_first else 1)))
        if saturation != 1 or turn:
            # OpenCV keeps half degrees, so that a full turn fits a byte.
            hues = (levels + turn / 2) % 180
            tables = np.stack([_levels(hues), _levels(levels * saturation), _levels(levels)], axis=1)
            hsv = cv2.LUT(cv2.cvtColor(img, cv2.COLOR_RGB2HSV), tables[None])
            img = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
        return img if contrast_first else cv2.LUT(img, _levels(levels * contrast))


def _levels(values: np.ndarray) -> np.ndarray:
    return values.clip(0, 255).astype(np.uint8)


class _Pipeline:
    """Albumentations in a row, behind the interface of `Transforms`.

    Args:
        transforms: in order.
        check_each_transform: leave boxes out as soon as a transform moves them outside. Without it they are left out
            after the last one, which is faster, and the same where nothing can bring them back.
    """

    def __init__(self, transforms: Sequence[A.BasicTransform | A.BaseCompose], *, check_each_transform: bool = True):
        # clip: float32 rounding may put the edge of a box a hair outside the image, which albumentations refuses.
        bbox_params = A.BboxParams(
            format="pascal_voc",
            clip=True,
            min_width=_VANISHED,
            min_height=_VANISHED,
            check_each_transform=check_each_transform,
        )
        self._compose = A.Compose(list(transforms), bbox_params=bbox_params, is_check_shapes=False)

    def __call__(
        self,
        image: np.ndarray,
        boxes_xyxy: np.ndarray,
        labels: np.ndarray,
        masks: np.ndarray | None = None,
        seed: int | None = None,
    ) -> Transformed:
        # Not set_random_seed: it gives every transform its own generator of the same seed, and all would draw the
        # same numbers (a flip would always come with a crop). None takes fresh entropy, also in forked workers.
        self._compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
        visible = ((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]) > _VANISHED).all(axis=1)
        rows = np.flatnonzero(visible)[:, None]
        data = {"image": image, "bboxes": np.concatenate([boxes_xyxy[visible], rows], axis=1, dtype=np.float32)}
        has_masks = masks is not None and len(masks) > 0
        if has_masks:
            data["masks"] = masks
        result = self._compose(**data)
        image, boxes = result["image"], result["bboxes"].reshape(-1, 5)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,):
            raise ConfigError(
                "transforms: the result is no uint8 RGB image. Normalisation and conversion to tensors happen "
                "in the model and the dataset: leave Normalize, ToFloat, ToTensorV2 and the like out."
            )
        kept = boxes[:, 4].astype(np.int64)
        if has_masks:
            masks = np.asarray(result["masks"])[kept]
        elif masks is not None:
            masks = np.zeros((0, *image.shape[:2]), np.uint8)
        return Transformed(image, boxes[:, :4].astype(np.float32), labels[kept], masks)


@TRANSFORMS.register
class DETRTrainTransforms(_Pipeline):
    """Flip, multi-scale resize and crop: the training recipe of DETR (Carion et al. 2020, appendix A.4).

    Sizes and their frequencies are the original's. Pixels are interpolated once (see `MultiScaleCrop`) by OpenCV,
    averaging when shrinking and linear otherwise, where the original resizes by Pillow up to twice.

    Args:
        scales, max_size, crop_scales, crop_range: see `MultiScaleCrop`; the defaults are for COCO.
        flip_probability: of a horizontal flip.
        crop_probability: of a crop.
    """

    def __init__(
        self,
        *,
        scales: Sequence[int] = tuple(range(480, 801, 32)),
        max_size: int = 1333,
        crop_scales: Sequence[int] = (400, 500, 600),
        crop_range: tuple[int, int] = (384, 600),
        flip_probability: float = 0.5,
        crop_probability: float = 0.5,
    ):
        sizes = MultiScaleCrop(
            scales=scales,
            max_size=max_size,
            crop_scales=crop_scales,
            crop_range=crop_range,
            crop_probability=crop_probability,
        )
        super().__init__([A.HorizontalFlip(p=flip_probability), sizes], check_each_transform=False)


@TRANSFORMS.register
class LargeScaleJitter(_Pipeline):
    """Flip, scale and crop or pad to one size: how Mask2Former trains on COCO (Cheng et al. 2022, appendix A).

    The padding belongs to the image, as in the original: it is grey (about the mean colour, and so about 0 after
    normalisation), lies in no mask, and is not in the batch's padding mask.

    Args:
        size: height and width of every result, pixels.
        scale_range: of the factor by which the image is larger than what fits into `size`.
        flip_probability: of a horizontal flip.
        pad_value: of the three colours.
    """

    def __init__(
        self,
        *,
        size: int = 1024,
        scale_range: tuple[float, float] = (0.1, 2.0),
        flip_probability: float = 0.5,
        pad_value: int = 128,
    ):
        if not 0 < scale_range[0] <= scale_range[1]:
            raise ConfigError(f"LargeScaleJitter: scale_range is {scale_range}; expected (least, greatest) above 0.")
        if size < 1:
            raise ConfigError(f"LargeScaleJitter: size is {size}; expected at least 1 pixel.")
        crop = _JitteredCrop(scale_range=tuple(scale_range), crop_size=(size, size), pad_value=pad_value)
        super().__init__([A.HorizontalFlip(p=flip_probability), crop], check_each_transform=False)


@TRANSFORMS.register
class SemanticTrainTransforms(_Pipeline):
    """Scale, crop, flip and colours: how MaskFormer and Mask2Former train on ADE20K and Cityscapes.

    An image smaller than the crop is padded, as in `LargeScaleJitter`.

    Args:
        crop_size: (height, width) of every result, pixels.
        short_sides: sizes that the short side is resized to; None: from a half to twice the crop's longer side in steps
            of a tenth, as in the originals.
        max_size: bound of the long side before the crop; None: four times the crop's longer side.
        max_class_area: the greatest part of a crop's labelled pixels that one class may take, tried ten times (0.75 in
            most recipes; the published MaskFormer and Mask2Former weights were trained with 1, which is no bound).
        flip_probability: of a horizontal flip.
        color_probability: of `ColorDistortion`.
        pad_value: of the three colours.
    """

    def __init__(
        self,
        *,
        crop_size: tuple[int, int] = (512, 512),
        short_sides: Sequence[int] | None = None,
        max_size: int | None = None,
        max_class_area: float = 0.75,
        flip_probability: float = 0.5,
        color_probability: float = 1.0,
        pad_value: int = 128,
    ):
        if not 0 < max_class_area <= 1:
            raise ConfigError(
                f"SemanticTrainTransforms: max_class_area is {max_class_area}; expected above 0 and at most 1."
            )
        longer = max(crop_size)
        crop = _ShortSideCrop(
            short_sides=short_sides or [int(tenths * 0.1 * longer) for tenths in range(5, 21)],
            max_size=max_size or 4 * longer,
            crop_size=tuple(crop_size),
            pad_value=pad_value,
            max_class_area=max_class_area,
        )
        flip, colors = A.HorizontalFlip(p=flip_probability), ColorDistortion(p=color_probability)
        super().__init__([crop, colors, flip], check_each_transform=False)


@TRANSFORMS.register
class EvalResize:
    """The resize of DETR's evaluation: Pillow's antialiased bilinear one, as published numbers were made with.

    Args:
        short_side, max_size: of the result, pixels; see `resized_size`.
    """

    def __init__(self, *, short_side: int = 800, max_size: int = 1333):
        self.short_side = short_side
        self.max_size = max_size

    def __call__(
        self,
        image: np.ndarray,
        boxes_xyxy: np.ndarray,
        labels: np.ndarray,
        masks: np.ndarray | None = None,
        seed: int | None = None,
    ) -> Transformed:
        height, width = image.shape[:2]
        size = resized_size(height, width, short_side=self.short_side, max_size=self.max_size)
        if size != (height, width):
            image = np.array(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
            boxes_xyxy = boxes_xyxy * np.array([size[1] / width, size[0] / height] * 2, np.float32)
        if masks is not None and size != (height, width):
            resized = [cv2.resize(mask, size[::-1], interpolation=cv2.INTER_NEAREST_EXACT) for mask in masks]
            masks = np.stack(resized) if resized else np.zeros((0, *size), np.uint8)
        return Transformed(image, boxes_xyxy, labels, masks)


@TRANSFORMS.register
class ComposedTransforms(_Pipeline):
    """Any transforms of albumentations, one after the other.

    Args:
        transforms: a list of `dict(type=NAME, **arguments)`, where NAME is a class of albumentations
            (https://explore.albumentations.ai), "MultiScaleCrop" or "ColorDistortion"; groups such as OneOf take
            `transforms` themselves.
    Raises:
        ConfigError: a name or an argument is unknown, or the transform cannot move boxes.
    """

    def __init__(self, *, transforms: Sequence[dict[str, Any]]):
        super().__init__([_build_albumentation(spec, f"transforms[{i}]") for i, spec in enumerate(transforms)])

    @classmethod
    def check_arguments(cls, *, transforms: Sequence[dict[str, Any]]) -> None:
        """Checks the names and arguments inside, for configs; raises as the constructor does."""
        cls(transforms=transforms)


def _build_albumentation(spec: Any, where: str) -> A.BasicTransform | A.BaseCompose:
    where = f"ComposedTransforms {where}"
    known = {
        name: value
        for name, value in vars(A).items()
        if isinstance(value, type) and issubclass(value, A.BasicTransform | A.BaseCompose)
    }
    known |= {"MultiScaleCrop": MultiScaleCrop, "ColorDistortion": ColorDistortion}
    if not isinstance(spec, dict) or spec.get("type") not in known:
        name = spec.get("type") if isinstance(spec, dict) else spec
        raise ConfigError(f"{where}: unknown transform {name!r}. {nearest(str(name), known)}")
    arguments = {name: value for name, value in spec.items() if name != "type"}
    constructor = known[spec["type"]]
    check_names(constructor, arguments, f"{where} {spec['type']}")
    if issubclass(constructor, A.BaseCompose) and "transforms" in arguments:
        if not isinstance(arguments["transforms"], list | tuple):
            raise ConfigError(f"{where} {spec['type']}: transforms is {arguments['transforms']!r}; expected a list.")
        inner = enumerate(arguments["transforms"])
        arguments["transforms"] = [_build_albumentation(part, f"{where}.transforms[{i}]") for i, part in inner]
    try:
        built = constructor(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} {spec['type']}: {error}") from error
    if isinstance(built, A.DualTransform) and Targets.BBOXES not in built._targets:
        raise ConfigError(f"{where}: {spec['type']} cannot move boxes, so it cannot be used for detection.")
    return built
