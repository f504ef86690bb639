"""The optimal one-to-one assignment of queries to targets (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.matchers.base import LayersOfSet, Matcher
from vitkit.ops.boxes import box_iou, clamp_sizes, cxcywh_to_xyxy, generalized_box_iou, rows_at_once
from vitkit.registry import MATCHERS, nearest
from vitkit.structures import DetectionTarget, ImageMatches, Matches, describe_image

logger = logging.getLogger("vitkit")


class LateCosts(TypedDict, total=False):
    """The costs from an epoch on, see `HungarianMatcher`."""

    epoch: int
    power: float


@MATCHERS.register
class HungarianMatcher(Matcher):
    """Assigns queries to the targets of each image so that the total cost is minimal.

    The cost of a pair is `cost_labels * labels + cost_l1 * |box - target|_1 - cost_giou * GIoU`, with the L1 distance
    computed between relative cxcywh boxes. An image's queries are only compared with its own targets.

    Args:
        activation: the kind of class logits, which defines `labels`. "softmax", with "no object" as the last class:
            minus the label's probability. "sigmoid", a logit per class: the change of the focal loss (Lin et al. 2017,
            https://arxiv.org/abs/1708.02002) with alpha 0.25 and gamma 2 if the label were positive rather than
            negative.
        late: from the epoch late["epoch"] on, counted from 0, the cost is minus the label's probability times the power
            late["power"] (default 4) of the IoU (DEIMv2, Huang et al. 2025, https://arxiv.org/abs/2509.20787); None:
            never. A target that no query overlaps is then matched with any.
    Raises:
        ConfigError: `activation` is unknown, or a value of `late` is missing or out of range.
    """

    def __init__(
        self,
        cost_labels: float,
        cost_l1: float,
        cost_giou: float,
        *,
        activation: Literal["softmax", "sigmoid"] = "softmax",
        late: LateCosts | None = None,
    ):
        super().__init__()
        if late is not None:
            _check_late(late)
        if activation not in LABEL_COSTS:
            raise ConfigError(f"activation={activation!r}: expected 'softmax' or 'sigmoid'.")
        self.weights = {"labels": cost_labels, "l1": cost_l1, "giou": -cost_giou}
        self.activation = activation
        self.late = None if late is None else LateCosts(epoch=late["epoch"], power=late.get("power", 4.0))
        self.changes_at = None if late is None else late["epoch"]

    @torch.no_grad()
    def forward(self, layers_and_targets: Sequence[LayersOfSet]) -> list[Matches]:
        """Match every decoder layer of every set separately, with a single transfer from the device.

        Args:
            layers_and_targets: a pair for each set. Layers have pred_logits (B, Q, C + 1) for "softmax" or (B, Q, C)
                for "sigmoid", and pred_boxes (B, Q, 4) cxcywh in 0..1. The B targets have any number of objects (none,
                or more than queries).
        Returns:
            the matches of each set.
        Raises:
            DataError: a label is not in 0..C-1.
        """
        costs = [self.costs_in_parts(*pair) for pair in layers_and_targets]
        return self.assign_all(layers_and_targets, costs, lambda *pair: self.costs(*pair)[1])

    def costs_in_parts(self, layers: Sequence[Mapping[str, Tensor]], targets: Sequence[DetectionTarget]) -> Tensor:
        """Return the cost of `costs`, computed for a few layers at a time: a crowd's terms are large."""
        pairs = sum(len(target["labels"]) for target in targets) * layers[0]["pred_logits"].shape[1]
        step = rows_at_once(pairs, layers[0]["pred_logits"].device)
        return torch.cat([self.costs(layers[i : i + step], targets)[0] for i in range(0, len(layers), step)])

    def assign_all(
        self,
        layers_and_targets: Sequence[LayersOfSet],
        costs: Sequence[Tensor],
        terms_of: Callable[[Sequence[Mapping[str, Tensor]], Sequence[DetectionTarget]], Mapping[str, Tensor]],
    ) -> list[Matches]:
        """Return the matches of each set with the lowest total cost, see `costs`.

        Args:
            layers_and_targets: see `forward`.
            costs: (L, T, Q) of each set.
            terms_of: returns the unweighted terms of layers, for a message if a cost is not finite.
        """
        # The step's only transfer from the device.
        flat = torch.cat([cost.flatten() for cost in costs]).cpu().split([cost.numel() for cost in costs])
        matches = []
        for (layers, targets), shaped, values in zip(layers_and_targets, costs, flat):
            cost = values.view(shaped.shape).numpy()
            if not np.isfinite(cost).all():
                self._report_non_finite(cost, terms_of, layers, targets)
            splits = np.cumsum([len(target["labels"]) for target in targets])[:-1]
            matches.append([[assign(image_cost) for image_cost in np.split(layer, splits)] for layer in cost])
        return matches

    def costs(
        self, layers: Sequence[Mapping[str, Tensor]], targets: Sequence[DetectionTarget]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cost of each target with each query of its image, and its unweighted terms, all (L, T, Q)."""
        boxes = torch.stack([layer["pred_boxes"] for layer in layers]).float()
        counts = [len(target["labels"]) for target in targets]
        target_boxes = torch.cat([target["boxes_cxcywh"] for target in targets]).float()  # (T, 4) of all images
        image = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(boxes.device, non_blocking=True)  # (T,)
        # Opposite edges may have crossed, if a head predicts a box by its edges.
        boxes_xyxy, targets_xyxy = cxcywh_to_xyxy(clamp_sizes(boxes)), cxcywh_to_xyxy(target_boxes)[:, None]
        # Each term is (L, T, Q); `image` takes the queries of each target's image, (L, T, Q, 4).
        if self.late is not None and self.epoch >= self.late["epoch"]:
            logits, labels, is_class = self._logits_and_labels(layers, targets)
            probabilities = logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(-1)
            terms = {
                "labels": _logits_of_labels(probabilities, image, labels),
                "iou": box_iou(boxes_xyxy[:, image], targets_xyxy),
            }
            cost = -terms["labels"] * terms["iou"] ** self.late["power"]
        else:
            label_costs, is_class = self.label_costs(layers, targets, image)
            terms = {
                "labels": label_costs,
                "l1": (boxes[:, image] - target_boxes[:, None]).abs().sum(-1),
                "giou": generalized_box_iou(boxes_xyxy[:, image], targets_xyxy),
            }
            cost = sum(self.weights[name] * term for name, term in terms.items())
        # `forward` recognizes an invalid label by its NaN, without another transfer.
        return cost.masked_fill(~is_class[:, None], torch.nan), terms

    def label_costs(
        self, layers: Sequence[Mapping[str, Tensor]], targets: Sequence[DetectionTarget], image: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the unweighted cost of each target's label, (L, T, Q), and whether there is such a label, (T,).

        Args:
            image: (T,) index in the batch of each target's image.
        """
        logits, labels, is_class = self._logits_and_labels(layers, targets)
        return LABEL_COSTS[self.activation](logits, image, labels), is_class

    def _logits_and_labels(
        self, layers: Sequence[Mapping[str, Tensor]], targets: Sequence[DetectionTarget]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (L, B, Q, C), the targets' labels, 0 for those out of range, and which are in it, (T,)."""
        logits = torch.stack([layer["pred_logits"] for layer in layers]).float()
        labels = torch.cat([target["labels"] for target in targets])
        is_class = (labels >= 0) & (labels < self._num_classes(logits))
        return logits, labels.where(is_class, 0), is_class

    def label_range(self, layers: Sequence[Mapping[str, Tensor]], target: DetectionTarget) -> tuple[int, str]:
        """Return the number of labels that a target may have, and what to do about others."""
        return self._num_classes(layers[0]["pred_logits"]), "Is the model's num_classes that of the dataset?"

    def _num_classes(self, logits: Tensor) -> int:
        """Return the number of classes, without "no object"."""
        return logits.shape[-1] - (self.activation == "softmax")

    def _report_non_finite(
        self,
        cost: np.ndarray,
        terms_of: Callable[[Sequence[Mapping[str, Tensor]], Sequence[DetectionTarget]], Mapping[str, Tensor]],
        layers: Sequence[Mapping[str, Tensor]],
        targets: Sequence[DetectionTarget],
    ) -> None:
        """Report the first non-finite cost of (L, T, Q); raise a DataError if its target's label is out of range."""
        layer, row, query = np.argwhere(~np.isfinite(cost))[0].tolist()
        image, index = [(i, j) for i, target in enumerate(targets) for j in range(len(target["labels"]))][row]
        target = targets[image]
        image_name = describe_image(image, target)
        label = int(target["labels"][index])
        num_labels, remedy = self.label_range(layers, target)
        if not 0 <= label < num_labels:
            raise DataError(
                f"matching: {image_name}, target {index} has label {label}; expected 0..{num_labels - 1}. {remedy}"
            )
        # Only a warning: the loss of diverged predictions is not finite either; the training loop decides what to do.
        terms = terms_of(layers[layer : layer + 1], targets)
        values = {name: float(term[0, row, query]) for name, term in terms.items()}
        bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not np.isfinite(value))
        logger.warning(
            f"matching: non-finite cost in layer {layer}, {image_name}, query {query}, target {index}: "
            f"{bad or 'only the weighted sum'}; the target's box is {target['boxes_cxcywh'][index].tolist()}. "
            "Expected finite costs: lower the learning rate, clip gradients, or leave fp16 if the predictions diverged."
        )


def _check_late(late: LateCosts) -> None:
    """Raise ConfigError unless the late costs have an epoch and a positive power."""
    if not isinstance(late, Mapping):
        raise ConfigError(f"late={late!r}: expected a dict, such as dict(epoch=400, power=4).")
    for key in late:
        if key not in LateCosts.__annotations__:
            raise ConfigError(f"late.{key}: unknown key. {nearest(key, LateCosts.__annotations__)}")
    epoch, power = late.get("epoch"), late.get("power", 4.0)
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise ConfigError(f"late.epoch={epoch!r}: expected a number of epochs from 0.")
    if not isinstance(power, (int, float)) or isinstance(power, bool) or not 0 < power < math.inf:
        raise ConfigError(f"late.power={power!r}: expected a number above 0.")


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


def focal_cost(pred_logits: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    """Return the change of the focal loss if the label were positive; shapes as in `softmax_cost`, with C logits."""
    if len(labels) > pred_logits[0, :, 0].numel():  # a crowd: more labels than classes
        as_positive, as_negative = focal_terms(pred_logits.sigmoid())
        return _logits_of_labels(as_positive - as_negative, image, labels)
    as_positive, as_negative = focal_terms(_logits_of_labels(pred_logits, image, labels).sigmoid())
    return as_positive - as_negative


def focal_terms(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the focal loss of probabilities if they were of positives, and if they were of negatives."""
    return 0.25 * (1 - p) ** 2 * -(p + 1e-8).log(), 0.75 * p**2 * -(1 - p + 1e-8).log()


def _logits_of_labels(logits: Tensor, image: Tensor, labels: Tensor) -> Tensor:
    # Two index tensors with a slice between them put their dimension first: (T, L, Q).
    return logits[:, image, :, labels].transpose(0, 1)


LABEL_COSTS = {"softmax": softmax_cost, "sigmoid": focal_cost}


def assign(cost: np.ndarray) -> ImageMatches:
    """Return (query indices ascending, target indices) of the cheapest assignment of (N, Q) costs.

    Pairs whose cost is not finite are matched last.
    """
    # scipy computes in float64.
    finite = np.nan_to_num(cost.astype(np.float64), copy=False, nan=1e30, posinf=1e30, neginf=1e30)
    target, query = linear_sum_assignment(finite)
    order = query.argsort()
    return torch.from_numpy(query[order]), torch.from_numpy(target[order])
