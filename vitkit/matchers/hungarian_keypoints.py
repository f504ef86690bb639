"""The optimal assignment of queries to targets with keypoints (DETRPose, Janampa and Pattichis 2025,
https://arxiv.org/abs/2506.13027)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.matchers.base import LayersOfSet
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.ops.keypoints import LabeledPoses, labeled_poses, pose_terms
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, Matches


@MATCHERS.register
class HungarianKeypointMatcher(HungarianMatcher):
    """Assigns queries to the targets of each image so that the total cost is minimal: `cost_labels * labels +
    cost_keypoint_l1 * keypoint_l1 + cost_oks * oks`, with the labels' cost of `HungarianMatcher` for a sigmoid per
    class, and the others of `pose_terms`."""

    def __init__(self, cost_labels: float, cost_keypoint_l1: float, cost_oks: float):
        super().__init__(cost_labels, 0.0, 0.0, activation="sigmoid")
        self.weights = {"labels": cost_labels, "keypoint_l1": cost_keypoint_l1, "oks": cost_oks}

    @torch.no_grad()
    def forward(self, layers_and_targets: Sequence[LayersOfSet], *, keypoint_sigmas: Tensor) -> list[Matches]:
        """Match every decoder layer of every set separately, with a single transfer from the device.

        Args:
            layers_and_targets: a pair for each set. Layers have pred_logits (B, Q, C) and pred_keypoints (B, Q, K, 2)
                in 0..1; targets are those of `labeled_poses`.
            keypoint_sigmas: (K,), see `KeypointInfo`.
        Raises:
            DataError: a label is not in 0..C-1, or a target has another number of keypoints than the model.
        """
        costs = [self.pose_costs(*pair, keypoint_sigmas)[0] for pair in layers_and_targets]
        return self.assign_all(layers_and_targets, costs, lambda *pair: self.pose_costs(*pair, keypoint_sigmas)[1])

    def pose_costs(
        self, layers: Sequence[Mapping[str, Any]], targets: Sequence[DetectionTarget], sigmas: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cost of each target with each query of its image, and its unweighted terms, all (L, T, Q)."""
        counts = torch.tensor([len(target["labels"]) for target in targets])
        image = torch.arange(len(targets)).repeat_interleave(counts).to(sigmas.device, non_blocking=True)  # (T,)
        label_costs, is_class = self.label_costs(layers, targets, image)
        poses = labeled_poses(targets, layers[0]["pred_keypoints"].shape[2])
        compared = LabeledPoses(*(field[:, None] for field in poses))
        # Layer by layer, as there are Q * K points for each target.
        of_layers = [pose_terms(layer["pred_keypoints"].float()[image], compared, sigmas) for layer in layers]
        terms = {name: torch.stack([of_layer[name] for of_layer in of_layers]) for name in of_layers[0]}
        terms["labels"] = label_costs
        cost = sum(self.weights[name] * term for name, term in terms.items())
        return cost.masked_fill(~is_class[:, None], torch.nan), terms
