"""The optimal assignment of queries to targets with boxes and masks (RF-DETR-Seg, Robinson et al. 2025,
https://arxiv.org/abs/2511.09554)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.matchers.base import LayersOfSet
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.matchers.hungarian_masks import cross_entropy_of_pairs, dice_of_pairs
from vitkit.ops.masks import sample_nearest_masks, sample_points
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, Matches


@MATCHERS.register
class HungarianBoxMaskMatcher(HungarianMatcher):
    """Assigns queries to the targets of each image so that the total cost is minimal: that of `HungarianMatcher`, plus
    `cost_mask * mask + cost_dice * dice`, the cross entropy and the dice loss at random points shared by all pairs.

    Args:
        pixels_per_point: number of a mask's predicted pixels for each point.
    Raises:
        ConfigError: there is less than one pixel per point; and see `HungarianMatcher`.
    """

    def __init__(
        self,
        cost_labels: float,
        cost_l1: float,
        cost_giou: float,
        cost_mask: float,
        cost_dice: float,
        *,
        activation: Literal["softmax", "sigmoid"] = "sigmoid",
        pixels_per_point: int = 16,
    ):
        super().__init__(cost_labels, cost_l1, cost_giou, activation=activation)
        if pixels_per_point < 1:
            raise ConfigError(f"pixels_per_point={pixels_per_point}: expected at least 1.")
        self.mask_weights = {"mask": cost_mask, "dice": cost_dice}
        self.pixels_per_point = pixels_per_point

    @torch.no_grad()
    def forward(self, layers_and_targets: Sequence[LayersOfSet], *, input_size: tuple[int, int]) -> list[Matches]:
        """Match every decoder layer of every set separately, with a single transfer from the device.

        Args:
            layers_and_targets: a pair for each set, as for `HungarianMatcher`. Layers also have mask_embed (B, Q, C)
                and mask_features (B, C, h, w), whose product is the masks; targets masks (N, H, W) bool of the
                unpadded images.
            input_size: (height, width) that the images were padded to, which the predicted masks cover.
        Raises:
            DataError: a label is not in 0..C-1.
        """
        height, width = layers_and_targets[0][0][0]["mask_features"].shape[-2:]
        count = max(height * width // self.pixels_per_point, 1)
        points = self.draw_points(count, layers_and_targets[0][0][0]["mask_features"].device)
        costs = []
        for layers, targets in layers_and_targets:
            cost, terms = self.costs(layers, targets)
            mask_terms = self._mask_terms(layers, targets, points, input_size)
            cost = cost + sum(self.mask_weights[name] * term for name, term in mask_terms.items())
            costs.append((cost, {**terms, **mask_terms}))
        return self.assign_all(layers_and_targets, costs)

    def draw_points(self, count: int, device: torch.device) -> Tensor:
        """Draw (1, count, 2) uniform in 0..1."""
        return torch.rand(1, count, 2, device=device)

    def _mask_terms(
        self,
        layers: Sequence[Mapping[str, Any]],
        targets: Sequence[DetectionTarget],
        points: Tensor,
        input_size: tuple[int, int],
    ) -> dict[str, Tensor]:
        """Return the mask and dice terms of each target with each query of its image, (L, T, Q)."""
        target_masks = [sample_nearest_masks(points, target["masks"], input_size) for target in targets]  # (N, P) each
        sampled: dict[int, Tensor] = {}  # groups of queries share the features of a layer
        mask_costs, dice_costs = [], []
        for layer in layers:
            features = layer["mask_features"]
            if id(features) not in sampled:
                expanded = points.expand(features.shape[0], -1, -1)
                sampled[id(features)] = sample_points(features.float(), expanded, padding_mode="border")  # (B, C, P)
            logits = layer["mask_embed"].float() @ sampled[id(features)]  # (B, Q, P)
            pairs = list(zip(logits, target_masks))
            mask_costs.append(torch.cat([cross_entropy_of_pairs(*pair) for pair in pairs]))
            dice_costs.append(torch.cat([dice_of_pairs(*pair) for pair in pairs]))
        return {"mask": torch.stack(mask_costs), "dice": torch.stack(dice_costs)}
