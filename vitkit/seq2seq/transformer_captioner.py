"""A Transformer that describes images: the places of a backbone's map in, words out."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.transformer import TransformerEncoder
from vitkit.registry import MODELS, Spec
from vitkit.seq2seq.captioner import Captioner, FeatureMap
from vitkit.seq2seq.decoding import DecodingSettings, vocabulary_size
from vitkit.seq2seq.transformer import TextDecoder, TextState, init_matrices
from vitkit.vocabulary import Vocabulary


@MODELS.register
class TransformerCaptioner(Captioner):
    """Backbone, projection, and the encoder and decoder of a Transformer (https://arxiv.org/abs/1706.03762).

    The code of a place's row and column is DETR's (https://arxiv.org/abs/2005.12872, appendix A.4), added to what the
    encoder gets.

    Args:
        backbone, freeze_backbone, target_vocabulary, decoding: see `Captioner`.
        target_size: tokens of the vocabulary, for use without one.
        num_encoder_layers: 0 leaves the places as the backbone gives them.
        d_model, num_heads, d_ffn, dropout, norm_first: see `TransformerEncoder`.
        positions, max_length, tied_output: see `TextDecoder`.
    Raises:
        ConfigError: there is no vocabulary and no size, or `d_model` is no multiple of 4.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        target_vocabulary: Vocabulary | None = None,
        target_size: int | None = None,
        freeze_backbone: bool = False,
        num_encoder_layers: int = 3,
        num_decoder_layers: int = 3,
        d_model: int = 512,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        positions: Literal["sine", "learned"] = "sine",
        max_length: int = 256,
        tied_output: bool = True,
        decoding: Mapping[str, Any] | DecodingSettings | None = None,
    ):
        super().__init__(
            backbone,
            freeze_backbone=freeze_backbone,
            target_vocabulary=target_vocabulary,
            decoding=decoding,
        )
        if d_model % 4:
            raise ConfigError(f"model.d_model: got {d_model}; expected a multiple of 4, for the code of places.")
        sizes = dict(d_model=d_model, num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first)
        self.projection = nn.Linear(self.feature_channels, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.encoder = TransformerEncoder(num_encoder_layers, **sizes)
        init_matrices(self.encoder)
        self.decoder = TextDecoder(
            vocabulary_size("target", target_vocabulary, target_size), num_decoder_layers, **sizes,
            positions=positions, max_length=max_length, tied_output=tied_output,
        )  # fmt: skip

    def forward(
        self,
        target_in: Tensor,
        images: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        features: Tensor | None = None,
        features_key: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """
        Args:
            target_in: (B, T) int64, BOS and the caption's words.
            The others: see `Captioner.look`.
        Returns:
            logits: (B, T, V) of the words that follow.
        """
        map_ = self.look(images, padding_mask, features=features, features_key=features_key)
        memory, memory_padding = self._encode(map_)
        return {"logits": self.decoder(target_in, memory, memory_padding=memory_padding)}

    def start(self, **inputs: Tensor) -> TextState:
        return self.decoder.start(*self._encode(self.look(**inputs)))

    def step(
        self, tokens: Tensor, state: TextState, *, with_attention: bool = False
    ) -> tuple[Tensor, TextState, Tensor | None]:
        logits, state, attention = self.decoder.step(tokens, state, with_attention=with_attention)
        return self.only_known(logits), state, attention

    def _encode(self, map_: FeatureMap) -> tuple[Tensor, Tensor]:
        """The memory (B, S, d_model) and its padding (B, S)."""
        places, padding_mask = map_.annotations(), map_.padding()
        size, d_model = map_.features.shape[-2:], self.projection.out_features
        codes = sine_positions_2d(size, d_model, padding_mask=map_.padding_mask, device=places.device)
        # Normalised: whatever the backbone's scale is, the codes have a say.
        x = self.norm(self.projection(places))
        x = x + codes.flatten(1, 2).to(x.dtype)
        return self.encoder(x, bias=padding_bias(padding_mask)), padding_mask
