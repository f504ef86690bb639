"""Mosaic, copy-paste and mixup: combine several images of a dataset, with boxes and masks, into one."""

from typing import NamedTuple

import cv2
import numpy as np

from vitkit.data.transforms.annotated_image import AnnotatedImage, ImageSource, Transforms, build_transforms, join
from vitkit.data.transforms.crops import pad_value_of, resize_image
from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS, Spec

_MIN_BOX_SIDE = 1e-3
_CENTERS = (0.25, 0.75)
"""Range of the point where a mosaic's four images meet, as fractions of its height and width."""
_PASTED_SHARE = 0.5
"""Probability that an object of the other image is pasted."""
_MIXUP_ALPHA = 32.0
"""Alpha of the beta distribution of the first image's weight: about one half, as both images' objects count in full."""


class Visibility(NamedTuple):
    """The minimum that must remain of an object that is cut or covered; otherwise it is removed."""

    share: float
    """Fraction of its box, or of its mask if it is covered."""
    side: float
    """Width and height of its box, in pixels."""

    def cut(self, boxes_xyxy: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut boxes (N, 4) at the edges of an image; return them, and which of them remain, (N,) bool."""
        cut = boxes_xyxy.clip(0, np.array([width, height] * 2, boxes_xyxy.dtype))
        sides = cut[:, 2:] - cut[:, :2]
        areas = (boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]).prod(axis=1)
        return cut, (sides >= self.side).all(axis=1) & (sides.prod(axis=1) >= self.share * areas)


@TRANSFORMS.register
class MultiImageTransforms:
    """Combine each image with others of the dataset, and transform the result like a single image.

    For detection and instance segmentation with few images. The three augmentations may be combined:

    - mosaic (Bochkovskiy et al. 2020, section 3.3, https://arxiv.org/abs/2004.10934): the image and three others around
      a random point of a canvas of the image's size, then `transforms`;
    - copy-paste (Ghiasi et al. 2021, https://arxiv.org/abs/2012.07177): each object of another image is pasted with
      probability 1/2, both after `transforms`, which is `LargeScaleJitter` in the paper; it needs masks;
    - mixup (Zhang et al. 2019, https://arxiv.org/abs/1902.04103): roughly the mean of the image and another one, both
      after `transforms`, with the objects of both.

    Args:
        transforms: spec of the transforms of each single image; None: no transforms.
        mosaic, copy_paste, mixup: probability of each augmentation.
        mosaic_scale: range of an image's scale in the mosaic, relative to the largest that fits the canvas.
        min_visible: an object is removed if a smaller fraction of its box is left by a cut, or of its mask by what
            covers it.
        min_box_side: an object is removed if its box becomes narrower or shorter than this many pixels.
        pad_value: value of all three channels of the mosaic's pixels outside the images.
    Raises:
        ConfigError: a value is out of range, or all three probabilities are 0.
    """

    def __init__(
        self,
        *,
        transforms: Spec | Transforms | None = None,
        mosaic: float = 0.0,
        copy_paste: float = 0.0,
        mixup: float = 0.0,
        mosaic_scale: tuple[float, float] = (0.5, 1.0),
        min_visible: float = 0.1,
        min_box_side: float = 2.0,
        pad_value: int = 128,
    ):
        name = type(self).__name__
        probabilities = {"mosaic": mosaic, "copy_paste": copy_paste, "mixup": mixup, "min_visible": min_visible}
        for argument, value in probabilities.items():
            if not 0 <= value <= 1:
                raise ConfigError(f"{name}: {argument} is {value}; expected 0 to 1.")
        if not (mosaic or copy_paste or mixup):
            raise ConfigError(f"{name}: mosaic, copy_paste and mixup are all 0. Set one, or use only its `transforms`.")
        if not 0 < mosaic_scale[0] <= mosaic_scale[1]:
            raise ConfigError(f"{name}: mosaic_scale is {mosaic_scale}; expected (minimum, maximum) above 0.")
        if min_box_side < 0:
            raise ConfigError(f"{name}: min_box_side is {min_box_side}; expected pixels, from 0.")
        self.transforms = build_transforms(transforms)
        self.mosaic, self.copy_paste, self.mixup = mosaic, copy_paste, mixup
        self.mosaic_scale = tuple(mosaic_scale)
        self.visibility = Visibility(min_visible, max(min_box_side, _MIN_BOX_SIDE))
        self.pad_value = pad_value

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Raise an error: a single image is not enough, see `mix`."""
        raise ConfigError(
            f"{type(self).__name__} is for a dataset's training images. For a single image use its `transforms`."
        )

    def check_source(self, source: ImageSource) -> None:
        """Raise ConfigError if a dataset does not provide what these transforms need."""
        if self.copy_paste and not source.masks:
            raise ConfigError(
                f"{type(self).__name__}: copy_paste={self.copy_paste} pastes objects by their masks, and this "
                f"{type(source).__name__} does not load masks. Set its masks=True, or leave copy_paste out."
            )

    def mix(self, sample: AnnotatedImage, source: ImageSource, *, seed: int | None = None) -> AnnotatedImage:
        """Transform an image together with others; see `vitkit.data.transforms.annotated_image.MixesImages`."""
        random = np.random.default_rng(seed)
        if random.random() < self.mosaic:
            others = [load_another_image(source, random) for _ in range(3)]
            sample = self._make_mosaic([sample, *others], random)
        sample = self._transform(sample, random)
        if random.random() < self.copy_paste:
            other = self._transform(load_another_image(source, random), random)
            sample = paste_objects(sample, other, random.random(len(other.labels)) < _PASTED_SHARE, self.visibility)
        if random.random() < self.mixup:
            other = self._transform(load_another_image(source, random), random)
            sample = blend(sample, other, random.beta(_MIXUP_ALPHA, _MIXUP_ALPHA), self.visibility)
        return sample

    def _transform(self, sample: AnnotatedImage, random: np.random.Generator) -> AnnotatedImage:
        seed = int(random.integers(2**63))
        return sample if self.transforms is None else self.transforms(sample, seed=seed)

    def _make_mosaic(self, samples: list[AnnotatedImage], random: np.random.Generator) -> AnnotatedImage:
        height, width = samples[0].image.shape[:2]
        x, y = (min(max(round(random.uniform(*_CENTERS) * extent), 1), extent - 1) for extent in (width, height))
        scales = random.uniform(*self.mosaic_scale, size=4)
        ordered = [samples[i] for i in random.permutation(4)]
        return make_mosaic(ordered, (height, width), (x, y), scales, self.visibility, self.pad_value)


def load_another_image(source: ImageSource, random: np.random.Generator) -> AnnotatedImage:
    """Load one of the images that are trained on."""
    indices = source.training_indices()
    return source.load_annotated(int(indices[random.integers(len(indices))]))


def make_mosaic(
    samples: list[AnnotatedImage],
    size: tuple[int, int],
    center: tuple[int, int],
    scales: np.ndarray,
    visibility: Visibility,
    pad_value: int = 128,
) -> AnnotatedImage:
    """Put four images around a point, each with a corner at it, cut off where its quarter of the canvas ends.

    Args:
        samples: top left, top right, bottom left, bottom right.
        size: (height, width) of the result.
        center: (x, y) of the point, inside the canvas.
        scales: scale of each image, 1 for the largest that fits the canvas.
        pad_value: value of pixels without an image.
    """
    (height, width), (x, y) = size, center
    first = samples[0].image
    canvas = np.full((height, width, first.shape[2]), pad_value_of(first, pad_value), first.dtype)
    parts = []
    for i, (sample, scale) in enumerate(zip(samples, scales)):
        old_height, old_width = sample.image.shape[:2]
        ratio = min(height / old_height, width / old_width) * scale
        new_height, new_width = max(1, round(old_height * ratio)), max(1, round(old_width * ratio))
        is_right, is_bottom = i % 2 == 1, i >= 2
        left, top = x if is_right else x - new_width, y if is_bottom else y - new_height
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + new_width, width), min(top + new_height, height)
        resized = sample.resize(resize_image(sample.image, (new_height, new_width)))
        canvas[y0:y1, x0:x1] = resized.image[y0 - top : y1 - top, x0 - left : x1 - left]
        parts.append(place(resized, size, (left, top), visibility))
    return join(canvas, parts)


def paste_objects(
    sample: AnnotatedImage, other: AnnotatedImage, chosen: np.ndarray, visibility: Visibility
) -> AnnotatedImage:
    """Paste objects of another image by their masks, at the same coordinates.

    The pixels that they cover are removed from the masks of the image's own objects; boxes shrink to what remains of a
    mask.

    Args:
        chosen: (N,) bool, the objects of `other` to paste.
    """
    size = sample.image.shape[:2]
    pasted = place(other.select(chosen), size, (0, 0), visibility)
    if not len(pasted.labels):
        return sample
    covered = pasted.masks.any(axis=0)
    image = sample.image.copy()
    # Masks are empty outside the other image.
    height, width = (min(a, b) for a, b in zip(size, other.image.shape[:2]))
    inside = covered[:height, :width]
    image[:height, :width][inside] = other.image[:height, :width][inside]
    return join(image, [_remove_covered(sample, covered, visibility), pasted])


def blend(sample: AnnotatedImage, other: AnnotatedImage, share: float, visibility: Visibility) -> AnnotatedImage:
    """Average an image with another one, aligned at the top left, where they overlap; keep the objects of both.

    Args:
        share: weight of `sample` in the average.
    """
    size = sample.image.shape[:2]
    height, width = (min(a, b) for a, b in zip(size, other.image.shape[:2]))
    image = sample.image.copy()
    part = image[:height, :width].copy()
    mixed = cv2.addWeighted(part, share, other.image[:height, :width].copy(), 1 - share, 0.0)
    image[:height, :width] = mixed.reshape(part.shape)
    return join(image, [sample, place(other, size, (0, 0), visibility)])


def place(
    sample: AnnotatedImage, size: tuple[int, int], offset: tuple[int, int], visibility: Visibility
) -> AnnotatedImage:
    """Return the visible part of the objects of an image whose top left corner is at `offset` (x, y) of a canvas.

    Args:
        size: (height, width) of the canvas.
    """
    (height, width), (left, top) = size, offset
    boxes, rows = visibility.cut(sample.boxes_xyxy + np.array([left, top] * 2, np.float32), height, width)
    masks = None
    if sample.masks is not None:
        masks = np.zeros((np.count_nonzero(rows), height, width), np.uint8)
        x0, y0 = max(left, 0), max(top, 0)
        part = sample.masks[rows, y0 - top : height - top, x0 - left : width - left]
        masks[:, y0 : y0 + part.shape[1], x0 : x0 + part.shape[2]] = part
    objects = sample._replace(boxes_xyxy=boxes, masks=None).select(rows)._replace(masks=masks)
    objects = objects.move_keypoints(np.array([[1, 0, left], [0, 1, top]]), (0, 0, width, height))
    return objects if masks is None else objects.select(masks.any(axis=(1, 2)))


def _remove_covered(sample: AnnotatedImage, covered: np.ndarray, visibility: Visibility) -> AnnotatedImage:
    """Return the objects of an image without the covered pixels, and covered keypoints hidden; `covered` is (H, W)
    bool."""
    masks = sample.masks * ~covered
    boxes = sample.boxes_xyxy.copy()
    rows = np.ones(len(boxes), bool)
    for i, (mask, before) in enumerate(zip(masks, sample.masks)):
        left, total = np.count_nonzero(mask), np.count_nonzero(before)
        if left == total:
            continue
        if left == 0 or left < visibility.share * total:
            rows[i] = False
            continue
        x, y, width, height = cv2.boundingRect(mask)
        boxes[i, :2] = np.maximum(boxes[i, :2], (x, y))
        boxes[i, 2:] = np.minimum(boxes[i, 2:], (x + width, y + height))
        rows[i] = (boxes[i, 2:] - boxes[i, :2] >= visibility.side).all()
    keypoints = sample.keypoints
    if keypoints is not None:
        keypoints = keypoints.copy()
        height, width = covered.shape
        x, y = np.floor(keypoints[..., :2]).astype(int).clip(0, [width - 1, height - 1]).T
        keypoints[..., 2] = np.where(covered[y, x].T, np.minimum(keypoints[..., 2], 1), keypoints[..., 2])
    return sample._replace(boxes_xyxy=boxes, masks=masks, keypoints=keypoints).select(rows)
