"""Focal and dice losses of full masks, as published."""

import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss


def whole_mask_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses of (M, h, w) logits, upsampled bilinearly, and (M, H, W) targets: (M,) focal and (M,) dice."""
    logits = F.interpolate(logits[:, None], size=targets.shape[1:], mode="bilinear", align_corners=False).flatten(1)
    targets = targets.flatten(1).to(logits.dtype)
    return sigmoid_focal_loss(logits, targets).mean(1), dice_loss(logits, targets)


def dice_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute 1 - (2 |A B| + 1) / (|A| + |B| + 1) (Milletari et al. 2016, https://arxiv.org/abs/1606.04797).

    Args:
        logits: (M, P).
        targets: (M, P) in 0..1.
    Returns:
        (M,) losses.
    """
    p = logits.sigmoid()
    return 1 - (2 * (p * targets).sum(1) + 1) / (p.sum(1) + targets.sum(1) + 1)
