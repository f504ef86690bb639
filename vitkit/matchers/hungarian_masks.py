"""The optimal assignment of queries to target masks (Cheng et al. 2021, https://arxiv.org/abs/2107.06278)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.matchers.base import LayersOfSet, Matcher
from vitkit.matchers.hungarian import assign
from vitkit.ops.masks import mask_logits, pad_masks, sample_masks, sample_points
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, Matches, describe_image

logger = logging.getLogger("vitkit")


@MATCHERS.register
class HungarianMaskMatcher(Matcher):
    """Assigns queries to the targets of each image so that the total cost is minimal.

    The cost of a pair is `-cost_labels * p(label) + cost_mask * mask + cost_dice * dice`.

    Args:
        mask_cost: the definition of `mask`: "points": the mean cross entropy at random points shared by all pairs of an
            image (Mask2Former); "focal": the mean focal loss over full masks at the predictions' size (MaskFormer).
            The dice term is computed at the same points or pixels.
        num_points: number of points, for "points".
    Raises:
        ConfigError: `mask_cost` is unknown, or there are no points.
    """

    def __init__(
        self,
        cost_labels: float,
        cost_mask: float,
        cost_dice: float,
        *,
        mask_cost: Literal["points", "focal"] = "points",
        num_points: int = 12544,
    ):
        super().__init__()
        if mask_cost not in ("points", "focal"):
            raise ConfigError(f"mask_cost={mask_cost!r}: expected 'points' or 'focal'.")
        if num_points < 1:
            raise ConfigError(f"num_points={num_points}: expected at least 1.")
        self.weights = {"labels": cost_labels, "mask": cost_mask, "dice": cost_dice}
        self.mask_cost = mask_cost
        self.num_points = num_points

    @torch.no_grad()
    def forward(self, layers_and_targets: Sequence[LayersOfSet], *, input_size: tuple[int, int]) -> list[Matches]:
        """Match every decoder layer of every set separately, with a single transfer from the device.

        Args:
            layers_and_targets: a pair for each set. Layers have pred_logits (B, Q, C + 1), the last class being "no
                object", and masks: pred_masks (B, Q, h, w), or their factors mask_embed (B, Q, C) and mask_features
                (B, C, h, w). The B targets have labels in 0..C-1 and masks (N, H, W) bool; none, or more than queries,
                are allowed.
            input_size: (height, width) that the images were padded to, which the predicted masks cover.
        Returns:
            the matches of each set.
        Raises:
            DataError: a label is not in 0..C-1.
        """
        all_terms = []
        with torch.autocast(layers_and_targets[0][0][0]["pred_logits"].device.type, enabled=False):
            for layers, targets in layers_and_targets:
                for i, layer in enumerate(layers):
                    all_terms += [self._terms(i, layer, j, target, input_size) for j, target in enumerate(targets)]
            costs = [sum(self.weights[name] * term for name, term in terms.items()) for terms in all_terms]
        # The step's only transfer from the device; scipy computes in float64.
        flat = torch.cat([cost.flatten() for cost in costs]).cpu().double().split([cost.numel() for cost in costs])
        values = iter([part.view(cost.shape).numpy() for part, cost in zip(flat, costs)])
        terms, is_reported, matches = iter(all_terms), False, []
        for layers, targets in layers_and_targets:
            matches.append([])
            for i, layer in enumerate(layers):
                matches[-1].append([])
                for image, target in enumerate(targets):
                    cost, cost_terms = next(values), next(terms)
                    if not np.isfinite(cost).all():
                        _check_labels(layer, image, target)
                        if not is_reported:
                            _warn_of_non_finite(i, image, target, cost_terms)
                            is_reported = True
                    matches[-1][i].append(assign(cost))
        return matches

    def draw_points(self, layer: int, image: int, device: torch.device) -> Tensor:
        """Draw (num_points, 2) uniform in 0..1."""
        return torch.rand(self.num_points, 2, device=device)

    def _terms(
        self, index: int, layer: Mapping[str, Any], image: int, target: DetectionTarget, input_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the labels, mask and dice terms, each (N, Q), unweighted."""
        probabilities = layer["pred_logits"][image].float().softmax(-1)
        if not len(target["labels"]):
            return {"labels": probabilities.new_zeros(0, len(probabilities))}
        masks = target["masks"]
        if self.mask_cost == "points":
            points = self.draw_points(index, image, masks.device)[None]
            logits = sample_mask_logits(layer, image, points)
            target_masks = sample_masks(points, masks, input_size)
            cost_mask = cross_entropy_of_pairs(logits, target_masks)
        else:
            logits = compute_mask_logits(layer, image)
            target_masks = F.interpolate(
                pad_masks(masks, input_size)[None].float(), size=logits.shape[-2:], mode="nearest"
            )[0]
            logits, target_masks = logits.flatten(1), target_masks.flatten(1)
            cost_mask = focal_of_pairs(logits, target_masks)
        labels = target["labels"]
        is_class = (labels >= 0) & (labels < probabilities.shape[-1] - 1)
        cost_labels = -probabilities[:, labels.where(is_class, 0)].T
        # An invalid label is recognized later by its NaN, without another transfer.
        cost_labels = cost_labels.masked_fill(~is_class[:, None], torch.nan)
        return {"labels": cost_labels, "mask": cost_mask, "dice": dice_of_pairs(logits, target_masks)}


def _check_labels(layer: Mapping[str, Any], image: int, target: DetectionTarget) -> None:
    """Raise a DataError for a label out of range."""
    num_classes, labels = layer["pred_logits"].shape[-1] - 1, target["labels"]
    if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            f"matching: {describe_image(image, target)} has labels {labels.unique().tolist()}; "
            f"expected 0..{num_classes - 1}. Is the model's num_classes that of the dataset?"
        )


def _warn_of_non_finite(index: int, image: int, target: DetectionTarget, terms: Mapping[str, Tensor]) -> None:
    """Warn of the costs of a layer and an image that are not finite."""
    bad = ", ".join(name for name, term in terms.items() if not term.isfinite().all())
    logger.warning(
        f"matching: non-finite cost in layer {index}, {describe_image(image, target)}: "
        f"{bad or 'only the weighted sum'}. Expected finite costs: lower the learning rate, clip "
        "gradients, or leave fp16 if the predictions diverged."
    )


def compute_mask_logits(layer: Mapping[str, Any], image: int) -> Tensor:
    """Return the logits of all queries' masks of one image, (Q, h, w) float32."""
    if "pred_masks" in layer:
        return layer["pred_masks"][image].float()
    return mask_logits(layer["mask_embed"][image], layer["mask_features"][image]).float()


def sample_mask_logits(layer: Mapping[str, Any], image: int, points: Tensor) -> Tensor:
    """Return the logits of all queries' masks of one image at shared points.

    Args:
        points: (1, P, 2).
    Returns:
        (Q, P) float32.
    """
    if "mask_embed" in layer:  # the product commutes with sampling, and there are fewer points than pixels
        features = sample_points(layer["mask_features"][image : image + 1].float(), points)[0]
        return layer["mask_embed"][image].float() @ features
    return sample_points(layer["pred_masks"][image : image + 1].float(), points)[0]


def cross_entropy_of_pairs(logits: Tensor, target_masks: Tensor) -> Tensor:
    """Return the mean binary cross entropy of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q)."""
    return (F.softplus(logits).sum(1) - target_masks @ logits.T) / logits.shape[1]


def focal_of_pairs(logits: Tensor, target_masks: Tensor, *, alpha: float = 0.25, gamma: float = 2) -> Tensor:
    """Return the mean focal loss of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q)."""
    p = logits.sigmoid()
    positive = alpha * (1 - p) ** gamma * F.softplus(-logits)
    negative = (1 - alpha) * p**gamma * F.softplus(logits)
    return (negative.sum(1) + target_masks @ (positive - negative).T) / logits.shape[1]


def dice_of_pairs(logits: Tensor, target_masks: Tensor, *, added: float = 1.0) -> Tensor:
    """Return the dice loss of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q).

    Args:
        added: to numerator and denominator.
    """
    p = logits.sigmoid()
    return 1 - (2 * target_masks @ p.T + added) / (target_masks.sum(1)[:, None] + p.sum(1) + added)
