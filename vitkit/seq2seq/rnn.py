"""Recurrent encoder and decoder: with a context of fixed length, or attending to the source (RNNsearch)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vitkit.errors import ConfigError, DataError
from vitkit.nn.additive_attention import AlignmentAttention
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import DecodingSettings, GenerativeModel, State, vocabulary_size
from vitkit.vocabulary import Vocabulary

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


@dataclass
class Memory:
    """What the decoder reads of B sources."""

    context: Tensor
    """(B, C), the whole source."""
    values: Tensor | None = None
    """(B, S, C), its places, where the decoder attends to them."""
    keys: Tensor | None = None
    """(B, S, ...), what the alignment score compares with."""
    padding: Tensor | None = None
    """(B, S) bool, True = padding."""

    def select(self, sources: Tensor) -> "Memory":
        parts = (self.context, self.values, self.keys, self.padding)
        return Memory(*(None if part is None else part[sources] for part in parts))


@dataclass
class RNNState(State):
    hidden: tuple[Tensor, ...]
    """Of the cells, each (layers, N, H): one for a GRU, two for an LSTM."""
    memory: Memory
    """Once for all rows of a source."""
    rows_per_source: int = 1

    def select(self, rows: Tensor) -> "RNNState":
        return self.select_beams(rows, beams=1, sources=rows // self.rows_per_source)

    def select_beams(self, rows: Tensor, *, beams: int, sources: Tensor | None) -> "RNNState":
        return RNNState(
            hidden=tuple(hidden[:, rows] for hidden in self.hidden),
            memory=self.memory if sources is None else self.memory.select(sources),
            rows_per_source=beams,
        )


class RNNEncoder(nn.Module):
    """Reads a text in one direction or both.

    Args:
        size: of the vocabulary.
        d_hidden: of each direction.
    """

    def __init__(
        self,
        size: int,
        d_embedding: int,
        *,
        d_hidden: int,
        cell: Literal["gru", "lstm"],
        num_layers: int,
        bidirectional: bool,
        dropout: float,
    ):
        super().__init__()
        self.embedding = nn.Embedding(size, d_embedding)
        self.dropout = nn.Dropout(dropout)
        self.rnn = CELLS[cell](
            d_embedding, d_hidden, num_layers, batch_first=True, bidirectional=bidirectional,
            dropout=dropout if num_layers > 1 else 0.0,
        )  # fmt: skip
        self.channels = d_hidden * (1 + bidirectional)

    def forward(self, source: Tensor, source_padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Args:
            source: (B, S) int64, then PAD.
            source_padding: (B, S) bool, True = padding, at the end of each text only.
        Returns:
            the last layer's states (B, S, C), zero on padding, and those at the end of each direction, (B, C).
        Raises:
            DataError: a text has no token.
        """
        padding = torch.zeros_like(source, dtype=torch.bool) if source_padding is None else source_padding
        lengths = (~padding).sum(dim=1).cpu()
        if not lengths.all():
            raise DataError(
                f"source: text {int(lengths.argmin())} of the batch has no token; expected at least its EOS."
            )
        x = self.dropout(self.embedding(source))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, last = self.rnn(packed)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])
        last = last[0] if isinstance(last, tuple) else last
        directions = self.channels // last.shape[-1]
        return outputs, last[-directions:].transpose(0, 1).flatten(1)


class RNNDecoder(nn.Module):
    """Writes a text; each step takes the last token and a context of the source.

    The output is the paper's (Bahdanau et al. 2015, appendix A.2.2): one maxout layer over state, token and context.

    Args:
        size: of the vocabulary.
        d_context: channels of the memory.
        attention: an alignment score of `AlignmentAttention`; None: the context is the whole source's at every step.
    """

    def __init__(
        self,
        size: int,
        d_embedding: int,
        *,
        d_hidden: int,
        d_context: int,
        cell: Literal["gru", "lstm"],
        num_layers: int,
        attention: str | None,
        dropout: float,
    ):
        super().__init__()
        self.embedding = nn.Embedding(size, d_embedding)
        self.dropout = nn.Dropout(dropout)
        self.attention = None if attention is None else AlignmentAttention(attention, d_hidden, d_key=d_context)
        self.num_states = 2 if cell == "lstm" else 1
        self.initial = nn.Linear(d_context, self.num_states * num_layers * d_hidden)
        self.rnn = CELLS[cell](
            d_embedding + d_context, d_hidden, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0
        )
        self.maxout = nn.Linear(d_hidden + d_embedding + d_context, 2 * d_embedding)
        self.output = nn.Linear(d_embedding, size)

    def start(self, memory: Memory) -> RNNState:
        initial = self.initial(memory.context).tanh().unflatten(-1, (self.num_states, self.rnn.num_layers, -1))
        return RNNState(tuple(initial.permute(1, 2, 0, 3).contiguous()), memory)

    def forward(self, target_in: Tensor, state: RNNState) -> Tensor:
        """(B, T) int64 -> logits of the tokens that follow, (B, T, V)."""
        words = self.dropout(self.embedding(target_in))
        if self.attention is None:
            contexts = state.memory.context[:, None].expand(-1, words.shape[1], -1)
            outputs, _ = self._run(words, contexts, state.hidden)
            return self._logits(outputs, words, contexts)
        steps, hidden = [], state.hidden
        for word in words.split(1, dim=1):
            context, _ = self._attend(hidden, state)
            output, hidden = self._run(word, context, hidden)
            steps.append((output, context))
        outputs, contexts = (torch.cat(parts, dim=1) for parts in zip(*steps))
        return self._logits(outputs, words, contexts)

    def step(self, tokens: Tensor, state: RNNState) -> tuple[Tensor, RNNState, Tensor | None]:
        """See `Decodable.step`; without an attention the third result is None."""
        words = self.embedding(tokens[:, None])
        context, weights = self._attend(state.hidden, state)
        outputs, hidden = self._run(words, context, state.hidden)
        state = RNNState(hidden, state.memory, state.rows_per_source)
        return self._logits(outputs, words, context)[:, 0], state, weights

    def _attend(self, hidden: tuple[Tensor, ...], state: RNNState) -> tuple[Tensor, Tensor | None]:
        """The contexts of N rows, (N, 1, C), and the attention weights, (N, S)."""
        memory = state.memory
        if self.attention is None:
            return memory.context.repeat_interleave(state.rows_per_source, dim=0)[:, None], None
        # As queries of one sequence, the rows of a source read its memory together.
        queries = hidden[0][-1].unflatten(0, (-1, state.rows_per_source))
        context, weights = self.attention(queries, memory.keys, memory.values, padding_mask=memory.padding)
        return context.flatten(0, 1)[:, None], weights.flatten(0, 1)

    def _run(self, words: Tensor, contexts: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(N, T, H) of the last layer, and the states after it."""
        outputs, hidden = self.rnn(torch.cat([words, contexts], dim=-1), hidden if len(hidden) > 1 else hidden[0])
        return outputs, hidden if isinstance(hidden, tuple) else (hidden,)

    def _logits(self, outputs: Tensor, words: Tensor, contexts: Tensor) -> Tensor:
        x = self.maxout(torch.cat([outputs, words, contexts], dim=-1)).unflatten(-1, (-1, 2)).amax(dim=-1)
        return self.output(self.dropout(x))


@MODELS.register
class RNNTranslator(GenerativeModel):
    """Recurrent encoder and decoder, from one text to another.

    With `attention`, RNNsearch (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473): the encoder reads in both
    directions, and the decoder's state attends to its places before each token. Without, the whole source is one
    vector that starts the decoder and enters each of its steps (Cho et al. 2014, https://arxiv.org/abs/1406.1078).

    Args:
        source_vocabulary, target_vocabulary: a run sets its dataset's.
        source_size, target_size: of vocabularies that are not given.
        attention: "additive" as published, "dot", "scaled_dot", "general", "cosine"; None for none.
        cell: "gru" or "lstm".
        d_hidden: of the decoder, and of each direction of the encoder. Where "dot", "scaled_dot" or "cosine" compare
            the two, both directions together have as many.
        bidirectional: whether the encoder reads in both directions; None: with attention, as published.
        dropout: of embeddings, between layers, and before the output.
        decoding: see `DecodingSettings`.
    Raises:
        ConfigError: a size is missing, or the attention or cell is unknown.
    """

    def __init__(
        self,
        *,
        source_vocabulary: Vocabulary | None = None,
        target_vocabulary: Vocabulary | None = None,
        source_size: int | None = None,
        target_size: int | None = None,
        attention: Literal["additive", "dot", "scaled_dot", "general", "cosine"] | None = "additive",
        cell: Literal["gru", "lstm"] = "gru",
        num_layers: int = 1,
        d_embedding: int = 620,
        d_hidden: int = 1000,
        bidirectional: bool | None = None,
        dropout: float = 0.0,
        decoding: Mapping[str, Any] | DecodingSettings | None = None,
    ):
        super().__init__(target_vocabulary, decoding)
        if cell not in CELLS:
            raise ConfigError(f"model.cell: got {cell!r}; expected 'gru' or 'lstm'.")
        bidirectional = attention is not None if bidirectional is None else bidirectional
        halved = bidirectional and attention in ("dot", "scaled_dot", "cosine")
        if halved and d_hidden % 2:
            raise ConfigError(
                f"model.d_hidden={d_hidden}: expected an even number, half for each direction of the encoder, as "
                f"attention={attention!r} compares it with the decoder."
            )
        layers = dict(cell=cell, num_layers=num_layers, dropout=dropout)
        self.encoder = RNNEncoder(
            vocabulary_size("source", source_vocabulary, source_size), d_embedding,
            d_hidden=d_hidden // 2 if halved else d_hidden, bidirectional=bidirectional, **layers,
        )  # fmt: skip
        self.decoder = RNNDecoder(
            vocabulary_size("target", target_vocabulary, target_size), d_embedding,
            d_hidden=d_hidden, d_context=self.encoder.channels, attention=attention, **layers,
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
        return {"logits": self.decoder(target_in, self.start(source, source_padding))}

    def start(self, source: Tensor, source_padding: Tensor | None = None) -> RNNState:
        states, context = self.encoder(source, source_padding)
        memory = Memory(context)
        if self.decoder.attention is not None:
            memory = Memory(context, states, self.decoder.attention.score.keys(states), source_padding)
        return self.decoder.start(memory)

    def step(
        self, tokens: Tensor, state: RNNState, *, with_attention: bool = False
    ) -> tuple[Tensor, RNNState, Tensor | None]:
        """See `Decodable.step`.

        Raises:
            ConfigError: attention is asked for, and there is none.
        """
        if with_attention and self.decoder.attention is None:
            raise ConfigError("model.attention=None: a context of fixed length has no attention to show.")
        return self.decoder.step(tokens, state)
