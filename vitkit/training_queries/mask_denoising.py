"""Queries from noised labels and masks of the targets (MP-Former, Zhang et al. 2023,
https://arxiv.org/abs/2303.07336)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.queries import Queries, QueryHead
from vitkit.registry import TRAINING_QUERIES
from vitkit.structures import DetectionTarget, QuerySet
from vitkit.training_queries.box_denoising import Denoising, check_counts, list_copied_rows, match_rows, sample_targets


@TRAINING_QUERIES.register
class MaskDenoising(Denoising):
    """Queries from embeddings of the targets' classes, which each decoder layer lets attend within the targets' masks
    instead of the masks that it predicted before. They need no matching.

    Args:
        head: the head that they join; its queries must attend within masks.
        num_classes: number of the targets' classes.
        num_queries: number of queries to fill with copies of the targets, counted by the image with the most targets;
            at least one copy is made.
        label_flips: fraction of labels that are replaced by random ones.
        mask_flips: average number of flipped points per mask, relative to its number of points; they may be outside of
            it.
    Raises:
        ConfigError: the head does not attend within masks, there are no queries or no classes, or a kind of noise is
            out of range.
    """

    def __init__(
        self,
        head: QueryHead,
        num_classes: int,
        *,
        num_queries: int = 100,
        label_flips: float = 0.2,
        mask_flips: float = 0.2,
    ):
        super().__init__()
        if not head.attends_in_masks:
            raise ConfigError(
                f"MaskDenoising needs queries that attend within masks, unlike those of {type(head).__name__}. Choose "
                "model.head.type=Mask2FormerHead."
            )
        check_counts(num_queries, num_classes)
        if not (0 <= label_flips <= 1 and 0 <= mask_flips <= 1):
            raise ConfigError(f"label_flips={label_flips}, mask_flips={mask_flips}: expected fractions in 0 to 1.")
        self.num_classes, self.num_queries = num_classes, num_queries
        self.label_flips, self.mask_flips = label_flips, mask_flips
        self.label_embed = nn.Embedding(num_classes, head.d_model)

    def forward(self, head: QueryHead, targets: Sequence[DetectionTarget], selected: Tensor | None) -> list[QuerySet]:
        """Draw noise and make the queries for a batch; targets have masks (N, H, W) of the padded images.

        With m the largest number of targets in an image, target j of an image is in row c * m + j of its copy c.
        """
        targets, sample = sample_targets(targets, self.num_queries)
        counts = [len(target["labels"]) for target in targets]
        max_targets = max(counts)
        num_copies = max(self.num_queries // max_targets, 1) if max_targets else 1
        labels = torch.cat([target["labels"] for target in targets]).repeat(num_copies)
        content = self.label_embed(self._add_noise(labels))
        rows = tuple(list_copied_rows(counts, num_copies).to(labels.device, non_blocking=True))
        content = content.new_zeros(len(targets), num_copies * max_targets, content.shape[1]).index_put(rows, content)
        query_set = QuerySet(
            name="dn",
            queries=Queries(
                content, torch.zeros_like(content), masks=NoisedMasks(targets, num_copies, self.mask_flips)
            ),
            matches=sample.matches([match_rows(count, max_targets, [False] * num_copies) for count in counts]),
            repeats=num_copies * sample.share,
            num_parts=num_copies,
            sees_own=True,
        )
        return [query_set]

    def _add_noise(self, labels: Tensor) -> Tensor:
        flipped = torch.rand(len(labels), device=labels.device) < self.label_flips
        new = torch.randint(self.num_classes, (len(labels),), device=labels.device)
        # Labels out of range are reported by the matcher, which can name the image.
        return new.where(flipped, labels.clamp(0, self.num_classes - 1))


class NoisedMasks:
    """The masks of `num_copies` copies of the targets, in a given size and with newly drawn noise at each call."""

    def __init__(self, targets: Sequence[DetectionTarget], num_copies: int, mask_flips: float):
        self.masks = [target["masks"].bool() for target in targets]  # decoded once, and outside of a compiled graph
        self.num_copies = num_copies
        self.mask_flips = mask_flips
        self._resized: dict[tuple[int, int], Tensor] = {}  # several layers attend in the same size

    def __call__(self, size: tuple[int, int]) -> Tensor:
        """Return (B, num_copies * largest number of targets, *size) bool; empty beyond an image's targets."""
        size = tuple(size)
        if size not in self._resized:
            max_targets = max(len(masks) for masks in self.masks)
            padded = [F.pad(resize(masks, size), (0, 0, 0, 0, 0, max_targets - len(masks))) for masks in self.masks]
            self._resized[size] = torch.stack(padded)
        return flip_points(self._resized[size].repeat(1, self.num_copies, 1, 1), self.mask_flips)


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
