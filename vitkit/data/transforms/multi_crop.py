"""Multi-crop augmentation for self-supervised learning."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms as tv

from vitkit.data.transforms.annotated_image import AnnotatedImage, check_rgb
from vitkit.data.transforms.classification import seed_generators
from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS
from vitkit.structures import Batch, Sample


@runtime_checkable
class MakesViews(Protocol):
    """Transforms that make several images of one, which only a dataset without annotations can return."""

    def views(self, image: np.ndarray, *, seed: int | None = None) -> list[np.ndarray]:
        """Return the views of an image (H, W, 3) uint8 RGB, large ones first; with a seed, they depend only on it."""


@TRANSFORMS.register
class MultiCrop:
    """Two large crops of an image and several small ones, each with its own colors, blur and flip (DINO, Caron et al.
    2021, https://arxiv.org/abs/2104.14294; colors and blur as in BYOL). An image smaller than a crop is enlarged.

    Args:
        size: height and width of the two large crops, in pixels.
        small_size: those of the small crops.
        num_small: number of small crops; 0: only the two large ones.
        scale: range of a large crop's fraction of the image's area.
        small_scale: that of a small crop.
    Raises:
        ConfigError: small crops are larger than large ones, or another argument is out of range.
    """

    def __init__(
        self,
        *,
        size: int = 224,
        small_size: int = 96,
        num_small: int = 8,
        scale: tuple[float, float] = (0.4, 1.0),
        small_scale: tuple[float, float] = (0.05, 0.4),
    ):
        if not 1 <= small_size <= size:
            raise ConfigError(
                f"MultiCrop: small_size={small_size}: expected 1 to size={size}, that of the large crops."
            )
        if num_small < 0:
            raise ConfigError(f"MultiCrop: num_small={num_small}: expected at least 0.")
        for name, (low, high) in (("scale", scale), ("small_scale", small_scale)):
            if not 0 < low <= high <= 1:
                raise ConfigError(
                    f"MultiCrop: {name}={low, high}: expected fractions of the image's area, low to high."
                )
        colors = [
            tv.RandomApply([tv.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)], p=0.8),
            tv.RandomGrayscale(p=0.2),
        ]

        def crop(size: int, scale: Sequence[float], *last: Callable[[Image.Image], Image.Image]) -> tv.Compose:
            resized = tv.RandomResizedCrop(size, scale=tuple(scale), interpolation=tv.InterpolationMode.BICUBIC)
            return tv.Compose([resized, tv.RandomHorizontalFlip(), *colors, *last])

        self._crops = [
            crop(size, scale, _blur),
            crop(size, scale, tv.RandomApply([_blur], p=0.1), tv.RandomApply([ImageOps.solarize], p=0.2)),
            *[crop(small_size, small_scale, tv.RandomApply([_blur], p=0.5))] * num_small,
        ]

    def views(self, image: np.ndarray, *, seed: int | None = None) -> list[np.ndarray]:
        """Return the two large crops, then the small ones; see `MakesViews`."""
        check_rgb(image, type(self).__name__)
        source = Image.fromarray(image)
        with seed_generators(seed):
            return [np.asarray(crop(source)) for crop in self._crops]

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Raise a ConfigError: one image cannot stand for all views."""
        raise ConfigError(
            "MultiCrop makes several views of each image, which only a dataset without annotations returns. Set "
            "data.train=dict(type='UnlabeledImages', source=…, transforms=dict(type='MultiCrop')), and other "
            "transforms for validation."
        )


def collate_views(samples: Sequence[Sample]) -> Batch:
    """Join samples with `views`: all images' first views, then all second ones, and so on.

    Returns:
        a batch with images, (2 B, 3, H, W), the large views; and, if there are any, small_images, (n B, 3, h, w).
    """
    views = [torch.stack(same) for same in zip(*(sample["views"] for sample in samples), strict=True)]
    inputs = {"images": torch.cat(views[:2])}
    if len(views) > 2:
        inputs["small_images"] = torch.cat(views[2:])
    return Batch(inputs, [sample["target"] for sample in samples])


def _blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
