"""Keypoints of a decoder's queries, as in RF-DETR's preview of keypoints (the package rfdetr 1.11.2) and Group Pose
(Liu et al. 2023, https://arxiv.org/abs/2308.07313): each query has a row of further queries, one for each point."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import MultiHeadAttention, mask_bias
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.deformable_transformer import init_deformable
from vitkit.nn.detection import box_head
from vitkit.nn.layers import MLP, FeedForward, Linear

NUM_OUTPUTS = 8
"""What is predicted for each point: 7 numbers, see `gaussian_keypoint_terms`, and what it adds to the class logits."""


class QueryKeypoints(nn.Module):
    """Predicts K keypoints for each query and each group of classes.

    Args:
        d_model: channels of queries and points.
        num_classes: number of logits per query.
        num_keypoints: K.
        classes: labels whose objects have keypoints, each with points of its own; None: all, with the same points.
        num_layers: number of decoder layers.
        num_levels: number of maps that points attend to.
        num_heads, num_cross_heads, num_points, dropout: see `RFDETRHead`.
    Raises:
        ConfigError: there are no keypoints, or a class is not one of the model's.
    """

    def __init__(
        self,
        d_model: int,
        num_classes: int,
        num_keypoints: int,
        *,
        classes: Sequence[int] | None,
        num_layers: int,
        num_levels: int,
        num_heads: int,
        num_cross_heads: int,
        num_points: int,
        dropout: float,
    ):
        super().__init__()
        if num_keypoints < 1:
            raise ConfigError(f"num_keypoints={num_keypoints}: expected at least 1. Load the dataset's keypoints.")
        if classes is not None and (not classes or len({*classes} & {*range(num_classes)}) < len(classes)):
            raise ConfigError(
                f"keypoint_classes={list(classes)}: expected different labels in 0..{num_classes - 1}, or None for all."
            )
        self.num_keypoints = num_keypoints
        self.num_groups = 1 if classes is None else len(classes)
        groups = torch.zeros(num_classes, dtype=torch.int64)
        if classes is not None:
            groups = groups.fill_(-1).index_copy_(0, torch.tensor(classes), torch.arange(len(classes)))
        self.register_buffer("label_groups", groups)
        count = self.num_groups * num_keypoints
        self.first_queries = ConditionedQueries(d_model, count)
        self.queries = ConditionedQueries(d_model, count)
        self.positions = nn.Parameter(torch.empty(count, d_model))
        attention = dict(num_levels=num_levels, num_points=num_points)
        self.layers = nn.ModuleList(
            KeypointLayer(d_model, num_heads=num_heads, num_cross_heads=num_cross_heads, dropout=dropout, **attention)
            for _ in range(num_layers)
        )
        init_deformable(self.first_queries, self.queries, self.layers)
        nn.init.xavier_uniform_(self.positions)
        self.embed = self.make_embed(d_model)
        group = torch.arange(count) // num_keypoints
        # The query itself sees all points, and is seen by them.
        separate = F.pad(group[:, None] != group, (1, 0, 1, 0))
        self.register_buffer("bias", mask_bias(separate) if self.num_groups > 1 else None, persistent=False)

    @staticmethod
    def make_embed(d_model: int) -> MLP:
        """Return layers that predict a point from its state, initially the center of the box."""
        return box_head(d_model, num_outputs=NUM_OUTPUTS)

    def predict_first(self, embed: nn.Module, states: Tensor, boxes_cxcywh: Tensor) -> Tensor:
        """Predict the points of a first stage, see `predict`, from its states (B, Q, d_model), by layers of its own."""
        return self.predict(self.first_queries(states), boxes_cxcywh, embed)

    def predict(self, points: Tensor, boxes_cxcywh: Tensor, embed: nn.Module | None = None) -> Tensor:
        """Predict from the states of points, (B, Q, G * K, d_model), relative to their queries' boxes (B, Q, 4).

        Returns:
            (B, Q, G, K, 8) float32, see `NUM_OUTPUTS`.
        """
        deltas = (self.embed if embed is None else embed)(points)
        deltas = deltas.to(torch.promote_types(deltas.dtype, torch.float32))
        centers, sizes = boxes_cxcywh[:, :, None].split(2, dim=-1)
        predicted = torch.cat((deltas[..., :2] * sizes + centers, deltas[..., 2:]), dim=-1)
        return predicted.unflatten(2, (self.num_groups, self.num_keypoints))

    def with_keypoints(self, outputs: dict[str, Any], predicted: Tensor) -> dict[str, Any]:
        """Add predicted points, (B, Q, G, K, 8), to the outputs of a layer or stage, and to its class logits.

        They are pred_keypoints (B, Q, G, K, 7), see `gaussian_keypoint_terms`, and keypoint_groups (C,) int64, the
        group of each label's points, -1 for labels without any.
        """
        groups = torch.arange(self.num_groups, device=predicted.device)
        of_group = (self.label_groups == groups[:, None]).to(predicted.dtype)  # (G, C)
        logits = outputs["pred_logits"] + predicted[..., -1].sum(-1) @ of_group
        found = {"pred_keypoints": predicted[..., :-1], "keypoint_groups": self.label_groups}
        return outputs | found | {"pred_logits": logits}


class ConditionedQueries(nn.Module):
    """Learned vectors of points, which the query that they belong to scales, shifts and gates."""

    def __init__(self, d_model: int, count: int):
        super().__init__()
        self.queries = nn.Parameter(torch.empty(count, d_model))
        self.modulation = nn.Sequential(Linear(d_model, d_model), nn.GELU(), Linear(d_model, 3 * d_model))
        self.proj = Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, Q, d_model) -> (B, Q, count, d_model)."""
        scale, shift, gate = self.modulation(x)[:, :, None].chunk(3, dim=-1)
        normalized = F.layer_norm(self.queries, self.queries.shape[1:])
        return self.proj((1 + scale) * normalized + shift) * gate + self.queries


class KeypointLayer(nn.Module):
    """Self-attention of each query with its own points, deformable cross-attention of the points around the query's
    box, and a feed-forward network, post-norm."""

    activation_checkpointing = False

    def __init__(
        self, d_model: int, *, num_heads: int, num_cross_heads: int, num_levels: int, num_points: int, dropout: float
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.query_scale = nn.Parameter(torch.full((1,), 1e-6))
        self.query_norm = nn.LayerNorm(d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.cross_attn = MultiScaleDeformableAttention(
            d_model, num_cross_heads, num_levels=num_levels, num_points=num_points
        )
        self.norm2 = nn.LayerNorm(d_model)
        self.ffn = FeedForward(d_model, 4 * d_model, dropout=dropout)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        points: Tensor,
        memory: Tensor,
        *,
        positions: Tensor,
        point_positions: Tensor,
        reference_points: Tensor,
        shapes: Sequence[tuple[int, int]],
        padding_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the states of the queries, and of their points.

        Args:
            x: (B, Q, d_model), the queries.
            points: (B, Q, P, d_model).
            memory: (B, S, d_model), which the points attend to.
            positions: (B, Q, d_model), of the queries; added to their points' in the cross-attention.
            point_positions: (P, d_model), which tell a query's points apart.
            reference_points: (B, Q, levels, 4), the queries' boxes in the padded maps.
            padding_mask: (B, S) bool, padding of the memory, True = padding.
            bias: (1 + P, 1 + P) of the self-attention, float.
        """
        rows, num_points = points.shape[:2], points.shape[2]
        tokens = torch.cat((x[:, :, None], points), dim=2).flatten(0, 1)  # (B * Q, 1 + P, d_model)
        coded = tokens + F.pad(point_positions, (0, 0, 1, 0))
        attended = self.self_attn(coded, coded, tokens, bias=bias).unflatten(0, rows)
        x = self.query_norm(x + self.query_scale * self.dropout(attended[:, :, 0]))
        points = self.norm1(points + self.dropout(attended[:, :, 1:]))
        attended = self.cross_attn(
            (points + positions[:, :, None]).flatten(1, 2),
            memory,
            reference_points=reference_points.repeat_interleave(num_points, dim=1),
            shapes=shapes,
            padding_mask=padding_mask,
        )
        points = self.norm2(points + self.dropout(attended.unflatten(1, (-1, num_points))))
        return x, self.norm3(points + self.dropout(self.ffn(points)))
