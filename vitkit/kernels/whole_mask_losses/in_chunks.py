"""Focal and dice losses of full masks, a few masks at a time, with gradients stored at the predictions' size."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.kernels.linear import linear

CHUNK_VALUES = (1 << 18, 1 << 24)
"""Number of values in an intermediate tensor, on a CPU and on a GPU: few enough for a CPU's cache; enough to keep a GPU
busy, 64 MiB."""


class WholeMaskLosses(torch.autograd.Function):
    """Computes the gradients of both losses in the forward pass, and saves nothing of the targets' size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the focal and dice losses of masks (M, h, w), both (M,), at the size of the targets (M, H, W)."""
        size = targets.shape[1:]
        rows, columns = (upsampling_matrix(*lengths, logits) for lengths in zip(logits.shape[1:], size))
        step = max(1, CHUNK_VALUES[logits.device.type == "cuda"] // size.numel())
        losses, grads = [], []
        for part, inside in zip(logits.split(step), targets.split(step)):
            upsampled = F.interpolate(part[:, None], size=size, mode="bilinear", align_corners=False)
            both, slopes = _focal_and_dice(upsampled.flatten(1), inside.flatten(1).to(logits.dtype))
            losses.append(both)
            if ctx.needs_input_grad[0]:
                grads.append(torch.stack([rows @ linear(slope.view(-1, *size), columns) for slope in slopes]))
        ctx.save_for_backward(*grads)
        return tuple(torch.cat(losses, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Scale the gradients that the forward pass computed."""
        by_logits = torch.cat(ctx.saved_tensors, dim=1)
        return torch.einsum("lm,lmhw->mhw", torch.stack(grads), by_logits), None


def upsampling_matrix(length: int, new_length: int, like: Tensor) -> Tensor:
    """Return the weight of each element in each new one when a row is resized linearly, (length, new_length)."""
    identity = torch.eye(length, dtype=like.dtype, device=like.device)
    return F.interpolate(identity[None], size=new_length, mode="linear", align_corners=False)[0]


def _focal_and_dice(logits: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute both losses, and their gradients with respect to the logits in closed form.

    Args:
        logits: (M, P).
        targets: (M, P), 0 or 1.
    Returns:
        (2, M) focal and dice losses, and the gradient (M, P) of each.
    """
    # With the sign flipped inside the mask, the formula for pixels outside applies to all pixels.
    z = logits * (1 - 2 * targets)
    wrong = z.sigmoid()  # the probability of the wrong class
    squared = wrong.square()
    focal = F.softplus(z).mul_(squared)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] @ b[:, :, None])[:, 0, 0]

    focal_loss = (0.75 * focal.sum(1) - 0.5 * dot(focal, targets)) / logits.shape[1]
    # The derivative is the sum of that of the cross entropy, `wrong`, and that of its factor, the square.
    focal_slope = torch.addcmul(2 * focal, wrong, squared.sub_(focal, alpha=2))
    focal_slope.mul_((0.75 - targets).div_(logits.shape[1]))

    area, missed = targets.sum(1), dot(wrong, targets)
    overlap = area - missed
    numerator, denominator = 2 * overlap + 1, wrong.sum(1) - missed + overlap + area + 1
    slope = (numerator / denominator**2)[:, None] - (2 / denominator)[:, None] * targets
    dice_slope = slope.mul_(torch.addcmul(wrong, wrong, wrong, value=-1))
    return torch.stack((focal_loss, 1 - numerator / denominator)), (focal_slope, dice_slope)
