"""Known queries: noised targets that the decoder learns to restore (DN-DETR and DINO).

DN-DETR (Li et al. 2022, https://arxiv.org/abs/2203.01305) turns the labels and boxes of the targets, with noise, into
queries, whose answer is known without matching. DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605, section 3.3)
adds to each copy a second one with so much noise that the answer is "no object".
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.layers import MLP
from vitkit.nn.position import sine_positions_boxes
from vitkit.nn.training_queries import DenoisingQueries, TrainingOnly
from vitkit.ops.boxes import cxcywh_to_xyxy, inverse_sigmoid, xyxy_to_cxcywh
from vitkit.structures import DetectionTarget

EDGE = 1e-3
"""Noised boxes keep about this distance to 0 and 1."""


@dataclass(frozen=True)
class DenoisingSettings:
    """How targets become queries in training."""

    denoising_queries: int | None = None
    """Copies of the targets, as many as fit into this number of queries where each image has as many targets as the one
    with the most; at least one. None: no denoising."""
    contrastive: bool = True
    """Each copy has a second one beside it, with more noise, which shall be no object (DINO)."""
    label_noise: float = 0.5
    """Half of this share of the labels is drawn anew."""
    box_noise: float = 1.0
    """How far each corner of a box moves at most, in halves of its width and height; more by 1 for "no object"."""


class Noise(NamedTuple):
    """The random numbers of K copied targets."""

    label_chance: Tensor
    """(K,) in 0..1; a label is replaced where it is below half of `label_noise`."""
    new_labels: Tensor
    """(K,) int64."""
    signs: Tensor
    """(K, 4) 1 or -1: the direction in which each coordinate of the corners moves."""
    shares: Tensor
    """(K, 4) in 0..1: how far."""


class BoxDenoising(TrainingOnly):
    """Make queries from noised labels and boxes.

    Args:
        num_classes: of the targets.
        embeds_boxes: it has `positions` for a decoder that makes none from boxes.
    Raises:
        ConfigError: there are no queries or no classes, or a kind of noise is out of range.
    """

    def __init__(self, num_classes: int, d_model: int, settings: DenoisingSettings, *, embeds_boxes: bool = False):
        super().__init__()
        self.settings = settings
        self.num_classes = num_classes
        queries = settings.denoising_queries
        if queries is None:
            return
        if queries < 1:
            raise ConfigError(f"model.head.denoising_queries={queries}: expected at least 1, or None for no denoising.")
        if num_classes < 1:
            raise ConfigError(
                f"model.head.denoising_queries={queries}: num_classes={num_classes} leaves no labels to noise."
            )
        if not 0 <= settings.label_noise <= 2 or settings.box_noise < 0:
            raise ConfigError(
                f"model.head: label_noise={settings.label_noise}, box_noise={settings.box_noise}: expected 0 to 2, and "
                "at least 0."
            )
        # The row after the classes is in the original's weights, too; no query has it.
        self.label_embed = nn.Embedding(num_classes + 1, d_model)
        if embeds_boxes:
            self.box_embed = MLP((2 * d_model, d_model, d_model))

    @property
    def is_enabled(self) -> bool:
        """Whether there are denoising queries."""
        return self.settings.denoising_queries is not None

    def positions(self, noised: DenoisingQueries) -> Tensor:
        """Return the positions (B, P, d_model) of queries that start from boxes."""
        return self.box_embed(sine_positions_boxes(noised.boxes_cxcywh, noised.content.shape[-1]))

    @torch.compiler.disable  # of another number of targets it would be compiled anew
    def forward(self, targets: Sequence[DetectionTarget]) -> DenoisingQueries:
        """Draw noise and make the queries of a batch.

        With m targets in the image that has the most, target j of an image is in row c * m + j of its copy c. Fewer
        targets leave rows empty, which are queries like the others: zero content, a box in the middle.
        """
        device = self.label_embed.weight.device
        counts = [len(target["labels"]) for target in targets]
        most = max(counts)
        num_groups = max(self.settings.denoising_queries // most, 1) if most else 1
        is_negative = [False, True] * num_groups if self.settings.contrastive else [False] * num_groups
        copies = len(is_negative)

        labels = torch.cat([target["labels"] for target in targets]).repeat(copies)
        boxes = torch.cat([target["boxes_cxcywh"] for target in targets]).float().repeat(copies, 1)
        negative = torch.tensor(is_negative).repeat_interleave(sum(counts))[:, None].to(device, non_blocking=True)
        noise = self.draw(len(labels), device)
        labels = labels.where(noise.label_chance >= self.settings.label_noise / 2, noise.new_labels)
        boxes = noised_boxes(boxes, noise.signs * (noise.shares + negative) * self.settings.box_noise)

        # A label out of range is for the matcher to report, which can name its image.
        content = self.label_embed(labels.clamp(0, self.num_classes - 1))
        rows = copied_rows(counts, copies).to(device, non_blocking=True)
        shape = len(targets), copies * most
        return DenoisingQueries(
            content=content.new_zeros(*shape, content.shape[1]).index_put(tuple(rows), content),
            boxes_cxcywh=boxes.new_full((*shape, 4), 0.5).index_put(tuple(rows), boxes),
            matches=[known_rows(count, most, is_negative) for count in counts],
            num_groups=num_groups,
        )

    def draw(self, count: int, device: torch.device) -> Noise:
        """Draw the random numbers of `count` copied targets."""
        return Noise(
            torch.rand(count, device=device),
            torch.randint(self.num_classes, (count,), device=device),
            torch.randint(2, (count, 4), device=device) * 2.0 - 1,
            torch.rand(count, 4, device=device),
        )


def noised_boxes(boxes_cxcywh: Tensor, moves: Tensor) -> Tensor:
    """Move the corners of boxes.

    Args:
        boxes_cxcywh: (K, 4) in 0..1.
        moves: (K, 4) of x0, y0, x1, y1, in halves of the width and height.
    Returns:
        (K, 4) cxcywh; corners stay in the image, and a box that would turn inside out gets the least size.
    """
    corners = cxcywh_to_xyxy(boxes_cxcywh) + moves * boxes_cxcywh[:, 2:].repeat(1, 2) / 2
    return inverse_sigmoid(xyxy_to_cxcywh(corners.clamp(0, 1)), eps=EDGE).sigmoid()


def copied_rows(counts: Sequence[int], copies: int) -> Tensor:
    """Return image and row of each copied target, (2, K): copy after copy, image after image."""
    most = max(counts)
    image = [i for i, count in enumerate(counts) for _ in range(count)] * copies
    row = [copy * most + j for copy, count in itertools.product(range(copies), counts) for j in range(count)]
    return torch.tensor([image, row], dtype=torch.int64)


def known_rows(count: int, most: int, is_negative: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return the rows of an image that shall predict a target, and which."""
    positive = [copy for copy, negative in enumerate(is_negative) if not negative]
    row = [copy * most + j for copy in positive for j in range(count)]
    return torch.tensor(row, dtype=torch.int64), torch.arange(count).repeat(len(positive))
