"""The queries of a decoder, and the training queries that a head adds to them.

A decoder's rows are those of each set of training queries, in the order of the config, and then the head's own queries.
A mask in the self-attention separates them: leaving the sets out does not change what the head predicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.nn.attention import mask_bias
from vitkit.registry import MASK_HEADS, Spec
from vitkit.structures import DetectionTarget, FeatureInfo, QuerySet


class Queries(NamedTuple):
    """The Q queries that a decoder starts from."""

    content: Tensor
    """(B, Q, d_model); or (B, Q, 1 + K, d_model), each query being an instance and its K keypoints."""
    positions: Tensor | None = None
    """(B, Q, d_model), added to the content in every attention; None if the decoder computes them from boxes."""
    references: Tensor | None = None
    """(B, Q, 2) or (B, Q, 1 + K, 2) points (x, y), or (B, Q, 4) boxes cxcywh, in 0..1 of the image without padding."""
    bias: Tensor | None = None
    """(Q, Q), added to the scores of the self-attention; None if all queries see each other."""
    num_parts: int = 1
    """Number of equal parts of the queries that do not see each other, for heads with `attends_in_parts`; more than 1
    only without a bias."""
    masks: Callable[[tuple[int, int]], Tensor] | None = None
    """Returns the masks (B, P, h, w) bool, in a given size (h, w), within which the first P queries attend instead of
    within those that they predict; None if there are no such queries."""


class QueryHead(nn.Module, ABC):
    """Base of heads with queries, which sets of training queries can be added to.

    It is built with `feature_info`, `num_classes` and `num_queries`, which the model sets. Its constructor sets
    `d_model`, `num_queries` and, if queries are made from learned vectors, `learned_channels`; its class sets
    `query_outputs`, and `reference` if queries have references. Heads that groups of queries can be added to also have
    `make_queries`.
    """

    d_model: int
    num_queries: int
    learned_channels: int = 0
    """Channels of the learned vector that each query is made from; 0 if queries are made only from the image."""
    reference: Literal["none", "points", "boxes", "keypoints"] = "none"
    """What the queries' references are. Boxes are denoised with "boxes", and with "none", where the positions of such
    queries are made from their boxes; keypoints with "keypoints"."""
    selects_boxes: bool = False
    """Whether the boxes that queries start from are selected from the image."""
    attends_in_parts: bool = False
    """Whether the self-attention reads `Queries.num_parts`, which is much faster than a bias that separates parts."""
    attends_in_masks: bool = False
    """Whether queries attend within masks, and so read `Queries.masks`."""
    level_names: Sequence[str] = ()
    """Names of the maps that decoder layers attend to in turn; empty: only the coarsest, or all at once."""
    rounds_padding: bool = True
    """Whether an image ends where the last location of a map that it reaches into does; False: with its last pixel."""
    query_outputs: tuple[str, ...]
    """Names of the outputs with a row for each query, (B, Q, ...)."""
    shared_outputs: tuple[str, ...] = ()
    """Names of the outputs that the predictions of all queries refer to."""
    num_initial_outputs: int = 0
    """Number of `aux_outputs` that are predicted before the first decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_head: nn.Module | None = None
        """Predicts a mask for each query, see `add_masks`; None: there are no masks."""

    @abstractmethod
    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict from the maps.

        Args:
            features: the neck's maps, (B, channels, h, w).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
            added: other queries in training: `queries = added.join(queries, self)` puts them before the head's own.
                From there on the head treats all alike, but passes `queries.bias` to the self-attention.
        Returns:
            the last layer's outputs, the rows of `added` included, and `aux_outputs`, a list of the same for each
            earlier layer, first layer first. `SetCriterion` reads pred_logits and pred_boxes.
        """

    def add_masks(self, masks: Spec | None, feature_info: Mapping[str, FeatureInfo], num_layers: int) -> None:
        """Build what predicts a mask for each query, for `with_masks`.

        Args:
            masks: its spec, such as "BlockMasks" or "PyramidMasks"; None: there are no masks.
            feature_info: description of the maps that `with_masks` passes to it.
            num_layers: number of decoder layers.
        """
        if masks is not None:
            sizes = dict(feature_info=feature_info, d_model=self.d_model, num_layers=num_layers)
            self.mask_head = MASK_HEADS.build(masks, **sizes)
            self.query_outputs = (*self.query_outputs, "mask_embed")
            self.shared_outputs = (*self.shared_outputs, "mask_features")

    def with_masks(
        self,
        outputs: dict[str, Any],
        features: Mapping[str, Tensor],
        states: Sequence[Tensor],
        padding_mask: Tensor | None,
    ) -> dict[str, Any]:
        """Add the factors of masks to a head's outputs, if it predicts masks.

        They are mask_embed (B, Q, C) and mask_features (B, C, h, w); a mask is their product, see `mask_logits`, which
        is computed only for queries whose masks are wanted.

        Args:
            features: the maps, fine to coarse.
            states: those of all queries after each decoder layer, (B, Q, d_model).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
        """
        if self.mask_head is None:
            return outputs
        *earlier, last = self.mask_head(features, states, padding_mask)
        aux_outputs = outputs["aux_outputs"]
        # What is predicted before a layer has refined its boxes.
        initial = [last if self.mask_head.initial else {}] * (len(aux_outputs) - len(earlier))
        aux_outputs = [layer | factors for layer, factors in zip(aux_outputs, [*initial, *earlier])]
        return {**outputs, **last, "aux_outputs": aux_outputs}

    def learned_vectors(self, count: int) -> nn.Embedding:
        """Return new learned vectors for further queries, (count, learned_channels)."""
        return nn.Embedding(count, self.learned_channels)

    def make_proposals(self) -> nn.Module | None:
        """Return new layers that select the boxes of another group of queries; None if all groups share the head's."""
        return None

    def queries_at(self, content: Tensor, boxes: Tensor) -> Queries:
        """Make queries that start from boxes, for heads whose `reference` is "boxes".

        Args:
            content: (B, Q, d_model).
            boxes: (B, Q, 4) cxcywh in 0..1.
        """
        return Queries(content, references=boxes)

    def make_queries(self, learned: Tensor | None, boxes: Tensor | None = None) -> Queries:
        """Make queries as the head's own are made; heads whose queries are locations of the image cannot.

        Args:
            learned: (B, Q, learned_channels), the learned vector of each query; None if `learned_channels` is 0. Q may
                differ from `num_queries`.
            boxes: (B, Q, 4) cxcywh in 0..1, for heads that select queries' boxes from the image; None for others.
        """
        raise NotImplementedError

    @classmethod
    def can_make_queries(cls) -> bool:
        """Return whether the head has `make_queries`."""
        return cls.make_queries is not QueryHead.make_queries


class TrainingQueries:
    """The sets of queries that a model adds to its head's own for one batch of training.

    Numbers of queries change with the targets, so compiled models run these methods outside of their graphs.

    Args:
        kinds: modules as in `vitkit.training_queries`.
        targets: of the images; masks, if any, of the padded images.
    """

    def __init__(self, kinds: Iterable[nn.Module], targets: Sequence[DetectionTarget]):
        self.kinds = list(kinds)
        self.targets = targets
        self.num_selected = sum(kind.num_selected for kind in self.kinds)
        """Number of boxes that a head which selects boxes from the image has to select beyond its own queries'."""
        self.proposals = [stage for kind in self.kinds for stage in kind.proposals]
        """The layers that select the boxes of each added group, as many boxes as the head has queries; empty if all
        groups share the head's, see `QueryHead.make_proposals`."""
        self.query_sets: list[QuerySet] = []

    @torch.compiler.disable
    def join(self, queries: Queries, head: QueryHead, selected: Tensor | None = None) -> Queries:
        """Return the sets' queries followed by the head's own.

        Args:
            queries: the head's own.
            selected: (B, num_selected, 4), the boxes that were selected for the sets; from `proposals`, if there are
                any, those of all groups.
        """
        counts = [kind.num_selected for kind in self.kinds]
        boxes = [None] * len(counts) if selected is None else selected.split(counts, dim=1)
        query_sets = [
            query_set for kind, part in zip(self.kinds, boxes) for query_set in kind(head, self.targets, part)
        ]
        # Masks are for the first queries.
        self.query_sets = sorted(query_sets, key=lambda query_set: query_set["queries"].masks is None)
        all_queries = [*(query_set["queries"] for query_set in self.query_sets), queries]

        def join(name: str) -> Tensor | None:
            values = [getattr(part, name) for part in all_queries]
            return None if values[-1] is None else torch.cat(values, dim=1)

        content, num_own = join("content"), queries.content.shape[1]
        in_parts = head.attends_in_parts and self._are_like_own(num_own)
        return Queries(
            content,
            join("positions"),
            join("references"),
            None if in_parts else self._attention_bias(num_own, content),
            len(all_queries) if in_parts else 1,
            next((part.masks for part in all_queries if part.masks is not None), None),
        )

    def _are_like_own(self, num_own: int) -> bool:
        """Whether all sets are as large as the head's own queries, and see only themselves."""
        return all(
            part_sizes(query_set) == [num_own] and not query_set.get("sees_own", False) for query_set in self.query_sets
        )

    def _attention_bias(self, num_own: int, like: Tensor) -> Tensor | None:
        """Return the bias of the self-attention, (L, L); None if there are no added queries in this batch."""
        sizes = [size for query_set in self.query_sets for size in part_sizes(query_set)]
        if not sum(sizes):
            return None
        sees_own = [query_set.get("sees_own", False) for query_set in self.query_sets for _ in part_sizes(query_set)]
        masked = attention_mask(sizes, sees_own, num_own)
        return mask_bias(masked.to(like.device, non_blocking=True), like.dtype)

    @torch.compiler.disable
    def separate(self, outputs: Mapping[str, Any], head: QueryHead) -> dict[str, Any]:
        """Separate a head's outputs into those of its own queries and those of each set."""
        sizes = [query_set["queries"].content.shape[1] for query_set in self.query_sets]
        sizes.append(outputs[head.query_outputs[0]].shape[1] - sum(sizes))
        layers = [outputs, *outputs["aux_outputs"]]
        split = [
            {name: layer[name].split(sizes, dim=1) for name in head.query_outputs if name in layer} for layer in layers
        ]
        shared = [{name: layer[name] for name in head.shared_outputs if name in layer} for layer in layers]

        def rows(i: int) -> list[dict[str, Tensor]]:
            return [
                {**{name: parts[i] for name, parts in layer.items()}, **common} for layer, common in zip(split, shared)
            ]

        *by_set, main = (rows(i) for i in range(len(sizes)))
        entries = [
            _with_outputs(query_set, last, earlier, head)
            for query_set, (last, *earlier) in zip(self.query_sets, by_set)
        ]
        last, *earlier = main
        first_stage = outputs.get("training_outputs", [])
        return {**outputs, **last, "aux_outputs": earlier, "training_outputs": [*first_stage, *entries]}


@torch.compiler.disable
def training_queries_of(kinds: Iterable[nn.Module], targets: Sequence[DetectionTarget]) -> TrainingQueries:
    """Return the training queries of a batch, outside of a compiled model's graph."""
    return TrainingQueries(kinds, targets)


def run_with_training_queries(
    head: QueryHead,
    kinds: Iterable[nn.Module],
    features: Mapping[str, Tensor],
    padding_mask: Tensor | None,
    targets: Sequence[DetectionTarget],
) -> dict[str, Any]:
    """Run a head with training queries added to its own.

    Args:
        features, padding_mask: inputs of the head.
        kinds, targets: see `TrainingQueries`.
    Returns:
        the head's outputs, with those of each set in the list `training_outputs`.
    """
    added = training_queries_of(kinds, targets)
    return added.separate(head(features, padding_mask, added=added), head)


def part_sizes(query_set: QuerySet) -> list[int]:
    """Return the number of queries in each part of a set."""
    num_parts = query_set.get("num_parts", 1)
    return [query_set["queries"].content.shape[1] // num_parts] * num_parts


def _with_outputs(
    query_set: QuerySet, last: Mapping[str, Tensor], earlier: Sequence[Mapping[str, Tensor]], head: QueryHead
) -> QuerySet:
    """Return a set as criteria read it, with its predictions in place of its queries."""
    # What is predicted before the first layer does not apply to queries whose masks are given.
    skipped = head.num_initial_outputs if query_set["queries"].masks is not None else 0
    return {
        **last,
        "aux_outputs": list(earlier[skipped:]),
        "name": query_set["name"],
        "matches": query_set.get("matches"),
        "repeats": query_set.get("repeats", 1),
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
