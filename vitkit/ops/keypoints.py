"""Predicted keypoints against labeled ones, as plain functions on tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.io.keypoints import COCO_SIGMAS, DEFAULT_SIGMA
from vitkit.ops.detections import BatchDetections, in_pixels
from vitkit.structures import OBJECT_FIELDS, DetectionTarget, KeypointDetections

KEYPOINT_MAP = "keypoints"
"""Name of a neck's map that only keypoints attend to."""


class KeypointLabels(NamedTuple):
    """The labeled keypoints of N objects, relative to the unpadded image."""

    points: Tensor
    """(N, K, 3) float32: x, y in 0..1, and visibility 0 (not labeled), 1 or 2."""
    areas: Tensor
    """(N,) float32, of the boxes, in 0..1."""


def relative_keypoints(target: DetectionTarget, num_keypoints: int) -> KeypointLabels:
    """Return the keypoints of an image's objects; none is labeled if the target has none.

    Raises:
        DataError: there is another number of them than the model predicts.
    """
    boxes = target["boxes_cxcywh"].float()
    areas = boxes[:, 2] * boxes[:, 3]
    if "keypoints" not in target:
        return KeypointLabels(boxes.new_zeros(len(boxes), num_keypoints, 3), areas)
    height, width = (int(side) for side in target["image_size"])
    points = target["keypoints"].float()
    if points.shape[1] != num_keypoints:
        raise DataError(
            f"image {target.get('image_id')}: its objects have {points.shape[1]} keypoints, and the model predicts "
            f"{num_keypoints}. Set model.num_keypoints to those of the data, as a run does."
        )
    return KeypointLabels(points / points.new_tensor([width, height, 1]), areas)


def sigmas_of_keypoints(num_keypoints: int, sigmas: Sequence[float] | None) -> Tensor:
    """Return how exactly each of K keypoints can be located, (K,) float32, see `KeypointInfo`.

    Args:
        sigmas: what is known of them; None: COCO's if there are 17, or else 0.05 for all.
    Raises:
        ConfigError: there is another number of them, or one is not above 0.
    """
    if sigmas is None:
        coco = list(COCO_SIGMAS.values())
        sigmas = coco if num_keypoints == len(coco) else [DEFAULT_SIGMA] * num_keypoints
    if len(sigmas) != num_keypoints or not all(sigma > 0 for sigma in sigmas):
        raise ConfigError(f"keypoint_sigmas={list(sigmas)}: expected {num_keypoints} numbers above 0.")
    return torch.tensor(sigmas)


def keep_labeled_objects(targets: Sequence[DetectionTarget], num_keypoints: int) -> list[DetectionTarget]:
    """Return the targets with only those objects that have a labeled keypoint; raises like `relative_keypoints`."""
    points = [relative_keypoints(target, num_keypoints).points for target in targets]
    # One transfer from the device for all images.
    kept = torch.cat([(each[..., 2] > 0).any(1) for each in points]).cpu().split([len(each) for each in points])
    result = []
    for target, rows in zip(targets, kept):
        if not rows.all():
            index = rows.nonzero()[:, 0].to(target["labels"].device, non_blocking=True)
            target = {**target, **{name: target[name][index] for name in OBJECT_FIELDS if name in target}}
        result.append(target)
    return result


class LabeledPoses(NamedTuple):
    """The keypoints of N objects that have at least one labeled, with what OKS measures their distances by."""

    points: Tensor
    """(N, K, 2) float32 x, y in 0..1 of the unpadded image."""
    is_labeled: Tensor
    """(N, K) bool."""
    scales: Tensor
    """(N, 2) float32, the image's width and height divided by the square root of the object's area."""


def labeled_poses(targets: Sequence[DetectionTarget], num_keypoints: int) -> LabeledPoses:
    """Return the poses of all objects of a batch; raises like `relative_keypoints`.

    Args:
        targets: whose objects all have a labeled keypoint, see `keep_labeled_objects`.
    """
    points = torch.cat([relative_keypoints(target, num_keypoints).points for target in targets])
    sides, areas = [], []
    for target in targets:
        height, width = (int(side) for side in target["image_size"])
        boxes = target["boxes_cxcywh"].float()
        sides.append(boxes.new_tensor([width, height]).expand(len(boxes), 2))
        # Without keypoints there are no objects, and so no areas.
        areas.append(target["areas"].float() if len(boxes) else boxes[:, 0])
    scales = torch.cat(sides) / torch.cat(areas).clamp(min=1e-6).sqrt()[:, None]
    return LabeledPoses(points[..., :2], points[..., 2] > 0, scales)


def pose_terms(predicted: Tensor, poses: LabeledPoses, sigmas: Tensor) -> dict[str, Tensor]:
    """Return how much predicted keypoints differ from labeled ones.

    Args:
        predicted: (..., K, 2) x, y in 0..1; leading axes are broadcast with those of `poses`.
        sigmas: (K,), see `KeypointInfo`.
    Returns:
        keypoint_l1: (...), the sum of the labeled points' distances |x| + |y|.
        oks: (...), 1 minus the object keypoint similarity, with distances in pixels: the mean of exp(-d^2 / (2 area (2
            sigma)^2)) over the labeled points.
    """
    distances = (predicted - poses.points) * poses.is_labeled[..., None]
    squared = (distances * poses.scales[..., None, :]).square().sum(-1)
    similarity = torch.exp(-squared / (8 * sigmas.square())) * poses.is_labeled
    # As in the original, never 0: a match that does not fit at all still has a direction.
    oks = (similarity.sum(-1) / (poses.is_labeled.sum(-1) + 1e-6)).clamp(min=1e-6)
    return {"keypoint_l1": distances.abs().sum((-2, -1)), "oks": 1 - oks}


def boxes_around_points(points: Tensor) -> Tensor:
    """Return the boxes around all points of each object: (..., K, 2) -> (..., 4) cxcywh."""
    low, high = points.amin(-2), points.amax(-2)
    return torch.cat(((low + high) / 2, high - low), dim=-1)


def gaussian_keypoint_terms(predicted: Tensor, points: Tensor, areas: Tensor) -> dict[str, Tensor]:
    """Return how much predicted keypoints, each with a Gaussian around it, differ from labeled ones.

    Args:
        predicted: (..., K, 7): x, y; the logits of being labeled, and of being visible; and the Gaussian's precision as
            the entries log L11, L21 and log L22 of its Cholesky factor, for distances relative to the object's size.
        points, areas: (..., K, 3) and (...), see `KeypointLabels`; leading axes are broadcast.
    Returns:
        (...) for each term, 0 for objects without a labeled point:
        keypoint_l1: mean distance |x| + |y| of the labeled points, relative to the square root of the area.
        keypoint_findable: mean cross entropy of whether each point is labeled.
        keypoint_visible: mean cross entropy of whether each point is visible.
        keypoint_nll: mean negative log likelihood of the labeled points, without its constant.
    """
    areas = areas.clamp(min=torch.finfo(areas.dtype).eps)
    is_labeled = points[..., 2] > 0
    count = is_labeled.sum(-1)
    distances = (predicted[..., :2] - points[..., :2]).masked_fill(~is_labeled[..., None], 0)
    # Points without a label have precision 1, so that their exponentials add nothing to the gradient.
    log_l11, l21, log_l22 = predicted[..., 4:].masked_fill(~is_labeled[..., None], 0).unbind(-1)
    dx, dy = distances.unbind(-1)
    mahalanobis = (log_l11.exp() * dx + l21 * dy) ** 2 + (log_l22.exp() * dy) ** 2
    likelihood = 0.5 * mahalanobis / areas[..., None] - log_l11 - log_l22
    terms = {
        "keypoint_l1": distances.abs().sum((-2, -1)) / count.clamp(min=1) / areas.sqrt(),
        "keypoint_findable": _cross_entropy(predicted[..., 2], is_labeled),
        "keypoint_visible": _cross_entropy(predicted[..., 3], points[..., 2] > 1),
        "keypoint_nll": likelihood.sum(-1) / count.clamp(min=1),
    }
    return {name: value.where(count > 0, 0) for name, value in terms.items()}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross entropy over the last axis; leading axes are broadcast."""
    return (F.softplus(logits) - logits * labels).mean(-1)


def log_mean_variance(predicted: Tensor) -> Tensor:
    """Return the logarithm of the mean of keypoints' variances, (...), weighted by the probability of being labeled.

    Args:
        predicted: (..., K, 7), see `gaussian_keypoint_terms`; a point's variance is the trace of its covariance.
    """
    log_l11, l21, log_l22 = predicted[..., 4:].unbind(-1)
    # The trace of the inverse of L L^T, in logarithms.
    cross = 2 * l21.abs().clamp(min=1e-12).log() - 2 * log_l11 - 2 * log_l22
    traces = torch.logsumexp(torch.stack((-2 * log_l11, -2 * log_l22, cross), dim=-1), dim=-1)
    weights = predicted[..., 2].sigmoid().clamp(min=1e-12).log()
    return torch.logsumexp(traces + weights, dim=-1) - torch.logsumexp(weights, dim=-1)


def keypoints_in_pixels(keypoints: Tensor, image_sizes: Tensor) -> Tensor:
    """Scale keypoints (B, N, K, 3), x and y relative to the image, to pixels of images (B, 2), height and width."""
    sizes = image_sizes.flip(1).to(keypoints.dtype)
    return torch.cat((keypoints[..., :2] * sizes[:, None, None], keypoints[..., 2:]), dim=-1)


def detections_with_keypoints(
    detections: BatchDetections, keypoints: Tensor, image_sizes: Sequence[tuple[int, int]]
) -> list[KeypointDetections]:
    """Return the detections of each image and their keypoints (B, N, K, 3), x and y in 0..1, in pixels of the original
    image, (height, width)."""
    sizes = torch.as_tensor(image_sizes, device=keypoints.device).view(-1, 2)
    in_images = zip(in_pixels(detections, image_sizes), keypoints_in_pixels(keypoints, sizes))
    return [KeypointDetections(**boxes, keypoints=points) for boxes, points in in_images]
