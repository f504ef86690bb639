"""Predicted keypoints against labeled ones, as plain functions on tensors."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import DataError
from vitkit.structures import DetectionTarget

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
