"""Augmentation of a training batch as a whole: images squashed to one square, mixed in pairs, or given objects of each
other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np
import torch

from vitkit.data.transforms.annotated_image import keep_inside
from vitkit.data.transforms.crops import resize_image
from vitkit.errors import ConfigError
from vitkit.io.image_files import to_tensor
from vitkit.structures import OBJECT_FIELDS, Sample


@dataclass(kw_only=True)
class Squares:
    """Squashes the images of each batch to a square of one size, whatever their proportions.

    A step's size is drawn from `sizes`, the same on all ranks; a size that is listed several times is drawn as often.

    Args:
        sizes: sides of the squares, in pixels.
        until_epoch, final_size: from this epoch on, counted from 0, all squares have this size; None: never.
        min_box_side: objects whose box is narrower or shorter than this in a square, in pixels, are removed.
    Raises:
        ConfigError: there are no sizes, a size is not positive, `min_box_side` is below 0, or only one of the other two
            is set.
    """

    sizes: Sequence[int] = ()
    until_epoch: int | None = None
    final_size: int | None = None
    min_box_side: float = 0.0

    def __post_init__(self):
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"data.squares.sizes: got {list(self.sizes)}; expected at least one number of pixels.")
        is_half = (self.until_epoch is None) != (self.final_size is None)
        if is_half or (self.final_size is not None and self.final_size < 1):
            raise ConfigError(
                f"data.squares: until_epoch is {self.until_epoch} and final_size is {self.final_size}; expected both, "
                "with at least 1 pixel, or neither."
            )
        if not self.min_box_side >= 0:
            raise ConfigError(f"data.squares.min_box_side: got {self.min_box_side}; expected a number of pixels, or 0.")

    @property
    def largest(self) -> int:
        """The largest size of any batch."""
        return max(*self.sizes, self.final_size or 0)

    def draw(self, epoch: int, random: np.random.Generator) -> int:
        """Return a step's size."""
        if self.until_epoch is not None and epoch >= self.until_epoch:
            return self.final_size
        return self.sizes[random.integers(len(self.sizes))]


@dataclass(kw_only=True)
class _SomeBatches:
    """Options of what is done to a fraction of the batches, in some epochs, with a drawn share of each image."""

    probability: float = 0.5
    share: tuple[float, float] = (0.45, 0.55)
    from_epoch: int = 0
    until_epoch: int | None = None
    option: ClassVar[str]

    def __post_init__(self):
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"{self.option}.probability: got {self.probability}; expected 0 to 1.")
        if not 0 <= self.share[0] <= self.share[1] <= 1:
            raise ConfigError(f"{self.option}.share: got {list(self.share)}; expected (minimum, maximum) in 0..1.")

    def draw(self, epoch: int, random: np.random.Generator) -> float | None:
        """Return the share of a batch, or None for a batch that stays as it is."""
        drawn, share = random.random(), random.uniform(*self.share)
        ends = self.until_epoch is not None and epoch >= self.until_epoch
        return None if epoch < self.from_epoch or ends or drawn >= self.probability else share


class Mixup(_SomeBatches):
    """Averages each image of a batch with the one before it, with the objects of both (Zhang et al. 2019,
    https://arxiv.org/abs/1902.04103).

    Args:
        probability: fraction of the batches that are mixed.
        share: range of the image's own weight in the average, one for a batch.
        from_epoch, until_epoch: the epochs in which batches are mixed, counted from 0, without the last; None: all.
    Raises:
        ConfigError: a value is out of range.
    """

    option = "data.mixup"


@dataclass(kw_only=True)
class CopyBlend(_SomeBatches):
    """Blends objects of the batch into each of its images, at random places (DEIMv2, Huang et al. 2025,
    https://arxiv.org/abs/2509.20787).

    Objects keep their size. They may be of the image itself, and what they cover stays.

    Args:
        probability: fraction of the batches whose images get objects; mixed batches get none.
        num_objects: number of objects for each image.
        min_area: least area of an object's box, in pixels; in the original, that of the annotation.
        share: range of the weight of the image below an object, one for a batch.
        margin: range of what is blended on each side of an object's box besides, relative to the box's width and
            height; as far as both images reach.
        from_epoch, until_epoch: the epochs in which this is done, counted from 0, without the last; None: all.
    Raises:
        ConfigError: a value is out of range.
    """

    num_objects: int = 3
    min_area: float = 100.0
    margin: tuple[float, float] = (0.1, 0.25)
    option = "data.copy_blend"

    def __post_init__(self):
        super().__post_init__()
        if self.num_objects < 1:
            raise ConfigError(f"data.copy_blend.num_objects: got {self.num_objects}; expected at least 1.")
        if not 0 <= self.margin[0] <= self.margin[1]:
            raise ConfigError(f"data.copy_blend.margin: got {list(self.margin)}; expected (minimum, maximum) from 0.")

    def __call__(self, samples: Sequence[Sample], epoch: int, random: np.random.Generator) -> list[Sample]:
        """Blend objects into the images, all of one size, if this batch is to get any.

        Raises:
            ConfigError: the samples have no boxes, or their labels are phrases.
        """
        share = self.draw(epoch, random)
        if share is None:
            return list(samples)
        check_labeled_boxes(samples, "data.copy_blend: blends images")
        pool = [(sample, i) for sample in samples for i in _large_objects(sample, self.min_area)]
        if not pool:
            return list(samples)
        count = min(self.num_objects, len(pool))
        return [
            self._blend(sample, [pool[i] for i in random.choice(len(pool), count, replace=False)], share, random)
            for sample in samples
        ]

    def _blend(
        self, sample: Sample, objects: Sequence[tuple[Sample, int]], share: float, random: np.random.Generator
    ) -> Sample:
        """Return the sample with other samples' objects, given by their numbers in these."""
        image = sample["image"].numpy().copy()
        target, *others = _with_known_masks(sample["target"], *(other["target"] for other, _ in objects))
        height, width = image.shape[1:]
        added: dict[str, list[torch.Tensor]] = {name: [] for name in OBJECT_FIELDS}
        for (other, i), theirs in zip(objects, others):
            x0, y0, x1, y1 = _box_in_pixels(other, i)
            left, top = random.integers(width - (x1 - x0) + 1), random.integers(height - (y1 - y0) + 1)
            growth = random.uniform(*self.margin)
            dx, dy = int((x1 - x0) * growth), int((y1 - y0) * growth)
            right, bottom = left + x1 - x0, top + y1 - y0
            # The same on both sides of the copy, so that the object stays in its place.
            before = min(dx, x0, left), min(dy, y0, top)
            after = min(dx, width - x1, width - right), min(dy, height - y1, height - bottom)
            below = image[:, top - before[1] : bottom + after[1], left - before[0] : right + after[0]]
            patch = other["image"].numpy()[:, y0 - before[1] : y1 + after[1], x0 - before[0] : x1 + after[0]]
            below[:] = cv2.addWeighted(np.ascontiguousarray(below), share, np.ascontiguousarray(patch), 1 - share, 0.0)
            box = [(left + right) / 2 / width, (top + bottom) / 2 / height, (x1 - x0) / width, (y1 - y0) / height]
            added["boxes_cxcywh"].append(target["boxes_cxcywh"].new_tensor(box))
            for name in target.keys() & {"labels", "has_masks", "areas"}:
                added[name].append(theirs[name][i])
            if "keypoints" in target:
                points = theirs["keypoints"][i].clone()
                points[:, :2] += points.new_tensor([left - x0, top - y0])
                points = keep_inside(points.numpy()[None], (0, 0, width, height))[0]
                added["keypoints"].append(torch.from_numpy(points))
            if "masks" in target:
                mask = torch.zeros_like(theirs["masks"][i])
                mask[top:bottom, left:right] = theirs["masks"][i, y0:y1, x0:x1]
                added["masks"].append(mask)
        for name in added.keys() & target.keys():
            target[name] = torch.cat([target[name], torch.stack(added[name])])
        if "negative_labels" in target:
            present = set(map(int, added["labels"]))
            target["negative_labels"] = [label for label in target["negative_labels"] if int(label) not in present]
        return Sample(image=torch.from_numpy(image), target=target)


def _large_objects(sample: Sample, min_area: float) -> list[int]:
    """Return the numbers of the objects whose boxes have at least this area, and a pixel, inside the image."""
    sizes = [(i, _box_in_pixels(sample, i)) for i in range(len(sample["target"]["labels"]))]
    return [i for i, (x0, y0, x1, y1) in sizes if x1 > x0 and y1 > y0 and (x1 - x0) * (y1 - y0) >= min_area]


def _box_in_pixels(sample: Sample, index: int) -> tuple[int, int, int, int]:
    """Return a box as whole pixels inside the image, xyxy."""
    height, width = sample["image"].shape[1:]
    cx, cy, w, h = sample["target"]["boxes_cxcywh"][index].tolist()
    x0, y0 = max(int((cx - w / 2) * width), 0), max(int((cy - h / 2) * height), 0)
    return x0, y0, min(int((cx + w / 2) * width), width), min(int((cy + h / 2) * height), height)


def check_labeled_boxes(samples: Sequence[Sample], what: str) -> None:
    """Raise ConfigError unless all samples have boxes whose labels are classes.

    Args:
        what: the option and what it does, for the message.
    """
    for target in (sample["target"] for sample in samples):
        if "boxes_cxcywh" not in target:
            raise ConfigError(f"{what} with boxes, and these have none. Leave it out.")
        if "phrases" in target:
            raise ConfigError(f"{what} whose labels are classes, and these have phrases. Leave it out.")


class BatchAugmentation:
    """Augments the samples of one batch together; its random numbers depend only on the seed, epoch and batch.

    Args:
        squares, mixup, copy_blend: options of `Squares`, `Mixup` and `CopyBlend`; None: without.
        seed: the run's seed, the same on all ranks.
        batches_per_step: see `TrainBatches`; all batches of a step have one size.
        rank, world_size: those of this process; ranks mix different batches.
    Raises:
        ConfigError: an option is out of range, or images are mixed or blended without being squares of one size.
    """

    def __init__(
        self,
        squares: Mapping[str, Any] | None,
        mixup: Mapping[str, Any] | None,
        copy_blend: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        batches_per_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ):
        if mixup is not None and squares is None:
            raise ConfigError("data.mixup: mixes images of one size. Set data.squares, for example sizes=[640].")
        if copy_blend is not None and squares is None:
            raise ConfigError("data.copy_blend: blends images of one size. Set data.squares, for example sizes=[640].")
        self.squares = None if squares is None else Squares(**squares)
        self.mixup = None if mixup is None else Mixup(**mixup)
        self.copy_blend = None if copy_blend is None else CopyBlend(**copy_blend)
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
            samples = [without_small(squash(sample, side), self.squares.min_box_side) for sample in samples]
        number_in_step = batch * self.world_size + self.rank  # of those of all ranks
        random = np.random.default_rng([self.seed, epoch, step, 1 + number_in_step])
        if self.mixup is not None and len(samples) > 1:
            share = self.mixup.draw(epoch, random)
            if share is not None:
                return [mix(sample, before, share) for sample, before in zip(samples, samples[-1:] + samples[:-1])]
        return samples if self.copy_blend is None else self.copy_blend(samples, epoch, random)


def squash(sample: Sample, size: int) -> Sample:
    """Resize an image with its masks to a square; objects whose masks vanish are removed.

    Raises:
        ConfigError: the sample is not an image, or has more that is made of it.
    """
    image, target = sample["image"], dict(sample["target"])
    if image.ndim != 3:
        raise ConfigError(f"data.squares: expected images, got a sample of shape {tuple(image.shape)}. Leave it out.")
    if others := sorted(sample.keys() & {"views", "features"}):
        raise ConfigError(f"data.squares: resizes an image only, and samples also have its {others[0]}. Leave it out.")
    if image.shape[1:] == (size, size):
        return sample
    resized = to_tensor(resize_image(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), (size, size)))
    target["image_size"] = (size, size)
    if "keypoints" in target:
        scale = torch.tensor([size / image.shape[2], size / image.shape[1], 1])
        target |= {"keypoints": target["keypoints"] * scale, "areas": target["areas"] * scale.prod()}
    if "masks" in target:
        from vitkit.ops.packed_masks import PackedMasks  # boxes need none

        new = (cv2.resize(x.byte().numpy(), (size, size), None, 0, 0, cv2.INTER_NEAREST_EXACT) for x in target["masks"])
        target["masks"] = PackedMasks.pack(new, (size, size))
        _keep_objects(target, ~target["masks"].is_empty())
    return Sample(image=resized, target=target)


def without_small(sample: Sample, min_side: float) -> Sample:
    """Remove objects whose box is narrower or shorter than this, in pixels of the image."""
    target = dict(sample["target"])
    if min_side <= 0 or "boxes_cxcywh" not in target:
        return sample
    height, width = sample["image"].shape[-2:]
    is_large = (target["boxes_cxcywh"][:, 2:] * torch.tensor([width, height]) >= min_side).all(1)
    _keep_objects(target, is_large)
    return Sample(image=sample["image"], target=target)


def _keep_objects(target: dict[str, Any], kept: torch.Tensor) -> None:
    """Keep the objects of a target where `kept` (N,) bool is true."""
    for name in target.keys() & OBJECT_FIELDS:
        target[name] = target[name][kept]
    if "phrase_spans" in target:
        target["phrase_spans"] = [spans for spans, is_kept in zip(target["phrase_spans"], kept.tolist()) if is_kept]


def _with_known_masks(*targets: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return copies of targets which all say what objects have masks if one of them does."""
    if not any("has_masks" in target for target in targets):
        return [dict(target) for target in targets]
    return [{"has_masks": torch.ones(len(target["labels"]), dtype=torch.bool), **target} for target in targets]


def mix(sample: Sample, other: Sample, share: float) -> Sample:
    """Average two images of one size, with the objects of both.

    Args:
        share: weight of `sample`.
    Raises:
        ConfigError: the samples have no boxes.
    """
    check_labeled_boxes((sample, other), "data.mixup: mixes images")
    target, added = _with_known_masks(sample["target"], other["target"])
    lacking = [one["negative_labels"] for one in (target, added) if "negative_labels" in one]
    if lacking:
        target["negative_labels"] = sorted(set.intersection(*({*map(int, labels)} for labels in lacking)))
    for name in target.keys() & OBJECT_FIELDS:
        target[name] = torch.cat([target[name], added[name]])
    image = cv2.addWeighted(sample["image"].numpy(), share, other["image"].numpy(), 1 - share, 0.0)
    return Sample(image=torch.from_numpy(image), target=target)
