"""Image tensors on the device: normalisation and padding."""

import torch
import torch.nn.functional as F
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of RGB values in 0..1, as are the deviations."""
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize_images(images: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Pixels to what ImageNet backbones were trained on; images that are float already pass unchanged.

    Args:
        images: (B, 3, H, W) uint8 RGB in 0..255, or float, already normalised.
        padding_mask: (B, H, W) bool, True = padding; padded places of uint8 images become 0 after normalisation.
    Returns:
        (B, 3, H, W) float.
    """
    if images.is_floating_point():
        return images
    mean, std = (torch.tensor(c, device=images.device).view(3, 1, 1) * 255 for c in (IMAGENET_MEAN, IMAGENET_STD))
    images = images.float().sub_(mean).div_(std)
    return images if padding_mask is None else images.masked_fill_(padding_mask[:, None], 0.0)


def resize_mask(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Nearest-neighbour resizing of a (B, H, W) bool mask to (B, *size), as the official detectors do it."""
    return F.interpolate(mask[:, None].float(), size=size)[:, 0].bool()


def pad_to_multiple(images: Tensor, padding_mask: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Pads at the right and bottom until height and width are multiples.

    Args:
        images: (B, C, H, W), padded with 0.
        padding_mask: (B, H, W) bool, padded with True.
    """
    height, width = images.shape[-2:]
    margins = (0, -width % multiple, 0, -height % multiple)
    return F.pad(images, margins), F.pad(padding_mask, margins, value=True)


def unpadded_sizes(images: Tensor, padding_mask: Tensor | None) -> Tensor:
    """(B, 2) int64: height and width of each image without padding."""
    if padding_mask is None:
        return torch.tensor([images.shape[-2:]] * len(images))
    return torch.stack([(~padding_mask[:, :, 0]).sum(1), (~padding_mask[:, 0, :]).sum(1)], dim=1)
