"""What TimeSformer attends to in a clip: the attention steps of a block, combined into one map over space and time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkit.backbones.timesformer import SCHEMES, Size, TimeSformer, join_groups, split_groups
from vitkit.errors import ConfigError
from vitkit.nn.attention import AttentionRecorder
from vitkit.protocols import child


class ClipAttention(NamedTuple):
    """The attention in one block, averaged over its heads."""

    class_token: Tensor
    """(h, w, T): the class token's attention in the block's last step, computed separately for each group of tokens."""
    steps: Sequence[tuple[str, Tensor]]
    """The name of each step, and its attention weights (G, S, S) within each of G groups, without the class token."""
    size: Size

    def of_token(self, row: int, column: int, frame: int) -> Tensor:
        """Return (h, w, T): how much a token attends to every token through all steps of the block.

        The weights of the steps are multiplied, beginning with the last step, which attends to the outputs of the
        earlier ones. Residual connections, by which a token keeps its own values, are left out.
        """
        weights = torch.zeros(1, *self.size, 1)
        weights[0, row, column, frame] = 1.0
        for step, attention in reversed(self.steps):
            seen = split_groups(weights, step)[0].transpose(1, 2) @ attention  # (G, 1, S)
            weights = join_groups(seen.transpose(1, 2)[None], step, self.size)
        return weights[0, ..., 0]


@torch.no_grad()
def clip_attention(model: nn.Module, clip: Tensor, block: int | None = None) -> ClipAttention:
    """Run a model on a clip and keep the attention of one block.

    Args:
        model: a Classifier on a TimeSformer, in evaluation mode.
        clip: (1, 3, T, H, W) uint8, or float, normalised.
        block: index from 0; None: the last.
    Raises:
        ConfigError: the backbone is not a TimeSformer, or has no such block.
    """
    backbone = child(model, "backbone")
    if not isinstance(backbone, TimeSformer):
        raise ConfigError(
            f"{type(backbone or model).__name__}: attention over space and time is drawn of TimeSformer alone."
        )
    last = len(backbone.blocks) - 1
    block = last if block is None else block
    if not 0 <= block <= last:
        raise ConfigError(f"block: got {block}; the model's blocks are 0 to {last}.")
    with AttentionRecorder(backbone.blocks[block]) as maps:
        model(clip)
    height, width = (-(-side // backbone.patch_embed.patch_size) for side in clip.shape[-2:])
    return _joined({name: calls[0] for name, calls in maps.items()}, backbone.attention, (height, width, clip.shape[2]))


def _joined(maps: Mapping[str, Tensor], scheme: str, size: Size) -> ClipAttention:
    # Attention within frames runs as joint attention over clips of one frame: the groups are the frames.
    names = ("spatial",) if scheme == "space" else SCHEMES[scheme]
    steps = []
    for step in names:
        attention = maps["attn" if step == names[-1] else f"{step}_attn"].mean(dim=1).float().cpu()  # (G, S, S)
        has_class_token = int(step != "temporal")
        steps.append((step, attention[:, has_class_token:, has_class_token:]))
    class_token = join_groups(attention[None, :, 0, 1:, None], names[-1], size)[0, ..., 0]
    return ClipAttention(class_token, steps, size)
