"""Additional groups of queries in training, by which each target is matched several times. Inference has none.

Group DETR (Chen et al. 2022, https://arxiv.org/abs/2207.13085) has K equal groups with their own learned queries, each
matched one-to-one; they share the decoder, and self-attention is restricted to each group. H-DETR (Jia et al. 2022,
https://arxiv.org/abs/2207.13080) has one additional, larger group, in which each target is matched to several queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.training_queries import KnownQueries, QueryLayout, TrainingOnly


@dataclass(frozen=True)
class GroupSettings:
    """Groups of queries in training, in addition to those used for predictions."""

    groups: int = 1
    """Number of groups of `num_queries` queries in training, one of which inference uses; their losses are averaged."""
    one_to_many_queries: int = 0
    """Number of queries in one more group in training, whose losses are added as separate terms."""
    one_to_many_repeats: int = 6
    """Number of queries in that group that each target is matched to; a divisor of its size."""

    def check(self) -> None:
        """Raise ConfigError if a number is out of range."""
        queries, repeats = self.one_to_many_queries, self.one_to_many_repeats
        if self.groups < 1:
            raise ConfigError(f"model.groups: got {self.groups}; expected at least 1, the queries that predict.")
        if queries < 0 or repeats < 1:
            raise ConfigError(
                f"model.one_to_many_queries={queries}, model.one_to_many_repeats={repeats}: expected at least 0 and 1."
            )
        if queries % repeats:
            below, above = queries // repeats * repeats, (queries // repeats + 1) * repeats
            raise ConfigError(
                f"model.one_to_many_queries={queries} does not divide by model.one_to_many_repeats={repeats}, the "
                f"queries per target: set {f'{below} or ' if below else ''}{above} queries, or a divisor of {queries}."
            )

    def sizes(self, num_queries: int) -> list[int]:
        """Return the number of queries in each additional group."""
        many = [self.one_to_many_queries] if self.one_to_many_queries else []
        return [num_queries] * (self.groups - 1) + many


@dataclass(frozen=True)
class QuerySettings(GroupSettings):
    """Settings of a model's queries."""

    num_queries: int = 100
    """Number of queries, and so the maximum number of objects predicted per image."""


class GroupQueries(TrainingOnly):
    """The additional groups of a head, and their learned vectors.

    Args:
        num_queries: number of queries used for predictions.
        channels: length of a query's vector; 0 if queries have none.
    """

    def __init__(self, settings: GroupSettings, num_queries: int, channels: int):
        super().__init__()
        settings.check()
        self.settings = settings
        self.num_queries = num_queries
        self.num_further = sum(settings.sizes(num_queries))
        self.embed = nn.Embedding(self.num_further, channels) if self.num_further and channels else None

    def layout(self, known: KnownQueries | None = None) -> QueryLayout:
        """Return the layout of a decoder's rows: known queries, additional groups in training, the usual queries."""
        settings = self.settings
        if not self.training or not self.num_further:
            return QueryLayout(self.num_queries, known)
        repeats = settings.one_to_many_repeats if settings.one_to_many_queries else 0
        return QueryLayout(self.num_queries, known, settings.sizes(self.num_queries), repeats)

    def before(self, usual: Tensor) -> Tensor:
        """Return the vectors of the additional groups, in training, followed by the usual ones, (Q, channels)."""
        return torch.cat([self.embed.weight, usual]) if self.training and self.embed is not None else usual
