"""Functions shared by set prediction losses: indices of the matched queries, the class term, normalisers."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.distributed import RatioMeter, all_reduce_mean, world_size
from vitkit.errors import ConfigError
from vitkit.registry import nearest
from vitkit.structures import DetectionTarget, Matches

logger = logging.getLogger("vitkit")


class SurplusWarning:
    """Warns once if an image has more targets than the model has queries, so that targets stay unmatched."""

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
            "contribute to the loss. Set model.num_queries to at least the most objects of an image. This warning is "
            "shown once.",
            image_id,
            most,
            num_queries,
            most - num_queries,
        )


def decoder_layers(outputs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return each layer's outputs by the prefix of its losses: "" for the last, "aux0_", "aux1_" ... for the others."""
    return {"": outputs} | {f"aux{i}_": layer for i, layer in enumerate(outputs.get("aux_outputs", ()))}


def layers_of_groups(outputs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the outputs of each layer for the usual queries and for all groups like them.

    The losses of the groups are averaged by `mean_of_groups`, so that they have the scale of one group. The keys are
    those of `decoder_layers`, preceded by the number of the group; the usual queries have number 0 and come first.
    """
    groups = [outputs, *outputs.get("groups", ())]
    return {f"{i}/{name}": layer for i, group in enumerate(groups) for name, layer in decoder_layers(group).items()}


def mean_of_groups(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Average losses over the groups of `layers_of_groups`."""
    by_name: dict[str, list[Tensor]] = {}
    for key, value in losses.items():
        by_name.setdefault(key.partition("/")[2], []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def repeat_targets(targets: Sequence[DetectionTarget], times: int) -> list[DetectionTarget]:
    """Return the targets with each object repeated `times` times."""
    names = ("labels", "boxes_cxcywh", "masks")
    return [
        {**target, **{name: torch.cat([target[name]] * times) for name in names if name in target}}
        for target in targets
    ]


def check_weights(weights: Mapping[str, float], terms: Sequence[str], *, optional: Sequence[str] = ()) -> None:
    """Raise ConfigError unless each term has a weight, and all or none of the optional ones."""
    for name in weights:
        if name not in (*terms, *optional):
            raise ConfigError(f"criterion.weights: unknown term {name!r}. {nearest(name, (*terms, *optional))}")
    expected = (*terms, *optional) if set(optional) & set(weights) else terms
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ConfigError(
            f"criterion.weights: no weight for {', '.join(missing)}. Set it to 0 to leave a term out of the loss."
        )


def matched_indices(matches: Matches, counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the indices of the M matched queries of each layer and of their targets, using a single transfer.

    Args:
        matches: result of a matcher.
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
    """Return the means over ranks of the class losses' weight sum and of the number of targets (at least one in total).

    The original averages the cross entropy per rank, and clamps the mean number of targets at 1. With sums over all
    ranks as normalisers, the gradients averaged by DDP equal those of a single process on the joined batch; on one rank
    both definitions are the same.
    """
    sums = torch.tensor([class_weight_sum, num_targets], dtype=torch.float32).to(device, non_blocking=True)
    if not training:
        # In evaluation, ranks may have different numbers of batches, so they cannot wait for each other.
        return [sums[0], sums[1].clamp(min=1)]
    classes, targets = all_reduce_mean(sums)
    return [classes, targets.clamp(min=1 / world_size())]


def class_weight_sum(num_queries: int, num_matched: int, no_object_weight: float) -> float:
    """Return the sum of the cross entropy's weights over all queries."""
    return num_matched + no_object_weight * (num_queries - num_matched)


def set_cross_entropy(logits: Tensor, where: Sequence[Tensor], labels: Tensor, *, no_object_weight: float) -> Tensor:
    """Compute the cross entropy of every query; the target of an unmatched one is "no object", the last class.

    Args:
        logits: (L, B, Q, C + 1).
        where: layer, image and query indices of the matched queries, each (L, M).
        labels: (L, M) int64.
        no_object_weight: the weight of unmatched queries; matched ones have 1.
    Returns:
        (L,) sums.
    """
    no_object = logits.shape[-1] - 1
    classes = labels.new_full(logits.shape[:-1], no_object)
    classes[tuple(where)] = labels
    class_weights = logits.new_ones(no_object + 1)
    class_weights[-1] = no_object_weight
    losses = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), class_weights, reduction="none")
    return losses.view(len(logits), -1).sum(1)
