"""The optimal assignment of queries to targets with boxes and masks (RF-DETR-Seg, Robinson et al. 2025,
https://arxiv.org/abs/2511.09554; ECSeg, 2026, https://arxiv.org/abs/2603.18739; D-FINE-seg, 2026,
https://arxiv.org/abs/2602.23043)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.matchers.base import LayersOfSet
from vitkit.matchers.hungarian import HungarianMatcher, LateCosts
from vitkit.matchers.hungarian_masks import cross_entropy_of_pairs, dice_of_pairs, focal_of_pairs
from vitkit.ops.masks import resize_target_masks, sample_masks, sample_points
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, Matches


@MATCHERS.register
class HungarianBoxMaskMatcher(HungarianMatcher):
    """Assigns queries to the targets of each image so that the total cost is minimal: that of `HungarianMatcher`, plus
    `cost_mask * mask + cost_dice * dice` for layers that predict masks, and targets that have one.

    Args:
        late: see `HungarianMatcher`.
        mask_cost: "points": the cross entropy and the dice loss at random points shared by all pairs; "focal": the
            focal and the dice loss of all pixels, at the size of the predicted masks (D-FINE-seg).
        pixels_per_point: number of a mask's predicted pixels for each point.
        point_padding: what a predicted mask is beyond its outermost pixels' centers, "border": as these (RF-DETR), or
            "zeros" (ECSeg).
    Raises:
        ConfigError: there is less than one pixel per point, or an argument is unknown; and see `HungarianMatcher`.
    """

    compares_masks = True

    def __init__(
        self,
        cost_labels: float,
        cost_l1: float,
        cost_giou: float,
        cost_mask: float,
        cost_dice: float,
        *,
        activation: Literal["softmax", "sigmoid"] = "sigmoid",
        late: LateCosts | None = None,
        mask_cost: Literal["points", "focal"] = "points",
        pixels_per_point: int = 16,
        point_padding: Literal["border", "zeros"] = "border",
    ):
        super().__init__(cost_labels, cost_l1, cost_giou, activation=activation, late=late)
        if pixels_per_point < 1 or mask_cost not in ("points", "focal") or point_padding not in ("border", "zeros"):
            raise ConfigError(
                f"pixels_per_point={pixels_per_point}, mask_cost={mask_cost!r}, point_padding={point_padding!r}: "
                "expected at least 1, 'points' or 'focal', and 'border' or 'zeros'."
            )
        self.mask_weights = {"mask": cost_mask, "dice": cost_dice}
        self.mask_cost, self.point_padding = mask_cost, point_padding
        self.pixels_per_point = pixels_per_point

    @torch.no_grad()
    def forward(self, layers_and_targets: Sequence[LayersOfSet], *, input_size: tuple[int, int]) -> list[Matches]:
        """Match every decoder layer of every set separately, with a single transfer from the device.

        Args:
            layers_and_targets: a pair for each set, as for `HungarianMatcher`. Layers may also have mask_embed (B, Q,
                C) and mask_features (B, C, h, w), whose product is the masks; targets have masks (N, H, W) bool of the
                unpadded images, and optionally has_masks.
            input_size: (height, width) that the images were padded to, which the predicted masks cover.
        Raises:
            DataError: a label is not in 0..C-1.
        """
        maps = next(layer["mask_features"] for layers, _ in layers_and_targets for layer in layers if _has_masks(layer))
        points = self.draw_points(max(maps[0, 0].numel() // self.pixels_per_point, 1), maps.device)

        def mask_terms(layers: Sequence[Mapping[str, Any]], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
            return self._mask_terms(layers, targets, points, input_size)

        costs = [self.costs_in_parts(*pair) for pair in layers_and_targets]
        for cost, pair in zip(costs, layers_and_targets):
            for name, term in mask_terms(*pair).items():
                cost += self.mask_weights[name] * term
        return self.assign_all(layers_and_targets, costs, lambda *pair: self.costs(*pair)[1] | mask_terms(*pair))

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
        with_masks = [layer for layer in layers if _has_masks(layer)]
        if not with_masks:
            return {}
        at_points = self.mask_cost == "points"
        size = with_masks[0]["mask_features"].shape[-2:]
        target_masks = [  # (N, P) each
            sample_masks(points, target["masks"], input_size, mode="nearest")
            if at_points
            else resize_target_masks(target["masks"], input_size, size).flatten(1)
            for target in targets
        ]
        has_masks = [target.get("has_masks", target["labels"] >= 0)[:, None] for target in targets]
        compare, added = (cross_entropy_of_pairs, 1.0) if at_points else (focal_of_pairs, 1e-6)
        sampled: dict[int, Tensor] = {}  # groups of queries, or all layers, share the features of a layer
        values = []
        for layer in with_masks:
            features = layer["mask_features"]
            if id(features) not in sampled:
                sampled[id(features)] = self._sample(features.float(), points)  # (B, C, P)
            logits = layer["mask_embed"].float() @ sampled[id(features)]  # (B, Q, P)
            pairs = list(zip(logits, target_masks, has_masks))
            mask = torch.cat([compare(x, masks) * known for x, masks, known in pairs])
            dice = torch.cat([dice_of_pairs(x, masks, added=added) * known for x, masks, known in pairs])
            values.append(torch.stack((mask, dice)))
        rest = iter(values)
        mask, dice = torch.stack(
            [next(rest) if _has_masks(layer) else torch.zeros_like(values[0]) for layer in layers], dim=1
        )
        return {"mask": mask, "dice": dice}

    def _sample(self, features: Tensor, points: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, C, P): at the points, or all pixels."""
        if self.mask_cost == "focal":
            return features.flatten(2)
        return sample_points(features, points.expand(features.shape[0], -1, -1), padding_mode=self.point_padding)


def _has_masks(layer: Mapping[str, Any]) -> bool:
    return "mask_embed" in layer
