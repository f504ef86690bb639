"""An image with its annotations, which transforms take and return, and the interfaces of transforms."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import cv2
import numpy as np

from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS, Spec
from vitkit.structures import Batch


class AnnotatedImage(NamedTuple):
    """An image with its annotations; row i of boxes, labels, masks, keypoints and areas describes the same object.

    Detection has boxes and labels, instance segmentation also masks, pose estimation also keypoints, panoptic and
    semantic segmentation a segment map.
    """

    image: np.ndarray
    """(H, W, 3) uint8 RGB, or (H, W, C) uint16. Between a dataset that resizes it and transforms that take one, a
    `LazyImage`; then masks are those of its source, and boxes its own."""
    boxes_xyxy: np.ndarray | None = None
    """(N, 4) float32, in pixels, inside the image."""
    labels: np.ndarray | None = None
    """(N,) int64, set whenever there are boxes."""
    masks: np.ndarray | None = None
    """(N, H, W) uint8 of 0 and 1."""
    segment_map: np.ndarray | None = None
    """(H, W) uint8 or uint16 numbers of non-overlapping regions, 0 for none."""
    keypoints: np.ndarray | None = None
    """(N, K, 3) float32 x, y in pixels from the top left corner, as boxes have, and visibility; see
    `DetectionTarget`."""
    areas: np.ndarray | None = None
    """(N,) float32 areas of the whole objects, in pixels, set whenever there are keypoints."""
    flip_order: Sequence[int] | None = None
    """K indices, see `KeypointInfo`; set whenever there are keypoints."""

    def resize(self, image: np.ndarray) -> "AnnotatedImage":
        """Replace the image by a resized one and resize the annotations to it, maps without interpolation."""
        (height, width), size = self.image.shape[:2], image.shape[:2]

        def resize(values: np.ndarray) -> np.ndarray:
            return cv2.resize(values, size[::-1], interpolation=cv2.INTER_NEAREST_EXACT)

        new: dict[str, np.ndarray] = {"image": image}
        if self.boxes_xyxy is not None:
            new["boxes_xyxy"] = self.boxes_xyxy * np.array([size[1] / width, size[0] / height] * 2, np.float32)
        if self.masks is not None:
            new["masks"] = np.array([resize(mask) for mask in self.masks], np.uint8).reshape(-1, *size)
        if self.segment_map is not None:
            new["segment_map"] = resize(self.segment_map)
        scaling = np.diag([size[1] / width, size[0] / height])
        return self._replace(**new).move_keypoints(np.column_stack([scaling, [0, 0]]))

    def select(self, rows: np.ndarray) -> "AnnotatedImage":
        """Return the image with some of its objects, (M,) bool or int64."""
        fields = ("boxes_xyxy", "labels", "masks", "keypoints", "areas")
        return self._replace(**{name: getattr(self, name)[rows] for name in fields if getattr(self, name) is not None})

    def move_keypoints(
        self, matrix: np.ndarray, window: tuple[float, float, float, float] | None = None
    ) -> "AnnotatedImage":
        """Move the keypoints, if there are any, by a (2, 3) matrix, and scale the areas; nothing is mirrored.

        Args:
            window: the part of the result that shows the image, (x0, y0, x1, y1); points outside are no longer labeled.
        """
        if self.keypoints is None:
            return self
        keypoints = self.keypoints.copy()
        keypoints[..., :2] = keypoints[..., :2] @ matrix[:, :2].T + matrix[:, 2]
        areas = self.areas * np.float32(abs(np.linalg.det(matrix[:, :2])))
        return self._replace(keypoints=keep_inside(keypoints, window), areas=areas)


def keep_inside(keypoints: np.ndarray, window: tuple[float, float, float, float] | None) -> np.ndarray:
    """Return (N, K, 3) keypoints with zeros for those that are not labeled or lie outside (x0, y0, x1, y1)."""
    kept = keypoints[..., 2:] > 0
    if window is not None:
        points = keypoints[..., :2]
        kept &= ((points >= window[:2]) & (points <= window[2:])).all(axis=-1, keepdims=True)
    return np.where(kept, keypoints, 0).astype(np.float32)


def join(image: np.ndarray, parts: Sequence[AnnotatedImage]) -> AnnotatedImage:
    """Return an image with the objects of all parts, which have been moved to it; masks only if all have them."""
    joined = {}
    for name in ("boxes_xyxy", "labels", "masks", "keypoints", "areas"):
        values = [getattr(part, name) for part in parts]
        joined[name] = None if any(value is None for value in values) else np.concatenate(values)
    return AnnotatedImage(image, **joined, flip_order=parts[0].flip_order)


def check_rgb(image: np.ndarray, name: str) -> None:
    """Raise a ConfigError that begins with `name` unless an image is RGB of 8 bits, for transforms of colors."""
    if image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise ConfigError(
            f"{name}: needs RGB of 8 bits, and the images have {image.shape[2]} channels of 16 bits (data.channels). "
            "Leave this transform out, or data.channels."
        )


class Transforms(Protocol):
    """The interface of transforms, as `TRANSFORMS.build` returns them.

    They may also be `TakesLazyImages` (vitkit.data.transforms.lazy_image).
    """

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Transform an image with its annotations; objects that leave the image are removed.

        Args:
            sample: the input, left unchanged.
            seed: if set, the result depends only on the arguments; None draws fresh random numbers.
        """


@runtime_checkable
class TransformsBatches(Protocol):
    """Transforms that go on with whole batches, on the model's device."""

    def for_batches(self, num_classes: int) -> Callable[[Batch], Batch] | None:
        """Return the transforms of a batch; None: there are none."""


@runtime_checkable
class ImageSource(Protocol):
    """A detection dataset as seen by transforms that combine several images."""

    masks: bool
    """Whether the images come with masks."""

    def training_indices(self) -> Sequence[int]:
        """Return the indices of the training images, from which others are drawn."""

    def load_annotated(self, index: int) -> AnnotatedImage:
        """Load an image with its objects before any transform."""


@runtime_checkable
class MixesImages(Protocol):
    """Transforms that combine several images; a dataset calls `mix` instead of the transforms themselves."""

    def check_source(self, source: ImageSource) -> None:
        """Raise ConfigError if a dataset does not provide what these transforms need."""

    def mix(self, sample: AnnotatedImage, source: ImageSource, *, seed: int | None = None) -> AnnotatedImage:
        """Transform an image together with others.

        Args:
            sample: the input, left unchanged.
            source: the dataset that the other images are drawn from.
            seed: if set, the result depends only on the arguments and the source.
        """


def build_transforms(transforms: Spec | Transforms | None) -> Transforms | None:
    """Build transforms from their spec; None, which means unchanged images, stays None."""
    return None if transforms is None else TRANSFORMS.build(transforms)
