"""A Transformer that describes images, from the locations of a backbone's map."""

from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.layers import Activation
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.text_layers import PositionEncoding, ScaledEmbedding, TextPositions, init_matrices
from vitkit.nn.transformer import TransformerEncoder
from vitkit.registry import MODELS, Spec
from vitkit.seq2seq.captioner import Captioner, FeatureMap
from vitkit.seq2seq.decoding import StepResult
from vitkit.seq2seq.incremental import IncrementalDecoder
from vitkit.seq2seq.transformer import TextDecoder, TextState


@MODELS.register
class TransformerCaptioner(Captioner):
    """Backbone, projection, and the encoder and decoder of a Transformer (https://arxiv.org/abs/1706.03762).

    The position encoding of rows and columns is DETR's (https://arxiv.org/abs/2005.12872, appendix A.4), added to the
    encoder's input.

    Args:
        backbone: see `Captioner`.
        num_encoder_layers: number of encoder layers; 0 passes the projected features directly to the decoder.
        d_model: number of channels of the locations and the words.
        num_heads, d_ffn, dropout, norm_first, activation, final_norm: see `vitkit.nn.transformer`.
        positions, max_length, tied_output, output_bias: for the words; see `vitkit.seq2seq.transformer`.
        options: the other arguments of `Captioner`.
    Raises:
        ConfigError: `d_model` is not a multiple of 4.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        num_encoder_layers: int = 3,
        num_decoder_layers: int = 3,
        d_model: int = 512,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "relu",
        final_norm: bool | None = None,
        positions: PositionEncoding = "sine",
        max_length: int = 256,
        tied_output: bool = True,
        output_bias: bool = False,
        **options: Any,
    ):
        super().__init__(backbone, **options)
        if d_model % 4:
            raise ConfigError(f"d_model={d_model}: expected a multiple of 4, for the position encoding.")
        layers = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.projection = nn.Linear(self.feature_channels, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **layers, final_norm=final_norm)
        init_matrices(self.encoder)
        self.decoder = TextDecoder(
            ScaledEmbedding(self.target_size, d_model),
            TextPositions(d_model, positions=positions, max_length=max_length, dropout=dropout),
            IncrementalDecoder(num_decoder_layers, d_model, **layers, final_norm=final_norm, all_layers=False),
            tied_output=tied_output,
            output_bias=output_bias,
        )

    def describe(self, target_in: Tensor, map_: FeatureMap) -> dict[str, Tensor]:
        memory, memory_padding = self._encode(map_)
        return {"logits": self.decoder(target_in, memory, memory_padding=memory_padding)}

    def start_from(self, map_: FeatureMap) -> TextState:
        return self.decoder.start(*self._encode(map_))

    def step(self, tokens: Tensor, state: TextState, *, with_attention: bool = False) -> StepResult[TextState]:
        """Predict the next word of each row; the unknown word is masked."""
        logits, state, attention = self.decoder.step(tokens, state, with_attention=with_attention)
        return self.mask_unknown(logits), state, attention

    def _encode(self, map_: FeatureMap) -> tuple[Tensor, Tensor]:
        """Encode a feature map: the memory (B, S, d_model) and its padding (B, S)."""
        features, padding_mask = map_.annotations(), map_.padding()
        size, d_model = map_.features.shape[-2:], self.projection.out_features
        codes = sine_positions_2d(size, d_model, padding_mask=map_.padding_mask, device=features.device)
        # Normalized, so that the positions have an effect whatever the scale of the backbone's features.
        x = self.norm(self.projection(features))
        x = x + codes.flatten(1, 2).to(x.dtype)
        return self.encoder(x, bias=padding_bias(padding_mask)), padding_mask
