"""Queries from noised labels and boxes of the targets, which the decoder learns to restore (DN-DETR and DINO)."""

import itertools
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.layers import MLP
from vitkit.nn.position import sine_positions_boxes
from vitkit.nn.queries import Queries, QueryHead
from vitkit.ops.boxes import cxcywh_to_xyxy, inverse_sigmoid, xyxy_to_cxcywh
from vitkit.registry import TRAINING_QUERIES
from vitkit.structures import DetectionTarget, ImageMatches, QuerySet

logger = logging.getLogger("vitkit")


class Noise(NamedTuple):
    """The random numbers for K copied targets."""

    label_chance: Tensor
    """(K,) in 0..1; a label is replaced if this is below half of `label_noise`."""
    new_labels: Tensor
    """(K,) int64, the replacement for each label."""
    signs: Tensor
    """(K, 4), 1 or -1: the direction in which each coordinate of the corners moves."""
    shares: Tensor
    """(K, 4) in 0..1: how far it moves, as a fraction of the maximum."""


class Denoising(nn.Module):
    """Base of denoising queries, which are noised targets and take no proposals."""

    key = "denoising"
    num_selected = 0
    proposals = ()


@TRAINING_QUERIES.register
class BoxDenoising(Denoising):
    """Queries from noised labels and boxes, which need no matching (DN-DETR, Li et al. 2022,
    https://arxiv.org/abs/2203.01305).

    Args:
        head: the head that they join; its queries must start from boxes or have learned positions.
        num_classes: number of the targets' classes.
        num_queries: number of queries to fill with copies of the targets, counted by the image with the most targets.
            Of an image with more targets a sample is copied, drawn anew in each step; the originals copy all, so that
            a crowd's queries take most of the step's time and memory.
        contrastive: whether each copy is accompanied by one with more noise, which has to be classified as "no object"
            (contrastive denoising, CDN, of DINO, Zhang et al. 2022, https://arxiv.org/abs/2203.03605, section 3.3).
        label_noise: fraction of labels of which half is replaced by random ones.
        box_noise: maximum shift of a box's corners, in halves of its width and height; "no object" boxes shift by one
            to two times as much.
        mirror: whether a width or height that the noise makes negative changes its sign (D-FINE and DEIM); without, it
            becomes the minimum (DINO, RT-DETR).
        eps: the distance that noised boxes keep to 0 and 1, approximately: 1e-3 in DINO, 1e-5 in RT-DETR, D-FINE and
            DEIM.
        padding: the four coordinates of the queries without a target, in images that have fewer than another: 0.5 in
            DINO, 0 in RT-DETR, D-FINE and DEIM.
    Raises:
        ConfigError: the head's queries start from points, there are no queries or no classes, or a kind of noise, eps
            or padding is out of range.
    """

    def __init__(
        self,
        head: QueryHead,
        num_classes: int,
        *,
        num_queries: int = 100,
        contrastive: bool = True,
        label_noise: float = 0.5,
        box_noise: float = 1.0,
        mirror: bool = False,
        eps: float = 1e-3,
        padding: float = 0.5,
    ):
        super().__init__()
        if head.reference in ("points", "keypoints") or head.attends_in_masks:
            raise ConfigError(
                f"BoxDenoising needs queries that start from boxes, unlike those of this {type(head).__name__}. "
                "Choose model.head.type=DABDeformableDETRHead or DINOHead, or DeformableDETRHead with two_stage=True."
            )
        check_counts(num_queries, num_classes)
        if not 0 <= label_noise <= 2 or box_noise < 0:
            raise ConfigError(f"label_noise={label_noise}, box_noise={box_noise}: expected 0 to 2, and at least 0.")
        if not (0 < eps < 0.5 and 0 <= padding <= 1):
            raise ConfigError(f"eps={eps}, padding={padding}: expected more than 0 and below 0.5, and 0 to 1.")
        self.num_classes, self.num_queries, self.contrastive = num_classes, num_queries, contrastive
        self.label_noise, self.box_noise = label_noise, box_noise
        self.mirror, self.eps, self.padding = mirror, eps, padding
        self.label_embed = self.make_label_embed(head.d_model)
        self.box_embed = None
        if head.reference == "none":
            self.box_embed = MLP((2 * head.d_model, head.d_model, head.d_model))

    def forward(self, head: QueryHead, targets: Sequence[DetectionTarget], selected: Tensor | None) -> list[QuerySet]:
        """Draw noise and make the queries for a batch.

        With m the largest number of targets in an image, target j of an image is in row c * m + j of its copy c. Rows
        without a target are queries like the others, with zero content and a box of `padding`.
        """
        device = self.label_embed.weight.device
        targets, sample = sample_targets(targets, self.num_queries)
        counts = [len(target["labels"]) for target in targets]
        max_targets = max(counts)
        num_groups = max(self.num_queries // max_targets, 1) if max_targets else 1
        is_negative = [False, True] * num_groups if self.contrastive else [False] * num_groups
        num_copies = len(is_negative)

        labels = torch.cat([target["labels"] for target in targets]).repeat(num_copies)
        boxes = torch.cat([target["boxes_cxcywh"] for target in targets]).float().repeat(num_copies, 1)
        negative = torch.tensor(is_negative).repeat_interleave(sum(counts))[:, None].to(device, non_blocking=True)
        noise = self.draw(len(labels), device)
        content = self.contents(labels, noise, targets, num_copies)
        moves = noise.signs * (noise.shares + negative) * self.box_noise
        boxes = shift_corners(boxes, moves, mirror=self.mirror, eps=self.eps)

        rows = tuple(list_copied_rows(counts, num_copies).to(device, non_blocking=True))
        shape = len(targets), num_copies * max_targets
        content = content.new_zeros(*shape, content.shape[1]).index_put(rows, content)
        padding = min(max(self.padding, self.eps), 1 - self.eps)
        boxes = boxes.new_full((*shape, 4), padding).index_put(rows, boxes)
        query_set = QuerySet(
            name="dn",
            queries=self._queries(head, content, boxes),
            matches=sample.matches([match_rows(count, max_targets, is_negative) for count in counts]),
            repeats=num_groups * sample.share,
            num_parts=num_groups,
            sees_own=True,
        )
        return [query_set]

    def make_label_embed(self, d_model: int) -> nn.Module:
        """Create the layer that computes the queries' contents."""
        # The original's weights also have the row after the classes; no query uses it.
        return nn.Embedding(self.num_classes + 1, d_model)

    def contents(self, labels: Tensor, noise: Noise, targets: Sequence[DetectionTarget], num_copies: int) -> Tensor:
        """Return the content of each copied target with a noised label, (K, d_model).

        Args:
            labels: (K,) of all targets of the batch, `num_copies` times.
        """
        labels = labels.where(noise.label_chance >= self.label_noise / 2, noise.new_labels)
        # Labels out of range are reported by the matcher, which can name the image.
        return self.label_embed(labels.clamp(0, self.num_classes - 1))

    def _queries(self, head: QueryHead, content: Tensor, boxes: Tensor) -> Queries:
        if self.box_embed is None:
            return head.queries_at(content, boxes)
        codes = sine_positions_boxes(boxes, content.shape[-1]).to(content.dtype)
        return Queries(content, positions=self.box_embed(codes))

    def draw(self, count: int, device: torch.device) -> Noise:
        """Draw the random numbers for `count` copied targets."""
        return Noise(
            torch.rand(count, device=device),
            torch.randint(self.num_classes, (count,), device=device),
            torch.randint(2, (count, 4), device=device) * 2.0 - 1,
            torch.rand(count, 4, device=device),
        )


def shift_corners(boxes_cxcywh: Tensor, moves: Tensor, *, mirror: bool, eps: float) -> Tensor:
    """Shift the corners of boxes.

    Args:
        boxes_cxcywh: (K, 4) in 0..1.
        moves: (K, 4) shifts of x0, y0, x1, y1, in halves of the width and height.
        mirror, eps: see `BoxDenoising`.
    Returns:
        (K, 4) cxcywh; corners stay in the image.
    """
    corners = cxcywh_to_xyxy(boxes_cxcywh) + moves * boxes_cxcywh[:, 2:].repeat(1, 2) / 2
    boxes = xyxy_to_cxcywh(corners.clamp(0, 1))
    return inverse_sigmoid(boxes.abs() if mirror else boxes, eps=eps).sigmoid()


def check_counts(num_queries: int, num_classes: int) -> None:
    """Raise ConfigError if there are no queries to make of targets, or no labels to noise."""
    if num_queries < 1:
        raise ConfigError(f"num_queries={num_queries}: expected at least 1.")
    if num_classes < 1:
        raise ConfigError(f"num_classes={num_classes} leaves no labels to noise; expected at least 1.")


class TargetSample(NamedTuple):
    """Which targets of each image queries are made of."""

    indices: Sequence[Tensor]
    """For each image (K,) int64."""
    share: float
    """Fraction of the targets of all images."""

    def matches(self, matches: Sequence[ImageMatches]) -> list[ImageMatches]:
        """Return matches of rows with targets of the sample as matches with those of the image."""
        return [(row, index[target]) for (row, target), index in zip(matches, self.indices)]


def sample_targets(targets: Sequence[DetectionTarget], most: int) -> tuple[list[DetectionTarget], TargetSample]:
    """Return at most `most` targets of each image, drawn at random if there are more, and which these are."""
    counts = [len(target["labels"]) for target in targets]
    if max(counts) <= most:
        return list(targets), TargetSample([torch.arange(count) for count in counts], 1)
    indices = [torch.randperm(n)[:most].sort().values if n > most else torch.arange(n) for n in counts]
    sampled: list[Any] = []
    for target, count, index in zip(targets, counts, indices):
        of_each = {name: target[name] for name in ("labels", "boxes_cxcywh", "masks", "keypoints") if name in target}
        at = index.to(target["labels"].device, non_blocking=True)
        sampled.append({**target, **{name: value[at] for name, value in of_each.items()}} if count > most else target)
    _say_once(most)
    return sampled, TargetSample(indices, sum(map(len, indices)) / sum(counts))


@cache
def _say_once(most: int) -> None:
    logger.info(
        f"denoising: images with more than {most} objects (num_queries of the training queries) have queries of as "
        "many of them, drawn anew in each step"
    )


def list_copied_rows(counts: Sequence[int], num_copies: int) -> Tensor:
    """Return the image and row of each copied target, (2, K), copy by copy and image by image."""
    max_targets = max(counts)
    image = [i for i, count in enumerate(counts) for _ in range(count)] * num_copies
    row = [copy * max_targets + j for copy, count in itertools.product(range(num_copies), counts) for j in range(count)]
    return torch.tensor([image, row], dtype=torch.int64)


def match_rows(count: int, max_targets: int, is_negative: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return the rows of an image that have to predict a target, and the index of that target."""
    positive = [copy for copy, negative in enumerate(is_negative) if not negative]
    row = [copy * max_targets + j for copy in positive for j in range(count)]
    return torch.tensor(row, dtype=torch.int64), torch.arange(count).repeat(len(positive))
