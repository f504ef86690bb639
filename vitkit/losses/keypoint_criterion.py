"""The loss of DETRPose (Janampa and Pattichis 2025, https://arxiv.org/abs/2506.13027)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.losses.class_losses import sigmoid_loss, sigmoid_settings
from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.dfine import Pairs, known_pairs, pairs_of_union
from vitkit.losses.matched import MatchedCriterion, SetLayers
from vitkit.ops.keypoints import LabeledPoses, keep_labeled_objects, labeled_poses, pose_terms, sigmas_of_keypoints
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget


@CRITERIA.register
class KeypointCriterion(MatchedCriterion):
    """Losses of the class and the keypoints of instances without boxes, for every decoder layer.

    - labels: the class loss of all queries, whose target at a matched label is the object keypoint similarity (OKS),
      with the matches of their own layer.
    - keypoint_l1, oks: see `pose_terms`; for the union of all layers' matches, as boxes in `DFINECriterion`.

    Denoising queries have the same losses, with the matches that they are made for. Objects without a labeled keypoint
    are left out: as in the original's data, they are background.

    Args:
        matcher: a spec of the matcher (see `HungarianKeypointMatcher`), or the matcher.
        weights: the weight of each of `terms`.
        class_loss: "varifocal" (DETRPose), or another sigmoid loss: "mal" or "focal". See `class_losses`.
        focal_alpha, focal_gamma, class_weights: see `SetCriterion`; DETRPose's alpha is 0.25.
        keypoint_sigmas: how exactly each keypoint can be located, for OKS, see `sigmas_of_keypoints`; a run sets those
            of its data.
    Raises:
        ConfigError: the class loss or a term is unknown, a term is missing, the class loss does not have an argument
            that is set, the matcher's costs are for other logits, or a class weight or sigma is not positive.
    """

    terms = ("labels", "keypoint_l1", "oks")
    needs_outputs = ("pred_logits", "pred_keypoints")
    needs_targets = ("labels", "boxes_cxcywh", "keypoints")
    class_activation = "sigmoid"

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        class_loss: Literal["varifocal", "mal", "focal"] = "varifocal",
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
        class_weights: ClassWeights | None = None,
        keypoint_sigmas: Sequence[float] | None = None,
    ):
        self.check_arguments(weights)
        super().__init__(matcher, weights, 0.0, class_weights)
        if class_loss not in ("varifocal", "mal", "focal"):
            raise ConfigError(f"class_loss={class_loss!r}: expected 'varifocal', 'mal' or 'focal'.")
        if self.matcher.activation != self.class_activation:
            raise ConfigError(f"matcher.activation={self.matcher.activation!r}: expected 'sigmoid'.")
        self.class_loss = class_loss
        self.sigmoid_settings = sigmoid_settings(class_loss, alpha=focal_alpha, gamma=focal_gamma)
        sigmas = None if keypoint_sigmas is None else sigmas_of_keypoints(len(keypoint_sigmas), keypoint_sigmas)
        self.register_buffer("keypoint_sigmas", sigmas, persistent=False)

    def count(self, targets: Sequence[DetectionTarget]) -> float:
        """Return the number of objects with a labeled keypoint."""
        return sum(int((target["keypoints"][..., 2] > 0).any(1).sum()) for target in targets)

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: predictions of the last layer: pred_logits (B, Q, C) and pred_keypoints (B, Q, K, 2) in 0..1; and
                aux_outputs, a list of the same for each earlier prediction. Optionally training_outputs, a list of
                `QuerySet`: the encoder's predictions for the same queries; and denoising queries.
            targets: B targets with labels in 0..C-1, keypoints (N, K, 3) and areas (N,).
        Returns:
            Weighted scalars whose sum is the loss: `labels keypoint_l1 oks` for the last layer, `aux0_labels ...` for
            the others; and `enc_labels ... dn_labels ... dn_aux0_labels ...` for training_outputs. The keys are the
            same for any targets, and each term depends on the outputs even when it is zero.
        Raises:
            DataError: a label is out of range, or a target has another number of keypoints than the model.
            ConfigError: there is another number of sigmas than of keypoints.
        """
        num_keypoints = outputs["pred_keypoints"].shape[2]
        sigmas = self.keypoint_sigmas
        if sigmas is None or len(sigmas) != num_keypoints:
            sigmas = sigmas_of_keypoints(num_keypoints, None if sigmas is None else sigmas.tolist())
            sigmas = sigmas.to(outputs["pred_logits"].device, non_blocking=True)
        losses = {}
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            targets = keep_labeled_objects(targets, num_keypoints)
            poses = labeled_poses(targets, num_keypoints)
            all_sets = self.match(outputs, targets, keypoint_sigmas=sigmas)
            union = pairs_of_union(self, all_sets)
            for sets in all_sets:
                losses |= self._set_losses(sets, union, poses, sigmas)
        return losses

    def _set_losses(self, sets: SetLayers, union: Pairs, poses: LabeledPoses, sigmas: Tensor) -> dict[str, Tensor]:
        """Return the weighted losses of each layer of a set."""
        matched = self.collect_matched_layers(sets)
        points = sets.stack("pred_keypoints")  # (L, B, Q, K, 2)

        def compare(predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
            return pose_terms(predicted, LabeledPoses(*(field[target] for field in poses)), sigmas)

        similarity = 1 - compare(points.detach()[tuple(matched.indices)], matched.target)["oks"]  # (L, M)
        class_losses = sigmoid_loss(self.class_loss, matched, similarity, **self.sigmoid_settings)
        pairs = known_pairs(self, sets, matched) if sets.has_known_matches else union
        compared = compare(points[:, pairs.image, pairs.query], pairs.target)
        terms = {name: values.sum(1) / pairs.normalizer for name, values in compared.items()}
        labels = class_losses / (sets.repeats * matched.num_targets)
        return sets.name_losses({"labels": labels, **terms}, self.weights)
