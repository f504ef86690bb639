"""What passes between the parts, field by field: features, batches, targets, predictions.

Sizes are (height, width) in pixels. Padding masks are bool with True = padding.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

IGNORED = 255
"""In label maps: a pixel of no class, which neither trains nor counts."""

PAD, UNK, BOS, EOS = range(4)
"""Token ids that every vocabulary has: padding, an unknown token, the begin and the end of a sentence."""


class FeatureInfo(NamedTuple):
    """One output of a backbone or neck."""

    channels: int
    stride: int
    """Input pixels per place of the map."""


class Sample(TypedDict, total=False):
    """One image as a dataset returns it."""

    image: Tensor
    """(3, H, W) uint8 RGB, resized and augmented, not yet normalised."""
    target: "DetectionTarget"


class DetectionTarget(TypedDict, total=False):
    """What is known of one image. Tensors are on the batch's device once the batch has moved there.

    Segmentation of every kind trains on the same fields: a mask and a class for each object (instance), for each class
    that is seen (semantic), or for each segment (panoptic). Pixels that are ignored are in no mask, and no mask is
    empty. What is evaluated against, in the image's original size, the evaluators ask the dataset for.
    """

    labels: Tensor
    """(N,) int64, contiguous class index (the dataset maps it to and from raw category ids)."""
    boxes_cxcywh: Tensor
    """(N, 4) float32 in 0..1 of the un-padded, transformed image."""
    masks: Tensor
    """(N, H, W) bool of the un-padded, transformed image; only when the dataset loads masks."""
    image_id: int
    """The annotation file's raw image id."""
    image_size: tuple[int, int]
    """Un-padded size of the transformed image."""
    original_size: tuple[int, int]
    """Size of the image as stored (after its EXIF rotation): predictions are scaled to it."""


class SegmentInfo(TypedDict, total=False):
    """One segment of a panoptic map. Predicted ones have a score, true ones say whether they are a crowd."""

    id: int
    """Its pixels' value in the map, above 0."""
    label: int
    """Contiguous class index."""
    score: float
    """0..1."""
    iscrowd: bool
    """It covers a group of objects, which are not counted."""


class PanopticMap(NamedTuple):
    """Every pixel of an image in one segment at most."""

    panoptic: np.ndarray
    """(H, W) int32 segment ids; 0 is void."""
    segments_info: list[SegmentInfo]


class Detections(TypedDict):
    """Predicted boxes of one image, best first not implied."""

    scores: Tensor
    """(N,) float32 in 0..1."""
    labels: Tensor
    """(N,) int64, contiguous class index."""
    boxes_xyxy: Tensor
    """(N, 4) float32 in pixels of the original image."""


class Instances(Detections):
    """Detections with masks."""

    masks: Tensor
    """(N, H, W) bool of the original image."""


class SemanticPrediction(TypedDict):
    """The predicted class of every pixel of one image."""

    semantic: Tensor
    """(H, W) int64 contiguous class index, of the original image."""


class PanopticPrediction(TypedDict):
    """The predicted segments of one image."""

    panoptic: Tensor
    """(H, W) int32 segment ids of the original image; 0 is void."""
    segments_info: list[SegmentInfo]


@dataclass
class Batch:
    """One step's input. `model(**batch.inputs)`, then `criterion(outputs, batch.targets)`.

    For images, `inputs` holds
        images: (B, 3, H, W) uint8 RGB, zero-padded at the right and bottom to a common size,
        padding_mask: (B, H, W) bool, True = padding.
    """

    inputs: dict[str, Tensor]
    targets: list[dict[str, Any]]

    def to(self, device: torch.device | str) -> "Batch":
        def move(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        return Batch(
            inputs={name: move(value) for name, value in self.inputs.items()},
            targets=[{name: move(value) for name, value in target.items()} for target in self.targets],
        )

    def pin_memory(self) -> "Batch":
        def pin(value: Any) -> Any:
            return value.pin_memory() if isinstance(value, Tensor) else value

        return Batch(
            inputs={name: pin(value) for name, value in self.inputs.items()},
            targets=[{name: pin(value) for name, value in target.items()} for target in self.targets],
        )

    def __len__(self) -> int:
        return len(self.targets)
