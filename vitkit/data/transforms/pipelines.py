"""Pipelines that augment and resize images with their boxes and masks, using albumentations."""

import random
from collections.abc import Sequence
from typing import Any, Literal

import albumentations as A
import numpy as np
from albumentations.core.type_definitions import Targets

from vitkit.data.transforms.annotated_image import AnnotatedImage, keep_inside
from vitkit.data.transforms.color_distortion import ColorDistortion
from vitkit.data.transforms.crops import (
    JitteredCrop,
    MultiScaleCrop,
    ShortSideCrop,
    compute_resized_size,
    resize_antialiased,
)
from vitkit.data.transforms.lazy_image import LazyImage
from vitkit.data.transforms.ssd import PhotometricDistort, RandomIoUCrop, RandomZoomOut
from vitkit.errors import ConfigError, DataError
from vitkit.io.image_files import OPENCV_CHANNELS
from vitkit.registry import ALBUMENTATIONS, TRANSFORMS, check_names, nearest

# Boxes thinner than this (in pixels) are removed: they are rounding errors of boxes that end where a crop begins.
_MIN_BOX_SIDE = 1e-3
_GIVEN_TARGETS = {"image", "mask", "masks", "bboxes"}
"""The inputs that a transform may request; transforms of several images request others, under names of their own."""


@ALBUMENTATIONS.register
class HorizontalFlip(A.HorizontalFlip):
    """Mirror left and right, as albumentations does, also a `LazyImage`."""

    def apply(self, img: np.ndarray | LazyImage, **params: Any) -> np.ndarray | LazyImage:
        """Flip an image."""
        return img.flip() if isinstance(img, LazyImage) else super().apply(img, **params)


class _Pipeline:
    """A sequence of albumentations transforms, with the interface of `Transforms`.

    Args:
        transforms: the transforms, in order.
        min_visible: an object is removed if a crop leaves a smaller fraction of its box than this.
        min_box_side: an object is removed if its box is narrower or shorter than this many pixels of the result.
    Raises:
        ConfigError: min_visible is not in 0..1, or min_box_side is negative.
    """

    check_each_transform = False
    """Whether boxes are removed as soon as a transform moves them outside. Otherwise they are removed after the last
    transform, which is faster, and equivalent if no transform can bring them back."""

    def __init__(
        self,
        transforms: Sequence[A.BasicTransform | A.BaseCompose],
        /,
        *,
        min_visible: float = 0.0,
        min_box_side: float = 0.0,
    ):
        name = type(self).__name__
        if not 0 <= min_visible <= 1:
            raise ConfigError(f"{name}: min_visible is {min_visible}; expected a fraction of the box, 0 to 1.")
        if min_box_side < 0:
            raise ConfigError(f"{name}: min_box_side is {min_box_side}; expected pixels, from 0.")
        # clip: float32 rounding may put the edge of a box slightly outside the image, which albumentations rejects.
        boxes = A.BboxParams(
            format="pascal_voc",
            clip=True,
            min_width=max(min_box_side, _MIN_BOX_SIDE),
            min_height=max(min_box_side, _MIN_BOX_SIDE),
            min_visibility=min_visible,
            check_each_transform=self.check_each_transform,
        )
        # With a column for the number of the point. Those outside stay: a later transform may bring them back.
        points = A.KeypointParams(format="xy", remove_invisible=False)
        self._compose = A.Compose(list(transforms), bbox_params=boxes, keypoint_params=points, is_check_shapes=False)
        # Not their subclasses, which may need pixels. A zoom-out must come first: what is cut off before it stays so.
        moving = [type(transform) for transform in transforms if type(transform) is not PhotometricDistort]
        self.takes_lazy_images = (
            type(self).__call__ is _Pipeline.__call__
            and self.check_each_transform
            and {*moving[:1]} <= {RandomZoomOut, RandomIoUCrop, HorizontalFlip}
            and {*moving[1:]} <= {RandomIoUCrop, HorizontalFlip}
        )
        """Whether it takes an image that is a `LazyImage`, and returns one with the masks of its source."""

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        # Not set_random_seed: it gives every transform its own generator with the same seed, so that all would draw the
        # same numbers (a flip would always come with a crop). None takes fresh entropy, even in forked workers.
        self._compose.set_random_state(np.random.default_rng(seed), random.Random(seed))
        boxes_xyxy = np.zeros((0, 4), np.float32) if sample.boxes_xyxy is None else sample.boxes_xyxy
        visible = ((boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]) > _MIN_BOX_SIDE).all(axis=1)
        rows = np.flatnonzero(visible)[:, None]
        data = {"image": sample.image, "bboxes": np.concatenate([boxes_xyxy[visible], rows], axis=1, dtype=np.float32)}
        is_lazy = isinstance(sample.image, LazyImage)
        if sample.masks is not None and len(sample.masks) and not is_lazy:
            data["masks"] = sample.masks
        if sample.segment_map is not None:
            data["mask"] = sample.segment_map
        if sample.keypoints is not None:
            data["keypoints"] = _points_of(sample)
        is_rgb = sample.image.dtype == np.uint8
        try:
            result = self._apply_lazily(**data) if is_lazy else self._compose(**data)
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's transform raises, such as for a crop larger than the image
            height, width, channels = sample.image.shape
            raise DataError(
                f"transforms: {type(error).__name__} on an image of {width}x{height} pixels (width x height) with "
                f"{len(boxes_xyxy)} boxes: {error}. Correct their arguments."
                + ("" if is_rgb else f" Those of colors need RGB of 8 bits, not {channels} channels of 16 bits.")
                + f" Many need at most {OPENCV_CHANNELS} channels." * (channels > OPENCV_CHANNELS)
            ) from error
        image, boxes = result["image"], result["bboxes"].reshape(-1, 5)
        if isinstance(image, np.ndarray) and image.ndim == 2:
            image = image[:, :, None]  # OpenCV drops the axis of a single channel
        expected = sample.image.dtype, sample.image.shape[2:]
        if not isinstance(image, np.ndarray | LazyImage) or (image.dtype, image.shape[2:]) != expected:
            kind = "a uint8 RGB image" if is_rgb else f"an image of uint16 with {sample.image.shape[2]} channels"
            raise ConfigError(
                f"transforms: the result is not {kind}. Normalization and conversion to tensors happen "
                "in the model and the dataset: leave Normalize, ToFloat, ToTensorV2 and the like out"
                + ("." if is_rgb else ", and transforms that need RGB of 8 bits, such as RandomGamma.")
            )
        if sample.boxes_xyxy is None:
            return AnnotatedImage(image, segment_map=result.get("mask"))
        rows = boxes[:, 4].astype(np.int64)
        masks = sample.masks
        if "masks" in data:
            masks = np.asarray(result["masks"])[rows]
        elif masks is not None:
            masks = masks[rows] if is_lazy else np.zeros((0, *image.shape[:2]), np.uint8)
        boxes_xyxy, segment_map = boxes[:, :4].astype(np.float32), result.get("mask")
        if sample.keypoints is None:
            return AnnotatedImage(image, boxes_xyxy, sample.labels[rows], masks, segment_map)
        moved = _with_points(sample, result["keypoints"], image.shape[:2])
        moved = moved._replace(image=image, masks=None, segment_map=segment_map).select(rows)
        return moved._replace(boxes_xyxy=boxes_xyxy, masks=masks)

    def _apply_lazily(
        self, image: LazyImage, bboxes: np.ndarray, keypoints: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Transform a lazy image with its boxes, as `Compose` does with arrays, the only images that it takes."""
        processor, data = self._compose.processors["bboxes"], {"image": image}
        data["bboxes"] = processor.check_and_convert(bboxes, _size(image), "to")
        if keypoints is not None:
            points = self._compose.processors["keypoints"]
            data["keypoints"] = points.check_and_convert(keypoints, _size(image), "to")
        self._compose.py_random.random()  # which Compose draws, too, for a probability of its own
        for transform in self._compose.transforms:
            data = transform(**data)
            data["bboxes"] = processor.filter(data["bboxes"], _size(data["image"]))
        data["bboxes"] = processor.check_and_convert(data["bboxes"], _size(data["image"]), "from")
        if keypoints is not None:
            data["keypoints"] = points.check_and_convert(data["keypoints"], _size(data["image"]), "from")
        return data


_NUM_PROBES = 3


def _points_of(sample: AnnotatedImage) -> np.ndarray:
    """Return the keypoints as rows x, y, number, after three of the image's corners, which show how it moves."""
    height, width = sample.image.shape[:2]
    points = np.concatenate([[[0, 0], [width, 0], [0, height]], sample.keypoints[..., :2].reshape(-1, 2)]) - 0.5
    return np.column_stack([points, np.arange(len(points))]).astype(np.float32)


def _with_points(sample: AnnotatedImage, moved: np.ndarray, size: tuple[int, int]) -> AnnotatedImage:
    """Return the sample with moved keypoints: exchanged where the image is mirrored, and without those outside of
    (height, width); areas are scaled as the whole image is.

    Raises:
        ConfigError: a transform has removed a corner of the image, as it does not move points.
    """
    moved = moved[np.argsort(moved[:, -1])]
    numbers, points = moved[:, -1].astype(int), moved[:, :2] + 0.5
    if (numbers[:_NUM_PROBES] != range(_NUM_PROBES)).any():
        raise ConfigError("transforms: one of them removes keypoints, so how it moves them is not known. Leave it out.")
    height, width = sample.image.shape[:2]
    turned = np.linalg.det(points[1:_NUM_PROBES] - points[0]) / (width * height)
    keypoints = np.zeros((sample.keypoints[..., 0].size, 3), np.float32)
    kept = numbers[_NUM_PROBES:] - _NUM_PROBES
    keypoints[kept] = np.column_stack([points[_NUM_PROBES:], sample.keypoints[..., 2].ravel()[kept]])
    keypoints = keep_inside(keypoints.reshape(sample.keypoints.shape), (0, 0, size[1], size[0]))
    if turned < 0:
        keypoints = keypoints[:, sample.flip_order]
    return sample._replace(keypoints=keypoints, areas=sample.areas * np.float32(abs(turned)))


def _size(image: LazyImage) -> dict[str, int]:
    return {"height": image.shape[0], "width": image.shape[1]}


@TRANSFORMS.register
class DETRTrainTransforms(_Pipeline):
    """Flip, multi-scale resize and crop: the training recipe of DETR (Carion et al. 2020, appendix A.4).

    Sizes and their frequencies are the original's. Pixels are interpolated once (see `MultiScaleCrop`) by OpenCV,
    averaging when shrinking and linear otherwise, whereas the original resizes with Pillow, up to twice.

    Args:
        scales, max_size, crop_scales, crop_range, crop_probability: see `MultiScaleCrop`; the defaults are for COCO.
        flip_probability: probability of a horizontal flip.
        min_visible, min_box_side: remove slivers of objects that a crop leaves, see `ComposedTransforms`; the original
            keeps every box of positive area.
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
        **visibility: float,
    ):
        sizes = MultiScaleCrop(
            scales=scales,
            max_size=max_size,
            crop_scales=crop_scales,
            crop_range=crop_range,
            crop_probability=crop_probability,
        )
        super().__init__([A.HorizontalFlip(p=flip_probability), sizes], **visibility)


@TRANSFORMS.register
class LargeScaleJitter(_Pipeline):
    """Flip, scale and crop or pad to a fixed size, as Mask2Former trains on COCO (Cheng et al. 2022, appendix A).

    As in the original, the padding is part of the image: it is gray (about the mean color, and so about 0 after
    normalization), is in no mask, and is not in the batch's padding mask.

    Args:
        size: height and width of every result, in pixels.
        scale_range: range of the factor between the image and the largest that fits into `size`.
        flip_probability: probability of a horizontal flip.
        pad_value: value of all three channels.
        color_probability: probability of `ColorDistortion`.
        min_visible, min_box_side: remove slivers of objects that the crop leaves, see `ComposedTransforms`; the
            original keeps all that are not empty.
    """

    def __init__(
        self,
        *,
        size: int = 1024,
        scale_range: tuple[float, float] = (0.1, 2.0),
        flip_probability: float = 0.5,
        pad_value: int = 128,
        color_probability: float = 0.0,
        **visibility: float,
    ):
        if not 0 < scale_range[0] <= scale_range[1]:
            raise ConfigError(f"LargeScaleJitter: scale_range is {scale_range}; expected (minimum, maximum) above 0.")
        if size < 1:
            raise ConfigError(f"LargeScaleJitter: size is {size}; expected at least 1 pixel.")
        colors = [ColorDistortion(p=color_probability)] if color_probability else []
        crop = JitteredCrop(scale_range=tuple(scale_range), crop_size=(size, size), pad_value=pad_value)
        super().__init__([A.HorizontalFlip(p=flip_probability), *colors, crop], **visibility)


@TRANSFORMS.register
class SemanticTrainTransforms(_Pipeline):
    """Scale, crop, flip and color distortion, as MaskFormer and Mask2Former train on ADE20K and Cityscapes.

    An image smaller than the crop is padded, as in `LargeScaleJitter`.

    Args:
        crop_size: (height, width) of every result, in pixels.
        short_sides: sizes that the short side is resized to; None: from half to twice the crop's longer side in steps
            of a tenth of it, as in the originals.
        max_size: upper bound of the long side before the crop; None: four times the crop's longer side.
        max_class_area: largest fraction of a crop's labeled pixels that one class may take, with ten attempts (0.75 in
            most recipes; the published MaskFormer and Mask2Former weights were trained with 1, which means no bound).
        flip_probability: probability of a horizontal flip.
        color_probability: probability of `ColorDistortion`.
        pad_value: value of all three channels.
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
        super().__init__([crop, colors, flip])


@TRANSFORMS.register
class EvalResize:
    """The resize of DETR's evaluation: antialiased bilinear by Pillow, as used for the published numbers.

    Args:
        short_side, max_size: sizes of the result, in pixels; see `compute_resized_size`. If both are equal, an image is
            fitted into a square; max_size=None means no bound.
        rounding: "detr" rounds as DETR does; "nearest" rounds both sides to the nearest pixel, as EoMT does.
        size: (height, width) of every result, whatever the proportions of the image, in place of the arguments above;
            None: the proportions are kept.
    Raises:
        ConfigError: `rounding` is unknown, or `size` is not positive or is combined with other arguments.
    """

    def __init__(
        self,
        *,
        short_side: int = 800,
        max_size: int | None = 1333,
        rounding: Literal["detr", "nearest"] = "detr",
        size: tuple[int, int] | None = None,
    ):
        if rounding not in ("detr", "nearest"):
            raise ConfigError(f"EvalResize: rounding is {rounding!r}; expected 'detr' or 'nearest'.")
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise ConfigError(f"EvalResize: size is {size}; expected (height, width), at least 1 pixel each.")
        if size is not None and (short_side, max_size, rounding) != (800, 1333, "detr"):
            raise ConfigError(
                f"EvalResize: size={tuple(size)} resizes every image to this height and width, so "
                f"short_side={short_side}, max_size={max_size} and rounding={rounding!r} have no effect. Set size=None "
                "to keep an image's proportions, or leave the others out."
            )
        self.short_side = short_side
        self.max_size = max_size
        self.rounding = rounding
        self.size = None if size is None else tuple(size)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to."""
        if self.size is not None:
            return self.size
        if self.rounding == "detr":
            return compute_resized_size(height, width, short_side=self.short_side, max_size=self.max_size)
        scale = self.short_side / min(height, width)
        if self.max_size is not None:
            scale = min(scale, self.max_size / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Transform an image as for evaluation: nothing is random."""
        height, width = sample.image.shape[:2]
        size = self.size_of(height, width)
        if size == (height, width):
            return sample
        return sample.resize(resize_antialiased(sample.image, size))


@TRANSFORMS.register
class ComposedTransforms(_Pipeline):
    """A sequence of arbitrary albumentations transforms.

    Args:
        transforms: a list of `dict(type=NAME, **arguments)`, where NAME is a class of albumentations
            (https://explore.albumentations.ai), of vitkit ("MultiScaleCrop", "ColorDistortion", "RandomZoomOut",
            "RandomIoUCrop", "PhotometricDistort"), or your own, registered in ALBUMENTATIONS; groups such as OneOf take
            `transforms` themselves.
        min_visible: an object is removed if a crop leaves a smaller fraction of its box than this.
        min_box_side: an object is removed if its box is narrower or shorter than this many pixels of the result.
    Raises:
        ConfigError: a name or an argument is unknown, or the transform cannot move boxes.
    """

    check_each_transform = True

    def __init__(self, *, transforms: Sequence[dict[str, Any]], min_visible: float = 0.1, min_box_side: float = 2.0):
        built = [_build_albumentation(spec, f"transforms[{i}]") for i, spec in enumerate(transforms)]
        super().__init__(built, min_visible=min_visible, min_box_side=min_box_side)

    @classmethod
    def check_arguments(
        cls, *, transforms: Sequence[dict[str, Any]], min_visible: float = 0.1, min_box_side: float = 2.0
    ) -> None:
        """Check the nested names and arguments of a config; raises like the constructor."""
        ComposedTransforms(transforms=transforms, min_visible=min_visible, min_box_side=min_box_side)


def _build_albumentation(spec: Any, context: str) -> A.BasicTransform | A.BaseCompose:
    context = f"ComposedTransforms {context}"
    constructors = {
        name: value
        for name, value in vars(A).items()
        if isinstance(value, type) and issubclass(value, A.BasicTransform | A.BaseCompose)
    }
    constructors |= {name: ALBUMENTATIONS.resolve(name)[0] for name in ALBUMENTATIONS.names()}
    if not isinstance(spec, dict) or not isinstance(spec.get("type"), str) or spec["type"] not in constructors:
        name = spec.get("type") if isinstance(spec, dict) else spec
        raise ConfigError(f"{context}: unknown transform {name!r}. {nearest(str(name), constructors)}")
    arguments = {name: value for name, value in spec.items() if name != "type"}
    constructor = constructors[spec["type"]]
    check_names(constructor, arguments, f"{context} {spec['type']}")
    if not issubclass(constructor, A.BasicTransform | A.BaseCompose):
        raise ConfigError(
            f"{context}: {spec['type']} is not an albumentation. Derive it from albumentations.ImageOnlyTransform or "
            "DualTransform, or register a whole pipeline in vitkit.registry.TRANSFORMS instead."
        )
    if issubclass(constructor, A.BaseCompose) and "transforms" in arguments:
        if not isinstance(arguments["transforms"], list | tuple):
            raise ConfigError(f"{context} {spec['type']}: transforms is {arguments['transforms']!r}; expected a list.")
        inner = enumerate(arguments["transforms"])
        arguments["transforms"] = [_build_albumentation(part, f"{context}.transforms[{i}]") for i, part in inner]
    try:
        built = constructor(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{context} {spec['type']}: {error}") from error
    others = sorted(set(getattr(built, "targets_as_params", ())) - _GIVEN_TARGETS)
    if others or isinstance(built, A.Transform3D):
        needs = f"needs {', '.join(others)}" if others else "is for volumes"
        raise ConfigError(
            f"{context}: {spec['type']} {needs}, and a dataset's transforms get one image with its boxes and masks. "
            "Mosaic, copy-paste and mixup of images with boxes are in MultiImageTransforms, mixup and cutmix of images "
            "that are classified in ClassificationTrainTransforms."
        )
    if isinstance(built, A.DualTransform) and Targets.BBOXES not in built._targets:
        raise ConfigError(f"{context}: {spec['type']} cannot move boxes, so it cannot be used for detection.")
    return built
