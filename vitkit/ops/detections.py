"""Converts class logits and boxes of queries to detections: selection, suppression of duplicates, scaling to pixels."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitkit.ops.boxes import cxcywh_to_xyxy, duplicates, scale_boxes
from vitkit.structures import Detections


class BatchDetections(NamedTuple):
    """The detections in all images of a batch, N in each."""

    scores: Tensor
    """(B, N) float32 in 0..1."""
    labels: Tensor
    """(B, N) int64."""
    boxes_xyxy: Tensor
    """(B, N, 4) float32, relative to the unpadded image."""
    queries: Tensor
    """(B, N) int64, index of the query that each is from."""


def best_classes(logits: Tensor, boxes_cxcywh: Tensor) -> BatchDetections:
    """Return each query with its best class, in the order of the queries.

    Args:
        logits: (B, Q, C + 1), the last class being "no object", which is never chosen.
        boxes_cxcywh: (B, Q, 4) in 0..1 of the unpadded image.
    """
    scores, labels = logits.float().softmax(dim=-1)[..., :-1].max(dim=-1)
    queries = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[0], -1)
    return BatchDetections(scores, labels, cxcywh_to_xyxy(boxes_cxcywh.float()), queries)


def best_pairs(logits: Tensor, boxes_cxcywh: Tensor, count: int) -> BatchDetections:
    """Return the `count` pairs of a query and a class with the highest scores (or all, if there are fewer), best first.

    A query may be returned with several classes.

    Args:
        logits: (B, Q, C), a sigmoid per class.
        boxes_cxcywh: (B, Q, 4) in 0..1 of the unpadded image.
    """
    return best_scores(logits.float().sigmoid(), boxes_cxcywh, count)


def best_scores(scores: Tensor, boxes_cxcywh: Tensor, count: int) -> BatchDetections:
    """Return the `count` best pairs of a query and a class as `best_pairs` does, by their scores, (B, Q, C)."""
    num_classes = scores.shape[-1]
    pairs = scores.flatten(1)
    scores, best = pairs.topk(min(count, pairs.shape[1]), dim=1)
    queries = best // num_classes
    boxes_xyxy = _gather_boxes(cxcywh_to_xyxy(boxes_cxcywh.float()), queries)
    # ONNX's exporter has no remainder by a number of classes that is only known when the file runs.
    return BatchDetections(scores, best - queries * num_classes, boxes_xyxy, queries)


def suppress_duplicates(detections: BatchDetections, iou: float | None) -> BatchDetections:
    """Give detections that overlap a better one of their class by more than this IoU the score 0, and sort by score.

    Args:
        detections: best first.
        iou: see `duplicates`; None: the detections stay as they are.
    """
    if iou is None:
        return detections
    are_duplicates = duplicates(detections.boxes_xyxy, detections.labels, iou=iou)
    return with_scores(detections, detections.scores.masked_fill(are_duplicates, 0.0))


def with_scores(detections: BatchDetections, scores: Tensor) -> BatchDetections:
    """Return detections with other scores (B, N), the best first."""
    _, labels, boxes_xyxy, queries = detections
    scores, order = scores.topk(scores.shape[1], dim=1)  # ONNX's exporter has no stable sort
    return BatchDetections(scores, labels.gather(1, order), _gather_boxes(boxes_xyxy, order), queries.gather(1, order))


def join_detections(parts: Iterable[BatchDetections]) -> BatchDetections:
    """Concatenate the detections of several parts, best first."""
    scores, labels, boxes_xyxy, queries = (torch.cat(fields, dim=1) for fields in zip(*parts))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return BatchDetections(scores, labels.gather(1, order), _gather_boxes(boxes_xyxy, order), queries.gather(1, order))


def in_pixels(detections: BatchDetections, image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
    """Return the detections of each image, with boxes in pixels of the original image, (height, width)."""
    scores, labels, boxes_xyxy, _ = detections
    of_images = zip(scores, labels, scale_boxes(boxes_xyxy, image_sizes), image_sizes, strict=True)
    return [Detections(scores=s, labels=l, boxes_xyxy=b) for s, l, b, _ in of_images]


def _gather_boxes(boxes: Tensor, indices: Tensor) -> Tensor:
    """Return boxes by index: (B, Q, 4) and (B, N) -> (B, N, 4)."""
    return boxes.gather(1, indices[..., None].expand(-1, -1, 4))
