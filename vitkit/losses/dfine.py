"""The loss of D-FINE (Peng et al. 2024, https://arxiv.org/abs/2410.13842)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.losses.class_losses import sigmoid_loss
from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.matched import MatchedLayers, SetLayers, mean_of_batches
from vitkit.losses.set_criterion import SetCriterion
from vitkit.ops.box_distances import distances_of_boxes, neighboring_bins
from vitkit.ops.boxes import box_iou, clamp_sizes, cxcywh_to_xyxy, generalized_box_iou
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget, ImageMatches, Matches


@dataclass
class Pairs:
    """M pairs of a query and a target, on which all layers of a set of queries are trained."""

    image: Tensor
    """(M,) int64."""
    query: Tensor
    """(M,) int64."""
    target: Tensor
    """(M,) int64, index of the target among those of the whole batch."""
    normalizer: Tensor
    """What sums over the pairs are divided by."""
    counts: Tensor
    """(2,), means over ranks of the number of pairs, and of the set's other queries."""


@CRITERIA.register
class DFINECriterion(SetCriterion):
    """Losses of the class, the box, and the distributions of its edges' distances, for every decoder layer.

    - labels: the class loss of all queries, with the matches of their own layer.
    - l1, giou: the box losses. Like the two below they are for the union of all layers' matches (see
      `union_of_matches`), so that all layers are trained on the same, more numerous pairs.
    - fgl, fine-grained localization: the cross entropy of each distribution and the target's distance, which is divided
      between two neighboring bins; weighted by the IoU of the predicted box.
    - ddf, decoupled distillation focal: the KL divergence of each earlier layer's distributions from the last
      layer's, for all queries. Matched ones are weighted by their IoU, others by the last layer's highest class
      probability, as their boxes may also fit an object.

    The union of matches and ddf are the paper's global optimal localization self-distillation, GO-LSD.

    Denoising queries have the same losses, with the matches that they are made for.

    Args:
        matcher: a spec of the matcher (see `HungarianMatcher`) with sigmoid activation, or the matcher.
        weights: the weight of each of `terms`.
        class_loss: "varifocal" (D-FINE), or another sigmoid loss: "mal" or "focal". See `class_losses`.
        focal_alpha, focal_gamma, class_weights: see `SetCriterion`.
        temperature: T, by which the distributions' logits are divided in ddf.
        union: whether box losses and those of distributions are for the union of all layers' matches; False: the box
            losses are for the matches of their own layer, and there are no others, whose weights must be 0 (DEIMv2's
            smallest models).
    Raises:
        ConfigError: the class loss or a term is unknown, a term is missing, the class loss does not have an argument
            that is set, the matcher's costs are for other logits, the temperature or a class weight is not positive, or
            fgl or ddf has a weight without the union.
    """

    terms = ("labels", "l1", "giou", "fgl", "ddf")
    mask_terms = ()
    needs_outputs = ("pred_logits", "pred_boxes", "pred_corners", "initial_boxes", "distance_bins", "reg_scale")

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        class_loss: Literal["varifocal", "mal", "focal"] = "varifocal",
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
        temperature: float = 5.0,
        union: bool = True,
        class_weights: ClassWeights | None = None,
    ):
        if class_loss == "cross_entropy":
            raise ConfigError(
                "class_loss='cross_entropy': expected 'varifocal', 'mal' or 'focal', since D-FINE has a sigmoid per "
                'class and no class "no object".'
            )
        super().__init__(
            matcher,
            weights,
            class_loss=class_loss,
            focal_alpha=focal_alpha,
            focal_gamma=focal_gamma,
            class_weights=class_weights,
        )
        if temperature <= 0:
            raise ConfigError(f"temperature={temperature}: expected a positive number.")
        if not union and (weights["fgl"] or weights["ddf"]):
            raise ConfigError(
                f"union=False: the losses of distributions need the union of matches, but weights.fgl={weights['fgl']} "
                f"and weights.ddf={weights['ddf']}: set both to 0."
            )
        self.temperature, self.union = temperature, union

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: predictions of the last layer: pred_logits (B, Q, C); pred_boxes (B, Q, 4) cxcywh in 0..1; and
                pred_corners (B, Q, 4 * N), logits of the distributions over N bins of the distances of the left, top,
                right and bottom edges from those of initial_boxes (B, Q, 4), which have no gradient. Also
                distance_bins (N,) and reg_scale (see `distance_bins`), and aux_outputs, a list of the first three for
                each earlier prediction, without pred_corners where boxes are predicted directly. Optionally
                training_outputs, a list of `QuerySet`: the encoder's predictions for the same queries, without
                pred_corners; and denoising queries, with the same fields as the main queries.
            targets: B targets with labels in 0..C-1.
        Returns:
            Weighted scalars whose sum is the loss: `labels l1 giou fgl` for the last layer, `aux0_labels aux0_l1
            aux0_giou aux0_fgl aux0_ddf ...` for the others, of which those without pred_corners have neither fgl nor
            ddf; and `enc_labels ... dn_labels ... dn_aux0_labels ...` for training_outputs. The keys are the same for
            any targets, and each term depends on the outputs even when it is zero.
        Raises:
            ConfigError: the outputs are not those of a D-FINE head, or the training queries do not fit it.
            DataError: a label is out of range.
        """
        _check_fields(outputs)
        losses = {}
        with torch.autocast(outputs["pred_logits"].device.type, enabled=False):
            all_sets = self.match(outputs, targets, **self.matching_inputs(outputs))
            _check_sets(all_sets, num_bins=len(outputs["distance_bins"]))
            if not self.union:
                return {name: loss for sets in all_sets for name, loss in self.set_losses(sets, outputs).items()}
            union = pairs_of_union(self, all_sets)
            for sets in all_sets:
                matched = self.collect_matched_layers(sets)
                pairs = known_pairs(self, sets, matched) if sets.has_known_matches else union
                losses |= self._class_and_box_losses(sets, matched, pairs)
                refined = _layers_with_distributions(sets)
                if refined.layers:
                    losses |= self._fgl(refined, pairs, outputs["distance_bins"].float(), outputs["reg_scale"])
                if len(refined.layers) > 1:
                    losses |= self._ddf(refined, pairs, main_counts=union.counts)
                losses |= self.further_losses(sets, matched, outputs)
        return losses

    def box_losses(self, pred_cxcywh: Tensor, target_cxcywh: Tensor) -> dict[str, Tensor]:
        """See `SetCriterion`; opposite edges of the predicted boxes may have crossed."""
        giou = generalized_box_iou(cxcywh_to_xyxy(clamp_sizes(pred_cxcywh)), cxcywh_to_xyxy(target_cxcywh))
        return {"l1": (pred_cxcywh - target_cxcywh).abs().sum(-1), "giou": 1 - giou}

    def _class_and_box_losses(self, sets: SetLayers, matched: MatchedLayers, pairs: Pairs) -> dict[str, Tensor]:
        boxes = sets.stack("pred_boxes")  # (L, B, Q, 4)
        ious = _ious(boxes[tuple(matched.indices)], _target_boxes(sets)[matched.target])
        class_losses = sigmoid_loss(self.class_loss, matched, ious, **self.sigmoid_settings)
        box_losses = self.box_losses(boxes[:, pairs.image, pairs.query], _target_boxes(sets)[pairs.target])
        terms = {name: values.sum(1) / pairs.normalizer for name, values in box_losses.items()}
        labels = class_losses / (sets.repeats * matched.num_targets)
        return sets.name_losses({"labels": labels, **terms}, self.weights)

    def _fgl(self, sets: SetLayers, pairs: Pairs, bins: Tensor, reg_scale: float) -> dict[str, Tensor]:
        """Return the weighted fine-grained localization loss of each layer (section 4.1)."""
        # All layers predict distances from the same boxes, so they have the same targets.
        initial_boxes = sets.layers[0]["initial_boxes"].detach().float()[pairs.image, pairs.query]
        target_boxes = _target_boxes(sets)[pairs.target]
        distances = distances_of_boxes(initial_boxes, cxcywh_to_xyxy(target_boxes), reg_scale)
        left, right_weight = neighboring_bins(distances, bins)  # (M, 4)
        neighbors = torch.stack([left, left + 1], dim=-1)  # (M, 4, 2)
        shares = torch.stack([1 - right_weight, right_weight], dim=-1)

        corners = _of_pairs(sets, "pred_corners", pairs).unflatten(-1, (4, len(bins)))  # (L, M, 4, N)
        log_probabilities = corners.log_softmax(-1).gather(-1, neighbors.expand(len(corners), -1, -1, -1))
        cross_entropy = -(shares * log_probabilities).sum((2, 3))  # (L, M)
        losses = (_pair_ious(sets, pairs) * cross_entropy).sum(1) / pairs.normalizer
        return sets.name_losses({"fgl": losses}, self.weights)

    def _ddf(self, sets: SetLayers, pairs: Pairs, *, main_counts: Tensor) -> dict[str, Tensor]:
        """Return the weighted distillation loss of each layer but the last, their teacher (GO-LSD, section 4.2)."""
        teacher = sets.layers[0]
        students = replace(sets, prefixes=sets.prefixes[1:], layers=sets.layers[1:])
        logits = students.stack("pred_corners").unflatten(-1, (4, -1)) / self.temperature  # (L, B, Q, 4, N)
        target_logits = teacher["pred_corners"].detach().float().unflatten(-1, (4, -1)) / self.temperature
        divergence = F.kl_div(logits.log_softmax(-1), target_logits.softmax(-1), reduction="none").sum(-1).mean(-1)

        confidence = teacher["pred_logits"].detach().float().sigmoid().amax(-1)  # (B, Q)
        weights = confidence.repeat(len(logits), 1, 1)
        weights[:, pairs.image, pairs.query] = _pair_ious(students, pairs)
        # Dividing the logits by T makes the gradients about T^2 times smaller.
        weighted = self.temperature**2 * weights * divergence  # (L, B, Q)

        is_paired = torch.zeros_like(confidence, dtype=torch.bool)
        # A number would be copied from the host, which waits for the GPU.
        is_paired[pairs.image, pairs.query] = is_paired.new_ones(())
        sums = torch.stack([weighted.where(mask, 0).sum((1, 2)) for mask in (is_paired, ~is_paired)])  # (2, L)
        means = sums / pairs.counts.clamp(min=1e-6)[:, None]
        # In denoising, the means also weigh as in the main queries. The original multiplies the counts by 8 / B, which
        # has no effect.
        shares = main_counts.sqrt() / main_counts.sqrt().sum()
        return students.name_losses({"ddf": (shares[:, None] * means).sum(0)}, self.weights)


def pairs_of_union(criterion: Criterion, all_sets: Sequence[SetLayers]) -> Pairs:
    """Return the pairs for all queries whose matches are not known, see `union_of_matches`."""
    main = all_sets[0]
    voting = [layer for sets in all_sets if not sets.has_known_matches for layer in sets.matches]
    union = union_of_matches(voting, main.layers[0]["pred_logits"].shape[1], main.counts)
    _, image, query, target = replace(main, matches=[union]).list_matched_indices()[:, 0]
    counts = _counts(criterion, query, main)
    return Pairs(image, query, target, counts[0].clamp(min=1e-6), counts)


def known_pairs(criterion: Criterion, sets: SetLayers, matched: MatchedLayers) -> Pairs:
    """Return the pairs of a set whose matches, the same in all layers, are known."""
    _, image, query = (indices[0] for indices in matched.indices)
    normalizer = sets.repeats * matched.num_targets
    return Pairs(image, query, matched.target[0], normalizer, _counts(criterion, query, sets))


def _counts(criterion: Criterion, query: Tensor, sets: SetLayers) -> Tensor:
    """Return the means over batches of the numbers of paired and of other queries, (2,)."""
    num_queries = sets.layers[0]["pred_logits"][..., 0].numel()
    counts = torch.tensor([len(query), num_queries - len(query)], dtype=torch.float32)
    counts = counts.to(query.device, non_blocking=True)
    means = mean_of_batches(criterion, counts)
    # Nearly all queries are not paired, however many objects a batch has.
    return means if criterion.step_share is None else torch.stack([means[0], counts[1]])


def union_of_matches(layers: Matches, num_queries: int, counts: Sequence[int]) -> list[ImageMatches]:
    """Match every query that any layer matches to the target that most layers match it with (GO-LSD, section 4.2).

    Args:
        layers: the matches of each layer.
        counts: number of targets in each image.
    Returns:
        for each image, (query indices ascending, target indices). A target may have several queries.
    """
    union = []
    for image, count in enumerate(counts):
        # There is also a column without targets, since a maximum needs one.
        votes = torch.zeros(num_queries, max(count, 1), dtype=torch.int64)
        for layer in layers:
            votes[layer[image]] += 1
        # Among targets with equally many votes, the first wins; the original takes any, as its sorting is not stable.
        most, target = votes.max(dim=1)
        query = most.nonzero()[:, 0]
        union.append((query, target[query]))
    return union


def _check_fields(outputs: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the outputs have the fields that a D-FINE head predicts."""
    missing = [name for name in DFINECriterion.needs_outputs if name not in outputs]
    if missing:
        raise ConfigError(
            f"DFINECriterion: the model's outputs have no {', '.join(missing)}, which D-FINE's head returns. Set "
            "criterion.type=SetCriterion for other heads."
        )


def _check_sets(all_sets: Sequence[SetLayers], *, num_bins: int) -> None:
    """Raise ConfigError unless the distributions have `num_bins` bins, and the sets are those of a D-FINE model."""
    main = all_sets[0]
    num_queries = main.layers[0]["pred_logits"].shape[1]
    for sets in all_sets:
        last = sets.layers[0]
        for layer in _layers_with_distributions(sets).layers:
            channels = layer["pred_corners"].shape[-1]
            if channels != 4 * num_bins:
                raise ConfigError(
                    f"DFINECriterion: pred_corners has {channels} channels, but there are {num_bins} distance_bins: "
                    f"expected {4 * num_bins}. Make both from the same reg_max."
                )
        if "pred_corners" in last and "initial_boxes" not in last:
            raise ConfigError(
                f"DFINECriterion: the queries {_name(sets)!r} of training_outputs have no initial_boxes. Name it in "
                "the head's query_outputs."
            )
        is_encoder = (
            "pred_corners" not in last
            and last["pred_logits"].shape[1] == num_queries
            and sets.counts == main.counts  # not repeated
        )
        is_single = len(sets.layers) == len(sets.prefixes)
        if not is_single or not (sets.is_main or sets.has_known_matches or is_encoder):
            raise ConfigError(
                f"DFINECriterion: it has no loss for the queries {_name(sets)!r} of training_outputs. Expected the "
                "encoder's predictions for the main queries, and denoising queries: leave others out of "
                "model.training_queries."
            )


def _name(sets: SetLayers) -> str:
    return sets.prefixes[0].removesuffix("_")


def _layers_with_distributions(sets: SetLayers) -> SetLayers:
    """Return the layers that predict distributions, with their prefixes."""
    kept = [(prefix, layer) for prefix, layer in zip(sets.prefixes, sets.layers) if "pred_corners" in layer]
    return replace(sets, prefixes=[prefix for prefix, _ in kept], layers=[layer for _, layer in kept])


def _target_boxes(sets: SetLayers) -> Tensor:
    """Return the targets' boxes of the whole batch, (T, 4) float32 cxcywh."""
    return torch.cat([target["boxes_cxcywh"] for target in sets.targets]).float()


def _of_pairs(sets: SetLayers, field: str, pairs: Pairs) -> Tensor:
    """Return a field of the pairs' queries in each layer, (L, M, ...) float32."""
    return torch.stack([layer[field][pairs.image, pairs.query] for layer in sets.layers]).float()


def _pair_ious(sets: SetLayers, pairs: Pairs) -> Tensor:
    """Return the IoU of each pair in each layer, (L, M), without gradient."""
    return _ious(_of_pairs(sets, "pred_boxes", pairs), _target_boxes(sets)[pairs.target])


def _ious(pred_cxcywh: Tensor, target_cxcywh: Tensor) -> Tensor:
    """Return the IoU of each predicted box and its target, (L, M), without gradient."""
    return box_iou(cxcywh_to_xyxy(pred_cxcywh.detach()), cxcywh_to_xyxy(target_cxcywh))
