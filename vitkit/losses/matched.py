"""Shared parts of set prediction losses: sets of queries, their matches with targets, the class term, normalizers."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.distributed import RatioMeter, all_reduce_mean, world_size
from vitkit.errors import ConfigError
from vitkit.losses.class_weights import ClassWeights, make_weights_tensor
from vitkit.protocols.criterion import Criterion
from vitkit.registry import MATCHERS, Spec, nearest
from vitkit.structures import OBJECT_FIELDS, DetectionTarget, Matches, QuerySet

logger = logging.getLogger("vitkit")


@dataclass
class SetLayers:
    """S sets of queries with the same name, whose losses are averaged; each has the outputs of L layers."""

    prefixes: Sequence[str]
    """Prefixes of the losses of the L layers, the last layer first: "", "aux0_", "aux1_" ... for the main queries."""
    layers: Sequence[Mapping[str, Any]]
    """The outputs of all S * L layers, set by set, in the order of `prefixes`."""
    targets: Sequence[DetectionTarget]
    """The targets that the queries are matched to."""
    repeats: float
    """Number of queries that each of these targets is matched with."""
    matches: Matches | None
    """Matches of all S * L layers; None until they are computed."""
    has_known_matches: bool
    """Whether the queries were made from targets, so that no matcher computes their matches."""
    class_agnostic: bool = False
    """Whether the only class is "object"; the targets then have label 0."""

    @property
    def is_main(self) -> bool:
        """Whether the first set is that of the main queries."""
        return self.prefixes[0] == ""

    @property
    def counts(self) -> list[int]:
        """Number of targets in each image."""
        return [len(target["labels"]) for target in self.targets]

    def stack(self, field: str) -> Tensor:
        """Return a field of all layers, (S * L, B, Q, ...) float32."""
        return torch.stack([layer[field] for layer in self.layers]).float()

    def list_matched_indices(self) -> Tensor:
        """Return the indices of the M matched queries of each layer and of their targets, using a single transfer.

        Returns:
            (4, S * L, M) int64 on the outputs' device: layer, image, query, and target among those of the whole batch.
        """
        starts = list(itertools.accumulate(self.counts, initial=0))
        layer = torch.arange(len(self.matches))[:, None]
        # Every layer matches the same number of an image's queries: as many as it has targets, or all queries.
        image = torch.cat([torch.full_like(query, i) for i, (query, _) in enumerate(self.matches[0])])
        query = torch.stack([torch.cat([query for query, _ in images]) for images in self.matches])
        target = torch.stack(
            [torch.cat([t + start for (_, t), start in zip(images, starts)]) for images in self.matches]
        )
        indices = torch.stack(torch.broadcast_tensors(layer, image, query, target))
        return indices.to(self.layers[0]["pred_logits"].device, non_blocking=True)

    def name_losses(self, terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the weighted losses of each layer by their keys.

        Args:
            terms: (S * L,) values of each term, which are averaged over the S sets.
        Raises:
            ConfigError: a term has no weight.
        """
        for name in terms:
            if name not in weights:
                raise ConfigError(
                    f"weights: no weight for the loss {name!r}. Add {name!r} to the `terms` of the criterion's class."
                )
        means = {name: weights[name] * values.view(-1, len(self.prefixes)).mean(0) for name, values in terms.items()}
        return {f"{prefix}{name}": mean[i] for i, prefix in enumerate(self.prefixes) for name, mean in means.items()}


@dataclass
class MatchedLayers:
    """The M matched queries of each of L layers, and the class predictions of all queries."""

    logits: Tensor
    """(L, B, Q, C) class logits of all queries; C includes "no object" if the criterion has it."""
    indices: Sequence[Tensor]
    """Layer, image and query index of each matched query, three of (L, M) int64."""
    target: Tensor
    """(L, M) int64, index of its target among those of the whole batch."""
    labels: Tensor
    """(L, M) int64, the target's label."""
    class_normalizer: Tensor
    """Mean over ranks of the sum of all queries' weights in the cross entropy; 0 if no rank has queries."""
    num_targets: Tensor
    """Mean over ranks of the number of targets."""
    class_weights: Tensor | None
    """(L, M) float32, the weight of each matched query's class; None: 1."""


class MatchedCriterion(Criterion):
    """Base of criteria that match queries to targets, one decoder layer at a time.

    `meters["matched_accuracy"]` counts how many of the last layer's matched queries predict their target's class.
    """

    terms: Sequence[str]
    """Names of the losses, each of which has a weight."""
    mask_terms: Sequence[str] = ()
    """Further names, all or none of which have weights."""

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        no_object_weight: float,
        class_weights: ClassWeights | None = None,
    ):
        super().__init__()
        self.register_buffer("class_weights", make_weights_tensor(class_weights), persistent=False)
        self.matcher = MATCHERS.build(matcher)
        self.weights = dict(weights)
        self.no_object_weight = no_object_weight
        self.meters = {"matched_accuracy": RatioMeter()}
        self._has_warned = False

    @classmethod
    def check_arguments(cls, weights: Mapping[str, float], **_: Any) -> None:
        """Raise ConfigError unless each term has a weight, and all or none of the mask terms."""
        names = (*cls.terms, *cls.mask_terms)
        for name in weights:
            if name not in names:
                raise ConfigError(f"weights: unknown term {name!r}. {nearest(name, names)}")
        expected = names if set(cls.mask_terms) & set(weights) else cls.terms
        missing = [name for name in expected if name not in weights]
        if missing:
            raise ConfigError(
                f"weights: no weight for {', '.join(missing)}. Set it to 0 to leave a term out of the loss."
            )

    def count(self, targets: Sequence[DetectionTarget]) -> float | tuple[float, float]:
        """Return the number of objects, and with class weights also the sum of the objects' weights."""
        number = sum(len(target["labels"]) for target in targets)
        if self.class_weights is None:
            return number
        labels, weights = torch.cat([target["labels"] for target in targets]).cpu(), self.class_weights.cpu()
        return number, float(weights[labels.clamp(0, len(weights) - 1)].sum())

    def late_changes(self) -> list[tuple[str, nn.Module, int]]:
        """Return the matcher, if it changes."""
        return [] if self.matcher.changes_at is None else [("matcher", self.matcher, self.matcher.changes_at)]

    def match(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget], **settings: Any) -> list[SetLayers]:
        """Return the sets of queries with their matches, the main queries first.

        Args:
            settings: further arguments of the matcher.
        Raises:
            ValueError: there are more or fewer targets than images.
        """
        if len(targets) != len(outputs["pred_logits"]):
            raise ValueError(f"got {len(targets)} targets of {len(outputs['pred_logits'])} images; expected one each")
        self._warn_of_surplus(targets, outputs["pred_logits"].shape[1])
        all_sets = collect_sets(outputs, targets)
        # In one call of the matcher, the costs of all sets take a single transfer from the device.
        unmatched = [sets for sets in all_sets if not sets.has_known_matches]
        self.matcher.epoch = self.epoch
        all_matches = self.matcher([(sets.layers, sets.targets) for sets in unmatched], **settings)
        for sets, matches in zip(unmatched, all_matches, strict=True):
            sets.matches = matches
        return all_sets

    def collect_matched_layers(self, sets: SetLayers) -> MatchedLayers:
        """Return the matched queries of all layers; those of the main set's last layer are counted by the meter."""
        logits = sets.stack("pred_logits")
        *indices, target = sets.list_matched_indices()
        labels = torch.cat([t["labels"] for t in sets.targets])[target]
        if sets.is_main:
            # The last layer of the main queries comes first.
            _, image, query = indices
            correct = (logits[0, image[0], query[0]].detach().argmax(-1) == labels[0]).sum()
            self.meters["matched_accuracy"].add(correct, torch.full_like(correct, len(labels[0])))
        num_queries, num_matched = logits[0, ..., 0].numel(), labels.shape[1]
        matched_sum, class_weights = num_matched, None
        if self.class_weights is not None and not sets.class_agnostic:
            num_classes = logits.shape[-1] - (self.no_object_weight > 0)
            if len(self.class_weights) != num_classes:
                raise ConfigError(f"class_weights: got {len(self.class_weights)}; the model has {num_classes} classes.")
            class_weights = self.class_weights[labels]
            # Layers have the same targets, so the same sum, unless an image has more of them than queries.
            matched_sum = class_weights.sum(1).mean()
        weight_sum = matched_sum + self.no_object_weight * (num_queries - num_matched)
        normalizer, num_targets = normalizers(
            self,
            weight_sum,
            sum(sets.counts),
            logits.device,
            no_object_weight=self.no_object_weight,
            num_queries=num_queries,
        )
        return MatchedLayers(logits, indices, target, labels, normalizer, num_targets, class_weights)

    def cross_entropy(self, matched: MatchedLayers) -> Tensor:
        """Return the cross entropy of each layer, (L,); the target of unmatched queries is "no object", the last class.

        It is the mean over queries, weighted by their class's weight if they are matched and by `no_object_weight` if
        not.
        """
        logits = matched.logits
        no_object = logits.shape[-1] - 1
        classes = matched.labels.new_full(logits.shape[:-1], no_object)
        classes[tuple(matched.indices)] = matched.labels
        class_weights = logits.new_ones(no_object + 1)
        if matched.class_weights is not None:
            class_weights[:-1] = self.class_weights
        class_weights[-1].fill_(self.no_object_weight)  # assigning the number would wait for the GPU
        losses = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), class_weights, reduction="none")
        # The normalizer is 0 if no rank has queries in this set, as in denoising without targets.
        return losses.view(len(logits), -1).sum(1) / matched.class_normalizer.clamp(min=1e-6)

    def _warn_of_surplus(self, targets: Sequence[Mapping[str, Any]], num_queries: int) -> None:
        """Warn once if an image has more targets than the model has queries."""
        image, most = max(enumerate(len(target["labels"]) for target in targets), key=lambda pair: pair[1])
        if most <= num_queries or self._has_warned:
            return
        self._has_warned = True
        image_id = f" {targets[image]['image_id']}" if "image_id" in targets[image] else ""
        logger.warning(
            f"image{image_id} has {most} targets, but the model has {num_queries} queries: {most - num_queries} of the "
            "targets stay unmatched and do not contribute to the loss. Set model.num_queries to at least the largest "
            "number of objects in an image. This warning is shown once."
        )


def collect_sets(outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> list[SetLayers]:
    """Return a model's sets of queries, grouped by name; the main queries come first.

    Args:
        outputs: predictions of the main queries, with optional `aux_outputs` and `training_outputs`, a list of
            `QuerySet`.
    Raises:
        ValueError: sets with the same name differ in more than their predictions.
    """
    main = {**outputs, "matches": None, "repeats": 1, "class_agnostic": False}
    by_name: dict[str, list[Mapping[str, Any]]] = {"": [main]}
    for training_outputs in outputs.get("training_outputs", ()):
        by_name.setdefault(training_outputs["name"], []).append(training_outputs)
    return [_join(name, query_sets, targets) for name, query_sets in by_name.items()]


def _join(name: str, query_sets: Sequence[QuerySet], targets: Sequence[DetectionTarget]) -> SetLayers:
    _check_averageable(name, query_sets)
    has_matches = query_sets[0].get("matches") is not None
    repeats = query_sets[0].get("repeats", 1)
    if query_sets[0].get("class_agnostic", False):
        targets = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
    if not has_matches and repeats > 1:
        # One-to-one matching then gives each target `repeats` queries.
        targets, repeats = repeat_targets(targets, repeats), 1
    prefixes = [f"{name}_{layer}" if name else layer for layer in decoder_layers(query_sets[0])]
    return SetLayers(
        prefixes=prefixes,
        layers=[layer for outputs in query_sets for layer in decoder_layers(outputs).values()],
        targets=targets,
        repeats=repeats,
        matches=[outputs["matches"] for outputs in query_sets for _ in prefixes] if has_matches else None,
        has_known_matches=has_matches,
        class_agnostic=query_sets[0].get("class_agnostic", False),
    )


def _check_averageable(name: str, query_sets: Sequence[QuerySet]) -> None:
    """Raise ValueError unless the losses of the sets can be averaged."""
    properties = [
        {
            "queries": outputs["pred_logits"].shape[1],
            "layers": len(decoder_layers(outputs)),
            "repeats": outputs.get("repeats", 1),
            "class_agnostic": outputs.get("class_agnostic", False),
            "matched": outputs.get("matches") is not None,
        }
        for outputs in query_sets
    ]
    for other in properties[1:]:
        if other != properties[0]:
            raise ValueError(
                f"training_outputs: sets of queries with the name {name!r} have {properties[0]} and {other}. Expected "
                "the same, since their losses are averaged: give one of them another name."
            )


def decoder_layers(outputs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return each layer's outputs by the prefix of its losses: "" for the last, "aux0_", "aux1_" ... for the others."""
    return {"": outputs} | {f"aux{i}_": layer for i, layer in enumerate(outputs.get("aux_outputs", ()))}


def repeat_targets(targets: Sequence[DetectionTarget], times: int) -> list[DetectionTarget]:
    """Return the targets with each object repeated `times` times."""
    names = (*OBJECT_FIELDS, "positive_map")
    return [
        {**target, **{name: torch.cat([target[name]] * times) for name in names if name in target}}
        for target in targets
    ]


def normalizers(
    criterion: Criterion,
    class_weight_sum: float | Tensor,
    num_targets: int,
    device: torch.device,
    *,
    no_object_weight: float = 0.0,
    num_queries: int = 0,
) -> list[Tensor]:
    """Return the means over ranks, or over all batches of a step, of the class losses' weight sum and of the number of
    targets.

    The number of targets of all ranks together is at least one.

    Args:
        no_object_weight, num_queries: the weight that queries without a target have in the sum, and the number of all
            queries.
    """
    if isinstance(class_weight_sum, Tensor):  # it is on the device, and need not be transferred
        sums = torch.stack([class_weight_sum, torch.full_like(class_weight_sum, num_targets)])
    else:
        sums = torch.tensor([class_weight_sum, num_targets], dtype=torch.float32).to(device, non_blocking=True)
    if not criterion.training:
        # In evaluation, ranks may have different numbers of batches, so they cannot wait for each other.
        return [sums[0], sums[1].clamp(min=1)]
    if (shares := criterion.step_share) is not None:
        # Only what targets add varies between batches. The share of a batch without any is the step's mean number.
        constant, number = no_object_weight * num_queries, shares[0] * sums[1].clamp(min=1)
        added = sums[0] - constant + no_object_weight * num_targets if num_targets else 1
        share = shares[-1] if isinstance(class_weight_sum, Tensor) else shares[0]
        return [constant + share * added - no_object_weight * number, number]
    # The original averages the cross entropy per rank, and clamps the mean number of targets at 1. With sums over all
    # ranks as normalizers, the gradients averaged by DDP equal those of a single process on the joined batch; on one
    # rank both definitions are the same.
    classes, targets = all_reduce_mean(sums)
    return [classes, targets.clamp(min=1 / world_size())]


def mean_of_batches(criterion: Criterion, count: Tensor) -> Tensor:
    """Return the mean of a count over ranks, or over all batches of a step, in training; the count in evaluation."""
    # In evaluation, ranks may have different numbers of batches, so they cannot wait for each other.
    if not criterion.training:
        return count
    return all_reduce_mean(count) if criterion.step_share is None else criterion.step_share[0] * count
