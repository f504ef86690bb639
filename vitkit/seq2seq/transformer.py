"""The Transformer for text (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), with the decoder of captioners.

Besides the arguments of `vitkit.nn.transformer`, text transformers take
    positions: the position encoding: "sine" (as originally published), "fairseq" (see `fairseq_positions_1d`) or
        "learned", a table.
    max_length: number of positions that have an encoding.
    tied_output: whether the output projection is the embedding table rather than a separate linear layer.
    output_bias: whether to add a bias to the logits, as Marian does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.linear import linear
from vitkit.nn.attention import mask_bias, padding_bias
from vitkit.nn.layers import Activation, Linear
from vitkit.nn.text_layers import PositionEncoding, ScaledEmbedding, TextPositions, init_matrices
from vitkit.nn.transformer import TransformerEncoder
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import State, StepResult, TextGenerator, vocabulary_size
from vitkit.seq2seq.incremental import IncrementalDecoder, KeyValueCache
from vitkit.seq2seq.word_vectors import init_embedding
from vitkit.text.vocabulary import Vocabulary


def causal_bias(length: int, device: torch.device) -> Tensor:
    """Return the bias (length, length) that masks the later tokens for each token."""
    return mask_bias(torch.ones(length, length, dtype=torch.bool, device=device).triu(1))


@dataclass
class TextState(State):
    """The decoding state of N rows: cached keys and values of their tokens, and their memory."""

    caches: list[KeyValueCache]
    """The keys and values of each layer."""
    memory: list[Tensor]
    """The projected memory of each layer, (2, sources, heads, S, d), shared by the rows of a source."""
    memory_bias: Tensor | None = None
    """(sources, 1, 1, S), masks padding of the memory."""
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
    """Decodes text while attending to a memory, from a sentence, an image, or anything else.

    Args:
        embedding: the tokens' embeddings; one for each token of the vocabulary.
        positions: adds their position encodings.
        stack: the layers; returns the output of the last one only.
        tied_output, output_bias: see above.
    """

    def __init__(
        self,
        embedding: ScaledEmbedding,
        positions: TextPositions,
        stack: IncrementalDecoder,
        *,
        tied_output: bool = True,
        output_bias: bool = False,
    ):
        super().__init__()
        size, d_model = embedding.weight.shape
        self.embedding = embedding
        self.positions = positions
        self.stack = stack
        self.output = None if tied_output else Linear(d_model, size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(size)) if output_bias else None
        init_matrices(self)

    def forward(self, target_in: Tensor, memory: Tensor, *, memory_padding: Tensor | None = None) -> Tensor:
        """Predict the token that follows each position of the target.

        Args:
            target_in: (B, T) int64, BOS and the tokens so far. No token attends to later ones, so padding at the end
                needs no mask.
            memory: (B, S, d_model).
            memory_padding: (B, S) bool, True = padding.
        Returns:
            logits for the tokens that follow, (B, T, V).
        """
        x = self.positions(self.embedding(target_in))
        bias = causal_bias(x.shape[1], x.device)
        memory_bias = None if memory_padding is None else padding_bias(memory_padding)
        return self.logits(self.stack(x, memory, bias=bias, memory_bias=memory_bias))

    def start(self, memory: Tensor, memory_padding: Tensor | None = None) -> TextState:
        """Return the state before BOS; arguments as in `forward`."""
        layers = self.stack.layers
        return TextState(
            caches=[KeyValueCache() for _ in layers],
            memory=[layer.cross_attn.project_memory(memory) for layer in layers],
            memory_bias=None if memory_padding is None else padding_bias(memory_padding),
        )

    def step(self, tokens: Tensor, state: TextState, *, with_attention: bool = False) -> StepResult[TextState]:
        """Advance every row by one token. The attention is averaged over the heads of the second to last layer."""
        x = self.positions(self.embedding(tokens[:, None]), offset=state.caches[0].length)
        # This layer matches human word alignments best (Garg et al. 2019, https://arxiv.org/abs/1909.02074).
        recorded_layer = max(0, len(self.stack.layers) - 2) if with_attention else None
        attention = None
        for i, layer in enumerate(self.stack.layers):
            x, weights = layer.step(
                x,
                state.caches[i],
                memory=state.memory[i],
                memory_bias=state.memory_bias,
                with_weights=i == recorded_layer,
            )
            attention = attention if weights is None else weights.mean(dim=1)
        return self.logits(self.stack.norm(x))[:, 0], state, attention

    def logits(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., V)."""
        return linear(x, (self.embedding if self.output is None else self.output).weight, self.output_bias)


@MODELS.register
class Transformer(TextGenerator):
    """Encoder and decoder, from one text to another.

    State dicts of `torch.nn.Transformer` with an embedding can be loaded if `final_norm` is set.

    Args:
        source_vocabulary: a run sets its dataset's.
        source_size: number of tokens, if there is no vocabulary.
        num_layers: number of layers of the encoder and of the decoder, or one number for both.
        d_model: number of channels of the tokens.
        num_heads, d_ffn, dropout, norm_first, activation, final_norm: see `vitkit.nn.transformer`.
        positions, max_length, tied_output, output_bias: see `vitkit.seq2seq.transformer`.
        word_vectors: a file of word vectors of d_model numbers (see vitkit.seq2seq.word_vectors), with which the
            embeddings begin training: those of the source, and of the target if they are shared.
        shared_embeddings: source and target share one embedding table; their vocabularies must then be the same.
        options: the arguments of `TextGenerator`.
    Raises:
        ConfigError: a size is missing, or the sizes differ although a table is shared.
    """

    def __init__(
        self,
        *,
        source_vocabulary: Vocabulary | None = None,
        source_size: int | None = None,
        num_layers: int | Sequence[int] = 6,
        d_model: int = 512,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "relu",
        final_norm: bool | None = None,
        positions: PositionEncoding = "sine",
        max_length: int = 1024,
        shared_embeddings: bool = True,
        tied_output: bool = True,
        output_bias: bool = False,
        word_vectors: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.source_vocabulary = source_vocabulary
        self.word_vectors = word_vectors
        source_size = vocabulary_size("source", source_vocabulary, source_size)
        is_shared = source_size == self.target_size and have_same_tokens(source_vocabulary, self.vocabulary)
        if shared_embeddings and not is_shared:
            raise ConfigError(
                f"shared_embeddings: the source has {source_size} tokens and the target {self.target_size}; expected "
                "one vocabulary. Build the data with a joint one, or set shared_embeddings=False."
            )
        num_encoder_layers, num_decoder_layers = (num_layers,) * 2 if isinstance(num_layers, int) else num_layers
        layers = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        encoding = dict(positions=positions, max_length=max_length, dropout=dropout)
        self.source_embedding = None if shared_embeddings else ScaledEmbedding(source_size, d_model)
        self.source_positions = TextPositions(d_model, **encoding)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **layers, final_norm=final_norm)
        init_matrices(self.encoder)
        self.decoder = TextDecoder(
            ScaledEmbedding(self.target_size, d_model),
            TextPositions(d_model, **encoding),
            IncrementalDecoder(num_decoder_layers, d_model, **layers, final_norm=final_norm, all_layers=False),
            tied_output=tied_output,
            output_bias=output_bias,
        )

    def forward(self, source: Tensor, source_padding: Tensor | None, target_in: Tensor) -> dict[str, Tensor]:
        """Predict the token that follows each position of the target (teacher forcing).

        Args:
            source: (B, S) int64, ends with EOS, then PAD.
            source_padding: (B, S) bool, True = padding.
            target_in: (B, T) int64, BOS and the tokens, then PAD.
        Returns:
            logits: (B, T, V) for the tokens that follow.
        """
        memory = self.encode(source, source_padding)
        return {"logits": self.decoder(target_in, memory, memory_padding=source_padding)}

    def load_pretrained(self) -> str | None:
        """Load the word vectors; see `init_embedding`."""
        embedding = self._embedding_of_source()
        return init_embedding(embedding, self.source_vocabulary, self.word_vectors, factor=embedding.factor)

    def encode(self, source: Tensor, source_padding: Tensor | None = None) -> Tensor:
        """Encode the sources, (B, S, d_model); arguments as in `forward`."""
        bias = None if source_padding is None else padding_bias(source_padding)
        return self.encoder(self.source_positions(self._embedding_of_source()(source)), bias=bias)

    def _embedding_of_source(self) -> ScaledEmbedding:
        return self.decoder.embedding if self.source_embedding is None else self.source_embedding

    def start(self, source: Tensor, source_padding: Tensor | None = None) -> TextState:
        """Encode the sources and return the decoder's initial state."""
        return self.decoder.start(self.encode(source, source_padding), source_padding)

    def step(self, tokens: Tensor, state: TextState, *, with_attention: bool = False) -> StepResult[TextState]:
        """Advance every row by one token."""
        return self.decoder.step(tokens, state, with_attention=with_attention)


def have_same_tokens(a: Vocabulary | None, b: Vocabulary | None) -> bool:
    """Return whether two vocabularies have the same tokens, perhaps with different splitting models, as in Marian."""
    return (None if a is None else a.tokens) == (None if b is None else b.tokens)


# Table 3 of the paper; the big model has dropout 0.3 for English-German and 0.1 for English-French (section 6.1).
VARIANTS = {
    "transformer_base": dict(num_layers=6, d_model=512, num_heads=8, d_ffn=2048, dropout=0.1),
    "transformer_big": dict(num_layers=6, d_model=1024, num_heads=16, d_ffn=4096, dropout=0.3),
}
MODELS.register_variants(Transformer, VARIANTS)
