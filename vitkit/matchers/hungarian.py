"""The optimal one-to-one assignment of queries to targets (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from vitkit.errors import DataError, TrainingError
from vitkit.ops.boxes import l1_and_giou
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget

Matches = list[list[tuple[Tensor, Tensor]]]
"""Per layer, per image: (query indices ascending, target indices), int64 on the CPU, `min(Q, N)` of each."""


@MATCHERS.register
class HungarianMatcher(nn.Module):
    """Assigns each target the query that makes the total cost of its image least.

    The cost of a pair is `cost_class * class + cost_l1 * |box - target|_1 - cost_giou * GIoU`, with the L1 distance
    taken between relative cxcywh boxes.

    Args:
        class_cost: what `class` is: "softmax", minus the label's probability, where the last logit is "no object"; or
            "focal", what the focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002) with alpha 0.25 and gamma 2
            would change by if the label were true, where each logit is a class.
    """

    def __init__(
        self,
        cost_class: float,
        cost_l1: float,
        cost_giou: float,
        *,
        class_cost: Literal["softmax", "focal"] = "softmax",
    ):
        super().__init__()
        self.weights = {"class": cost_class, "l1": cost_l1, "giou": -cost_giou}
        self.class_cost = class_cost

    @torch.no_grad()
    def forward(self, pred_logits: Tensor, pred_boxes: Tensor, targets: Sequence[DetectionTarget]) -> Matches:
        """
        Args:
            pred_logits: of L decoder layers, (L, B, Q, C + 1) for "softmax", (L, B, Q, C) for "focal".
            pred_boxes: (L, B, Q, 4) cxcywh in 0..1.
            targets: B targets, of any number of objects (none, or more than queries).
        Raises:
            TrainingError: a cost is not finite; layer, image and term are named.
            DataError: a label is not in 0..C-1.
        """
        device = pred_logits.device
        num_classes = pred_logits.shape[-1] - (self.class_cost == "softmax")
        counts = [len(target["labels"]) for target in targets]
        image = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device, non_blocking=True)
        labels = torch.cat([target["labels"] for target in targets])
        target_boxes = torch.cat([target["boxes_cxcywh"] for target in targets])
        # A label out of range has no cost. NaN lets the check below find it, without a transfer of its own.
        some_label = labels.clamp(0, num_classes - 1)
        target_boxes = target_boxes.where((labels == some_label)[:, None], torch.nan)

        class_costs = CLASS_COSTS[self.class_cost](pred_logits.float(), image, some_label)
        terms = {"class": class_costs, **_box_terms(pred_boxes.float(), image, target_boxes.float())}
        cost = terms["class"] * self.weights["class"]
        for name in ("l1", "giou"):
            cost.add_(terms[name], alpha=self.weights[name])

        cost = cost.cpu()  # the step's only transfer from the device
        finite = cost.sum().isfinite() or cost.isfinite().all()  # a sum, which takes less time, may overflow
        # scipy computes in float64, so all costs are converted at once.
        cost = cost.transpose(0, 1).to(torch.float64, memory_format=torch.contiguous_format).numpy()  # (L, T, Q)
        if not finite:
            _raise_non_finite(cost, terms, targets, num_classes=num_classes)
        ends = np.cumsum(counts)
        return [[assign(layer[end - count : end]) for count, end in zip(counts, ends)] for layer in cost]


def softmax_cost(pred_logits: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    """(T, L, Q) of T targets; `image` (T,) is the index in the batch of each target's image."""
    # Layer by layer into the same memory, so that the probabilities of all classes stay in the processor's cache.
    probabilities = torch.empty_like(pred_logits[0])
    picked = [torch.softmax(layer, -1, out=probabilities)[image, :, labels] for layer in pred_logits]
    return torch.stack(picked, dim=1).neg_()


def focal_cost(pred_logits: Tensor, image: Tensor, labels: Tensor, *, alpha: float = 0.25, gamma: float = 2) -> Tensor:
    """As `softmax_cost`."""
    logits = pred_logits[:, image, :, labels]  # (T, L, Q): two lists of indices with a slice between them come first
    p = logits.sigmoid()
    return alpha * (1 - p) ** gamma * -(p + 1e-8).log() - (1 - alpha) * p**gamma * -(1 - p + 1e-8).log()


CLASS_COSTS = {"softmax": softmax_cost, "focal": focal_cost}


def _box_terms(pred_boxes: Tensor, image: Tensor, target_boxes: Tensor) -> dict[str, Tensor]:
    """The L1 distance and the GIoU, each (T, L, Q): T targets of all images against the queries of their own image."""
    # With coordinates as whole planes, picking a target's image copies long rows and all else reads contiguous numbers.
    planes = pred_boxes.permute(3, 1, 0, 2).contiguous()
    queries = [plane.index_select(0, image) for plane in planes]  # copies, so they may be overwritten
    l1, giou = l1_and_giou(queries, target_boxes.T[:, :, None, None].unbind(), overwrite_a=True)
    return {"l1": l1, "giou": giou}


def _raise_non_finite(
    cost: np.ndarray, terms: dict[str, Tensor], targets: Sequence[DetectionTarget], *, num_classes: int
) -> None:
    layer, row, query = np.argwhere(~np.isfinite(cost))[0].tolist()
    owners = [(i, j) for i, target in enumerate(targets) for j in range(len(target["labels"]))]
    image, index = owners[row]
    where = f"image {image} of the batch"
    if "image_id" in targets[image]:
        where += f" (image_id {targets[image]['image_id']})"
    label = int(targets[image]["labels"][index])
    if not 0 <= label < num_classes:
        raise DataError(
            f"matching: {where}, target {index} has label {label}; expected 0..{num_classes - 1}. "
            f"Is the model's num_classes that of the dataset?"
        )
    values = {name: float(term[row, layer, query]) for name, term in terms.items()}
    bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not np.isfinite(value))
    raise TrainingError(
        f"matching: non-finite cost in layer {layer}, {where}, query {query}, target {index}: "
        f"{bad or 'only the weighted sum'}; the target's box is {targets[image]['boxes_cxcywh'][index].tolist()}. "
        f"Expected finite costs: lower the learning rate, clip gradients, or leave fp16 if the predictions diverged."
    )


def assign(cost: np.ndarray) -> tuple[Tensor, Tensor]:
    """(N, Q) costs -> (query indices ascending, target indices)."""
    target, query = linear_sum_assignment(cost)
    order = query.argsort()
    return torch.from_numpy(query[order]), torch.from_numpy(target[order])
