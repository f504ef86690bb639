"""Pipelines that augment and resize images with their boxes and masks, through albumentations."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import albumentations as A
import cv2
import numpy as np
from albumentations.core.type_definitions import Targets
from PIL import Image

from vitkit.data.colors import ColorDistortion
from vitkit.data.crops import JitteredCrop, MultiScaleCrop, ShortSideCrop, resized_size
from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS, check_names, nearest

# Boxes thinner than this (pixels) are left out: rounding errors of boxes that end where a crop begins.
_VANISHED = 1e-3


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
        crop = JitteredCrop(scale_range=tuple(scale_range), crop_size=(size, size), pad_value=pad_value)
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
        crop = ShortSideCrop(
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
