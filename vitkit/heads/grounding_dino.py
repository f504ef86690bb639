"""Grounding DINO (Liu et al. 2023, https://arxiv.org/abs/2303.05499): a detector whose classes are the words of a text.

Image and text attend to each other in the encoder, queries to the text in the decoder, and the logit of a query and a
token is their product. MM-Grounding-DINO (Zhao et al. 2024, https://arxiv.org/abs/2401.02361) is the same network with
other settings: `scale`, `bias`, and heads that are not shared.

S counts the locations of all levels of the image, T the tokens of the text.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.errors import ConfigError
from vitkit.nn.attention import MultiHeadAttention, attend, mask_bias, padding_bias
from vitkit.nn.deformable_transformer import (
    DeformableDecoderLayer,
    DeformableEncoderLayer,
    Levels,
    flatten_levels,
    in_padded_maps,
    init_deformable,
)
from vitkit.nn.detection import PRIOR_PROBABILITY, check_channels
from vitkit.nn.layers import Linear, init_xavier
from vitkit.nn.position import sine_positions_boxes
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import BoxSelection
from vitkit.nn.refining_decoder import LOGIT_EPS, RefiningDecoder
from vitkit.nn.transformer import TransformerEncoderLayer
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo
from vitkit.text.prompt_tokens import prompt_layout


class EncodedPrompts(NamedTuple):
    """The encoded prompts of a batch."""

    features: Tensor
    """(B, T, d_model), the text encoder's, projected."""
    padding_mask: Tensor
    """(B, T) bool, True = padding."""
    phrase_ids: Tensor
    """(B, T) int64, the phrase of each token, see `PromptTokens`."""
    is_word: Tensor
    """(B, T) bool, see `PromptTokens`."""


@HEADS.register
class GroundingDINOHead(QueryHead):
    """Grounding DINO's transformer, which reads all maps of the neck and the text, and its predictions.

    Args:
        feature_info: description of the neck's maps, fine to coarse; each must have `d_model` channels.
        num_queries: number of boxes predicted per image.
        d_model, num_heads, num_points, d_ffn, dropout: of all layers of the image, see
            `vitkit.nn.deformable_transformer`. Layers of the text and the fusion have half as many heads and half of
            `d_ffn`.
        fusion_drop_path: fraction of images whose fusion is skipped in training, the same in all layers.
        fusion_dropout: fraction of the fusion's attention weights that is dropped in training.
        scale: whether logits are divided by sqrt(d_model), as in MM-Grounding-DINO.
        bias: whether logits have a learned bias, which starts from a probability of 0.01.
        share_heads: whether all decoder layers predict with the same heads.
        look_forward_twice: whether the loss of a layer's boxes also trains the previous layer.
        box_eps: distance to 0 and 1 to which coordinates are clamped before a box is predicted around them; 1e-5 in
            MM-Grounding-DINO.
    Raises:
        ConfigError: a map does not have `d_model` channels, or there are no queries.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")
    shared_outputs = ("text_padding",)
    reference = "boxes"
    selects_boxes = True

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 2048,
        dropout: float = 0.0,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        fusion_drop_path: float = 0.1,
        fusion_dropout: float = 0.0,
        scale: bool = False,
        bias: bool = False,
        share_heads: bool = True,
        look_forward_twice: bool = True,
        box_eps: float = LOGIT_EPS,
    ):
        super().__init__()
        check_channels("GroundingDINOHead", feature_info, d_model)
        if num_queries < 1:
            raise ConfigError(f"GroundingDINOHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries, self.learned_channels = d_model, num_queries, d_model
        num_levels = len(feature_info)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        fusion = dict(drop_path=fusion_drop_path, dropout=fusion_dropout)
        num_predictors = 1 if share_heads else num_decoder_layers

        def class_head() -> TokenClassifier:
            return TokenClassifier(d_model, scale=scale, bias=bias)

        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = FeatureEnhancer(num_encoder_layers, d_model, num_levels, **layer, fusion=fusion)
        layers = [TextDecoderLayer(d_model, num_levels, **layer) for _ in range(num_decoder_layers)]
        self.decoder = RefiningDecoder(
            layers, d_model, num_predictors, look_forward_twice=look_forward_twice, prediction_eps=box_eps
        )
        self.class_embed = nn.ModuleList(class_head() for _ in range(num_predictors))
        self.proposals = BoxSelection("Grounding DINO", d_model, class_head, num_queries)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        text: EncodedPrompts,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box per query, and a logit for each of the text's tokens.

        Args:
            features: the neck's maps, (B, d_model, h, w).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
            text: what to look for.
            added: other queries, which precede the head's own in the outputs.
        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        levels = flatten_levels(features, self.level_embed, padding_mask, position_offset=0.0, temperature=20.0)
        memory, words = self.encoder(levels, text)  # (B, S, d_model), (B, T, d_model)
        classes = words, text.padding_mask
        num_selected = self.num_queries + (0 if added is None else added.num_selected)
        selection, boxes = self.proposals(memory, levels, num_selected, *classes)
        learned = self.proposals.content.weight.expand(memory.shape[0], -1, -1)
        queries = self.make_queries(learned, boxes[:, : self.num_queries])
        if added is not None:
            queries = added.join(queries, self, boxes[:, self.num_queries :])
        decoded = self.decoder(queries, memory, levels, words, padding_bias(text.padding_mask, words.dtype))
        layers = [
            {
                # (B, Q, T), one sigmoid per token; -inf for padding
                "pred_logits": self.class_embed[i % len(self.class_embed)](states, *classes),
                "pred_boxes": boxes,  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
                "reference_points": references,  # (B, Q, 4), the boxes that the layer sampled in
                "text_padding": text.padding_mask,  # (B, T) bool, True = padding
            }
            for i, (states, references, boxes) in enumerate(decoded)
        ]
        return {
            **layers[-1],
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
            # The encoder's predictions at the selected locations, (B, Q, ...).
            "training_outputs": [selection | {"text_padding": text.padding_mask}],
        }

    def make_queries(self, learned: Tensor, boxes: Tensor) -> Queries:
        """Return queries with learned content, (B, Q, d_model), at selected boxes; see `QueryHead`."""
        return Queries(learned, references=boxes)


class TokenClassifier(nn.Module):
    """Dot products of queries and tokens, in place of a class head."""

    def __init__(self, d_model: int, *, scale: bool, bias: bool):
        super().__init__()
        self.factor = d_model**-0.5 if scale else 1.0
        start = -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY)
        self.bias = nn.Parameter(torch.tensor(start)) if bias else None

    def forward(self, x: Tensor, words: Tensor, padding_mask: Tensor) -> Tensor:
        """Return the logits of all pairs, (B, Q, T), -inf for padding.

        Args:
            x: (B, Q, d_model).
            words: (B, T, d_model).
            padding_mask: (B, T) bool, True = padding.
        """
        logits = x @ words.mT
        if self.factor != 1:
            logits = logits * self.factor
        if self.bias is not None:
            logits = logits + self.bias
        return logits.masked_fill(padding_mask[:, None], -torch.inf)


class FeatureEnhancer(nn.Module):
    """Encoder of image and text (section 3.1): in each layer they attend to each other, then each to itself."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_levels: int,
        *,
        num_heads: int,
        num_points: int,
        d_ffn: int,
        dropout: float,
        fusion: Mapping[str, float],
    ):
        super().__init__()
        image = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        text = dict(num_heads=num_heads // 2, d_ffn=d_ffn // 2)
        self.fusion_layers = nn.ModuleList(
            FusionLayer(d_model, d_ffn // 2, num_heads // 2, **fusion) for _ in range(num_layers)
        )
        self.text_layers = nn.ModuleList(
            TransformerEncoderLayer(d_model, **text, dropout=dropout) for _ in range(num_layers)
        )
        self.layers = nn.ModuleList(DeformableEncoderLayer(d_model, num_levels, **image) for _ in range(num_layers))
        init_xavier(self.text_layers)

    def forward(self, levels: Levels, text: EncodedPrompts) -> tuple[Tensor, Tensor]:
        """Return the encoded levels, (B, S, d_model), and the encoded text, (B, T, d_model)."""
        x, words = levels.tokens, text.features
        masked, token_positions = prompt_layout(text.phrase_ids)
        # One number for all channels, so its code is twice as wide as that of a box's.
        text_positions = sine_positions_boxes(token_positions[..., None], 2 * words.shape[-1]).to(words.dtype)
        bias = mask_bias(masked, words.dtype)[:, None]
        # A bias in float16 could not mask a key among scores that exceed its range.
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        image_padding = None if levels.padding_mask is None else padding_bias(levels.padding_mask, dtype)
        text_padding = padding_bias(text.padding_mask, dtype)
        reference_points = in_padded_maps(levels.centers(), levels.valid_ratios).expand(x.shape[0], -1, -1, -1)
        # Every head reads its own image's mask. The originals repeat masks over heads before images, so that in a batch
        # of different prompts most heads of their text layers read the mask of another one. And the fusion masks padded
        # text, as Grounding DINO's does; MM-Grounding-DINO's code means to, but its mask adds 1 to every score.
        for fusion, text_layer, image_layer in zip(self.fusion_layers, self.text_layers, self.layers):
            x, words = fusion(x, words, image_padding, text_padding)
            words = text_layer(words, text_positions, bias=bias)
            x = image_layer(
                x,
                levels.positions,
                reference_points=reference_points,
                shapes=levels.shapes,
                padding_mask=levels.padding_mask,
            )
        return x, words


class FusionLayer(nn.Module):
    """Attention between image and text in both directions, added to the normalized inputs.

    Args:
        channels: of queries, keys and values in all heads together.
        drop_path: see `GroundingDINOHead`.
        dropout: fraction of attention weights dropped in training.
    """

    activation_checkpointing = False

    def __init__(self, d_model: int, channels: int, num_heads: int, *, drop_path: float, dropout: float):
        super().__init__()
        self.image_norm = nn.LayerNorm(d_model)
        self.text_norm = nn.LayerNorm(d_model)
        self.attn = BidirectionalAttention(d_model, channels, num_heads, dropout)
        self.image_scale = nn.Parameter(torch.full((d_model,), 1e-4))
        self.text_scale = nn.Parameter(torch.full((d_model,), 1e-4))
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(
        self, image: Tensor, text: Tensor, image_padding: Tensor | None, text_padding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fuse image, (B, S, d_model), and text, (B, T, d_model).

        Args:
            image_padding, text_padding: biases (B, 1, 1, S) and (B, 1, 1, T), see `padding_bias`.
        """
        # Unlike in a pre-norm layer, the residual sums start from the normalized values.
        image, text = self.image_norm(image), self.text_norm(text)
        from_text, from_image = self.attn(image, text, image_padding, text_padding)
        image = image + self.drop_path(self.image_scale * from_text)
        return image, text + self.drop_path(self.text_scale * from_image)


class BidirectionalAttention(nn.Module):
    """Attention from image to text and from text to image, which share their scores.

    A recorder gets two entries for each call: the weights of the image's locations over the tokens, (B, heads, S, T),
    then those of the tokens over the locations, (B, heads, T, S).

    Raises:
        ConfigError: `num_heads` does not divide `channels`.
    """

    def __init__(self, d_model: int, channels: int, num_heads: int, dropout: float):
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ConfigError(f"BidirectionalAttention: num_heads={num_heads} must divide the {channels} channels.")
        self.num_heads, self.dropout = num_heads, dropout
        self.image_proj = Linear(d_model, channels)
        self.text_proj = Linear(d_model, channels)
        self.image_values = Linear(d_model, channels)
        self.text_values = Linear(d_model, channels)
        self.image_out = Linear(channels, d_model)
        self.text_out = Linear(channels, d_model)
        init_xavier(self)
        for layer in self.children():
            nn.init.zeros_(layer.bias)

    def forward(
        self, image: Tensor, text: Tensor, image_padding: Tensor | None, text_padding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what the image reads in the text, (B, S, d_model), and the text in the image, (B, T, d_model)."""
        layers = (self.image_proj, image), (self.text_proj, text), (self.image_values, image), (self.text_values, text)
        parts = [layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer, x in layers]
        dropout_p = self.dropout if self.training else 0.0
        dtype = parts[0].dtype
        if dtype == torch.float16:  # the scores of trained weights exceed its range
            parts = [part.float() for part in parts]
        image_codes, text_codes, image_values, text_values = parts
        with torch.autocast("cpu" if image.is_meta else image.device.type, enabled=False):  # "meta" has none
            from_text = attend(image_codes, text_codes, text_values, text_padding, dropout_p=dropout_p)
            from_image = attend(text_codes, image_codes, image_values, image_padding, dropout_p=dropout_p)
        from_text, from_image = (x.to(dtype).transpose(1, 2).flatten(2) for x in (from_text, from_image))
        return self.image_out(from_text), self.text_out(from_image)


class TextDecoderLayer(DeformableDecoderLayer):
    """Decoder layer with attention to the text between its self-attention and its attention to the image."""

    def __init__(self, d_model: int, num_levels: int, *, num_heads: int, num_points: int, d_ffn: int, dropout: float):
        super().__init__(d_model, num_levels, num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        self.text_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.text_norm = nn.LayerNorm(d_model)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        words: Tensor,
        text_padding: Tensor,
        *,
        positions: Tensor,
        reference_points: Tensor,
        shapes: list[tuple[int, int]],
        padding_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply self-attention, attention to the text and to the memory, and the feed-forward network.

        Args:
            words: (B, T, d_model).
            text_padding: (B, 1, 1, T), bias that masks padding of the text.
            The others are as in `DeformableDecoderLayer`.
        """
        qk = x + positions
        x = self.norm2(x + self.dropout(self.self_attn(qk, qk, x, bias=bias)))
        x = self.text_norm(x + self.dropout(self.text_attn(x + positions, words, words, bias=text_padding)))
        attended = self.cross_attn(
            x + positions, memory, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.norm1(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.ffn(x)))
