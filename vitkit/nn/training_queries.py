"""Queries that a decoder has only in training, in addition to those used for predictions.

A decoder's rows are, in this order: noised targets (Li et al. 2022, https://arxiv.org/abs/2203.01305), additional
groups of queries, each matched to the targets separately (Chen et al. 2022, https://arxiv.org/abs/2207.13085), and the
usual queries. A mask in the self-attention separates them, so that leaving the others out does not change the usual
ones.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.nn.attention import mask_bias

logger = logging.getLogger("vitkit")


class TrainingOnly(nn.Module):
    """A part of a head that is only used in training.

    Weights with a different such part, or without one, can be loaded: their entries for it are dropped, and it keeps
    its initial values.
    """

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Replace the entries below `prefix`, in place, by the module's own unless their shapes are the same."""
        own = self.state_dict(prefix=prefix)
        theirs = {key: value for key, value in state.items() if key.startswith(prefix)}
        if {key: value.shape for key, value in theirs.items()} == {key: value.shape for key, value in own.items()}:
            return
        if own:
            difference = "has another shape in the weights" if theirs else "is not in the weights"
            logger.info("%s is used only in training, and %s: it is newly initialised", prefix, difference)
        for key in theirs:
            del state[key]
        state |= own


@dataclass(frozen=True)
class KnownQueries:
    """P rows that start from noised targets; P is 0 if no image of the batch has a target."""

    content: Tensor
    """(B, P, d_model); zero in padding rows."""
    matches: list[tuple[Tensor, Tensor]]
    """For each image, as from a matcher: the rows that have to predict a target, and its index; int64 on the CPU."""
    num_groups: int
    """Number of equal parts of the rows that do not see each other, each with a copy of every target; at least 1."""

    @property
    def group_sizes(self) -> list[int]:
        """Number of rows in each group."""
        return [self.content.shape[1] // self.num_groups] * self.num_groups


@dataclass(frozen=True)
class DenoisingQueries(KnownQueries):
    """Known queries that start from boxes."""

    boxes_cxcywh: Tensor
    """(B, P, 4) noised boxes, within 0..1."""


@dataclass(frozen=True)
class QueryLayout:
    """The meaning of a decoder's rows.

    Outside of training there are only the usual queries: no mask, and outputs are returned unchanged.
    """

    num_queries: int
    denoising: KnownQueries | None = None
    group_sizes: Sequence[int] = ()
    """Number of rows in each additional group."""
    one_to_many_repeats: int = 0
    """Number of rows of the last of these groups that a target is matched to; 0 if that group is like the others."""

    @property
    def num_rows(self) -> int:
        """Total number of rows."""
        num_known = 0 if self.denoising is None else self.denoising.content.shape[1]
        return num_known + sum(self.group_sizes) + self.num_queries

    def attention_bias(self, like: Tensor) -> Tensor | None:
        """Return the bias of the self-attention, (L, L), in the dtype of `like`; None if all rows see each other."""
        return None if self.denoising is None and not self.group_sizes else self._bias_between_groups(like)

    @torch.compiler.disable  # different sizes of the groups would cause a recompilation
    def _bias_between_groups(self, like: Tensor) -> Tensor | None:
        denoising = [] if self.denoising is None else self.denoising.group_sizes
        if not (sum(denoising) or self.group_sizes):
            return None
        masked = training_mask(self.num_queries, denoising_sizes=denoising, group_sizes=self.group_sizes)
        return mask_bias(masked.to(like.device, non_blocking=True), like.dtype)

    def outputs(self, layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """Separate the outputs of the groups of rows.

        Args:
            layers: the outputs of each decoder layer, each (B, L, ...).
        Returns:
            the last layer's outputs for the usual queries, with aux_outputs, a list of the same for earlier layers;
            denoising: the same for the noised targets, with matches and num_groups of `DenoisingQueries`, if any;
            groups: a list of the same for each additional group, if there are any;
            one_to_many: the same for the group with `one_to_many_repeats`, with their number as repeats, if any.
        """
        num_denoising = 0 if self.denoising is None else self.denoising.content.shape[1]
        sizes = [num_denoising, *self.group_sizes, self.num_queries]
        if len(sizes) == 2 and num_denoising == 0 and self.denoising is None:
            return _with_aux_outputs(layers)
        split = [{name: value.split(sizes, dim=1) for name, value in layer.items()} for layer in layers]
        denoising, *groups, usual = (
            _with_aux_outputs([{name: parts[i] for name, parts in layer.items()} for layer in split])
            for i in range(len(sizes))
        )
        if self.denoising is not None:
            usual["denoising"] = _with_matches(denoising, self.denoising)
        if self.one_to_many_repeats:
            usual["one_to_many"] = {**groups.pop(), "repeats": self.one_to_many_repeats}
        return {**usual, "groups": groups} if groups else usual


@torch.compiler.disable  # it would make the graph specific to these numbers of targets
def _with_matches(outputs: dict[str, Any], known: KnownQueries) -> dict[str, Any]:
    return outputs | dict(matches=known.matches, num_groups=known.num_groups)


def _with_aux_outputs(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    return {**layers[-1], "aux_outputs": list(layers[:-1])}  # torch 2.6 can compile neither dict(a, b=c) nor a | b


def training_mask(num_queries: int, *, denoising_sizes: Sequence[int] = (), group_sizes: Sequence[int] = ()) -> Tensor:
    """Return which keys each row of a decoder must not see in the self-attention.

    Every group of rows sees itself. Noised targets, which would give the answer away, are seen by no other rows, but
    they see the usual queries.

    Args:
        num_queries: number of the usual queries, which are the last rows.
        denoising_sizes: number of rows in each group of noised targets, which are the first rows.
        group_sizes: number of rows in each additional group, which come in between.
    Returns:
        (L, L) bool, True = masked.
    """
    sizes = torch.tensor([*denoising_sizes, *group_sizes, num_queries])
    group = torch.arange(len(sizes)).repeat_interleave(sizes)
    is_denoising, is_usual = group < len(denoising_sizes), group == len(sizes) - 1
    return (group[:, None] != group) & ~(is_denoising[:, None] & is_usual)
