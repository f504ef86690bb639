"""Recurrent encoder and decoder: with a context of fixed length, or with attention to the source (RNNsearch)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vitkit.errors import ConfigError, DataError
from vitkit.nn.additive_attention import AlignmentAttention, needs_equal_sizes
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import State, StepResult, TextGenerator, vocabulary_size
from vitkit.seq2seq.word_vectors import init_embedding
from vitkit.text.vocabulary import Vocabulary

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


def recurrent_layers(
    cell: Literal["gru", "lstm"],
    d_input: int,
    d_hidden: int,
    *,
    num_layers: int,
    dropout: float,
    bidirectional: bool = False,
) -> nn.GRU | nn.LSTM:
    """Create recurrent layers, with dropout between them."""
    dropout = dropout if num_layers > 1 else 0.0  # PyTorch warns of dropout in a single layer
    return CELLS[cell](d_input, d_hidden, num_layers, batch_first=True, bidirectional=bidirectional, dropout=dropout)


@dataclass
class Memory:
    """The B encoded sources that the decoder reads."""

    context: Tensor
    """(B, C), a summary of the source."""
    values: Tensor | None = None
    """(B, S, C), a value for each token; None if the decoder has no attention."""
    keys: Tensor | None = None
    """(B, S, ...), keys for the alignment score."""
    padding: Tensor | None = None
    """(B, S) bool, True = padding."""

    def select(self, sources: Tensor) -> "Memory":
        """Return the memory of the sources with these indices."""
        parts = (self.context, self.values, self.keys, self.padding)
        return Memory(*(None if part is None else part[sources] for part in parts))


@dataclass
class RNNState(State):
    """The decoding state of N rows: the cells' states and the encoded sources."""

    hidden: tuple[Tensor, ...]
    """The cells' states, each (layers, N, H): one for a GRU, two for an LSTM."""
    memory: Memory
    """One entry per source, shared by its rows."""
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
    """Encodes a text, in one direction or both.

    Args:
        size: number of tokens in the vocabulary.
        d_hidden: hidden size of each direction.
        The other arguments: see `RNNTranslator`.
    """

    def __init__(
        self,
        size: int,
        d_embedding: int,
        d_hidden: int,
        *,
        cell: Literal["gru", "lstm"],
        num_layers: int,
        dropout: float,
        bidirectional: bool,
    ):
        super().__init__()
        self.embedding = nn.Embedding(size, d_embedding)
        self.dropout = nn.Dropout(dropout)
        self.rnn = recurrent_layers(
            cell, d_embedding, d_hidden, num_layers=num_layers, dropout=dropout, bidirectional=bidirectional
        )
        self.channels = d_hidden * (1 + bidirectional)

    def forward(self, source: Tensor, source_padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode each token in its context, and each text as a summary vector.

        Args:
            source: (B, S) int64, then PAD.
            source_padding: (B, S) bool, True = padding, only at the end of each text.
        Returns:
            the last layer's states (B, S, C), zero on padding, and the final states of each direction, (B, C).
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
    """Decodes a text; each step reads the last token and a context from the source.

    The output layer is the paper's (Bahdanau et al. 2015, appendix A.2.2): one maxout layer over state, token and
    context.

    Args:
        size: number of tokens in the vocabulary.
        d_context: number of channels of the memory.
        attention: an alignment score of `AlignmentAttention`; None: the same summary of the source at every step.
        max_keys: see `AlignmentAttention`.
        The other arguments: see `RNNTranslator`.
    """

    def __init__(
        self,
        size: int,
        d_embedding: int,
        d_hidden: int,
        *,
        d_context: int,
        attention: str | None,
        max_keys: int,
        cell: Literal["gru", "lstm"],
        num_layers: int,
        dropout: float,
        scheduled_sampling: float,
    ):
        super().__init__()
        self.scheduled_sampling = scheduled_sampling
        self.embedding = nn.Embedding(size, d_embedding)
        self.dropout = nn.Dropout(dropout)
        self.attention = None
        if attention is not None:
            self.attention = AlignmentAttention(attention, d_hidden, d_key=d_context, max_keys=max_keys)
        self.num_states = 2 if cell == "lstm" else 1
        self.initial = nn.Linear(d_context, self.num_states * num_layers * d_hidden)
        self.rnn = recurrent_layers(cell, d_embedding + d_context, d_hidden, num_layers=num_layers, dropout=dropout)
        self.maxout = nn.Linear(d_hidden + d_embedding + d_context, 2 * d_embedding)
        self.output = nn.Linear(d_embedding, size)

    def start(self, memory: Memory) -> RNNState:
        """Compute the cells' initial states from the summary of each source."""
        initial = self.initial(memory.context).tanh().unflatten(-1, (self.num_states, self.rnn.num_layers, -1))
        return RNNState(tuple(initial.permute(1, 2, 0, 3).contiguous()), memory)

    def forward(self, target_in: Tensor, state: RNNState) -> Tensor:
        """Predict the logits of the tokens that follow: (B, T) int64 -> (B, T, V)."""
        words = self.dropout(self.embedding(target_in))
        if self.training and self.scheduled_sampling > 0:
            return self._sample(words, state)
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

    def _sample(self, words: Tensor, state: RNNState) -> Tensor:
        """Like `forward`, but randomly chosen words are replaced by the most probable ones after those before."""
        logits: list[Tensor] = []
        hidden = state.hidden
        for i, word in enumerate(words.split(1, dim=1)):
            if i > 0:
                predicted = self.dropout(self.embedding(logits[-1].detach().argmax(-1)))
                is_predicted = torch.rand(len(word), 1, 1, device=word.device) < self.scheduled_sampling
                word = torch.where(is_predicted, predicted, word)
            context, _ = self._attend(hidden, state)
            output, hidden = self._run(word, context, hidden)
            logits.append(self._logits(output, word, context))
        return torch.cat(logits, dim=1)

    def step(self, tokens: Tensor, state: RNNState) -> StepResult[RNNState]:
        """Advance every row by one token; without an attention the third result is None."""
        words = self.embedding(tokens[:, None])
        context, weights = self._attend(state.hidden, state)
        outputs, hidden = self._run(words, context, state.hidden)
        state = RNNState(hidden, state.memory, state.rows_per_source)
        return self._logits(outputs, words, context)[:, 0], state, weights

    def _attend(self, hidden: tuple[Tensor, ...], state: RNNState) -> tuple[Tensor, Tensor | None]:
        """Return the contexts of N rows, (N, 1, C), and the attention weights, (N, S)."""
        memory = state.memory
        if self.attention is None:
            return memory.context.repeat_interleave(state.rows_per_source, dim=0)[:, None], None
        # The rows of a source are passed as queries of one sequence, so that its memory is read once for all.
        queries = hidden[0][-1].unflatten(0, (-1, state.rows_per_source))
        context, weights = self.attention(queries, memory.keys, memory.values, padding_mask=memory.padding)
        return context.flatten(0, 1)[:, None], weights.flatten(0, 1)

    def _run(self, words: Tensor, contexts: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the cells: return the last layer's outputs, (N, T, H), and the final states."""
        outputs, hidden = self.rnn(torch.cat([words, contexts], dim=-1), hidden if len(hidden) > 1 else hidden[0])
        return outputs, hidden if isinstance(hidden, tuple) else (hidden,)

    def _logits(self, outputs: Tensor, words: Tensor, contexts: Tensor) -> Tensor:
        x = self.maxout(torch.cat([outputs, words, contexts], dim=-1)).unflatten(-1, (-1, 2)).amax(dim=-1)
        return self.output(self.dropout(x))


@MODELS.register
class RNNTranslator(TextGenerator):
    """Recurrent encoder and decoder, from one text to another.

    With `attention`, this is RNNsearch (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473): the encoder reads in
    both directions, and before each token the decoder's state attends to the source tokens. Without, the source is
    encoded as one vector that initializes the decoder and enters each of its steps (Cho et al. 2014,
    https://arxiv.org/abs/1406.1078).

    Args:
        source_vocabulary: a run sets its dataset's.
        source_size: number of tokens, if there is no vocabulary.
        attention: "additive" as published, or another score of `vitkit.nn.additive_attention.SCORES`, each of which has
            its formula there; None for no attention.
        bidirectional: whether the encoder reads in both directions; None: only with attention, as published.
        cell, num_layers: kind and number of the recurrent layers, of the encoder and of the decoder.
        d_embedding: number of channels of the tokens.
        d_hidden: hidden size of the decoder, and of each direction of the encoder. For "dot", "scaled_dot", "cosine"
            and "plain_cosine", which compare the two, both directions together have this size.
        dropout: dropout probability of embeddings, between layers, and before the output.
        scheduled_sampling: in training, the fraction of the target's tokens that the decoder reads from its own
            predictions (Bengio et al. 2015, https://arxiv.org/abs/1506.03099); the hook `ScheduledSampling` increases
            it.
        max_source_length: the number of source tokens that "location" can attend to; it ignores those after them.
        word_vectors: a file of word vectors (see vitkit.seq2seq.word_vectors) to initialize the encoder's embeddings
            with.
        options: the arguments of `TextGenerator`.
    Raises:
        ConfigError: a size is missing, or the attention or cell is unknown.
    """

    def __init__(
        self,
        *,
        source_vocabulary: Vocabulary | None = None,
        source_size: int | None = None,
        attention: Literal["additive", "concat", "dot", "scaled_dot", "general", "cosine", "plain_cosine", "location"]
        | None = "additive",
        bidirectional: bool | None = None,
        cell: Literal["gru", "lstm"] = "gru",
        num_layers: int = 1,
        d_embedding: int = 620,
        d_hidden: int = 1000,
        dropout: float = 0.0,
        scheduled_sampling: float = 0.0,
        max_source_length: int = 100,
        word_vectors: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        if not 0 <= scheduled_sampling <= 1:
            raise ConfigError(f"scheduled_sampling={scheduled_sampling}: expected 0 to 1.")
        if cell not in CELLS:
            raise ConfigError(f"cell={cell!r}: expected 'gru' or 'lstm'.")
        bidirectional = attention is not None if bidirectional is None else bidirectional
        halved = bidirectional and needs_equal_sizes(attention)
        if halved and d_hidden % 2:
            raise ConfigError(
                f"d_hidden={d_hidden}: expected an even number, half for each direction of the encoder, as "
                f"attention={attention!r} compares it with the decoder."
            )
        source_size = vocabulary_size("source", source_vocabulary, source_size)
        layers = dict(cell=cell, num_layers=num_layers, dropout=dropout)
        d_encoder = d_hidden // 2 if halved else d_hidden
        self.encoder = RNNEncoder(source_size, d_embedding, d_encoder, **layers, bidirectional=bidirectional)
        self.decoder = RNNDecoder(
            self.target_size,
            d_embedding,
            d_hidden,
            **layers,
            d_context=self.encoder.channels,
            attention=attention,
            max_keys=max_source_length,
            scheduled_sampling=scheduled_sampling,
        )
        self.source_vocabulary = source_vocabulary
        self.word_vectors = word_vectors

    def set_sampling(self, fraction: float) -> None:
        """Set `scheduled_sampling`."""
        self.decoder.scheduled_sampling = fraction

    def load_pretrained(self) -> str | None:
        """Load the word vectors; see `init_embedding`."""
        return init_embedding(self.encoder.embedding, self.source_vocabulary, self.word_vectors)

    def forward(self, source: Tensor, source_padding: Tensor | None, target_in: Tensor) -> dict[str, Tensor]:
        """Predict the token that follows each position of the target; arguments and result as in `Transformer`."""
        return {"logits": self.decoder(target_in, self.start(source, source_padding))}

    def start(self, source: Tensor, source_padding: Tensor | None = None) -> RNNState:
        """Encode the sources and return the decoder's initial state."""
        states, context = self.encoder(source, source_padding)
        memory = Memory(context)
        if self.decoder.attention is not None:
            memory = Memory(context, states, self.decoder.attention.score.keys(states), source_padding)
        return self.decoder.start(memory)

    def step(self, tokens: Tensor, state: RNNState, *, with_attention: bool = False) -> StepResult[RNNState]:
        """Advance every row by one token.

        Raises:
            ConfigError: attention is requested, but the model has none.
        """
        if with_attention and self.decoder.attention is None:
            raise ConfigError("attention=None: a context of fixed length has no attention to show.")
        return self.decoder.step(tokens, state)
