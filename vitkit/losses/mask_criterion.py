"""The losses of MaskFormer (https://arxiv.org/abs/2107.06278) and Mask2Former (https://arxiv.org/abs/2112.01527)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.whole_mask_losses import dice_loss, whole_mask_losses
from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.matched import MatchedCriterion, SetLayers
from vitkit.ops.boxes import rows_at_once
from vitkit.ops.masks import choose_uncertain_points, pad_masks, sample_masks, sample_points
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget


@CRITERIA.register
class MaskCriterion(MatchedCriterion):
    """Cross entropy of every query, and mask and dice losses of the matched ones, for every decoder layer.

    A subclass adds terms to `terms` and `mask_losses`.

    Args:
        matcher: a spec of the matcher (see `HungarianMaskMatcher`), or the matcher.
        weights: the weight of each of `terms`.
        no_object_weight: the weight of unmatched queries in the cross entropy; matched ones have 1.
        mask_loss: "points": binary cross entropy and dice at points, most of them where the prediction is uncertain
            (Mask2Former); "focal": focal loss and dice over full masks at the targets' size (MaskFormer).
        num_points: number of points per mask, for "points".
        oversample: number of candidates drawn per point, from which the uncertain ones are chosen.
        importance: fraction of uncertain points; the others are uniform.
        class_weights: how much a query that is matched with each class weighs in the cross entropy, see `ClassWeights`;
            None: 1.
    Raises:
        ConfigError: a term or `mask_loss` is unknown, a term is missing, or a number is out of range.
    """

    terms = ("labels", "mask", "dice")
    needs_outputs = ("pred_logits", "input_size")
    needs_targets = ("labels", "masks")

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        no_object_weight: float,
        mask_loss: Literal["points", "focal"] = "points",
        num_points: int = 12544,
        oversample: float = 3.0,
        importance: float = 0.75,
        class_weights: ClassWeights | None = None,
    ):
        self.check_arguments(weights)
        super().__init__(matcher, weights, no_object_weight, class_weights)
        if not no_object_weight > 0:
            raise ConfigError(f"no_object_weight={no_object_weight}: expected a positive number.")
        if not (0 <= importance <= 1 and oversample >= 1 and num_points >= 1):
            raise ConfigError(
                f"num_points={num_points}, oversample={oversample}, importance={importance}: expected at least 1, at "
                "least 1, and 0 to 1."
            )
        if mask_loss not in ("points", "focal"):
            raise ConfigError(f"mask_loss={mask_loss!r}: expected 'points' or 'focal'.")
        self.mask_loss = mask_loss
        self.num_points = num_points
        self.oversample = oversample
        self.importance = importance

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: pred_logits (B, Q, C + 1), the last class being "no object"; masks in the form that
                `compute_matched_masks` takes; input_size (height, width) that the images were padded to, which the
                masks cover; optionally aux_outputs, a list of such dicts for the earlier layers, and training_outputs,
                a list of `QuerySet` for queries that exist only in training; and windows, (N, 3) int64, if the B rows
                are not of images but of N windows, of size `input_size`: the index of the image, and the top and left
                of the window.
            targets: B targets with labels (N,) in 0..C-1 and masks (N, H, W) bool of the unpadded images.
        Returns:
            Weighted scalars whose sum is the loss: `labels mask dice` for the last layer, `aux0_labels ...` for the
            others; for training_outputs with a name `NAME_labels ... NAME_aux0_labels ...`. Queries with the same name
            have one loss, the average. The keys are the same for any targets, and each term depends on the outputs even
            when it is zero.
        Raises:
            DataError: a label is out of range.
        """
        input_size = outputs["input_size"]
        if "windows" in outputs:
            targets = crop_targets_to_windows(targets, outputs["windows"], input_size)
        losses = {}
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            for sets in self.match(outputs, targets, input_size=input_size):
                losses |= self._set_losses(sets, input_size)
        return losses

    def _set_losses(self, sets: SetLayers, input_size: tuple[int, int]) -> dict[str, Tensor]:
        """Return the weighted losses of each layer, averaged over the sets."""
        matched = self.collect_matched_layers(sets)
        class_losses = self.cross_entropy(matched)
        _, image, query = matched.indices
        matches_per_image = [len(query) for query, _ in sets.matches[0]]
        masks = compute_matched_masks(sets.layers, image[0], query, matches_per_image)
        starts = list(itertools.accumulate(sets.counts, initial=0))
        layer_losses = []
        for layer, layer_target in enumerate(matched.target):
            by_image = layer_target.split(matches_per_image)
            target_masks = [(t["masks"], j - start) for t, j, start in zip(sets.targets, by_image, starts)]
            layer_losses.append(self.mask_losses(layer, masks[layer], target_masks, input_size))
        mask_normalizer = sets.repeats * matched.num_targets
        terms = {"labels": class_losses}
        for name in layer_losses[0]:
            terms[name] = torch.stack([losses[name].sum() for losses in layer_losses]) / mask_normalizer
        return sets.name_losses(terms, self.weights)

    def draw_points(
        self, purpose: Literal["candidates", "uniform"], layer: int, num_masks: int, count: int, device
    ) -> Tensor:
        """Draw (num_masks, count, 2) uniform in 0..1: candidates for uncertain points, or points to use as they are.

        A layer's masks are drawn in several calls, in their order.
        """
        return torch.rand(num_masks, count, 2, device=device)

    def mask_losses(
        self, layer: int, logits: Tensor, targets: Sequence[tuple[Tensor, Tensor]], input_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the loss of each matched mask of one layer by term, (M,); M may be 0.

        Args:
            layer: index of the layer, 0 for the last one of the main queries.
            logits: (M, h, w) of the matched queries, covering the padded input.
            targets: for each image, the masks of its targets, (N, H, W) bool, without padding, and the index of that of
                each of its matched queries, int64.
            input_size: (height, width) of the padded input.
        """
        if not len(logits):
            return dict.fromkeys(("mask", "dice"), logits.flatten(1).sum(1))
        if self.mask_loss == "focal":
            focal, dice = whole_mask_losses(logits, torch.cat([pad_masks(m[j], input_size) for m, j in targets]))
            return {"mask": focal, "dice": dice}
        points = self.choose_points(layer, logits.detach())
        by_image = zip(points.split([len(j) for _, j in targets]), targets)
        labels = torch.cat([sample_masks(p, masks, input_size, index=j) for p, (masks, j) in by_image])
        logits = sample_points(logits[:, None], points)[:, 0]
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return {"mask": losses.mean(1), "dice": dice_loss(logits, labels)}

    @property
    def num_uncertain(self) -> int:
        """Number of the most uncertain ones among the `num_points`, which come first."""
        return int(self.importance * self.num_points)

    def choose_points(self, layer: int, logits: Tensor) -> Tensor:
        """Choose the points of the "points" loss, (M, num_points, 2) in 0..1, for masks (M, h, w)."""
        num_uncertain = self.num_uncertain
        num_candidates = int(self.oversample * self.num_points)
        uncertain = []
        for part in logits.split(rows_at_once(num_candidates, logits.device)):
            candidates = self.draw_points("candidates", layer, len(part), num_candidates, logits.device)
            values = sample_points(part[:, None], candidates)[:, 0]
            uncertain.append(choose_uncertain_points(candidates, values, num_uncertain))
        uniform = self.draw_points("uniform", layer, len(logits), self.num_points - num_uncertain, logits.device)
        return torch.cat([torch.cat(uncertain), uniform], dim=1)


def crop_targets_to_windows(
    targets: Sequence[DetectionTarget], windows: Tensor, size: tuple[int, int]
) -> list[DetectionTarget]:
    """Return the labels and masks in windows of the images; masks that are empty there are removed.

    Args:
        windows: (N, 3) int64, the index of the image, and the top and left of the window.
        size: (height, width) of the windows.
    """
    cropped = []
    for image, top, left in windows.tolist():
        masks = targets[image]["masks"][:, top : top + size[0], left : left + size[1]]
        visible = masks.flatten(1).any(1)
        cropped.append({**targets[image], "labels": targets[image]["labels"][visible], "masks": masks[visible]})
    return cropped


def compute_matched_masks(
    layers: Sequence[Mapping[str, Any]], image: Tensor, query: Tensor, counts: Sequence[int]
) -> Sequence[Tensor]:
    """Return each layer's mask logits of the matched queries, (M, h, w) float32; only these are computed.

    Args:
        layers: with pred_masks (B, Q, h, w), or mask_embed (B, Q, C) and mask_features (B, C, h, w), which may be the
            same for all layers.
        image: (M,) image index of the matched queries, in ascending order.
        query: (L, M) their query index in each layer.
        counts: number of matched queries in each image.
    """
    if "mask_embed" not in layers[0]:
        return [layer["pred_masks"][image, index].float() for layer, index in zip(layers, query)]
    embeds = [layer["mask_embed"][image, index].float() for layer, index in zip(layers, query)]  # (M, C) each
    features = layers[0]["mask_features"]
    if any(layer["mask_features"] is not features for layer in layers):
        return [
            _product(embed[None], layer["mask_features"].float(), counts)[0] for embed, layer in zip(embeds, layers)
        ]
    # One product per image for all layers: separate ones would each have a gradient as large as the features.
    return _product(torch.stack(embeds), features.float(), counts).unbind()


def _product(embeds: Tensor, features: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the masks of embeddings (L, M, C), image by image `counts` of them, in maps (B, C, h, w): (L, M, h, w)."""
    masks = [
        (embed.flatten(0, 1) @ maps.flatten(1)).view(len(embeds), count, *maps.shape[1:])
        for embed, maps, count in zip(embeds.split(counts, dim=1), features.unbind(), counts)
    ]
    return torch.cat(masks, dim=1)
