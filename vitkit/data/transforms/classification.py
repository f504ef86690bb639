"""Augmentation and resizing of images for classification, using timm and torchvision."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data.auto_augment import rand_augment_transform
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp
from torchvision import transforms as tv

from vitkit.data.transforms.annotated_image import AnnotatedImage, check_rgb
from vitkit.data.transforms.mixing import BatchMixing
from vitkit.errors import ConfigError
from vitkit.ops.images import IMAGENET_MEAN
from vitkit.registry import TRANSFORMS

_RAND_AUGMENT = re.compile(r"rand(-(m|n|p|mstd|mmax|inc)\d+(\.\d+)?)*")


@contextmanager
def seed_generators(seed: int | None) -> Iterator[None]:
    """Seed the global CPU generators inside the context and restore their states afterwards.

    None leaves them unseeded.
    """
    if seed is None:
        yield
        return
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also seed the GPU.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


class PillowTransforms:
    """A sequence of transforms of Pillow images, with the interface of `Transforms`."""

    def __init__(self, transforms: list[Callable[[Image.Image], Image.Image]]):
        self._compose = tv.Compose(transforms)

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Transform an image without annotations; see `Transforms`.

        Raises:
            ConfigError: the image has boxes, masks or a segment map.
        """
        if any(field is not None for field in sample[1:]):
            raise ConfigError(
                f"{type(self).__name__} cannot move boxes and masks: it is for images that are classified. For "
                "detection use DETRTrainTransforms, EvalResize or ComposedTransforms."
            )
        check_rgb(sample.image, type(self).__name__)
        with seed_generators(seed):
            return AnnotatedImage(np.asarray(self._compose(Image.fromarray(sample.image))))


@TRANSFORMS.register
class ClassificationTrainTransforms(PillowTransforms):
    """Crop, flip, RandAugment; then, on whole batches, random erasing, mixup and cutmix.

    The implementations are those of timm or torchvision, which DeiT, Swin and MViT are trained with. Without the
    arguments from `rand_augment` on, this is the augmentation of ResNet.

    Args:
        size: height and width of the result, in pixels.
        scale: range of the crop's fraction of the image's area.
        ratio: range of the crop's width / height.
        interpolation: "random" draws bilinear or bicubic for each image.
        flip_probability: probability of a horizontal flip.
        color_jitter: largest relative change of brightness, contrast and saturation. DeiT, Swin and MViT set it to 0.4
            along with RandAugment, which replaces it.
        rand_augment: RandAugment (https://arxiv.org/abs/1909.13719) in timm's notation, such as
            "rand-m9-mstd0.5-inc1": magnitude 9 of 10 with a standard deviation of 0.5, larger being stronger.
        erasing: fraction of the images in which a rectangle becomes noise (https://arxiv.org/abs/1708.04896).
        mixup: alpha of mixup (https://arxiv.org/abs/1710.09412); 0 for none.
        cutmix: alpha of cutmix (https://arxiv.org/abs/1905.04899); 0 for none. With both, each batch draws one.
    Raises:
        ConfigError: `rand_augment` is not in that notation, or a number is out of range.
    """

    def __init__(
        self,
        *,
        size: int = 224,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic",
        flip_probability: float = 0.5,
        color_jitter: float = 0.0,
        rand_augment: str | None = None,
        erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ):
        for name, value, greatest in (("erasing", erasing, 1.0), ("mixup", mixup, None), ("cutmix", cutmix, None)):
            if value < 0 or (greatest is not None and value > greatest):
                up_to = "at least 0" if greatest is None else f"0 to {greatest:g}"
                raise ConfigError(f"ClassificationTrainTransforms: {name}={value}; expected {up_to}.")
        self.erasing, self.mixup, self.cutmix = erasing, mixup, cutmix
        steps = [
            RandomResizedCropAndInterpolation(size, scale=scale, ratio=ratio, interpolation=interpolation),
            tv.RandomHorizontalFlip(flip_probability),
        ]
        if rand_augment is not None:
            steps.append(_rand_augment(rand_augment, size, interpolation))
        if color_jitter:
            steps.append(tv.ColorJitter(color_jitter, color_jitter, color_jitter))
        super().__init__(steps)

    def for_batches(self, num_classes: int) -> BatchMixing | None:
        """Return the transforms of whole batches, or None if there are none."""
        if not (self.erasing or self.mixup or self.cutmix):
            return None
        return BatchMixing(num_classes, erasing=self.erasing, mixup=self.mixup, cutmix=self.cutmix)


def _rand_augment(notation: str, size: int, interpolation: str) -> Callable[[Image.Image], Image.Image]:
    # timm ignores parts of the notation that it does not know.
    if not _RAND_AUGMENT.fullmatch(notation):
        raise ConfigError(
            f"ClassificationTrainTransforms: rand_augment={notation!r}; expected 'rand' and any of -mMAGNITUDE "
            "-nOPERATIONS -pPROBABILITY -mstdDEVIATION -mmaxMAGNITUDE -inc1, such as 'rand-m9-mstd0.5-inc1'."
        )
    hparams = {"translate_const": int(size * 0.45), "img_mean": tuple(round(255 * mean) for mean in IMAGENET_MEAN)}
    if interpolation != "random":
        hparams["interpolation"] = str_to_pil_interp(interpolation)
    augment = rand_augment_transform(notation, hparams)
    for operation in augment.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return augment


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Reduce the bits of each channel to 1 or more: timm's range ends at 0, which Pillow refuses."""
    return ImageOps.posterize(image, min(max(bits, 1), 8))


@TRANSFORMS.register
class ClassificationEvalTransforms(PillowTransforms):
    """Resize the short side to `size / crop_pct`, then take a center crop, as for published top-1 accuracies.

    Args:
        size: height and width of the result, in pixels.
        crop_pct: ratio of `size` to the short side. The original repositories use 0.875 (256 to 224); timm evaluates
            the same weights at 0.9, where accuracy differs by up to half a point.
        interpolation: interpolation by Pillow, antialiased.
        squash: resize height and width to `size` without a crop, whatever the image's aspect ratio.
    Raises:
        ConfigError: crop_pct is not in 0..1.
    """

    def __init__(
        self,
        *,
        size: int = 224,
        crop_pct: float = 0.875,
        interpolation: Literal["bilinear", "bicubic"] = "bicubic",
        squash: bool = False,
    ):
        if not 0 < crop_pct <= 1:
            raise ConfigError(f"ClassificationEvalTransforms: crop_pct={crop_pct}; expected above 0, at most 1.")
        self.size, self.interpolation = size, interpolation
        self.short_side = None if squash else int(size / crop_pct)
        side = (size, size) if squash else self.short_side
        super().__init__([tv.Resize(side, tv.InterpolationMode(interpolation)), tv.CenterCrop(size)])
