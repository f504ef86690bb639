"""Masks of a detector's queries, for `QueryDetector`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitkit.ops.detections import BatchDetections, in_pixels
from vitkit.ops.images import padding_to_multiple, unpadded_sizes
from vitkit.ops.mask_postprocess import geometry_of, upsample_to_masks
from vitkit.ops.masks import masks_of_queries, pixels_inside
from vitkit.structures import InstanceDetections


def mask_sizes(images: Tensor, padding_mask: Tensor | None, multiple: int) -> dict[str, Any]:
    """Return input_size, the (height, width) that the masks cover, a multiple of `multiple`; and image_sizes (B, 2)
    int64, height and width of each image without padding."""
    input_size = tuple(side + padding_to_multiple(side, multiple) for side in images.shape[-2:])
    return {"input_size": input_size, "image_sizes": unpadded_sizes(images, padding_mask)}


def with_masks(
    batch: BatchDetections, outputs: Mapping[str, Any], image_sizes: Sequence[tuple[int, int]], *, results: str
) -> list[InstanceDetections]:
    """Return the detections of each image in pixels of the original image, with masks (N, H, W) bool.

    Args:
        outputs: with masks or their factors, see `masks_of_queries`, and `mask_sizes`.
        image_sizes: (height, width) of the original images.
        results: "resized once": logits are resized; "cut to boxes": probabilities are, and masks end with their boxes.
    """
    cuts, instances = results == "cut to boxes", []
    for i, detections in enumerate(in_pixels(batch, image_sizes)):
        # A query may be detected with several classes, but has only one mask.
        chosen, position = batch.queries[i].unique(return_inverse=True)
        logits = masks_of_queries(outputs, i, chosen).float()
        masks = upsample_to_masks(logits, geometry_of(outputs, i, image_sizes[i]), probabilities=cuts)[position]
        if cuts:
            masks &= pixels_inside(detections["boxes_xyxy"], image_sizes[i])
        instances.append(InstanceDetections(**detections, masks=masks))
    return instances
