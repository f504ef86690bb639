"""Losses between predicted masks and their targets."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.masks import pad_masks


def dice_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """1 - (2 |A B| + 1) / (|A| + |B| + 1) (Milletari et al. 2016, https://arxiv.org/abs/1606.04797).

    Args:
        logits: (M, P).
        wanted: (M, P) in 0..1.
    Returns:
        (M,).
    """
    p = logits.sigmoid()
    return 1 - (2 * (p * wanted).sum(1) + 1) / (p.sum(1) + wanted.sum(1) + 1)


def whole_masks(logits: Tensor, masks: Sequence[Tensor], input_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Predictions and targets, place by place, at the padded input's size.

    Args:
        logits: (M, h, w).
        masks: of each image (M_i, H_i, W_i) bool, un-padded, in the order of the logits.
        input_size: (height, width) that the logits cover.
    Returns:
        logits and wanted values in 0..1, each (M, P).
    """
    wanted = torch.cat([pad_masks(m, input_size) for m in masks]).float()
    logits = F.interpolate(logits[:, None], size=input_size, mode="bilinear", align_corners=False)[:, 0]
    return logits.flatten(1), wanted.flatten(1)
