"""Image tensors on the device: normalization and padding."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.protocols.backbone import IMAGENET_MEAN, IMAGENET_STD, Backbone, with_defaults


def check_pixel_statistics(
    mean: Sequence[float], std: Sequence[float], in_channels: int = 3
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel's values in 0..1 as tuples.

    Raises:
        ConfigError: they are not a number for each channel, or seem to be for pixels in 0..255, or a standard deviation
            is not positive.
    """
    mean, std = tuple(mean), tuple(std)
    if in_channels < 1:
        raise ConfigError(f"in_channels={in_channels}: expected at least 1.")
    if in_channels == 3:
        expected, remedy = "three numbers {}, for R, G, B", "Divide those of 0..255 by 255."
    else:
        expected = f"a number {{}} for each of in_channels={in_channels}"
        remedy = "The doctor measures them (vitkit doctor CONFIG --only images)."
    if len(mean) != in_channels or not all(0 <= value <= 1 for value in mean):
        raise ConfigError(f"pixel_mean={mean}: expected {expected.format('in 0..1')}. {remedy}")
    if len(std) != in_channels or not all(0 < value <= 1 for value in std):
        raise ConfigError(f"pixel_std={std}: expected {expected.format('above 0 and up to 1')}. {remedy}")
    return mean, std


def pixel_statistics(backbone: nn.Module | Backbone) -> dict[str, Sequence[float]]:
    """Return `mean` and `std` for `normalize_images`: the backbone's, or ImageNet's if it specifies none."""
    stated = with_defaults(backbone, Backbone)
    return dict(mean=stated.pixel_mean, std=stated.pixel_std)


def in_channels(backbone: nn.Module | Backbone) -> int:
    """Return the number of channels of a backbone's images: as many as its pixel statistics have, or 3."""
    return len(pixel_statistics(backbone)["mean"])


def float_statistics(backbone: Any) -> dict[str, Sequence[float]]:
    """Return the `mean` and `std` that images in float are already normalized by: ImageNet's for RGB, or else those of
    the backbone, or of a classifier."""
    statistics = pixel_statistics(backbone)
    return statistics if len(statistics["mean"]) != 3 else dict(mean=IMAGENET_MEAN, std=IMAGENET_STD)


def check_images(owner: str, images: Tensor, *, min_size: int = 1, clips: bool = False, in_channels: int = 3) -> None:
    """Raise DataError if images have a wrong shape, or are too small.

    Args:
        owner: the name of the backbone that takes them, for messages.
        min_size: minimum height and width, in pixels.
        clips: whether it takes (B, 3, T, H, W) rather than (B, 3, H, W).
        in_channels: number of channels, 3 above.
    """
    expected = f"(B, {in_channels}, T, H, W)" if clips else f"(B, {in_channels}, H, W)"
    if images.ndim != 4 + clips or images.shape[1] != in_channels:
        raise DataError(f"{owner}: images of shape {tuple(images.shape)}: expected {expected}.")
    height, width = images.shape[-2:]
    if height < min_size or width < min_size:
        raise DataError(
            f"{owner}: images of {height} x {width} pixels: expected at least {min_size} x {min_size}. Resize them."
        )


def normalize_images(
    images: Tensor,
    padding_mask: Tensor | None = None,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Normalize pixels by a mean and a standard deviation, by default those of ImageNet backbones.

    Args:
        images: (B, C, H, W), or (B, C, T, H, W) for clips: uint8 in 0..255, or uint16 in 0..65535; or float, already
            normalized: RGB by ImageNet's mean and standard deviation, other channels by `mean` and `std`.
        padding_mask: (B, H, W) bool, True = padding; padded pixels are 0 after normalization.
        mean, std: statistics of the C channels, those of RGB by default, with pixel values in 0..1.
    Returns:
        the normalized images, float, in the shape of `images`.
    Raises:
        DataError: the images have a wrong number of channels or axes.
    """
    channels = len(mean)
    kind = ", RGB" if channels == 3 else ""
    if images.ndim == 5 and images.shape[1] != channels:
        is_swapped = images.shape[2] == channels
        remedy = "Put channels before frames: clips.transpose(1, 2)." if is_swapped else "Convert them."
        raise DataError(f"clips of shape {tuple(images.shape)}: expected (B, {channels}, T, H, W){kind}. {remedy}")
    if images.shape[1:2] != (channels,):
        kinds = {1: " (gray)", 2: " (gray and alpha)", 3: " (RGB)", 4: " (RGB and alpha)"}
        got = f"{images.shape[1]} channels{kinds.get(images.shape[1], '')}" if images.ndim > 1 else "no channels"
        is_rgb = "Convert them, such as by Pillow's image.convert('RGB')."
        remedy = is_rgb if channels == 3 else "Set model.backbone.in_channels and data.channels to that of the images."
        raise DataError(
            f"images of shape {tuple(images.shape)} have {got}; expected (B, {channels}, H, W){kind}. {remedy}"
        )
    if images.ndim not in (4, 5):
        shape = f"(B, {channels}, H, W), or (B, {channels}, T, H, W)"
        raise DataError(f"images of shape {tuple(images.shape)}: expected {shape} of clips.")
    is_normalized = images.is_floating_point()
    if is_normalized:
        if channels != 3 or (*mean, *std) == (*IMAGENET_MEAN, *IMAGENET_STD):
            return images
        usual_mean, usual_std, new_mean, new_std = (
            per_channel(c, images) for c in (IMAGENET_MEAN, IMAGENET_STD, mean, std)
        )
        images = images * (usual_std / new_std) + (usual_mean - new_mean) / new_std
    else:
        largest = 65535 if images.dtype == torch.uint16 else 255
        mean, std = (per_channel(c, images) * largest for c in (mean, std))
        images = images.float().sub_(mean).div_(std)
    if padding_mask is None:
        return images
    hidden = padding_mask[:, None] if images.ndim == 4 else padding_mask[:, None, None]
    if is_normalized:  # padding may be nan
        return images.masked_fill_(hidden, 0.0)
    # Several times as fast as filling by a mask that is broadcast over the channels.
    return images.mul_((~hidden).to(images.dtype))


def per_channel(values: Sequence[float], images: Tensor) -> Tensor:
    """Return a value for each channel, shaped to broadcast over images (B, C, H, W) or clips (B, C, T, H, W)."""
    # torch.tensor(values, device=...) would synchronize with the GPU.
    dtype = images.dtype if images.is_floating_point() else torch.float32
    values = torch.tensor(values, dtype=dtype).to(images.device, non_blocking=True)
    return values.view(-1, *(1,) * (images.ndim - 2))


def resize_mask(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a (B, H, W) bool mask to (B, *size) by nearest neighbor, as the official detectors do."""
    return F.interpolate(mask[:, None].float(), size=size)[:, 0].bool()


def padding_to_multiple(length: int, multiple: int) -> int:
    """Return the padding that extends a length to a multiple.

    `-length % multiple` is the same, but torch.compile cannot compute with it if the length is free.
    """
    return (length + multiple - 1) // multiple * multiple - length


def pad_to_multiple(images: Tensor, padding_mask: Tensor | None, multiple: int) -> tuple[Tensor, Tensor | None]:
    """Pad at the right and bottom until height and width are multiples of `multiple`.

    Args:
        images: (B, C, H, W), padded with 0.
        padding_mask: (B, H, W) bool, padded with True.
    """
    height, width = images.shape[-2:]
    margins = (0, padding_to_multiple(width, multiple), 0, padding_to_multiple(height, multiple))
    return F.pad(images, margins), None if padding_mask is None else F.pad(padding_mask, margins, value=True)


def unpadded_sizes(images: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return the (height, width) of each image without padding, (B, 2) int64."""
    if padding_mask is None:
        return torch.tensor(images.shape[-2:]).repeat(images.shape[0], 1)
    return torch.stack([(~padding_mask[:, :, 0]).sum(1), (~padding_mask[:, 0, :]).sum(1)], dim=1)
