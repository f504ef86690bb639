"""Language models made of the Transformer's layers: decoder-only, with or without a prefix, and encoder-only.

Besides the arguments of `vitkit.nn.transformer` and `vitkit.seq2seq.transformer`, they take
    scale_embedding: whether token embeddings are multiplied by sqrt(d_model); BERT and GPT-2 do not.
    norm_eps: the number that all layer norms add to the variance.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import mask_bias, padding_bias
from vitkit.nn.layers import Activation, Linear
from vitkit.nn.text_layers import PositionEncoding, ScaledEmbedding, TextPositions, init_matrices, set_norm_eps
from vitkit.nn.transformer import TransformerEncoder
from vitkit.protocols.model import Model
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import State, StepResult, TextGenerator, vocabulary_size
from vitkit.seq2seq.incremental import IncrementalEncoder, KeyValueCache
from vitkit.seq2seq.transformer import TextDecoder, causal_bias, have_same_tokens
from vitkit.seq2seq.word_vectors import init_embedding
from vitkit.structures import BOS, EOS, PAD
from vitkit.text.vocabulary import Vocabulary


@dataclass
class PromptState(State):
    """The decoding state of N rows, whose prompts may differ in length."""

    caches: list[KeyValueCache]
    """For each layer: the prompts, then the decoded tokens."""
    prompt_lengths: Tensor
    """(N,) int64, number of tokens of each prompt."""
    prompt_padding: Tensor
    """(N, P) bool, True = the cached position is beyond the end of the prompt."""
    tokens: Tensor | None = None
    """(N,) int64, input of the first step, which is not cached yet; None: BOS."""

    @property
    def num_written(self) -> int:
        """The number of tokens cached after the prompts."""
        return self.caches[0].length - self.prompt_padding.shape[1]

    def select(self, rows: Tensor) -> "PromptState":
        for cache in self.caches:
            cache.select(rows)
        tokens = None if self.tokens is None else self.tokens[rows]
        return PromptState(self.caches, self.prompt_lengths[rows], self.prompt_padding[rows], tokens)


class DecoderOnly(TextGenerator):
    """Base of models with a single stack of layers, in which the written text follows the prompt.

    The default sizes are those of GPT-2's smallest model.

    Args:
        norm_eps, scale_embedding: see `vitkit.seq2seq.language_models`.
        options: the arguments of `TextGenerator`.
        The other arguments: see `Transformer`.
    """

    def __init__(
        self,
        *,
        num_layers: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ffn: int = 3072,
        dropout: float = 0.1,
        norm_first: bool = True,
        activation: Activation = "relu",
        final_norm: bool | None = None,
        norm_eps: float = 1e-5,
        scale_embedding: bool = True,
        positions: PositionEncoding = "learned",
        max_length: int = 1024,
        tied_output: bool = True,
        output_bias: bool = False,
        word_vectors: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.embedding = ScaledEmbedding(self.target_size, d_model, scale=scale_embedding)
        self.positions = TextPositions(d_model, positions=positions, max_length=max_length, dropout=dropout)
        layers = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.stack = IncrementalEncoder(num_layers, d_model, **layers, final_norm=final_norm)
        self.output = None if tied_output else Linear(d_model, self.target_size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(self.target_size)) if output_bias else None
        self.word_vectors = word_vectors
        init_matrices(self)
        set_norm_eps(self, norm_eps)

    def load_pretrained(self) -> str | None:
        """Load the word vectors; see `init_embedding`."""
        return init_embedding(self.embedding, self.vocabulary, self.word_vectors, factor=self.embedding.factor)

    def encode_prompt(
        self, prompt: Tensor, padding_mask: Tensor, bias: Tensor, *, next_tokens: Tensor | None = None
    ) -> PromptState:
        """Cache the keys and values of prompts.

        Args:
            prompt: (B, P) int64.
            padding_mask: (B, P) bool, True = padding.
            bias: float, broadcastable to (B, heads, P, P).
            next_tokens: (B,) int64 tokens that follow the prompts; None: BOS.
        """
        state = PromptState(
            caches=[KeyValueCache() for _ in self.stack.layers],
            prompt_lengths=(~padding_mask).sum(dim=1),
            prompt_padding=padding_mask,
            tokens=next_tokens,
        )
        if prompt.shape[1]:
            x = self.positions(self.embedding(prompt))
            for layer, cache in zip(self.stack.layers, state.caches):
                x = layer.step(x, cache, bias=bias)
        return state

    def step(self, tokens: Tensor, state: PromptState, *, with_attention: bool = False) -> StepResult[PromptState]:
        """Advance every row by one token; there is no separate attention to a source.

        Raises:
            ConfigError: attention is requested.
        """
        if with_attention:
            raise ConfigError(
                f"{type(self).__name__} has no separate attention to a source. Use vitkit explain --text for the "
                "attention within the text."
            )
        written = state.num_written
        positions = (state.prompt_lengths + written)[:, None]
        x = self.positions(self.embedding(tokens[:, None]), offset=state.caches[0].length, positions=positions)
        # Positions between the end of a row's prompt and that of the longest prompt contain no tokens of that row.
        bias = mask_bias(F.pad(state.prompt_padding, (0, written + 1)))[:, None, None]
        for layer, cache in zip(self.stack.layers, state.caches):
            x = layer.step(x, cache, bias=bias)
        return self.logits(self.stack.norm(x))[:, 0], state, None

    logits = TextDecoder.logits


@MODELS.register
class CausalLanguageModel(DecoderOnly):
    """Decoder-only: predicts each token from those before it (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners"). GPT-2 also has `activation="gelu_tanh"` and `scale_embedding=False`.

    Its arguments are those of `DecoderOnly`.
    """

    takes = ("tokens",)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Predict the token that follows each position.

        Args:
            tokens: (B, T) int64, BOS and the text, then PAD.
            padding_mask: ignored; every batch of texts has it, but no token attends to later ones, including padding.
        Returns:
            logits: (B, T, V) for the tokens that follow.
        """
        x = self.positions(self.embedding(tokens))
        return {"logits": self.logits(self.stack(x, bias=causal_bias(x.shape[1], x.device)))}

    def start(self, tokens: Tensor, padding_mask: Tensor | None = None) -> PromptState:
        """Encode the prompts without their last tokens, which are the first step's input.

        Args:
            tokens: (B, P) int64, BOS and the beginning of each text, then PAD.
            padding_mask: (B, P) bool, True = padding.
        """
        if padding_mask is None:
            padding_mask = tokens == PAD
        last = (~padding_mask).sum(dim=1, keepdim=True) - 1
        prompt = tokens[:, :-1]
        padding_mask = torch.arange(prompt.shape[1], device=tokens.device) >= last
        bias = causal_bias(prompt.shape[1], tokens.device)
        return self.encode_prompt(prompt, padding_mask, bias, next_tokens=tokens.gather(1, last)[:, 0])


@MODELS.register
class PrefixLanguageModel(DecoderOnly):
    """Decoder-only, from one text to another: the source is a prefix, whose tokens all attend to each other, and the
    target follows it token by token (prefix language model; Raffel et al. 2020, section 3.2 and figures 3 and 4,
    https://arxiv.org/abs/1910.10683). The source names the task in words, such as "translate English to German:".

    Args:
        source_vocabulary: a run sets its dataset's; it must be the same as the target's.
        source_size: number of tokens, if there is no vocabulary.
        options: the arguments of `DecoderOnly`.
    Raises:
        ConfigError: a size is missing, or source and target have different vocabularies.
    """

    joins_source = True

    def __init__(self, *, source_vocabulary: Vocabulary | None = None, source_size: int | None = None, **options: Any):
        super().__init__(**options)
        source_size = vocabulary_size("source", source_vocabulary, source_size)
        if source_size != self.target_size or not have_same_tokens(source_vocabulary, self.vocabulary):
            raise ConfigError(
                "source_vocabulary, target_vocabulary: source and target of a prefix language model form one text; "
                "expected the same vocabulary for both. Build the data with a joint one "
                "(data.train.vocabulary.shared=True)."
            )

    def forward(self, source: Tensor, source_padding: Tensor | None, target_in: Tensor) -> dict[str, Tensor]:
        """Predict the token that follows each position of the target; arguments and result as in `Transformer`."""
        if source_padding is None:
            source_padding = torch.zeros_like(source, dtype=torch.bool)
        source_length, target_length = source.shape[1], target_in.shape[1]
        # The target's positions continue those of the source, without its padding.
        of_source = torch.arange(source_length, device=source.device).expand_as(source)
        of_target = (~source_padding).sum(dim=1, keepdim=True) + torch.arange(target_length, device=source.device)
        positions = torch.cat([of_source, of_target], dim=1)
        x = self.positions(self.embedding(torch.cat([source, target_in], dim=1)), positions=positions)
        bias = mask_bias(prefix_mask(source_padding, target_length))[:, None]
        return {"logits": self.logits(self.stack(x, bias=bias)[:, source_length:])}

    def start(self, source: Tensor, source_padding: Tensor | None = None) -> PromptState:
        """Encode the sources; arguments as in `forward`."""
        if source_padding is None:
            source_padding = torch.zeros_like(source, dtype=torch.bool)
        return self.encode_prompt(source, source_padding, padding_bias(source_padding))


def prefix_mask(source_padding: Tensor, target_length: int) -> Tensor:
    """Return which keys each token must not see: tokens of a source see all of it, tokens of a target see the source
    and the tokens before them.

    Args:
        source_padding: (B, S) bool, True = padding.
        target_length: T.
    Returns:
        (B, S + T, S + T) bool, True = masked.
    """
    source_length = source_padding.shape[1]
    length = source_length + target_length
    masked = torch.ones(length, length, dtype=torch.bool, device=source_padding.device).triu(1)
    masked[:source_length, :source_length] = False
    return masked | F.pad(source_padding, (0, target_length))[:, None]


@MODELS.register
class MaskedLanguageModel(Model):
    """Encoder-only: predicts masked tokens from both sides (Devlin et al. 2019, section 3.1,
    https://arxiv.org/abs/1810.04805). The default sizes are those of BERT's base model, which also has
    `activation="gelu"`, `scale_embedding=False`, `embedding_norm=True`, `norm_eps=1e-12` and `class_token=True`.

    A fraction `mask_share` of the tokens is chosen; 80 % of these become the mask token, 10 % a random one, 10 % stay.
    In evaluation the choice is always the same.

    Args:
        target_vocabulary: a run sets its dataset's; it must have a mask token (`vocabulary.mask_id`).
        target_size, mask_id: number of tokens and id of the mask token, if there is no vocabulary.
        mask_share: fraction of chosen tokens, 0.15 in the paper.
        embedding_norm: whether embeddings and positions are normalized before the first layer.
        class_token: whether the model puts BOS, as BERT's [CLS], before each text; its output is not returned.
        norm_eps, scale_embedding: see `vitkit.seq2seq.language_models`.
        The other arguments: see `Transformer`; the logits always have a bias.
    Raises:
        ConfigError: a size is missing, there is no mask token, or mask_share is not in 0..1.
    """

    takes = ("tokens",)
    returns = ("masked_tokens",)

    def __init__(
        self,
        *,
        target_vocabulary: Vocabulary | None = None,
        target_size: int | None = None,
        mask_id: int | None = None,
        mask_share: float = 0.15,
        num_layers: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ffn: int = 3072,
        dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "relu",
        final_norm: bool | None = None,
        norm_eps: float = 1e-5,
        scale_embedding: bool = True,
        embedding_norm: bool = False,
        class_token: bool = False,
        positions: PositionEncoding = "learned",
        max_length: int = 512,
        tied_output: bool = True,
        word_vectors: str | None = None,
    ):
        super().__init__()
        size = vocabulary_size("target", target_vocabulary, target_size)
        if target_vocabulary is not None and mask_id is None:
            mask_id = target_vocabulary.mask_id
        if mask_id is None:
            raise ConfigError("mask_id: the vocabulary has no mask token. Train it with mask=True.")
        if not 0 < mask_share < 1:
            raise ConfigError(f"mask_share={mask_share}: expected above 0 and below 1.")
        self.vocabulary = target_vocabulary
        self.mask_id = mask_id
        self.mask_share = mask_share
        self.class_token = class_token
        self.word_vectors = word_vectors
        self.embedding = ScaledEmbedding(size, d_model, scale=scale_embedding)
        self.positions = TextPositions(
            d_model, positions=positions, max_length=max_length, dropout=dropout, norm=embedding_norm
        )
        layers = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.encoder = TransformerEncoder(num_layers, d_model, **layers, final_norm=final_norm)
        self.head = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model))
        self.output = None if tied_output else Linear(d_model, size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(size))
        init_matrices(self)
        set_norm_eps(self, norm_eps)

    load_pretrained, logits = DecoderOnly.load_pretrained, TextDecoder.logits

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Mask tokens, and predict the token at each position.

        Args:
            tokens: (B, S) int64, the text, then PAD.
            padding_mask: (B, S) bool, True = padding.
        Returns:
            logits: (B, S, V) for the token at each position.
            masked: (B, S) bool, the chosen positions; the loss only counts these.
        """
        if padding_mask is None:
            padding_mask = tokens == PAD
        hidden, masked = self.mask(tokens)
        return {"logits": self.predict(hidden, padding_mask), "masked": masked}

    def predict(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V) for the token at each position, for texts that are already masked or unmasked."""
        if self.class_token:
            tokens = F.pad(tokens, (1, 0), value=BOS)
            padding_mask = None if padding_mask is None else F.pad(padding_mask, (1, 0))
        bias = None if padding_mask is None else padding_bias(padding_mask)
        x = self.encoder(self.positions(self.embedding(tokens)), bias=bias)
        x = x[:, 1:] if self.class_token else x
        return self.logits(self.head(x))

    def mask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, S) with masked ones replaced, and which were chosen, (B, S) bool."""
        # Drawn on the CPU, so that the choice is the same for every device.
        if self.training:
            chances, others = torch.rand(2, *tokens.shape), torch.randint(EOS + 1, len(self.output_bias), tokens.shape)
        else:  # by each text alone, whatever its batch
            *chances, other = torch.stack([_draw_for(text) for text in tokens.cpu()]).unbind(-1)
            chances, others = torch.stack(chances), EOS + 1 + (other * (len(self.output_bias) - EOS - 1)).long()
        chance, fate = chances.to(tokens.device, non_blocking=True)
        others = others.to(tokens.device, non_blocking=True)
        masked = (tokens > EOS) & (chance < self.mask_share)
        hidden = tokens.masked_fill(masked & (fate < 0.8), self.mask_id)
        return torch.where(masked & (fate >= 0.9), others, hidden), masked


def _draw_for(text: Tensor) -> Tensor:
    """Return (S, 3) numbers in 0..1 that only depend on a text (S,), without its padding."""
    seed = zlib.crc32(text[text != PAD].numpy().tobytes())
    return torch.rand(len(text), 3, generator=torch.Generator().manual_seed(seed))
