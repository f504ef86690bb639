"""Masks of a detector's queries, for `QueryDetector`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitkit.ops.detections import BatchDetections, in_pixels
from vitkit.ops.images import padding_to_multiple, unpadded_sizes
from vitkit.ops.mask_postprocess import Geometry, geometry_of, upsample_to_masks
from vitkit.ops.masks import masks_of_queries, pixels_inside


def mask_sizes(images: Tensor, padding_mask: Tensor | None, multiple: int) -> dict[str, Any]:
    """Return input_size, the (height, width) that the masks cover, a multiple of `multiple`; and image_sizes (B, 2)
    int64, height and width of each image without padding."""
    input_size = tuple(side + padding_to_multiple(side, multiple) for side in images.shape[-2:])
    return {"input_size": input_size, "image_sizes": unpadded_sizes(images, padding_mask)}


class QueryMasks:
    """The masks of an image's detections, of which only those that are asked for by index are made.

    Args:
        logits: (Q, h, w), masks of queries.
        rows: (N,) int64, the row in `logits` of each detection: a query may be detected with several classes.
        boxes_xyxy: (N, 4) in pixels of the original image, with which masks end, whose probabilities are then resized;
            None: their logits are.
        geometry: the sizes from the logits to the original image.
    """

    def __init__(self, logits: Tensor, rows: Tensor, boxes_xyxy: Tensor | None, geometry: Geometry):
        self._logits, self._rows, self._boxes_xyxy, self._geometry = logits, rows, boxes_xyxy, geometry

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """Return the masks of some detections, (n, H, W) bool at the size of the original image."""
        rows, position = self._rows[index].unique(return_inverse=True)
        cuts = self._boxes_xyxy is not None
        masks = upsample_to_masks(self._logits[rows], self._geometry, probabilities=cuts)[position]
        if self._boxes_xyxy is not None:
            masks &= pixels_inside(self._boxes_xyxy[index], self._geometry.original)
        return masks

    def select(self, index: Tensor) -> "QueryMasks":
        """Return the masks of some detections, which are not yet made."""
        boxes = None if self._boxes_xyxy is None else self._boxes_xyxy[index]
        return QueryMasks(self._logits, self._rows[index], boxes, self._geometry)

    def cpu(self) -> "QueryMasks":
        boxes = None if self._boxes_xyxy is None else self._boxes_xyxy.cpu()
        return QueryMasks(self._logits.cpu(), self._rows.cpu(), boxes, self._geometry)


def with_masks(
    batch: BatchDetections, outputs: Mapping[str, Any], image_sizes: Sequence[tuple[int, int]], *, results: str
) -> list[dict[str, Any]]:
    """Return the detections of each image in pixels of the original image, with masks that are `QueryMasks`.

    Args:
        outputs: with masks or their factors, see `masks_of_queries`, and `mask_sizes`.
        image_sizes: (height, width) of the original images.
        results: "resized once": logits are resized; "cut to boxes": probabilities are, and masks end with their boxes.
    """
    instances = []
    for i, detections in enumerate(in_pixels(batch, image_sizes)):
        queries, rows = batch.queries[i].unique(return_inverse=True)
        boxes = detections["boxes_xyxy"] if results == "cut to boxes" else None
        logits = masks_of_queries(outputs, i, queries).float()
        masks = QueryMasks(logits, rows, boxes, geometry_of(outputs, i, image_sizes[i]))
        instances.append({**detections, "masks": masks})
    return instances
