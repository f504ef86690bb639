"""The decoder that computes queries' positions from their boxes, and refines these layer by layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from vitkit.nn.deformable_transformer import Levels, box_codes
from vitkit.nn.detection import box_head, boxes_around
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.queries import Queries

LOGIT_EPS = 1e-3
"""Distance to 0 and 1 to which coordinates of references are clamped, so that their logits are finite."""


class RefiningDecoder(nn.Module):
    """DINO's decoder (Zhang et al. 2022, section 3.1, https://arxiv.org/abs/2203.03605).

    Args:
        layers: called as `DeformableDecoderLayer` is.
        num_predictors: number of box heads; 1: all layers share it.
        look_forward_twice: whether the loss of a layer's boxes also trains the previous layer (section 3.5).
        prediction_eps: `LOGIT_EPS` of the boxes that layers predict; those that the next layer attends in keep that.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        d_model: int,
        num_predictors: int,
        *,
        look_forward_twice: bool,
        prediction_eps: float = LOGIT_EPS,
    ):
        super().__init__()
        self.look_forward_twice, self.prediction_eps = look_forward_twice, prediction_eps
        self.layers = nn.ModuleList(layers)
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in range(num_predictors))
        self.norm = nn.LayerNorm(d_model)
        self.ref_point_head = MLP((2 * d_model, d_model, d_model))
        init_xavier(self.ref_point_head)

    def forward(
        self, queries: Queries, memory: Tensor, levels: Levels, *others: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Decode the queries with every layer.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
            others: what layers attend to besides, passed to each after the memory.
        Returns:
            for each layer, the normalized states (B, L, d_model), the boxes (B, L, 4) that it attended in, and the
            boxes that it predicts, cxcywh in 0..1.
        """
        x, references = queries.content, queries.references
        decoded, predicted_from = [], references
        for i, layer in enumerate(self.layers):
            around = levels.around(references)
            positions = self.ref_point_head(box_codes(around["reference_points"], x.shape[-1]).to(x.dtype))
            x = layer(x, memory, *others, positions=positions, bias=queries.bias, **around)
            states, bbox_embed = self.norm(x), self.bbox_embed[i % len(self.bbox_embed)]
            predicted = boxes_around(predicted_from, bbox_embed(states), eps=self.prediction_eps)
            decoded.append((states, references, predicted))
            if i + 1 < len(self.layers):
                refined = boxes_around(references, bbox_embed(x), eps=LOGIT_EPS)
                references = refined.detach()
                # With its gradient, the next layer's loss also trains this layer's box ("look forward twice").
                predicted_from = refined if self.look_forward_twice else references
        return decoded
