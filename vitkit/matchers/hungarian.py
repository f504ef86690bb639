"""The optimal one-to-one assignment of queries to targets (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from vitkit.errors import DataError
from vitkit.ops.boxes import cxcywh_to_xyxy, generalized_box_iou
from vitkit.registry import MATCHERS
from vitkit.structures import DetectionTarget, Matches, describe_image

logger = logging.getLogger("vitkit")


@MATCHERS.register
class HungarianMatcher(nn.Module):
    """Assigns queries to the targets of each image so that the total cost is minimal.

    The cost of a pair is `cost_class * class + cost_l1 * |box - target|_1 - cost_giou * GIoU`, with the L1 distance
    computed between relative cxcywh boxes. An image's queries are only compared with its own targets.

    Args:
        class_cost: the definition of `class`: "softmax": minus the label's probability, for logits whose last class is
            "no object"; "focal": the change of the focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002) with
            alpha 0.25 and gamma 2 if the label were positive rather than negative, for one sigmoid logit per class.
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

    def forward(self, pred_logits: Tensor, pred_boxes: Tensor, targets: Sequence[DetectionTarget]) -> Matches:
        """Match every decoder layer separately.

        Args:
            pred_logits: logits of L decoder layers, (L, B, Q, C + 1) for "softmax", (L, B, Q, C) for "focal".
            pred_boxes: (L, B, Q, 4) cxcywh in 0..1.
            targets: B targets with any number of objects (none, or more than queries).
        Raises:
            DataError: a label is not in 0..C-1.
        """
        return self.match_all([(pred_logits, pred_boxes, targets)])[0]

    @torch.no_grad()
    def match_all(self, cases: Sequence[tuple[Tensor, Tensor, Sequence[DetectionTarget]]]) -> list[Matches]:
        """Match several sets of layers, each with the arguments of `forward`, in a single transfer from the device."""
        costs = [self._costs(*case) for case in cases]
        # The step's only transfer from the device; scipy computes in float64.
        flat = torch.cat([cost.flatten() for cost, _ in costs]).cpu().double().split([c.numel() for c, _ in costs])
        matches = []
        for (logits, _, targets), (cost, terms), values in zip(cases, costs, flat):
            cost = values.view(cost.shape).numpy()
            if not np.isfinite(cost).all():
                num_classes = logits.shape[-1] - (self.class_cost == "softmax")
                _report_non_finite(cost, terms, targets, num_classes=num_classes)
            splits = np.cumsum([len(target["labels"]) for target in targets])[:-1]
            matches.append([[assign(image_cost) for image_cost in np.split(layer, splits)] for layer in cost])
        return matches

    def _costs(
        self, pred_logits: Tensor, pred_boxes: Tensor, targets: Sequence[DetectionTarget]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cost of each target with each query of its image, and its unweighted terms, all (L, T, Q)."""
        device = pred_logits.device
        counts = [len(target["labels"]) for target in targets]
        labels = torch.cat([target["labels"] for target in targets])  # (T,) of all images
        target_boxes = torch.cat([target["boxes_cxcywh"] for target in targets]).float()  # (T, 4)
        image = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device, non_blocking=True)  # (T,)
        num_classes = pred_logits.shape[-1] - (self.class_cost == "softmax")
        is_class = (labels >= 0) & (labels < num_classes)

        class_costs = CLASS_COSTS[self.class_cost](pred_logits.float(), image, labels.where(is_class, 0))
        boxes = pred_boxes.float()[:, image]  # (L, T, Q, 4), the queries of each target's image
        terms = {  # each (L, T, Q)
            "class": class_costs,
            "l1": (boxes - target_boxes[:, None]).abs().sum(-1),
            "giou": generalized_box_iou(cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(target_boxes)[:, None]),
        }
        cost = sum(self.weights[name] * term for name, term in terms.items())
        # The check below recognises an invalid label by its NaN, without another transfer.
        return cost.masked_fill(~is_class[:, None], torch.nan), terms


def softmax_cost(pred_logits: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    """Return the negative probability of each target's label.

    Args:
        pred_logits: (L, B, Q, C + 1).
        image: (T,) index in the batch of each target's image.
        labels: (T,).
    Returns:
        (L, T, Q).
    """
    return -_logits_of_labels(pred_logits.softmax(-1), image, labels)


def focal_cost(pred_logits: Tensor, image: Tensor, labels: Tensor, *, alpha: float = 0.25, gamma: float = 2) -> Tensor:
    """Return the change of the focal loss if the label were positive; shapes as in `softmax_cost`, with C logits."""
    p = _logits_of_labels(pred_logits, image, labels).sigmoid()
    return alpha * (1 - p) ** gamma * -(p + 1e-8).log() - (1 - alpha) * p**gamma * -(1 - p + 1e-8).log()


def _logits_of_labels(logits: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    # Two index tensors with a slice between them put their dimension first: (T, L, Q).
    return logits[:, image, :, labels].transpose(0, 1)


CLASS_COSTS = {"softmax": softmax_cost, "focal": focal_cost}


def _report_non_finite(
    cost: np.ndarray, terms: dict[str, Tensor], targets: Sequence[DetectionTarget], *, num_classes: int
) -> None:
    """Report the first non-finite cost of (L, T, Q): an error for a label out of range, else a warning.

    The loss of diverged predictions is not finite either, and the training loop decides whether to take the step.
    """
    layer, row, query = np.argwhere(~np.isfinite(cost))[0].tolist()
    image, index = [(i, j) for i, target in enumerate(targets) for j in range(len(target["labels"]))][row]
    target = targets[image]
    where = describe_image(image, target)
    label = int(target["labels"][index])
    if not 0 <= label < num_classes:
        raise DataError(
            f"matching: {where}, target {index} has label {label}; expected 0..{num_classes - 1}. "
            f"Is the model's num_classes that of the dataset?"
        )
    values = {name: float(term[layer, row, query]) for name, term in terms.items()}
    bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not np.isfinite(value))
    logger.warning(
        f"matching: non-finite cost in layer {layer}, {where}, query {query}, target {index}: "
        f"{bad or 'only the weighted sum'}; the target's box is {target['boxes_cxcywh'][index].tolist()}. "
        f"Expected finite costs: lower the learning rate, clip gradients, or leave fp16 if the predictions diverged."
    )


def assign(cost: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return (query indices ascending, target indices) of the cheapest assignment of (N, Q) costs.

    Pairs whose cost is not finite are matched last.
    """
    target, query = linear_sum_assignment(np.nan_to_num(cost, nan=1e30, posinf=1e30, neginf=1e30))
    order = query.argsort()
    return torch.from_numpy(query[order]), torch.from_numpy(target[order])
