"""Losses between predicted masks and their targets."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.nn.linear import linear
from vitkit.ops.masks import pad_masks

CHUNK_VALUES = (1 << 18, 1 << 24)
"""Values of one intermediate tensor: few enough for a CPU's cache; on a GPU enough to be busy, 64 MiB."""


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


def whole_mask_losses(logits: Tensor, masks: Sequence[Tensor], input_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002) and dice loss of whole masks.

    Predictions are enlarged to the padded input's size, bilinearly. At that size nothing is kept for the backward pass,
    and only a few masks are in memory at a time.

    Args:
        logits: (M, h, w).
        masks: of each image (M_i, H_i, W_i) bool, un-padded, in the order of the logits.
        input_size: (height, width) that the logits cover.
    Returns:
        (M,) means of the focal loss with alpha 0.25 and gamma 2 over all places, and (M,) dice losses.
    """
    wanted = torch.cat([pad_masks(m, input_size) for m in masks])
    return _WholeMaskLosses.apply(logits, wanted)


class _WholeMaskLosses(torch.autograd.Function):
    """The gradients of both losses are found in the forward pass, and kept at the predictions' size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        size = wanted.shape[1:]
        rows, columns = (enlargement(*lengths, logits) for lengths in zip(logits.shape[1:], size))
        step = max(1, CHUNK_VALUES[logits.device.type == "cuda"] // size.numel())
        losses, grads = [], []
        for part, inside in zip(logits.split(step), wanted.split(step)):
            enlarged = F.interpolate(part[:, None], size=size, mode="bilinear", align_corners=False)
            both, slopes = _focal_and_dice(enlarged.flatten(1), inside.flatten(1).to(logits.dtype))
            losses.append(both)
            if ctx.needs_input_grad[0]:
                grads.append(torch.stack([rows @ linear(slope.view(-1, *size), columns) for slope in slopes]))
        ctx.save_for_backward(*grads)
        return tuple(torch.cat(losses, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        by_logits = torch.cat(ctx.saved_tensors, dim=1)
        return torch.einsum("lm,lmhw->mhw", torch.stack(upstream), by_logits), None


def enlargement(length: int, new_length: int, like: Tensor) -> Tensor:
    """(length, new_length): how much of each place each new one takes when a row is resized linearly."""
    places = torch.eye(length, dtype=like.dtype, device=like.device)
    return F.interpolate(places[None], size=new_length, mode="linear", align_corners=False)[0]


def _focal_and_dice(logits: Tensor, wanted: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """
    Args:
        logits: (M, P).
        wanted: (M, P), 0 or 1.
    Returns:
        (2, M) focal and dice losses, and the gradient (M, P) of each.
    """
    # With the sign of what is not wanted, every place has the formula of an empty one.
    z = logits * (1 - 2 * wanted)
    wrong = z.sigmoid()  # the probability of the other side
    squared = wrong.square()
    focal = F.softplus(z).mul_(squared)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] @ b[:, :, None])[:, 0, 0]

    focal_loss = (0.75 * focal.sum(1) - 0.5 * dot(focal, wanted)) / logits.shape[1]
    # The slope is that of the cross entropy, `wrong`, and that of its factor, the square.
    focal_slope = torch.addcmul(2 * focal, wrong, squared.sub_(focal, alpha=2))
    focal_slope.mul_((0.75 - wanted).div_(logits.shape[1]))

    count, missed = wanted.sum(1), dot(wrong, wanted)
    found = count - missed
    numerator, denominator = 2 * found + 1, wrong.sum(1) - missed + found + count + 1
    slope = (numerator / denominator**2)[:, None] - (2 / denominator)[:, None] * wanted
    dice_slope = slope.mul_(torch.addcmul(wrong, wrong, wrong, value=-1))
    return torch.stack((focal_loss, 1 - numerator / denominator)), (focal_slope, dice_slope)
