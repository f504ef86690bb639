"""The optimal assignment of queries to targets with boxes and keypoints (RF-DETR's preview of keypoints, the package
rfdetr 1.11.2)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vitkit.matchers.hungarian import HungarianMatcher, LateCosts
from vitkit.ops.keypoints import gaussian_keypoint_terms, relative_keypoints
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget


@MATCHERS.register
class HungarianBoxKeypointMatcher(HungarianMatcher):
    """Assigns queries to the targets of each image so that the total cost is minimal: that of `HungarianMatcher`, plus
    the four terms of `gaussian_keypoint_terms` for targets with labeled keypoints.

    Layers also have pred_keypoints and keypoint_groups, see `QueryKeypoints.with_keypoints`; targets may have keypoints
    (N, K, 3) in pixels of the unpadded image, whose size is their `image_size`.

    Args:
        late: see `HungarianMatcher`.
    """

    def __init__(
        self,
        cost_labels: float,
        cost_l1: float,
        cost_giou: float,
        cost_keypoint_l1: float = 1.0,
        cost_keypoint_findable: float = 1.0,
        cost_keypoint_visible: float = 1.0,
        cost_keypoint_nll: float = 1.0,
        *,
        activation: Literal["softmax", "sigmoid"] = "sigmoid",
        late: LateCosts | None = None,
    ):
        super().__init__(cost_labels, cost_l1, cost_giou, activation=activation, late=late)
        self.keypoint_weights = {
            "keypoint_l1": cost_keypoint_l1,
            "keypoint_findable": cost_keypoint_findable,
            "keypoint_visible": cost_keypoint_visible,
            "keypoint_nll": cost_keypoint_nll,
        }

    def costs(
        self, layers: Sequence[Mapping[str, Any]], targets: Sequence[DetectionTarget]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `HungarianMatcher`."""
        cost, terms = super().costs(layers, targets)
        counts = torch.tensor([len(target["labels"]) for target in targets])
        image = torch.arange(len(targets)).repeat_interleave(counts).to(cost.device, non_blocking=True)  # (T,)
        num_keypoints = layers[0]["pred_keypoints"].shape[3]
        points, areas = map(torch.cat, zip(*(relative_keypoints(target, num_keypoints) for target in targets)))
        groups = layers[0]["keypoint_groups"]
        # Labels out of range are reported by their cost.
        group = groups[torch.cat([target["labels"] for target in targets]).clamp(0, len(groups) - 1)]
        points = points * (group >= 0)[:, None, None]
        compared = (points[:, None], areas[:, None])
        # Layer by layer, as there are Q * K points for each target.
        of_layers = [
            gaussian_keypoint_terms(layer["pred_keypoints"].float()[image, :, group.clamp(min=0)], *compared)
            for layer in layers
        ]
        added = {name: torch.stack([of_layer[name] for of_layer in of_layers]) for name in self.keypoint_weights}
        return cost + sum(self.keypoint_weights[name] * term for name, term in added.items()), {**terms, **added}
