"""Queries from noised keypoints of the targets, which the decoder learns to restore (DETRPose, Janampa and Pattichis
2025, https://arxiv.org/abs/2506.13027)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.layers import init_xavier
from vitkit.nn.queries import Queries, QueryHead
from vitkit.ops.boxes import inverse_sigmoid
from vitkit.ops.keypoints import keep_labeled_objects, labeled_poses
from vitkit.registry import TRAINING_QUERIES
from vitkit.structures import DetectionTarget, QuerySet
from vitkit.training_queries.box_denoising import Denoising, check_counts, list_copied_rows, match_rows, sample_targets

POSITIVE, NEGATIVE = (0.0, math.log(2)), (math.log(2), math.log(10))
"""The range of minus the logarithm of a shifted keypoint's similarity (OKS): 1 to 1/2, and 1/2 to 1/10."""
_EPS = 1e-3
"""The distance that noised keypoints keep to 0 and 1, approximately."""


class KeypointNoise(NamedTuple):
    """The random numbers for K copied targets with P keypoints."""

    label_chance: Tensor
    """(K,) in 0..1; a label is replaced if this is below half of `label_noise`."""
    new_labels: Tensor
    """(K,) int64, the replacement for each label."""
    directions: Tensor
    """(K, 1 + P, 2), in which the center and the keypoints move; their lengths do not matter."""
    shares: Tensor
    """(K, 1 + P) in 0..1: where in the range of similarities each keypoint ends."""


@TRAINING_QUERIES.register
class KeypointDenoising(Denoising):
    """Queries from noised labels and keypoints, which need no matching. Each copy of the targets is accompanied by one
    with more noise, which has to be classified as "no object".

    A keypoint moves so far that its similarity to the labeled one is drawn from 1/2 to 1, or from 1/10 to 1/2 in the
    copy with more noise. Those that are not labeled stay at 0, and the instance's center is that of its box. Objects
    without a labeled keypoint are left out.

    Args:
        head: the head that they join, a `DETRPoseHead`.
        num_classes: number of the targets' classes.
        num_queries: number of queries to fill with copies of the targets, counted by the image with the most targets;
            at least one copy is made, and as many with more noise besides.
        label_noise: fraction of labels of which half is replaced by random ones.
        noise_labels: number of labels that replacements are drawn from; None: those of the classes. The original draws
            from 80, although it has one class of objects.
        published_noise: whether keypoints move as in the original's code, with which ECPose's weights are likely to be
            trained: there, the directions are no unit vectors but divided by their norm over the keypoints of power -1,
            which makes moves about 60 times as long, all to the lower right; and boxes (cx, cy, w, h) are taken for
            corners, so that the center is ((cx + w) / 2, (cy + h) / 2). False: as the paper says.
    Raises:
        ConfigError: the head's queries have no keypoints, there are no queries, classes or labels, or label_noise is
            out of range.
    """

    def __init__(
        self,
        head: QueryHead,
        num_classes: int,
        *,
        num_queries: int = 20,
        label_noise: float = 0.5,
        noise_labels: int | None = None,
        published_noise: bool = False,
    ):
        super().__init__()
        if head.reference != "keypoints":
            raise ConfigError(
                f"KeypointDenoising needs queries with keypoints, unlike those of this {type(head).__name__}. Choose "
                "model.head.type=DETRPoseHead."
            )
        check_counts(num_queries, num_classes)
        if not 0 <= label_noise <= 2:
            raise ConfigError(f"label_noise={label_noise}: expected 0 to 2.")
        if noise_labels is not None and noise_labels < 1:
            raise ConfigError(f"noise_labels={noise_labels}: expected at least 1, or None for the number of classes.")
        self.num_classes, self.num_queries, self.label_noise = num_classes, num_queries, label_noise
        self.noise_labels = num_classes if noise_labels is None else noise_labels
        self.published_noise = published_noise
        # The original's weights also have the row after the labels; no query uses it.
        self.label_embed = nn.Embedding(max(num_classes, self.noise_labels) + 1, head.d_model)
        self.keypoint_embed = nn.Embedding(len(head.keypoint_sigmas), head.d_model)
        init_xavier(self.label_embed, self.keypoint_embed)

    def forward(self, head: QueryHead, targets: Sequence[DetectionTarget], selected: Tensor | None) -> list[QuerySet]:
        """Draw noise and make the queries for a batch.

        With m the largest number of targets in an image, target j of an image is in row c * m + j of its copy c. Rows
        without a target are queries like the others, with zero content and all keypoints in the image's center.
        """
        device, num_keypoints = self.label_embed.weight.device, len(self.keypoint_embed.weight)
        targets, sample = sample_targets(keep_labeled_objects(targets, num_keypoints), self.num_queries)
        counts = [len(target["labels"]) for target in targets]
        max_targets = max(counts)
        num_groups = max(self.num_queries // max_targets, 1) if max_targets else 1
        is_negative = [False, True] * num_groups
        num_copies = len(is_negative)

        labels = torch.cat([target["labels"] for target in targets]).repeat(num_copies)
        negative = torch.tensor(is_negative).repeat_interleave(sum(counts)).to(device, non_blocking=True)
        noise = self.draw(len(labels), device)
        labels = labels.where(noise.label_chance >= self.label_noise / 2, noise.new_labels)
        # Labels out of range are reported by the matcher, which can name the image.
        instances = self.label_embed(labels.clamp(0, len(self.label_embed.weight) - 1))
        content = torch.cat((instances[:, None], self.keypoint_embed.weight.expand(len(labels), -1, -1)), dim=1)
        points = self.shift(targets, negative, noise, head.keypoint_sigmas)

        rows = tuple(list_copied_rows(counts, num_copies).to(device, non_blocking=True))
        shape = len(targets), num_copies * max_targets
        content = content.new_zeros(*shape, *content.shape[1:]).index_put(rows, content)
        points = points.new_full((*shape, *points.shape[1:]), 0.5).index_put(rows, points)
        query_set = QuerySet(
            name="dn",
            queries=Queries(content, references=points),
            matches=sample.matches([match_rows(count, max_targets, is_negative) for count in counts]),
            repeats=num_groups * sample.share,
            num_parts=num_groups,
            sees_own=True,
        )
        return [query_set]

    def shift(
        self, targets: Sequence[DetectionTarget], negative: Tensor, noise: KeypointNoise, sigmas: Tensor
    ) -> Tensor:
        """Return the shifted center and keypoints of each copied target, (K, 1 + P, 2) in 0..1.

        Args:
            negative: (K,) bool, whether there is more noise.
            sigmas: (P,), see `KeypointInfo`.
        """
        num_copies = len(negative) // max(sum(len(target["labels"]) for target in targets), 1)
        poses = labeled_poses(targets, len(sigmas))
        boxes = torch.cat([target["boxes_cxcywh"] for target in targets]).float()
        centers = (boxes[:, :2] + boxes[:, 2:]) / 2 if self.published_noise else boxes[:, :2]
        points = torch.cat((centers[:, None], poses.points), dim=1).repeat(num_copies, 1, 1)

        (least, middle), (_, most) = POSITIVE, NEGATIVE
        low = torch.where(negative, middle, least)[:, None]
        exponents = low + noise.shares[:, 1:] * (torch.where(negative, most, middle)[:, None] - low)
        # The longer side of the image, relative to the square root of the object's area.
        longest = poses.scales.amax(1).repeat(num_copies)[:, None]
        lengths = (2 * exponents).sqrt() * 2 * sigmas / longest * poses.is_labeled.repeat(num_copies, 1)
        lengths = F.pad(lengths, (1, 0))  # the center stays
        if self.published_noise:
            units = F.normalize(noise.directions, p=-1.0, dim=1)
        else:
            units = F.normalize(noise.directions, dim=-1)
        return inverse_sigmoid(points + lengths[..., None] * units, eps=_EPS).sigmoid()

    def draw(self, count: int, device: torch.device) -> KeypointNoise:
        """Draw the random numbers for `count` copied targets."""
        shape = count, 1 + len(self.keypoint_embed.weight)
        draw_directions = torch.rand if self.published_noise else torch.randn
        return KeypointNoise(
            torch.rand(count, device=device),
            torch.randint(self.noise_labels, (count,), device=device),
            draw_directions(*shape, 2, device=device),
            torch.rand(shape, device=device),
        )
