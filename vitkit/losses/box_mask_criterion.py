"""The loss of RF-DETR-Seg (Robinson et al. 2025, https://arxiv.org/abs/2511.09554): classes, boxes and masks."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.whole_mask_losses import dice_loss
from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.mask_criterion import compute_matched_masks
from vitkit.losses.matched import MatchedLayers, SetLayers
from vitkit.losses.set_criterion import SetCriterion
from vitkit.ops.masks import choose_uncertain_points, sample_nearest_masks, sample_points
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget


@CRITERIA.register
class BoxMaskCriterion(SetCriterion):
    """The losses of `SetCriterion`, and binary cross entropy and dice of the matched masks, for every decoder layer.

    They are computed at points, most of them where the predicted mask is uncertain.

    Args:
        matcher, weights, class_loss, no_object_weight, focal_alpha, focal_gamma, class_weights: see `SetCriterion`; the
            matcher is a `HungarianBoxMaskMatcher`.
        pixels_per_point: number of a mask's predicted pixels for each point; there are at least as many points as rows.
        oversample: number of candidates drawn per point, from which the uncertain ones are chosen.
        importance: fraction of uncertain points; the others are uniform.
    Raises:
        ConfigError: a number is out of range; and see `SetCriterion`.
    """

    terms = ("labels", "l1", "giou", "mask", "dice")
    mask_terms = ()
    needs_outputs = ("pred_logits", "pred_boxes", "mask_embed", "input_size")

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        class_loss: Literal["cross_entropy", "focal", "varifocal", "mal", "iou_aware"] = "iou_aware",
        no_object_weight: float | None = None,
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
        class_weights: ClassWeights | None = None,
        pixels_per_point: int = 16,
        oversample: float = 3.0,
        importance: float = 0.75,
    ):
        super().__init__(
            matcher,
            weights,
            class_loss=class_loss,
            no_object_weight=no_object_weight,
            focal_alpha=focal_alpha,
            focal_gamma=focal_gamma,
            class_weights=class_weights,
        )
        if not (0 <= importance <= 1 and oversample >= 1 and pixels_per_point >= 1):
            raise ConfigError(
                f"pixels_per_point={pixels_per_point}, oversample={oversample}, importance={importance}: expected at "
                "least 1, at least 1, and 0 to 1."
            )
        self.pixels_per_point = pixels_per_point
        self.oversample = oversample
        self.importance = importance

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: those of `SetCriterion`; for all layers and training_outputs also mask_embed (B, Q, C) and
                mask_features (B, C, h, w), whose product is the masks; input_size (height, width) that these cover.
            targets: B targets with labels in 0..C-1, boxes and masks (N, H, W) bool of the unpadded images.
        Returns:
            Weighted scalars whose sum is the loss: `labels l1 giou mask dice` with the prefixes of `SetCriterion`.
        Raises:
            DataError: a label is out of range.
        """
        input_size, losses = outputs["input_size"], {}
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            for sets in self.match(outputs, targets, input_size=input_size):
                matched = self.collect_matched_layers(sets)
                terms = self.set_terms(sets, matched) | self._mask_terms(sets, matched, input_size)
                losses |= sets.name_losses(terms, self.weights)
        return losses

    def draw_points(self, purpose: Literal["candidates", "uniform"], num_masks: int, count: int, device) -> Tensor:
        """Draw (num_masks, count, 2) uniform in 0..1: candidates for uncertain points, or points to use as they are."""
        return torch.rand(num_masks, count, 2, device=device)

    def _mask_terms(self, sets: SetLayers, matched: MatchedLayers, input_size: tuple[int, int]) -> dict[str, Tensor]:
        """Return the mask and dice losses of all layers of all sets, (L,)."""
        _, image, query = matched.indices
        matches_per_image = [len(query) for query, _ in sets.matches[0]]
        starts = list(itertools.accumulate(sets.counts, initial=0))
        sums = []
        for masks, target in zip(
            compute_matched_masks(sets.layers, image[0], query, matches_per_image), matched.target
        ):
            if not len(masks):
                sums.append(masks.new_zeros(2) + masks.sum())
                continue
            points = self._choose_points(masks.detach())
            per_image = zip(sets.targets, points.split(matches_per_image), target.split(matches_per_image), starts)
            labels = torch.cat(
                [sample_nearest_masks(p, t["masks"][j - start], input_size) for t, p, j, start in per_image]
            )
            logits = sample_points(masks[:, None], points, padding_mode="border")[:, 0]
            cross_entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
            sums.append(torch.stack((cross_entropy.sum(), dice_loss(logits, labels).sum())))
        mask, dice = (torch.stack(sums) / (sets.repeats * matched.num_targets)).unbind(1)
        return {"mask": mask, "dice": dice}

    def _choose_points(self, masks: Tensor) -> Tensor:
        """Choose the points (M, P, 2) in 0..1 at which masks (M, h, w) are compared."""
        height, width = masks.shape[-2:]
        count = max(height, height * width // self.pixels_per_point)
        num_uncertain = int(self.importance * count)
        candidates = self.draw_points("candidates", len(masks), int(self.oversample * count), masks.device)
        logits = sample_points(masks[:, None], candidates, padding_mode="border")[:, 0]
        uncertain = choose_uncertain_points(candidates, logits, num_uncertain)
        uniform = self.draw_points("uniform", len(masks), count - num_uncertain, masks.device)
        return torch.cat((uncertain, uniform), dim=1)
