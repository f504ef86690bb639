"""What passes between the parts, field by field: features, batches, targets, predictions.

Sizes are (height, width) in pixels. Padding masks are bool with True = padding.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor


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
    """What is known of one image. Tensors are on the batch's device once the batch has moved there."""

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


class Detections(TypedDict):
    """Predicted boxes of one image, best first not implied."""

    scores: Tensor
    """(N,) float32 in 0..1."""
    labels: Tensor
    """(N,) int64, contiguous class index."""
    boxes_xyxy: Tensor
    """(N, 4) float32 in pixels of the original image."""


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
