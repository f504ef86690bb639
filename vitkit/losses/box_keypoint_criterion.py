"""The loss of RF-DETR's preview of keypoints (the package rfdetr 1.11.2): classes, boxes and points."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitkit.losses.matched import MatchedLayers, SetLayers
from vitkit.losses.set_criterion import SetCriterion
from vitkit.ops.keypoints import gaussian_keypoint_terms, relative_keypoints
from vitkit.registry import CRITERIA


@CRITERIA.register
class BoxKeypointCriterion(SetCriterion):
    """The losses of `SetCriterion`, and those of the matched keypoints, for every decoder layer, see
    `gaussian_keypoint_terms`; divided by the number of targets.

    Objects without a labeled point, and images without keypoints, are trained by their boxes and classes alone. (The
    original teaches such objects that their points cannot be found.) Arguments are those of `SetCriterion`; the matcher
    is a `HungarianBoxKeypointMatcher`, or one without costs of keypoints.

    Outputs have pred_keypoints (B, Q, G, K, 7) and keypoint_groups (C,), see `QueryKeypoints.with_keypoints`; targets
    keypoints (N, K, 3) in pixels of the unpadded image, whose size is their `image_size`.

    Raises:
        DataError: a target has another number of keypoints than the model.
    """

    terms = ("labels", "l1", "giou", "keypoint_l1", "keypoint_findable", "keypoint_visible", "keypoint_nll")
    needs_outputs = ("pred_logits", "pred_boxes", "pred_keypoints")
    further_targets = ("keypoints",)

    def further_losses(self, sets: SetLayers, matched: MatchedLayers, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the weighted losses of the keypoints."""
        predicted = sets.stack("pred_keypoints")[tuple(matched.indices)]  # (L, M, G, K, 7)
        group = outputs["keypoint_groups"][matched.labels]  # (L, M)
        index = group.clamp(min=0)[..., None, None, None].expand(-1, -1, 1, *predicted.shape[3:])
        num_keypoints = predicted.shape[3]
        points, areas = map(torch.cat, zip(*(relative_keypoints(target, num_keypoints) for target in sets.targets)))
        points = points[matched.target] * (group >= 0)[..., None, None]
        terms = gaussian_keypoint_terms(predicted.gather(2, index)[:, :, 0], points, areas[matched.target])
        normalizer = sets.repeats * matched.num_targets
        means = {name: values.sum(1) / normalizer for name, values in terms.items()}
        return sets.name_losses(means, self.weights)
