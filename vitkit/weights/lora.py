"""Merges LoRA's low-rank updates into the weights of a checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.ops.low_rank import JOINT_WEIGHT, WEIGHT, low_rank_update

_PAIR = re.compile(r"(.+)\.lora\.(\w+)\.([ab])")
"""Entries of the matrices A and B: layer, part, matrix."""


def merge_pairs(state: Mapping[str, Tensor], about: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Return a model's weights with the low-rank updates added to those of their layers.

    Args:
        state: with the entries of the pairs, see `vitkit.nn.lora`.
        about: the `rank` and `alpha` of the run.
        name: name of the checkpoint, for errors.
    Raises:
        CheckpointError: a layer's weights are missing, or have another shape than its update.
    """
    state = dict(state)
    pairs: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key in list(state):
        if match := _PAIR.fullmatch(key):
            layer, part, matrix = match.groups()
            pairs.setdefault(layer, {}).setdefault(part, {})[matrix] = state.pop(key)
    scale = about["alpha"] / about["rank"]
    for layer, parts in pairs.items():
        key = next((key for leaf in (WEIGHT, JOINT_WEIGHT) if (key := f"{layer}.{leaf}") in state), "")
        update = scale * low_rank_update({part: (pair["a"], pair["b"]) for part, pair in parts.items()})
        weight = state.get(key)
        if weight is None or (len(weight), weight[0].numel()) != update.shape:
            found = "no weights" if weight is None else f"weights {tuple(weight.shape)}"
            raise CheckpointError(
                f"{name}: has an update {tuple(update.shape)} of {layer} and {found} for it; expected all weights of "
                "the model beside what LoRA trained. Train again, or get a complete file."
            )
        state[key] = weight + update.view_as(weight).to(weight)
    return state
