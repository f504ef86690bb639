"""Builds the training queries that a config lists."""

from collections.abc import Sequence

from torch import nn

from vitkit.errors import ConfigError
from vitkit.nn.queries import QueryHead
from vitkit.registry import TRAINING_QUERIES, Spec


def build_training_queries(specs: Sequence[Spec | nn.Module], head: nn.Module, num_classes: int) -> nn.ModuleDict:
    """Build all training queries of a model, by their `key`.

    Args:
        specs: specs of them, or modules.
        head: the head whose queries they join.
        num_classes: number of classes of the targets.
    Raises:
        ConfigError: the head has no queries, or a kind is listed twice or does not fit the head.
    """
    if not isinstance(head, QueryHead):
        raise ConfigError(
            f"training_queries: {type(head).__name__} has no queries that others can be added to. Leave them out."
        )
    kinds = nn.ModuleDict()
    for spec in specs:
        kind = TRAINING_QUERIES.build(spec, head=head, num_classes=num_classes)
        if kind.key in kinds:
            raise ConfigError(f"training_queries: {type(kind).__name__} is given twice; expected each kind once.")
        kinds[kind.key] = kind
    return kinds
