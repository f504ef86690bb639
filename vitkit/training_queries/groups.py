"""Additional queries of the head's kind, with which each target is matched several times in training."""

from collections.abc import Sequence

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.queries import QueryHead
from vitkit.registry import TRAINING_QUERIES
from vitkit.structures import DetectionTarget, QuerySet


@TRAINING_QUERIES.register
class QueryGroups(nn.Module):
    """Groups of queries that are each matched to the targets one-to-one (Group DETR, Chen et al. 2022,
    https://arxiv.org/abs/2207.13085). They share the decoder, and see only their own group; losses are averaged.

    Args:
        head: the head whose queries the others are like.
        groups: number of groups, including the head's own queries. If the head makes proposals, each has a first
            stage of its own.
    Raises:
        ConfigError: there are fewer than two groups, or the head makes no further queries.
    """

    key = "groups"

    def __init__(self, head: QueryHead, num_classes: int, *, groups: int):
        super().__init__()
        _check_makes_queries(self, head)
        if groups < 2:
            raise ConfigError(f"groups={groups}: expected at least 2, including the head's own queries.")
        count = (groups - 1) * head.num_queries
        self.proposals = nn.ModuleList()
        self.embed = head.learned_vectors(count) if head.learned_channels else None
        self.num_selected = count if head.selects_boxes else 0
        self.num_added = groups - 1
        stages = [head.make_proposals() for _ in range(groups - 1)]
        self.proposals.extend(stage for stage in stages if stage is not None)

    def forward(self, head: QueryHead, targets: Sequence[DetectionTarget], selected: Tensor | None) -> list[QuerySet]:
        """Make the groups for a batch."""
        learned = [None] * self.num_added
        if self.embed is not None:
            learned = [part.expand(len(targets), -1, -1) for part in self.embed.weight.chunk(self.num_added)]
        boxes = [None] * self.num_added if selected is None else selected.chunk(self.num_added, dim=1)
        return [QuerySet(name="", queries=head.make_queries(part, b)) for part, b in zip(learned, boxes)]


@TRAINING_QUERIES.register
class OneToManyQueries(nn.Module):
    """A set of queries in which each target is matched to several (H-DETR, Jia et al. 2022,
    https://arxiv.org/abs/2207.13080); its losses are added as terms of their own.

    Args:
        head: the head whose queries the others are like.
        num_queries: number of queries.
        repeats: number of queries that each target is matched to, a divisor of `num_queries`.
    Raises:
        ConfigError: a number is out of range, or the head makes no further queries.
    """

    key = "one_to_many"
    proposals = ()

    def __init__(self, head: QueryHead, num_classes: int, *, num_queries: int, repeats: int = 6):
        super().__init__()
        _check_makes_queries(self, head)
        if num_queries < 1 or repeats < 1:
            raise ConfigError(f"num_queries={num_queries}, repeats={repeats}: expected at least 1.")
        if num_queries % repeats:
            below, above = num_queries // repeats * repeats, (num_queries // repeats + 1) * repeats
            raise ConfigError(
                f"num_queries={num_queries} is not divisible by repeats={repeats}, the number of queries that each "
                f"target is matched to: set num_queries to {f'{below} or ' if below else ''}{above}."
            )
        if type(head).make_proposals is not QueryHead.make_proposals:
            raise ConfigError(
                f"OneToManyQueries: the first stage of {type(head).__name__} selects boxes for groups as large as its "
                "own queries. Choose QueryGroups."
            )
        self.repeats = repeats
        self.embed = head.learned_vectors(num_queries) if head.learned_channels else None
        self.num_selected = num_queries if head.selects_boxes else 0

    def forward(self, head: QueryHead, targets: Sequence[DetectionTarget], selected: Tensor | None) -> list[QuerySet]:
        """Make the set for a batch."""
        learned = None if self.embed is None else self.embed.weight.expand(len(targets), -1, -1)
        return [QuerySet(name="many", queries=head.make_queries(learned, selected), repeats=self.repeats)]


def _check_makes_queries(kind: nn.Module, head: QueryHead) -> None:
    if not head.can_make_queries():
        raise ConfigError(
            f"{type(kind).__name__} needs a head that can make further queries, unlike {type(head).__name__}, whose "
            "queries are locations of the image. Leave it out, or choose another head."
        )
