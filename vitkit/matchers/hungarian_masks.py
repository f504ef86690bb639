"""The optimal assignment of queries to target masks (Cheng et al. 2021, https://arxiv.org/abs/2107.06278)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.kernels.shared_points import sample_shared_points
from vitkit.matchers.base import LayersOfSet, Matcher
from vitkit.matchers.hungarian import assign
from vitkit.ops.masks import mask_logits, pad_masks, sample_masks, sample_points
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, Matches, describe_image

logger = logging.getLogger("vitkit")

MASKS_AT_ONCE = 128
"""Number of target masks that are compared with the queries at once, which bounds the memory of a crowd."""


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
        with torch.autocast(layers_and_targets[0][0][0]["pred_logits"].device.type, enabled=False):
            all_terms = [  # for each set, for each image
                [self._terms(layers, image, target, input_size) for image, target in enumerate(targets)]
                for layers, targets in layers_and_targets
            ]
            costs = [
                sum(self.weights[name] * term for name, term in terms.items())
                for terms_of_images in all_terms
                for terms in terms_of_images
            ]
        # The step's only transfer from the device.
        flat = torch.cat([cost.flatten() for cost in costs]).cpu().split([cost.numel() for cost in costs])
        values = iter([part.view(cost.shape).numpy() for part, cost in zip(flat, costs)])
        is_reported, matches = False, []
        for (layers, targets), terms_of_images in zip(layers_and_targets, all_terms):
            by_image = []
            for image, (target, terms) in enumerate(zip(targets, terms_of_images)):
                cost = next(values)  # (L, N, Q)
                if not np.isfinite(cost).all():
                    _check_labels(layers[0], image, target)
                    if not is_reported:
                        _warn_of_non_finite(cost, image, target, terms)
                        is_reported = True
                by_image.append([assign(of_layer) for of_layer in cost])
            matches.append([list(of_layer) for of_layer in zip(*by_image)])
        return matches

    def draw_points(self, layer: int, image: int, device: torch.device) -> Tensor:
        """Draw (num_points, 2) uniform in 0..1."""
        return torch.rand(self.num_points, 2, device=device)

    def _terms(
        self, layers: Sequence[Mapping[str, Any]], image: int, target: DetectionTarget, input_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the labels, mask and dice terms of one image, each (L, N, Q), unweighted."""
        probabilities = torch.stack([layer["pred_logits"][image] for layer in layers]).float().softmax(-1)
        labels = target["labels"]
        if not len(labels):
            return {"labels": probabilities.new_zeros(len(layers), 0, probabilities.shape[1])}
        is_class = (labels >= 0) & (labels < probabilities.shape[-1] - 1)
        cost_labels = -probabilities[..., labels.where(is_class, 0)].mT
        # An invalid label is recognized later by its NaN, without another transfer.
        terms = {"labels": cost_labels.masked_fill(~is_class[:, None], torch.nan)}
        compare = self._compare_at_points if self.mask_cost == "points" else _compare_pixels
        return terms | compare(layers, image, target["masks"], input_size)

    def _compare_at_points(
        self, layers: Sequence[Mapping[str, Any]], image: int, masks: Tensor, input_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the mask and dice terms at each layer's points, (L, N, Q)."""
        points = torch.stack([self.draw_points(i, image, masks.device) for i in range(len(layers))])  # (L, P, 2)
        logits = sample_mask_logits(layers, image, points)
        terms = {"mask": [], "dice": []}
        for part in masks.split(MASKS_AT_ONCE):
            # Each mask is read once for all layers.
            sampled = sample_masks(points.view(1, -1, 2), part, input_size).view(len(part), *points.shape[:2])
            pairs = list(zip(logits, sampled.unbind(1)))
            terms["mask"].append(torch.stack([cross_entropy_of_pairs(*pair) for pair in pairs]))
            terms["dice"].append(torch.stack([dice_of_pairs(*pair) for pair in pairs]))
        return {name: torch.cat(parts, dim=1) for name, parts in terms.items()}


def _compare_pixels(
    layers: Sequence[Mapping[str, Any]], image: int, masks: Tensor, input_size: tuple[int, int]
) -> dict[str, Tensor]:
    """Return the mask and dice terms of all pixels at the predictions' size, (L, N, Q)."""
    terms = {"mask": [], "dice": []}
    few, resized = pad_masks(masks, input_size).split(MASKS_AT_ONCE), {}  # layers usually have one size
    for layer in layers:
        logits = compute_mask_logits(layer, image)
        size = logits.shape[-2:]
        if size not in resized:
            resized[size] = torch.cat([F.interpolate(part[None].float(), size, mode="nearest")[0] for part in few])
        terms["mask"].append(focal_of_pairs(logits.flatten(1), resized[size].flatten(1)))
        terms["dice"].append(dice_of_pairs(logits.flatten(1), resized[size].flatten(1)))
    return {name: torch.stack(parts) for name, parts in terms.items()}


def _check_labels(layer: Mapping[str, Any], image: int, target: DetectionTarget) -> None:
    """Raise a DataError for a label out of range."""
    num_classes, labels = layer["pred_logits"].shape[-1] - 1, target["labels"]
    if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            f"matching: {describe_image(image, target)} has labels {labels.unique().tolist()}; "
            f"expected 0..{num_classes - 1}. Is the model's num_classes that of the dataset?"
        )


def _warn_of_non_finite(cost: np.ndarray, image: int, target: DetectionTarget, terms: Mapping[str, Tensor]) -> None:
    """Warn of the costs of an image, (L, N, Q), that are not finite, and of the first such layer."""
    layer = int(np.argwhere(~np.isfinite(cost))[0, 0])
    bad = ", ".join(name for name, term in terms.items() if not term[layer].isfinite().all())
    logger.warning(
        f"matching: non-finite cost in layer {layer}, {describe_image(image, target)}: "
        f"{bad or 'only the weighted sum'}. Expected finite costs: lower the learning rate, clip "
        "gradients, or leave fp16 if the predictions diverged."
    )


def compute_mask_logits(layer: Mapping[str, Any], image: int) -> Tensor:
    """Return the logits of all queries' masks of one image, (Q, h, w) float32."""
    if "pred_masks" in layer:
        return layer["pred_masks"][image].float()
    return mask_logits(layer["mask_embed"][image], layer["mask_features"][image]).float()


def sample_mask_logits(layers: Sequence[Mapping[str, Any]], image: int, points: Tensor) -> list[Tensor]:
    """Return the logits of all queries' masks of one image at points shared by them, (Q, P) float32 for each layer.

    Args:
        points: (L, P, 2).
    """
    logits = []
    for layer, shared in zip(layers, points[:, None]):
        if "mask_embed" in layer:  # the product commutes with sampling, and there are fewer points than pixels
            features = sample_shared_points(layer["mask_features"][image : image + 1].float(), shared)[0]
            logits.append(layer["mask_embed"][image].float() @ features)
        else:
            logits.append(sample_points(layer["pred_masks"][image : image + 1].float(), shared)[0])
    return logits


def cross_entropy_of_pairs(logits: Tensor, target_masks: Tensor) -> Tensor:
    """Return the mean binary cross entropy of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q)."""
    return (-F.logsigmoid(-logits).sum(1) - target_masks @ logits.T) / logits.shape[1]


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
