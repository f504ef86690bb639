"""Losses of the masks of a detector's queries, beside those of its classes and boxes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.whole_mask_losses import dice_loss
from vitkit.losses.mask_criterion import compute_matched_masks
from vitkit.losses.matched import MatchedLayers, SetLayers, mean_of_batches, normalizers
from vitkit.losses.set_criterion import SetCriterion
from vitkit.ops.boxes import cxcywh_to_xyxy
from vitkit.ops.masks import choose_uncertain_points, pixels_inside, resize_target_masks, sample_masks, sample_points
from vitkit.registry import Spec
from vitkit.structures import DetectionTarget


class InstanceMaskLosses(SetCriterion):
    """Adds binary cross entropy and dice of the matched masks, for every decoder layer that predicts masks.

    They are for the matches of their own layer, and only masks of matched queries are computed. Objects without a mask
    (`has_masks` of a target), and images without `masks`, are trained by their boxes alone.

    - "points": at points, most of them where the predicted mask is uncertain (RF-DETR, ECSeg); divided by the number
      of targets with masks.
    - "boxes": of the pixels in the target's box, at the predicted masks' size; means over the matched pairs
      (D-FINE-seg, https://arxiv.org/abs/2602.23043).

    A subclass derives from it, and from another criterion of classes and boxes than `SetCriterion` if it has one.

    Args:
        mask_loss: which of the two.
        pixels_per_point: number of a mask's predicted pixels for each point; there are at least as many points as rows.
        oversample: number of candidates drawn per point, from which the uncertain ones are chosen.
        importance: fraction of uncertain points; the others are uniform.
        point_padding: what a predicted mask is beyond its outermost pixels' centers: "border": as these (RF-DETR), or
            "zeros" (ECSeg).
        options: see the criterion of classes and boxes.
    Raises:
        ConfigError: an argument is unknown or out of range; and see the criterion of classes and boxes.
    """

    mask_terms = ()

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        mask_loss: Literal["points", "boxes"] = "points",
        pixels_per_point: int = 16,
        oversample: float = 3.0,
        importance: float = 0.75,
        point_padding: Literal["border", "zeros"] = "border",
        **options: Any,
    ):
        super().__init__(matcher, weights, **options)
        if mask_loss not in ("points", "boxes") or point_padding not in ("border", "zeros"):
            raise ConfigError(
                f"mask_loss={mask_loss!r}, point_padding={point_padding!r}: expected 'points' or 'boxes', and 'border' "
                "or 'zeros'."
            )
        if not (0 <= importance <= 1 and oversample >= 1 and pixels_per_point >= 1):
            raise ConfigError(
                f"pixels_per_point={pixels_per_point}, oversample={oversample}, importance={importance}: expected at "
                "least 1, at least 1, and 0 to 1."
            )
        self.mask_loss = mask_loss
        self.pixels_per_point = pixels_per_point
        self.oversample = oversample
        self.importance = importance
        self.point_padding = point_padding

    def count(self, targets: Sequence[DetectionTarget]) -> tuple[float, ...]:
        """Return the number of objects, of those with a mask, and what `MatchedCriterion` divides class losses by."""
        counts = super().count(targets)
        number, *_, of_classes = counts if isinstance(counts, tuple) else (counts, counts)
        return number, _num_masks(targets), of_classes

    def match(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget], **settings: Any) -> list[SetLayers]:
        """See `MatchedCriterion`."""
        return super().match(outputs, [with_masks(target) for target in targets], **settings)

    def matching_inputs(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size that masks cover, for a matcher with costs of masks."""
        return {"input_size": outputs["input_size"]} if self.matcher.compares_masks else {}

    def further_losses(self, sets: SetLayers, matched: MatchedLayers, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the weighted mask and dice losses of the layers that predict masks."""
        rows = [i for i, layer in enumerate(sets.layers) if "mask_embed" in layer]
        if not rows:
            return {}
        names = [prefix for prefix, layer in zip(sets.prefixes, sets.layers) if "mask_embed" in layer]
        with_masks = replace(sets, prefixes=names, layers=[sets.layers[i] for i in rows])
        image, query = matched.indices[1][0], matched.indices[2][rows]
        matches_per_image = [len(query) for query, _ in sets.matches[0]]
        masks = compute_matched_masks(with_masks.layers, image, query, matches_per_image)
        starts = list(itertools.accumulate(sets.counts, initial=0))
        sums, num_pairs = [], masks[0].new_zeros(())
        for logits, target in zip(masks, matched.target[rows]):
            if not len(logits):
                sums.append(logits.new_zeros(2) + logits.sum())
                continue
            indices = [j - start for j, start in zip(target.split(matches_per_image), starts)]
            compare = self._at_points if self.mask_loss == "points" else self._in_boxes
            losses = compare(logits, sets.targets, indices, outputs["input_size"])
            known = torch.cat([known_masks(t)[j] for t, j in zip(sets.targets, indices)])
            sums.append(losses.where(known, 0).sum(1))
            num_pairs = known.sum().to(logits.dtype)
        normalizer = self._mask_normalizer(sets, num_pairs)
        mask, dice = (torch.stack(sums) / normalizer).unbind(1)
        return with_masks.name_losses({"mask": mask, "dice": dice}, self.weights)

    def _mask_normalizer(self, sets: SetLayers, num_pairs: Tensor) -> Tensor:
        share = self.step_share[1] if self.training and self.step_share is not None else None
        if self.mask_loss == "boxes":
            return (mean_of_batches(self, num_pairs) if share is None else share * num_pairs).clamp(min=1)
        num_masks = _num_masks(sets.targets)
        number = normalizers(self, 0, num_masks, num_pairs.device)[1] if share is None else share * max(num_masks, 1)
        return sets.repeats * number

    def draw_points(self, purpose: Literal["candidates", "uniform"], num_masks: int, count: int, device) -> Tensor:
        """Draw (num_masks, count, 2) uniform in 0..1: candidates for uncertain points, or points to use as they are."""
        return torch.rand(num_masks, count, 2, device=device)

    def _at_points(
        self, masks: Tensor, targets: Sequence[DetectionTarget], indices: Sequence[Tensor], input_size: tuple[int, int]
    ) -> Tensor:
        """Return the losses of each pair of a predicted mask (h, w) and a target, (2, M).

        Args:
            masks: (M, h, w) logits.
            indices: for each image, which of its targets its masks are matched with.
            input_size: (height, width) that the masks cover.
        """
        points = self._choose_points(masks.detach())
        per_image = zip(points.split([len(j) for j in indices]), targets, indices)
        labels = torch.cat([sample_masks(p, t["masks"], input_size, index=j, mode="nearest") for p, t, j in per_image])
        logits = sample_points(masks[:, None], points, padding_mode=self.point_padding)[:, 0]
        cross_entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        return torch.stack((cross_entropy, dice_loss(logits, labels)))

    def _choose_points(self, masks: Tensor) -> Tensor:
        """Choose the points (M, P, 2) in 0..1 at which masks (M, h, w) are compared."""
        height, width = masks.shape[-2:]
        count = max(height, height * width // self.pixels_per_point)
        num_uncertain = int(self.importance * count)
        candidates = self.draw_points("candidates", len(masks), int(self.oversample * count), masks.device)
        logits = sample_points(masks[:, None], candidates, padding_mode=self.point_padding)[:, 0]
        uncertain = choose_uncertain_points(candidates, logits, num_uncertain)
        uniform = self.draw_points("uniform", len(masks), count - num_uncertain, masks.device)
        return torch.cat((uncertain, uniform), dim=1)

    def _in_boxes(
        self, masks: Tensor, targets: Sequence[DetectionTarget], indices: Sequence[Tensor], input_size: tuple[int, int]
    ) -> Tensor:
        """Return the losses of each pair in the target's box, (2, M); arguments as in `_at_points`."""
        size = masks.shape[-2:]
        labels, boxes = [], []
        for target, j in zip(targets, indices):
            height, width = target["masks"].shape[-2:]
            labels.append(resize_target_masks(target["masks"][j], input_size, size))
            sides = masks.new_tensor([width / input_size[1] * size[1], height / input_size[0] * size[0]])
            boxes.append(cxcywh_to_xyxy(target["boxes_cxcywh"][j].float()) * sides.repeat(2))
        left_top, right_bottom = torch.cat(boxes).split(2, dim=1)
        last = masks.new_tensor([size[1] - 1, size[0] - 1])
        left_top, right_bottom = left_top.clamp(min=0).minimum(last), right_bottom.clamp(min=1).minimum(last + 1)
        inside = pixels_inside(torch.cat((left_top, right_bottom), dim=1), size)
        area = (right_bottom - left_top).prod(1).clamp(min=1)
        target_masks = torch.cat(labels)
        losses = F.binary_cross_entropy_with_logits(masks, target_masks, reduction="none")
        predicted, true = masks.sigmoid().where(inside, 0), target_masks.where(inside, 0)
        shared, total = (predicted * true).sum((1, 2)), predicted.sum((1, 2)) + true.sum((1, 2))
        return torch.stack((losses.where(inside, 0).sum((1, 2)) / area, 1 - (2 * shared + 1e-6) / (total + 1e-6)))


def with_masks(target: DetectionTarget) -> DetectionTarget:
    """Return a target with masks: empty ones that do not count, if the image has boxes alone."""
    if "masks" in target:
        return target
    empty = torch.zeros_like(target["labels"], dtype=torch.bool)
    return {**target, "masks": empty[:, None, None].expand(-1, *target["image_size"]), "has_masks": empty}


def _num_masks(targets: Sequence[DetectionTarget]) -> int:
    return sum(int(known_masks(t).sum()) if "has_masks" in t else len(t["labels"]) for t in targets)


def known_masks(target: DetectionTarget) -> Tensor:
    """Return which objects have a mask, (N,) bool: all, unless the target says otherwise."""
    return target.get("has_masks", target["labels"] >= 0)
