"""The queries of a decoder, and the one place where a model adds others to them in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn


class Queries(NamedTuple):
    """The Q queries that a decoder starts from."""

    content: Tensor
    """(B, Q, d_model)."""
    positions: Tensor | None = None
    """(B, Q, d_model), added to the content in every attention; None if the decoder computes them from boxes."""
    references: Tensor | None = None
    """(B, Q, 2) points (x, y) or (B, Q, 4) boxes cxcywh, in 0..1 of the un-padded image; None without any."""
    bias: Tensor | None = None
    """(Q, Q), added to the scores of the self-attention; None if all queries see each other."""
    num_parts: int = 1
    """Number of equal parts of the queries that do not see each other, for heads with `attends_in_parts`; more than 1
    only without a bias."""
    masks: Callable[[tuple[int, int]], Tensor] | None = None
    """Returns the masks (B, P, h, w) bool, in a given size (h, w), within which the first P queries attend instead of
    within those that they predict; None if there are no such queries."""


class QueryHead(nn.Module, ABC):
    """Base of heads with queries: what sets of training queries need to know of a head.

    It is built with `feature_info`, `num_classes` and `num_queries`, which the model sets. Its constructor sets
    `d_model`, `num_queries` and, if queries are made from learned vectors, `learned_channels`; its class sets
    `query_outputs`, and `reference` if queries have references. Heads that groups of queries can be added to also have
    `make_queries`, see `MakesQueries`.
    """

    d_model: int
    num_queries: int
    learned_channels: int = 0
    """Channels of the learned vector that each query is made from; 0 if queries are made only from the image."""
    reference: Literal["none", "points", "boxes"] = "none"
    """What the queries' references are. Boxes can be denoised with all but "points"; with "none", the positions of such
    queries are made from their boxes."""
    selects_boxes: bool = False
    """Whether the boxes that queries start from are selected from the image."""
    attends_in_parts: bool = False
    """Whether the self-attention reads `Queries.num_parts`, which is much faster than a bias that separates parts."""
    attends_in_masks: bool = False
    """Whether queries attend within masks, and so read `Queries.masks`."""
    level_names: Sequence[str] = ()
    """Names of the maps that decoder layers attend to in turn; empty: only the coarsest, or all at once."""
    rounds_padding: bool = True
    """Whether sampled points are relative to the padding rounded to each map's locations; False: in pixels."""
    query_outputs: tuple[str, ...]
    """Names of the outputs with a row for each query, (B, Q, ...)."""
    shared_outputs: tuple[str, ...] = ()
    """Names of the outputs that the predictions of all queries refer to."""
    num_initial_outputs: int = 0
    """Number of `aux_outputs` that are predicted before the first decoder layer."""

    @abstractmethod
    def forward(
        self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None, *, added: AddedQueries | None = None
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


@runtime_checkable
class MakesQueries(Protocol):
    """A head that can make further queries like its own; heads whose queries are locations of the image cannot."""

    def make_queries(self, learned: Tensor | None, boxes: Tensor | None = None) -> Queries:
        """Make queries as the head's own are made.

        Args:
            learned: (B, Q, learned_channels), the learned vector of each query; None if `learned_channels` is 0. Q may
                differ from `num_queries`.
            boxes: (B, Q, 4) cxcywh in 0..1, for heads that select queries' boxes from the image; None for others.
        """


class AddedQueries(ABC):
    """Queries that a model adds to its head's own for one batch of training, see `vitkit.training_queries`."""

    num_selected: int = 0
    """Number of boxes that a head which selects boxes from the image has to select beyond its own queries'."""
    proposals: Sequence[nn.Module] = ()
    """The layers that select the boxes of each added group, as many boxes as the head has queries; empty if all groups
    share the head's, see `QueryHead.make_proposals`."""

    @abstractmethod
    def join(self, queries: Queries, head: QueryHead, selected: Tensor | None = None) -> Queries:
        """Return the added queries followed by the head's own.

        Args:
            queries: the head's own.
            selected: (B, num_selected, 4), the boxes that were selected for added queries; from `proposals`, if there
                are any, those of all groups.
        """
