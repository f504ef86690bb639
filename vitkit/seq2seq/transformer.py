"""The Transformer for text (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), and the decoder that all share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.nn.attention import mask_bias, padding_bias
from vitkit.nn.kv_cache import KeyValueCache
from vitkit.nn.linear import Linear, linear
from vitkit.nn.position import sine_positions_1d
from vitkit.nn.transformer import TransformerDecoder, TransformerEncoder
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import DecodingSettings, GenerativeModel, State, vocabulary_size
from vitkit.vocabulary import Vocabulary


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times sqrt(d_model), drawn so that the products have variance 1 (section 3.4)."""

    def __init__(self, size: int, d_model: int):
        super().__init__(size, d_model)
        nn.init.normal_(self.weight, std=d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embedding_dim**0.5


class TextPositions(nn.Module):
    """Adds the positions' codes to embeddings, then drops some (section 5.4).

    Args:
        kind: "sine", or "learned".
        max_length: places that there are codes for.
    """

    def __init__(self, kind: Literal["sine", "learned"], max_length: int, *, d_model: int, dropout: float):
        super().__init__()
        if kind not in ("sine", "learned"):
            raise ConfigError(f"model.positions: got {kind!r}; expected 'sine' or 'learned'.")
        if kind == "sine" and d_model % 2:
            raise ConfigError(f"model.d_model: got {d_model}; expected an even number, as sines and cosines are pairs.")
        if kind == "sine":
            self.register_buffer("codes", sine_positions_1d(max_length, d_model), persistent=False)
        else:
            self.codes = nn.Parameter(torch.randn(max_length, d_model) * d_model**-0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, first: int = 0, places: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (B, L, d_model).
            first: position of the first of the L places.
            places: (B, L) int64, the positions, where they differ between rows; all below `first` + L.
        Raises:
            DataError: there is no code for a position.
        """
        end = first + x.shape[1]
        if end > len(self.codes):
            raise DataError(
                f"a text of {end} tokens or more, but the model has positions for {len(self.codes)}. Shorten the text "
                "(or decoding.max_length), or set model.max_length."
            )
        return self.dropout(x + (self.codes[first:end] if places is None else self.codes[places]))


def causal_bias(length: int, device: torch.device) -> Tensor:
    """(length, length): no place sees those after it."""
    return mask_bias(torch.ones(length, length, dtype=torch.bool, device=device).triu(1))


def init_matrices(module: nn.Module) -> None:
    """Xavier's uniform distribution for all matrices but embeddings, and zero for the biases of linear layers."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim == 2 and name.endswith("weight"):
                nn.init.xavier_uniform_(parameter)
            elif isinstance(part, nn.Linear):
                nn.init.zeros_(parameter)


@dataclass
class TextState(State):
    """What a Transformer knows of N rows: the keys and values of what they have written, and their memory."""

    caches: list[KeyValueCache]
    """Of each layer."""
    memory: list[Tensor]
    """Of each layer the projected memory, (2, sources, heads, S, d), once for all rows of a source."""
    memory_bias: Tensor | None = None
    """(sources, 1, 1, S)."""
    rows_per_source: int = 1

    def select(self, rows: Tensor) -> "TextState":
        return self.select_beams(rows, beams=1, sources=rows // self.rows_per_source)

    def select_beams(self, rows: Tensor, *, beams: int, sources: Tensor | None) -> "TextState":
        for cache in self.caches:
            cache.select(rows)
        if sources is not None:
            self.memory = [memory[:, sources] for memory in self.memory]
            self.memory_bias = None if self.memory_bias is None else self.memory_bias[sources]
        self.rows_per_source = beams
        return self


class TextDecoder(nn.Module):
    """Writes text while attending to a memory: of a sentence, a picture, or anything else.

    Args:
        size: of the vocabulary.
        num_layers, d_model, num_heads, d_ffn, dropout, norm_first, final_norm: see `TransformerDecoder`.
        positions, max_length: see `TextPositions`.
        tied_output: the output projection is the embedding table; otherwise a linear layer without bias.
    """

    def __init__(
        self,
        size: int,
        num_layers: int,
        *,
        d_model: int,
        num_heads: int,
        d_ffn: int,
        dropout: float = 0.1,
        norm_first: bool = False,
        final_norm: bool | None = None,
        positions: Literal["sine", "learned"] = "sine",
        max_length: int = 1024,
        tied_output: bool = True,
    ):
        super().__init__()
        self.embedding = ScaledEmbedding(size, d_model)
        self.positions = TextPositions(positions, max_length, d_model=d_model, dropout=dropout)
        self.stack = TransformerDecoder(
            num_layers, d_model, num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first,
            final_norm=norm_first if final_norm is None else final_norm, all_layers=False,
        )  # fmt: skip
        self.output = None if tied_output else Linear(d_model, size, bias=False)
        init_matrices(self)

    def forward(self, target_in: Tensor, memory: Tensor, *, memory_padding: Tensor | None = None) -> Tensor:
        """
        Args:
            target_in: (B, T) int64, BOS and the tokens so far. What follows a token does not matter to it, so padding
                at the end needs no mask.
            memory: (B, S, d_model).
            memory_padding: (B, S) bool, True = padding.
        Returns:
            logits of the tokens that follow, (B, T, V).
        """
        x = self.positions(self.embedding(target_in))
        bias = causal_bias(x.shape[1], x.device)
        memory_bias = None if memory_padding is None else padding_bias(memory_padding)
        return self.logits(self.stack(x, memory, bias=bias, memory_bias=memory_bias))

    def start(self, memory: Tensor, memory_padding: Tensor | None = None) -> TextState:
        """The state before BOS; arguments as of `forward`."""
        layers = self.stack.layers
        return TextState(
            caches=[KeyValueCache() for _ in layers],
            memory=[layer.cross_attn.project_memory(memory) for layer in layers],
            memory_bias=None if memory_padding is None else padding_bias(memory_padding),
        )

    def step(
        self, tokens: Tensor, state: TextState, *, with_attention: bool = False
    ) -> tuple[Tensor, TextState, Tensor | None]:
        """See `Decodable.step`.

        The attention is the mean over the heads of the last layer but one, which fits people's word alignments best
        (Garg et al. 2019, https://arxiv.org/abs/1909.02074).
        """
        x = self.positions(self.embedding(tokens[:, None]), first=state.caches[0].length)
        shown = max(0, len(self.stack.layers) - 2) if with_attention else None
        attention = None
        for i, layer in enumerate(self.stack.layers):
            x, weights = layer.step(
                x, state.caches[i], memory=state.memory[i], memory_bias=state.memory_bias, with_weights=i == shown
            )
            attention = attention if weights is None else weights.mean(dim=1)
        return self.logits(self.stack.norm(x))[:, 0], state, attention

    def logits(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., V)."""
        return linear(x, self.embedding.weight if self.output is None else self.output.weight)


@MODELS.register
class Transformer(GenerativeModel):
    """Encoder and decoder, from one text to another.

    The defaults are the paper's base model. State dicts of `torch.nn.Transformer` with an embedding fit, given
    `final_norm`.

    Args:
        source_vocabulary, target_vocabulary: a run sets its dataset's.
        source_size, target_size: of vocabularies that are not given.
        num_layers: of the encoder, and of the decoder.
        norm_first: normalise the input of each branch (Xiong et al. 2020, https://arxiv.org/abs/2002.04745), in place
            of each sum, as published.
        final_norm: of encoder and decoder; None: with `norm_first` alone. `torch.nn.Transformer` always has them.
        positions: "sine", or "learned".
        max_length: positions that there are codes for.
        shared_embeddings: source and target have one table; their vocabularies are one, then.
        tied_output: the output projection is the target's table.
        decoding: see `DecodingSettings`.
    Raises:
        ConfigError: a size is missing, or differs where one table is shared.
    """

    def __init__(
        self,
        *,
        source_vocabulary: Vocabulary | None = None,
        target_vocabulary: Vocabulary | None = None,
        source_size: int | None = None,
        target_size: int | None = None,
        num_layers: int | Sequence[int] = 6,
        d_model: int = 512,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        final_norm: bool | None = None,
        positions: Literal["sine", "learned"] = "sine",
        max_length: int = 1024,
        shared_embeddings: bool = True,
        tied_output: bool = True,
        decoding: Mapping[str, Any] | DecodingSettings | None = None,
    ):
        super().__init__(target_vocabulary, decoding)
        source_size = vocabulary_size("source", source_vocabulary, source_size)
        target_size = vocabulary_size("target", target_vocabulary, target_size)
        if shared_embeddings and (source_size != target_size or source_vocabulary != target_vocabulary):
            raise ConfigError(
                f"model.shared_embeddings: the source has {source_size} tokens and the target {target_size}; expected "
                "one vocabulary. Build the data with a joint one, or set model.shared_embeddings=False."
            )
        num_encoder_layers, num_decoder_layers = (num_layers,) * 2 if isinstance(num_layers, int) else num_layers
        sizes = dict(
            d_model=d_model, num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first,
            final_norm=final_norm,
        )  # fmt: skip
        self.source_embedding = None if shared_embeddings else ScaledEmbedding(source_size, d_model)
        self.source_positions = TextPositions(positions, max_length, d_model=d_model, dropout=dropout)
        self.encoder = TransformerEncoder(num_encoder_layers, **sizes)
        init_matrices(self.encoder)
        self.decoder = TextDecoder(
            target_size, num_decoder_layers, **sizes, positions=positions, max_length=max_length,
            tied_output=tied_output,
        )  # fmt: skip

    def forward(self, source: Tensor, source_padding: Tensor | None, target_in: Tensor) -> dict[str, Tensor]:
        """
        Args:
            source: (B, S) int64, ends with EOS, then PAD.
            source_padding: (B, S) bool, True = padding.
            target_in: (B, T) int64, BOS and the tokens, then PAD.
        Returns:
            logits: (B, T, V) of the tokens that follow.
        """
        memory = self.encode(source, source_padding)
        return {"logits": self.decoder(target_in, memory, memory_padding=source_padding)}

    def encode(self, source: Tensor, source_padding: Tensor | None = None) -> Tensor:
        """(B, S, d_model); arguments as of `forward`."""
        embedding = self.decoder.embedding if self.source_embedding is None else self.source_embedding
        bias = None if source_padding is None else padding_bias(source_padding)
        return self.encoder(self.source_positions(embedding(source)), bias=bias)

    def start(self, source: Tensor, source_padding: Tensor | None = None) -> TextState:
        return self.decoder.start(self.encode(source, source_padding), source_padding)

    def step(
        self, tokens: Tensor, state: TextState, *, with_attention: bool = False
    ) -> tuple[Tensor, TextState, Tensor | None]:
        return self.decoder.step(tokens, state, with_attention=with_attention)


# Table 3 of the paper; big has dropout 0.3 for English-German and 0.1 for English-French (section 6.1).
VARIANTS = {
    "transformer_base": dict(num_layers=6, d_model=512, num_heads=8, d_ffn=2048, dropout=0.1),
    "transformer_big": dict(num_layers=6, d_model=1024, num_heads=16, d_ffn=4096, dropout=0.3),
}
MODELS.register_variants(Transformer, VARIANTS)
