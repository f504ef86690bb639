"""Functions shared by set prediction losses: sets of queries and their matches, the class term, normalisers."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter, all_reduce_mean, world_size
from vitkit.errors import ConfigError
from vitkit.registry import nearest
from vitkit.structures import DetectionTarget, Matches, TrainingOutputs

logger = logging.getLogger("vitkit")


@dataclass
class QuerySets:
    """S sets of queries with the same name, whose losses are averaged; each has the outputs of L layers."""

    prefixes: Sequence[str]
    """Prefixes of the losses of the L layers, the last layer first: "", "aux0_", "aux1_" ... for the main queries."""
    layers: Sequence[Mapping[str, Any]]
    """The outputs of all S * L layers, set by set, in the order of `prefixes`."""
    targets: Sequence[DetectionTarget]
    """The targets that the queries are matched to."""
    repeats: int
    """Number of queries that each of these targets is matched with."""
    matches: Matches | None
    """Matches of all S * L layers; None until they are computed."""

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

    def named_losses(self, terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
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


def collect_sets(outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> list[QuerySets]:
    """Return a model's sets of queries, those with the same name together; the main queries come first.

    Args:
        outputs: predictions of the main queries, with optional `aux_outputs` and `training_outputs`, a list of
            `TrainingOutputs`.
    Raises:
        ValueError: sets with the same name differ in more than their predictions.
    """
    main = {**outputs, "matches": None, "repeats": 1, "class_agnostic": False}
    by_name: dict[str, list[Mapping[str, Any]]] = {"": [main]}
    for training_outputs in outputs.get("training_outputs", ()):
        by_name.setdefault(training_outputs["name"], []).append(training_outputs)
    return [_joined(name, query_sets, targets) for name, query_sets in by_name.items()]


def _joined(name: str, query_sets: Sequence[TrainingOutputs], targets: Sequence[DetectionTarget]) -> QuerySets:
    _check_alike(name, query_sets)
    has_matches = query_sets[0].get("matches") is not None
    repeats = query_sets[0].get("repeats", 1)
    if query_sets[0].get("class_agnostic", False):
        targets = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
    if not has_matches and repeats > 1:
        # One-to-one matching then gives each target `repeats` queries.
        targets, repeats = repeat_targets(targets, repeats), 1
    prefixes = [f"{name}_{layer}" if name else layer for layer in decoder_layers(query_sets[0])]
    return QuerySets(
        prefixes=prefixes,
        layers=[layer for outputs in query_sets for layer in decoder_layers(outputs).values()],
        targets=targets,
        repeats=repeats,
        matches=[outputs["matches"] for outputs in query_sets for _ in prefixes] if has_matches else None,
    )


def _check_alike(name: str, query_sets: Sequence[TrainingOutputs]) -> None:
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


def match_sets(query_sets: Sequence[QuerySets], matcher: Callable[[Sequence[tuple]], list[Matches]]) -> None:
    """Match the sets that have no matches yet, all in one call of the matcher, and store the result in them."""
    # In one call, the costs of all sets take a single transfer from the device.
    unmatched = [queries for queries in query_sets if queries.matches is None]
    all_matches = matcher([(queries.layers, queries.targets) for queries in unmatched])
    for queries, matches in zip(unmatched, all_matches, strict=True):
        queries.matches = matches


def decoder_layers(outputs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return each layer's outputs by the prefix of its losses: "" for the last, "aux0_", "aux1_" ... for the others."""
    return {"": outputs} | {f"aux{i}_": layer for i, layer in enumerate(outputs.get("aux_outputs", ()))}


def repeat_targets(targets: Sequence[DetectionTarget], times: int) -> list[DetectionTarget]:
    """Return the targets with each object repeated `times` times."""
    names = ("labels", "boxes_cxcywh", "masks")
    return [
        {**target, **{name: torch.cat([target[name]] * times) for name in names if name in target}}
        for target in targets
    ]


class SurplusWarning:
    """Warns once if an image has more targets than the model has queries."""

    def __init__(self):
        self.warned = False

    def __call__(self, targets: Sequence[Mapping[str, Any]], num_queries: int) -> None:
        image, most = max(enumerate(len(target["labels"]) for target in targets), key=lambda pair: pair[1])
        if most <= num_queries or self.warned:
            return
        self.warned = True
        image_id = f" {targets[image]['image_id']}" if "image_id" in targets[image] else ""
        logger.warning(
            "image%s has %d targets, but the model has %d queries: %d of the targets stay unmatched and do not "
            "contribute to the loss. Set model.num_queries to at least the largest number of objects in an image. This "
            "warning is shown once.",
            image_id,
            most,
            num_queries,
            most - num_queries,
        )


def check_weights(weights: Mapping[str, float], terms: Sequence[str], *, optional: Sequence[str] = ()) -> None:
    """Raise ConfigError unless each term has a weight, and all or none of the optional ones."""
    for name in weights:
        if name not in (*terms, *optional):
            raise ConfigError(f"weights: unknown term {name!r}. {nearest(name, (*terms, *optional))}")
    expected = (*terms, *optional) if set(optional) & set(weights) else terms
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ConfigError(f"weights: no weight for {', '.join(missing)}. Set it to 0 to leave a term out of the loss.")


def matched_indices(matches: Matches, counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the indices of the M matched queries of each layer and of their targets, using a single transfer.

    Args:
        matches: matches of L layers.
        counts: number of targets in each image.
    Returns:
        (4, L, M) int64 on the device: layer, image, query, and target among those of the whole batch.
    """
    starts = list(itertools.accumulate(counts, initial=0))
    layer = torch.arange(len(matches))[:, None]
    # Every layer matches the same number of an image's queries: as many as it has targets, or all queries.
    image = torch.cat([torch.full_like(query, i) for i, (query, _) in enumerate(matches[0])])
    query = torch.stack([torch.cat([query for query, _ in images]) for images in matches])
    target = torch.stack([torch.cat([t + start for (_, t), start in zip(images, starts)]) for images in matches])
    return torch.stack(torch.broadcast_tensors(layer, image, query, target)).to(device, non_blocking=True)


def count_correct_classes(meter: RatioMeter, matched_logits: Tensor, labels: Tensor) -> None:
    """Count which of the M matched queries predict their target's class; (M, C) logits and (M,) labels."""
    correct = (matched_logits.detach().argmax(-1) == labels).sum()
    meter.add(correct, torch.full_like(correct, len(labels)))


def normalizers(class_weight_sum: float, num_targets: int, device: torch.device, *, training: bool) -> list[Tensor]:
    """Return the means over ranks of the class losses' weight sum and of the number of targets.

    The number of targets of all ranks together is at least one.
    """
    sums = torch.tensor([class_weight_sum, num_targets], dtype=torch.float32).to(device, non_blocking=True)
    if not training:
        # In evaluation, ranks may have different numbers of batches, so they cannot wait for each other.
        return [sums[0], sums[1].clamp(min=1)]
    # The original averages the cross entropy per rank, and clamps the mean number of targets at 1. With sums over all
    # ranks as normalisers, the gradients averaged by DDP equal those of a single process on the joined batch; on one
    # rank both definitions are the same.
    classes, targets = all_reduce_mean(sums)
    return [classes, targets.clamp(min=1 / world_size())]


def class_weight_sum(num_queries: int, num_matched: int, no_object_weight: float) -> float:
    """Return the sum of the cross entropy's weights over all queries."""
    return num_matched + no_object_weight * (num_queries - num_matched)


def set_cross_entropy(
    logits: Tensor, query_indices: Sequence[Tensor], labels: Tensor, *, no_object_weight: float
) -> Tensor:
    """Compute the cross entropy of every query; the target of an unmatched one is "no object", the last class.

    Args:
        logits: (L, B, Q, C + 1).
        query_indices: layer, image and query indices of the matched queries, each (L, M).
        labels: (L, M) int64, the labels of their targets.
        no_object_weight: the weight of unmatched queries; matched ones have 1.
    Returns:
        (L,) sums.
    """
    no_object = logits.shape[-1] - 1
    classes = labels.new_full(logits.shape[:-1], no_object)
    classes[tuple(query_indices)] = labels
    class_weights = logits.new_ones(no_object + 1)
    class_weights[-1] = no_object_weight
    losses = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), class_weights, reduction="none")
    return losses.view(len(logits), -1).sum(1)
