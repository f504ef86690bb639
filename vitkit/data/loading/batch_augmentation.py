"""Augmentation of a training batch as a whole: images squashed to one square, and mixed in pairs."""

from collections.abc import Sequence
from typing import TypedDict

import cv2
import numpy as np
import torch

from vitkit.data.transforms.crops import resize_image
from vitkit.errors import ConfigError
from vitkit.io.image_files import to_tensor
from vitkit.structures import Sample


class SquareOptions(TypedDict, total=False):
    """Options of `Squares`."""

    sizes: Sequence[int]
    until_epoch: int
    final_size: int


class MixupOptions(TypedDict, total=False):
    """Options of `Mixup`."""

    probability: float
    share: tuple[float, float]
    from_epoch: int
    until_epoch: int


class Squares:
    """Squashes the images of each batch to a square of one size, whatever their proportions.

    A step's size is drawn from `sizes`, the same on all ranks; a size that is listed several times is drawn as often.

    Args:
        sizes: sides of the squares, in pixels.
        until_epoch, final_size: from this epoch on, counted from 0, all squares have this size; None: never.
    Raises:
        ConfigError: there are no sizes, a size is not positive, or only one of the two is set.
    """

    def __init__(self, *, sizes: Sequence[int] = (), until_epoch: int | None = None, final_size: int | None = None):
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"data.squares.sizes: got {list(sizes)}; expected at least one number of pixels.")
        if (until_epoch is None) != (final_size is None) or (final_size is not None and final_size < 1):
            raise ConfigError(
                f"data.squares: until_epoch is {until_epoch} and final_size is {final_size}; expected both, with at "
                "least 1 pixel, or neither."
            )
        self.sizes = tuple(sizes)
        self.until_epoch = until_epoch
        self.final_size = final_size

    @property
    def largest(self) -> int:
        """The largest size of any batch."""
        return max(*self.sizes, self.final_size or 0)

    def draw(self, epoch: int, random: np.random.Generator) -> int:
        """Return a step's size."""
        if self.until_epoch is not None and epoch >= self.until_epoch:
            return self.final_size
        return self.sizes[random.integers(len(self.sizes))]


class Mixup:
    """Averages each image of a batch with the one before it, with the objects of both (Zhang et al. 2019,
    https://arxiv.org/abs/1902.04103).

    Args:
        probability: fraction of the batches that are mixed.
        share: range of the image's own weight in the average, one for a batch.
        from_epoch, until_epoch: the epochs in which batches are mixed, counted from 0, without the last; None: all.
    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        probability: float = 0.5,
        share: tuple[float, float] = (0.45, 0.55),
        from_epoch: int = 0,
        until_epoch: int | None = None,
    ):
        if not 0 <= probability <= 1:
            raise ConfigError(f"data.mixup.probability: got {probability}; expected 0 to 1.")
        if not 0 <= share[0] <= share[1] <= 1:
            raise ConfigError(f"data.mixup.share: got {list(share)}; expected (minimum, maximum) in 0..1.")
        self.probability = probability
        self.share = tuple(share)
        self.from_epoch = from_epoch
        self.until_epoch = until_epoch

    def draw(self, epoch: int, random: np.random.Generator) -> float | None:
        """Return the fraction of each image itself, or None for a batch that is not mixed."""
        drawn, share = random.random(), random.uniform(*self.share)
        ends = self.until_epoch is not None and epoch >= self.until_epoch
        return None if epoch < self.from_epoch or ends or drawn >= self.probability else share


class BatchAugmentation:
    """Augments the samples of one batch together; its random numbers depend only on the seed, epoch and batch.

    Args:
        squares, mixup: options of `Squares` and `Mixup`; None: without.
        seed: the run's seed, the same on all ranks.
        batches_per_step: see `TrainBatches`; all batches of a step have one size.
        rank, world_size: those of this process; ranks mix different batches.
    Raises:
        ConfigError: an option is out of range, or images are mixed without being squares of one size.
    """

    def __init__(
        self,
        squares: SquareOptions | None,
        mixup: MixupOptions | None,
        *,
        seed: int = 0,
        batches_per_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ):
        if mixup is not None and squares is None:
            raise ConfigError("data.mixup: mixes images of one size. Set data.squares, for example sizes=[640].")
        self.squares = None if squares is None else Squares(**squares)
        self.mixup = None if mixup is None else Mixup(**mixup)
        self.seed = seed
        self.batches_per_step = batches_per_step
        self.rank = rank
        self.world_size = world_size

    def side(self, epoch: int, number: int) -> int | None:
        """Return the side of the squares of batch `number` of an epoch; None: without squares."""
        if self.squares is None:
            return None
        step = number // self.batches_per_step
        return self.squares.draw(epoch, np.random.default_rng([self.seed, epoch, step]))

    def __call__(self, samples: Sequence[Sample], epoch: int, number: int) -> list[Sample]:
        """Augment the samples of batch `number` of an epoch."""
        samples = list(samples)
        step, batch = divmod(number, self.batches_per_step)
        if (side := self.side(epoch, number)) is not None:
            samples = [squash(sample, side) for sample in samples]
        if self.mixup is not None and len(samples) > 1:
            number_in_step = batch * self.world_size + self.rank  # of those of all ranks
            share = self.mixup.draw(epoch, np.random.default_rng([self.seed, epoch, step, 1 + number_in_step]))
            if share is not None:
                samples = [mix(sample, before, share) for sample, before in zip(samples, samples[-1:] + samples[:-1])]
        return samples


def squash(sample: Sample, size: int) -> Sample:
    """Resize an image with its masks to a square; objects whose masks vanish are removed.

    Raises:
        ConfigError: the sample is not an image.
    """
    image, target = sample["image"], dict(sample["target"])
    if image.ndim != 3:
        raise ConfigError(f"data.squares: expected images, got a sample of shape {tuple(image.shape)}. Leave it out.")
    if image.shape[1:] == (size, size):
        return sample
    resized = to_tensor(resize_image(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), (size, size)))
    target["image_size"] = (size, size)
    if "masks" in target:
        masks = np.zeros((len(target["masks"]), size, size), np.uint8)
        for new, mask in zip(masks, target["masks"].numpy().view(np.uint8)):
            cv2.resize(mask, (size, size), dst=new, interpolation=cv2.INTER_NEAREST_EXACT)
        target["masks"] = torch.from_numpy(masks.astype(bool))
        visible = target["masks"].flatten(1).any(1)
        for name in ("labels", "boxes_cxcywh", "masks"):
            if name in target:
                target[name] = target[name][visible]
    return Sample(image=resized, target=target)


def mix(sample: Sample, other: Sample, share: float) -> Sample:
    """Average two images of one size, with the objects of both.

    Args:
        share: weight of `sample`.
    Raises:
        ConfigError: the samples have no boxes.
    """
    target = dict(sample["target"])
    if "boxes_cxcywh" not in target:
        raise ConfigError("data.mixup: mixes images with boxes, and these have none. Leave it out.")
    if "phrases" in target or "phrases" in other["target"]:
        raise ConfigError("data.mixup: mixes images whose labels are classes, and these have phrases. Leave it out.")
    lacking = [one["negative_labels"] for one in (target, other["target"]) if "negative_labels" in one]
    if lacking:
        target["negative_labels"] = sorted(set.intersection(*({*map(int, labels)} for labels in lacking)))
    for name in {"labels", "boxes_cxcywh", "masks"} & target.keys():
        target[name] = torch.cat([target[name], other["target"][name]])
    image = cv2.addWeighted(sample["image"].numpy(), share, other["image"].numpy(), 1 - share, 0.0)
    return Sample(image=torch.from_numpy(image), target=target)
