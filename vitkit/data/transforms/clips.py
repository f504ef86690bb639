"""Scale jitter and crops of clips: image transforms that are given the same random numbers for all frames of a clip."""

import random

import numpy as np
from PIL import Image
from torchvision import transforms as tv

from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.classification import PillowTransforms
from vitkit.data.transforms.crops import compute_resized_size
from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS


@TRANSFORMS.register
class ClipTrainTransforms(PillowTransforms):
    """Scale jitter, a random crop and a flip, as non-local networks, SlowFast and TimeSformer train on Kinetics.

    (MViT trains with `ClassificationTrainTransforms`.) The crop is resized directly, bilinear and antialiased; the
    originals resize the entire frame and then crop.

    Args:
        size: height and width of the result, in pixels.
        short_sides: range of the frame's short side before the crop.
        flip_probability: probability of a horizontal flip; use 0 where classes distinguish left from right.
    Raises:
        ConfigError: the crop could be larger than the frame.
    """

    def __init__(self, *, size: int = 224, short_sides: tuple[int, int] = (256, 320), flip_probability: float = 0.5):
        if not 1 <= size <= short_sides[0] <= short_sides[1]:
            raise ConfigError(
                f"ClipTrainTransforms: size={size}, short_sides={tuple(short_sides)}; expected size <= minimum <= "
                "maximum."
            )
        self.size, self.short_sides = size, tuple(short_sides)
        super().__init__([self._crop, tv.RandomHorizontalFlip(flip_probability)])

    def _crop(self, image: Image.Image) -> Image.Image:
        side = min(image.size) * self.size / random.randint(*self.short_sides)  # the crop's side in the stored frame
        left, top = (random.uniform(0, length - side) for length in image.size)
        return _resize(image, left, top, side, side, self.size)


@TRANSFORMS.register
class ClipEvalTransforms:
    """Resize the short side, then crop along the long side, as published video accuracies are measured.

    Args:
        size: height and width of each crop, in pixels.
        short_side: short side of the frame before the crop, in pixels.
        num_crops: 1: a center crop; more: crops spread from the left (top) to the right (bottom) end.
    Raises:
        ConfigError: the crop is larger than the frame, or num_crops is below 1.
    """

    def __init__(self, *, size: int = 224, short_side: int = 256, num_crops: int = 1):
        if not 1 <= size <= short_side or num_crops < 1:
            raise ConfigError(
                f"ClipEvalTransforms: size={size}, short_side={short_side}, num_crops={num_crops}; expected 1 <= size "
                "<= short_side and at least one crop."
            )
        self.size, self.short_side = size, short_side
        positions = np.linspace(0, 1, num_crops).tolist() if num_crops > 1 else [0.5]
        self.views = [_ClipCrop(size, short_side, position) for position in positions]
        """Transforms that each produce one of the crops."""

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Return the middle one of the crops; nothing is random."""
        return self.views[len(self.views) // 2](sample, seed=seed)


class _ClipCrop(PillowTransforms):
    def __init__(self, size: int, short_side: int, position: float):
        self.size, self.short_side, self.position = size, short_side, position
        super().__init__([self._crop])

    def _crop(self, image: Image.Image) -> Image.Image:
        height, width = compute_resized_size(image.height, image.width, short_side=self.short_side, max_size=None)
        scale_x, scale_y = image.width / width, image.height / height
        along, across = self.position, 0.5
        left = round((width - self.size) * (along if width >= height else across)) * scale_x
        top = round((height - self.size) * (across if width >= height else along)) * scale_y
        return _resize(image, left, top, self.size * scale_x, self.size * scale_y, self.size)


def _resize(image: Image.Image, left: float, top: float, width: float, height: float, size: int) -> Image.Image:
    """Resize a part of an image to (size, size)."""
    right, bottom = min(left + width, image.width), min(top + height, image.height)  # rounding
    return image.resize((size, size), Image.Resampling.BILINEAR, (left, top, right, bottom))
