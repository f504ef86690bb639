"""The optimal assignment of queries to target masks (Cheng et al. 2021, https://arxiv.org/abs/2107.06278)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError, TrainingError
from vitkit.matchers.hungarian import Matches, assign
from vitkit.ops.masks import pad_masks, points_in_part, sample_points
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget


@MATCHERS.register
class HungarianMaskMatcher(nn.Module):
    """Assigns each target the query that makes the total cost of its image least.

    The cost of a pair is `-cost_class * p(label) + cost_mask * mask + cost_dice * dice`.

    Args:
        mask_cost: what `mask` is: "points", the mean cross entropy at random points that all pairs of an image share
            (Mask2Former); or "focal", the mean focal loss over whole masks at the predictions' size (MaskFormer).
            The dice term is taken at the same places.
        num_points: of "points".
    Raises:
        ConfigError: `mask_cost` is another, or there are no points.
    """

    def __init__(
        self,
        cost_class: float,
        cost_mask: float,
        cost_dice: float,
        *,
        mask_cost: Literal["points", "focal"] = "points",
        num_points: int = 12544,
    ):
        super().__init__()
        if mask_cost not in ("points", "focal"):
            raise ConfigError(f"criterion.matcher.mask_cost: got {mask_cost!r}; expected 'points' or 'focal'.")
        if num_points < 1:
            raise ConfigError(f"criterion.matcher.num_points: got {num_points}; expected at least 1.")
        self.weights = {"class": cost_class, "mask": cost_mask, "dice": cost_dice}
        self.mask_cost = mask_cost
        self.num_points = num_points

    @torch.no_grad()
    def forward(
        self, layers: Sequence[Mapping[str, Any]], targets: Sequence[DetectionTarget], *, input_size: tuple[int, int]
    ) -> Matches:
        """
        Args:
            layers: of each decoder layer pred_logits (B, Q, C + 1), the last class being "no object", and masks as
                `MaskPredictions` has them.
            targets: B targets with labels in 0..C-1 and masks (N, H, W) bool; none, or more than queries, will do.
            input_size: (height, width) that the images were padded to, which the predicted masks cover.
        Raises:
            TrainingError: a cost is not finite; layer, image and term are named.
            DataError: a label is not in 0..C-1.
        """
        device = layers[0]["pred_logits"].device
        terms = []
        with torch.autocast(device.type, enabled=False):
            for image, target in enumerate(targets):
                self._check_labels(layers[0], image, target)
                if len(target["labels"]):
                    terms += [self._terms(i, layer, image, target, input_size) for i, layer in enumerate(layers)]
            costs = [sum(self.weights[name] * term for name, term in own.items()) for own in terms]
        # The only transfers from the device, when all costs are under way.
        costs = [cost.cpu().double().numpy() for cost in costs]
        matches: Matches = [[] for _ in layers]
        for image, target in enumerate(targets):
            for i in range(len(layers)):
                if not len(target["labels"]):
                    matches[i].append((torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)))
                    continue
                cost, own = costs.pop(0), terms.pop(0)
                if not np.isfinite(cost).all():
                    bad = ", ".join(name for name, term in own.items() if not term.isfinite().all())
                    raise TrainingError(
                        f"matching: non-finite cost in layer {i}, image {image} of the batch{_image_id(target)}: "
                        f"{bad or 'only the weighted sum'}. Expected finite costs: lower the learning rate, clip "
                        "gradients, or leave fp16 if the predictions diverged."
                    )
                matches[i].append(assign(cost))
        return matches

    def draw_points(self, layer: int, image: int, device: torch.device) -> Tensor:
        """(num_points, 2) uniform in 0..1."""
        return torch.rand(self.num_points, 2, device=device)

    def _check_labels(self, layer: Mapping[str, Any], image: int, target: DetectionTarget) -> None:
        num_classes = layer["pred_logits"].shape[-1] - 1
        labels = target["labels"]
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise DataError(
                f"matching: image {image} of the batch{_image_id(target)} has labels {labels.unique().tolist()}; "
                f"expected 0..{num_classes - 1}. Is the model's num_classes that of the dataset?"
            )

    def _terms(
        self, index: int, layer: Mapping[str, Any], image: int, target: DetectionTarget, input_size: tuple[int, int]
    ) -> dict[str, Tensor]:
        """class, mask and dice, each (N, Q), unweighted."""
        probabilities = layer["pred_logits"][image].float().softmax(-1)
        masks = target["masks"].float()
        if self.mask_cost == "points":
            points = self.draw_points(index, image, masks.device)[None]
            logits = sample_predicted(layer, image, points)
            wanted = sample_points(masks[None], points_in_part(points, input_size, masks.shape[-2:]))[0]
            cost_mask = cross_entropy_of_pairs(logits, wanted)
        else:
            logits = layer["pred_masks"][image].float()
            wanted = F.interpolate(pad_masks(masks, input_size)[None], size=logits.shape[-2:], mode="nearest")[0]
            logits, wanted = logits.flatten(1), wanted.flatten(1)
            cost_mask = focal_of_pairs(logits, wanted)
        cost_class = -probabilities[:, target["labels"]].T
        return {"class": cost_class, "mask": cost_mask, "dice": dice_of_pairs(logits, wanted)}


def sample_predicted(layer: Mapping[str, Any], image: int, points: Tensor) -> Tensor:
    """Logits of all queries' masks of one image at shared points.

    Args:
        points: (1, P, 2).
    Returns:
        (Q, P) float32.
    """
    if "mask_embed" in layer:  # the product commutes with sampling, and has fewer places at points
        features = sample_points(layer["mask_features"][image : image + 1].float(), points)[0]
        return layer["mask_embed"][image].float() @ features
    return sample_points(layer["pred_masks"][image : image + 1].float(), points)[0]


def cross_entropy_of_pairs(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean binary cross entropy of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q)."""
    return (F.softplus(logits).sum(1) - wanted @ logits.T) / logits.shape[1]


def focal_of_pairs(logits: Tensor, wanted: Tensor, *, alpha: float = 0.25, gamma: float = 2) -> Tensor:
    """Mean focal loss of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q)."""
    p = logits.sigmoid()
    positive = alpha * (1 - p) ** gamma * F.softplus(-logits)
    negative = (1 - alpha) * p**gamma * F.softplus(logits)
    return (negative.sum(1) + wanted @ (positive - negative).T) / logits.shape[1]


def dice_of_pairs(logits: Tensor, wanted: Tensor) -> Tensor:
    """Dice loss of each target with each query; (Q, P) and (N, P) in 0..1 -> (N, Q)."""
    p = logits.sigmoid()
    return 1 - (2 * wanted @ p.T + 1) / (wanted.sum(1)[:, None] + p.sum(1) + 1)


def _image_id(target: DetectionTarget) -> str:
    return f" (image_id {target['image_id']})" if "image_id" in target else ""
