"""Known queries for masked attention: noised labels and masks of the targets (MP-Former).

MP-Former (Zhang et al. 2023, https://arxiv.org/abs/2303.07336) makes queries from embeddings of the targets' classes
and lets each decoder layer attend within the targets' masks, instead of the masks that it predicted before. They need
no matching, as their targets are known. Labels are replaced at random, and points of the masks flipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.denoising import copied_rows, known_rows
from vitkit.nn.training_queries import KnownQueries, TrainingOnly
from vitkit.structures import DetectionTarget


@dataclass(frozen=True)
class MaskDenoisingSettings:
    """How targets are turned into queries in training."""

    denoising_queries: int | None = None
    """Number of queries to fill with copies of the targets, counted by the image with the most targets; at least one
    copy is made. None: no denoising."""
    label_flips: float = 0.2
    """Fraction of labels that are replaced by random ones."""
    mask_flips: float = 0.2
    """Average number of flipped points per mask, relative to its number of points; they may be outside of it."""


@dataclass(frozen=True)
class PilotQueries(KnownQueries):
    """Known queries with the masks within which they attend."""

    masks: Sequence[Tensor]
    """For each level, (B, P, h, w) bool; empty for padding rows."""
    mask_flips: float

    def outside(self, level: int) -> Tensor:
        """Return where a layer may not attend, (B, P, h, w) bool, with newly drawn noise."""
        return ~flip_points(self.masks[level], self.mask_flips)


class MaskDenoising(TrainingOnly):
    """Makes queries from noised labels and masks.

    Args:
        num_classes: number of the targets' classes.
    Raises:
        ConfigError: there are no queries or no classes, or a kind of noise is out of range.
    """

    def __init__(self, num_classes: int, d_model: int, settings: MaskDenoisingSettings):
        super().__init__()
        queries, flips = settings.denoising_queries, (settings.label_flips, settings.mask_flips)
        if queries is None or queries < 1:
            raise ConfigError(f"model.head.denoising_queries={queries}: expected at least 1, or None for no denoising.")
        if num_classes < 1:
            raise ConfigError(
                f"model.head.denoising_queries={queries}: num_classes={num_classes} leaves no labels to noise."
            )
        if not (0 <= flips[0] <= 1 and 0 <= flips[1] <= 1):
            raise ConfigError(f"model.head: label_flips={flips[0]}, mask_flips={flips[1]}: expected shares in 0 to 1.")
        self.settings = settings
        self.num_classes = num_classes
        self.label_embed = nn.Embedding(num_classes, d_model)

    @torch.compiler.disable  # a different number of targets would cause a recompilation
    def forward(self, targets: Sequence[DetectionTarget], sizes: Sequence[tuple[int, int]]) -> PilotQueries:
        """Draw noise and make the queries for a batch.

        With m the largest number of targets in an image, target j of an image is in row c * m + j of its copy c.

        Args:
            targets: targets with labels, and masks (N, H, W) of the padded images.
            sizes: sizes of the maps that layers attend to.
        """
        counts = [len(target["labels"]) for target in targets]
        most = max(counts)
        copies = max(self.settings.denoising_queries // most, 1) if most else 1
        labels = torch.cat([target["labels"] for target in targets]).repeat(copies)
        content = self.label_embed(self._noised(labels))
        rows = copied_rows(counts, copies).to(labels.device, non_blocking=True)
        shape = len(targets), copies * most
        return PilotQueries(
            content=content.new_zeros(*shape, content.shape[1]).index_put(tuple(rows), content),
            matches=[known_rows(count, most, [False] * copies) for count in counts],
            num_groups=copies,
            masks=[masks.repeat(1, copies, 1, 1) for masks in resized_masks(targets, most, sizes)],
            mask_flips=self.settings.mask_flips,
        )

    def _noised(self, labels: Tensor) -> Tensor:
        flipped = torch.rand(len(labels), device=labels.device) < self.settings.label_flips
        new = torch.randint(self.num_classes, (len(labels),), device=labels.device)
        # Labels out of range are reported by the matcher, which can name the image.
        return new.where(flipped, labels.clamp(0, self.num_classes - 1))


def resized_masks(targets: Sequence[DetectionTarget], most: int, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the targets' masks in each size, (B, most, *size) bool, resized in the same way as predicted masks."""
    by_image = [
        [F.pad(resize(target["masks"], size), (0, 0, 0, 0, 0, most - len(target["masks"]))) for size in sizes]
        for target in targets
    ]
    return [torch.stack(masks) for masks in zip(*by_image)]


def resize(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (N, H, W) bool masks bilinearly."""
    if not len(masks):
        return masks.new_zeros(0, *size)
    return F.interpolate(masks[None].float(), size=size, mode="bilinear", align_corners=False)[0] >= 0.5


def flip_points(masks: Tensor, share: float) -> Tensor:
    """Flip random points of masks (..., h, w), on average `share` times as many as there are in the mask."""
    inside = masks.sum((-2, -1), keepdim=True)
    chance = share * inside / (masks.shape[-2] * masks.shape[-1])
    return masks ^ (torch.rand(masks.shape, device=masks.device) < chance)
