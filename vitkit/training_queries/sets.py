"""Sets of training queries: how they join a head's own queries, and how their outputs are separated again.

A decoder's rows are those of each set, in the order of the config, and then the head's own queries. A mask in the
self-attention separates them: leaving the sets out does not change what the head predicts.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import mask_bias
from vitkit.nn.queries import AddedQueries, Queries, QueryHead
from vitkit.registry import TRAINING_QUERIES, Spec
from vitkit.structures import DetectionTarget, TrainingOutputs


@dataclass(frozen=True)
class QuerySet:
    """P queries of one batch that have a loss of their own. P is 0 if no image has a target to make queries from."""

    name: str
    """Prefix of its losses; sets with the same name are averaged, those named "" with the head's own queries."""
    queries: Queries
    """Content, and positions or references, and masks within which they attend."""
    matches: list[tuple[Tensor, Tensor]] | None = None
    """For each image, as from a matcher: the queries that have to predict a target, and its index; None: the criterion
    matches them."""
    repeats: int = 1
    """Number of queries that each target is matched to."""
    num_parts: int = 1
    """Number of equal parts of the set that do not see each other."""
    sees_own: bool = False
    """Whether the queries see the head's own, which never see them."""

    def sizes(self) -> list[int]:
        """Return the number of queries in each part."""
        return [self.queries.content.shape[1] // self.num_parts] * self.num_parts


class TrainingQueriesBase(nn.Module, ABC):
    """Base of all kinds of training queries; registered in TRAINING_QUERIES, built with `head` and `num_classes`."""

    key: str
    """Name of its parameters in a model's state dict, `training_queries.KEY`."""
    num_selected: int = 0
    """Number of boxes that it takes from a head that selects boxes from the image."""

    def __init__(self):
        super().__init__()
        self.proposals = nn.ModuleList()
        """The layers that select these boxes, see `AddedQueries`; none if those of the head do."""

    @abstractmethod
    def forward(self, head: QueryHead, targets: Sequence[DetectionTarget], selected: Tensor | None) -> list[QuerySet]:
        """Make the queries for a batch.

        Args:
            selected: (B, num_selected, 4), boxes that the head has selected for these queries.
        """


class TrainingQueries(nn.ModuleDict):
    """All training queries of a model.

    Args:
        specs: specs of them, or modules.
        head: the head whose queries they join.
        num_classes: number of classes of the targets.
    Raises:
        ConfigError: the head has no queries, a kind is given twice, or does not fit the head.
    """

    def __init__(self, specs: Sequence[Spec | nn.Module], head: nn.Module, num_classes: int):
        super().__init__()
        if not isinstance(head, QueryHead):
            raise ConfigError(
                f"training_queries: {type(head).__name__} has no queries that others can be added to. Leave them out."
            )
        for spec in specs:
            kind = TRAINING_QUERIES.build(spec, head=head, num_classes=num_classes)
            if kind.key in self:
                raise ConfigError(f"training_queries: {type(kind).__name__} is given twice; expected each kind once.")
            self[kind.key] = kind

    def forward(
        self,
        head: QueryHead,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None,
        targets: Sequence[DetectionTarget],
    ) -> dict[str, Any]:
        """Run a head with the training queries added to its own.

        Args:
            features, padding_mask: inputs of the head.
            targets: targets of the images; masks, if any, of the padded images.
        Returns:
            the head's outputs, with those of each set in the list `training_outputs`.
        """
        batch = self._batch(targets)
        return batch.separate(head(features, padding_mask, added=batch), head)

    @torch.compiler.disable
    def _batch(self, targets: Sequence[DetectionTarget]) -> "BatchQueries":
        return BatchQueries(list(self.values()), targets)


class BatchQueries(AddedQueries):
    """The training queries of one batch.

    Numbers of queries change with the targets, so compiled models run these methods outside of their graphs.
    """

    def __init__(self, kinds: Sequence[TrainingQueriesBase], targets: Sequence[DetectionTarget]):
        self.kinds = kinds
        self.targets = targets
        self.num_selected = sum(kind.num_selected for kind in kinds)
        self.proposals = [stage for kind in kinds for stage in kind.proposals]
        self.query_sets: list[QuerySet] = []

    @torch.compiler.disable
    def join(self, queries: Queries, head: QueryHead, selected: Tensor | None = None) -> Queries:
        """See `AddedQueries`."""
        counts = [kind.num_selected for kind in self.kinds]
        boxes = [None] * len(counts) if selected is None else selected.split(counts, dim=1)
        query_sets = [
            query_set for kind, part in zip(self.kinds, boxes) for query_set in kind(head, self.targets, part)
        ]
        # Masks are for the first queries.
        self.query_sets = sorted(query_sets, key=lambda query_set: query_set.queries.masks is None)
        all_queries = [*(query_set.queries for query_set in self.query_sets), queries]

        def joined(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in all_queries]
            return None if values[-1] is None else torch.cat(values, dim=1)

        content, num_own = joined("content"), queries.content.shape[1]
        in_parts = head.attends_in_parts and self._are_like_own(num_own)
        return Queries(
            content,
            joined("positions"),
            joined("references"),
            None if in_parts else self._attention_bias(num_own, content),
            len(all_queries) if in_parts else 1,
            next((part.masks for part in all_queries if part.masks is not None), None),
        )

    def _are_like_own(self, num_own: int) -> bool:
        """Whether all sets are as large as the head's own queries, and see only themselves."""
        return all(query_set.sizes() == [num_own] and not query_set.sees_own for query_set in self.query_sets)

    def _attention_bias(self, num_own: int, like: Tensor) -> Tensor | None:
        """Return the bias of the self-attention, (L, L); None if there are no added queries in this batch."""
        sizes = [size for query_set in self.query_sets for size in query_set.sizes()]
        if not sum(sizes):
            return None
        sees_own = [query_set.sees_own for query_set in self.query_sets for _ in query_set.sizes()]
        masked = attention_mask(sizes, sees_own, num_own)
        return mask_bias(masked.to(like.device, non_blocking=True), like.dtype)

    @torch.compiler.disable
    def separate(self, outputs: Mapping[str, Any], head: QueryHead) -> dict[str, Any]:
        """Separate a head's outputs into those of its own queries and those of each set."""
        sizes = [query_set.queries.content.shape[1] for query_set in self.query_sets]
        sizes.append(outputs[head.query_outputs[0]].shape[1] - sum(sizes))
        layers = [outputs, *outputs["aux_outputs"]]
        split = [
            {name: layer[name].split(sizes, dim=1) for name in head.query_outputs if name in layer} for layer in layers
        ]
        shared = [{name: layer[name] for name in head.shared_outputs} for layer in layers]

        def rows(i: int) -> list[dict[str, Tensor]]:
            return [
                {**{name: parts[i] for name, parts in layer.items()}, **common} for layer, common in zip(split, shared)
            ]

        *by_set, main = (rows(i) for i in range(len(sizes)))
        entries = [
            _training_outputs(query_set, last, earlier, head)
            for query_set, (last, *earlier) in zip(self.query_sets, by_set)
        ]
        last, *earlier = main
        first_stage = outputs.get("training_outputs", [])
        return {**outputs, **last, "aux_outputs": earlier, "training_outputs": [*first_stage, *entries]}


def _training_outputs(
    query_set: QuerySet, last: Mapping[str, Tensor], earlier: Sequence[Mapping[str, Tensor]], head: QueryHead
) -> TrainingOutputs:
    # What is predicted before the first layer does not apply to queries whose masks are given.
    skipped = head.num_initial_outputs if query_set.queries.masks is not None else 0
    return {
        **last,
        "aux_outputs": list(earlier[skipped:]),
        "name": query_set.name,
        "matches": query_set.matches,
        "repeats": query_set.repeats,
        "class_agnostic": False,
    }


def attention_mask(sizes: Sequence[int], sees_own: Sequence[bool], num_own: int) -> Tensor:
    """Return which keys each row of a decoder must not see in the self-attention.

    Every part sees itself. Added queries, which may give the answer away, are seen by no others.

    Args:
        sizes: number of rows of each part of the added queries, which are the first rows.
        sees_own: for each part, whether it also sees the head's own queries.
        num_own: number of the head's own queries, which are the last rows.
    Returns:
        (L, L) bool, True = masked.
    """
    part = torch.arange(len(sizes) + 1).repeat_interleave(torch.tensor([*sizes, num_own]))
    is_own = part == len(sizes)
    sees = torch.tensor([*sees_own, True])[part]
    return (part[:, None] != part) & ~(sees[:, None] & is_own)
