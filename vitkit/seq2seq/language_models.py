"""Language models, made of the Transformer's own layers: decoder-only, with a prefix or without, and encoder-only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.linear import linear
from vitkit.nn.attention import mask_bias, padding_bias
from vitkit.nn.kv_cache import KeyValueCache
from vitkit.nn.layers import Linear
from vitkit.nn.transformer import TransformerEncoder
from vitkit.registry import MODELS
from vitkit.seq2seq.decoding import DecodingSettings, State, TextGenerator, vocabulary_size
from vitkit.seq2seq.transformer import (
    ScaledEmbedding,
    TextPositions,
    TextSettings,
    causal_bias,
    have_same_tokens,
    init_matrices,
)
from vitkit.structures import EOS, PAD
from vitkit.vocabulary import Vocabulary

BASE = dict(d_model=768, num_heads=12, d_ffn=3072, positions="learned")
"""The sizes of GPT-2's smallest model and of BERT's base model."""


@dataclass
class PromptState(State):
    """The decoding state of N rows, whose prompts may differ in length."""

    caches: list[KeyValueCache]
    """Per layer: the prompts, then the decoded tokens."""
    prompt_lengths: Tensor
    """(N,) int64."""
    prompt_padding: Tensor
    """(N, P) bool, True = the cached position is behind the prompt's end."""
    tokens: Tensor | None = None
    """(N,) int64, the first step's input, which is not cached yet; None: BOS."""

    @property
    def num_written(self) -> int:
        """Number of tokens cached after the prompts."""
        return self.caches[0].length - self.prompt_padding.shape[1]

    def select(self, rows: Tensor) -> "PromptState":
        """Return the state of other rows."""
        for cache in self.caches:
            cache.select(rows)
        tokens = None if self.tokens is None else self.tokens[rows]
        return PromptState(self.caches, self.prompt_lengths[rows], self.prompt_padding[rows], tokens)


class DecoderOnly(TextGenerator):
    """Base of models with one stack of layers, in which what is written follows the prompt.

    Args:
        vocabulary: of the text.
        size: number of its tokens.
        decoding: see `DecodingSettings`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        size: int,
        num_layers: int,
        settings: TextSettings,
        decoding: Mapping[str, Any] | DecodingSettings | None,
    ):
        super().__init__(vocabulary, decoding)
        d_model = settings.d_model
        self.embedding = ScaledEmbedding(size, d_model)
        self.positions = TextPositions(settings)
        self.stack = TransformerEncoder(num_layers, d_model, settings, final_norm=settings.final_norm)
        self.output = None if settings.tied_output else Linear(d_model, size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(size)) if settings.output_bias else None
        init_matrices(self)

    def encode_prompt(
        self, prompt: Tensor, padding_mask: Tensor, bias: Tensor, *, next_tokens: Tensor | None = None
    ) -> PromptState:
        """Cache the keys and values of prompts.

        Args:
            prompt: (B, P) int64.
            padding_mask: (B, P) bool, True = padding.
            bias: float, broadcastable to (B, heads, P, P).
            next_tokens: (B,) int64, that follow the prompts; None: BOS.
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

    def step(
        self, tokens: Tensor, state: PromptState, *, with_attention: bool = False
    ) -> tuple[Tensor, PromptState, Tensor | None]:
        """Advance every row by one token; there is no attention to a source alone.

        Raises:
            ConfigError: attention is asked for.
        """
        if with_attention:
            raise ConfigError(
                f"{type(self).__name__} has no source, or it stands in one text with what is written, and so no "
                "attention to it alone. Use tools/explain.py --text for the attention within the text."
            )
        written = state.num_written
        positions = (state.prompt_lengths + written)[:, None]
        x = self.positions(self.embedding(tokens[:, None]), offset=state.caches[0].length, positions=positions)
        # Positions between a prompt's end and that of the longest prompt hold nothing of that row.
        bias = mask_bias(F.pad(state.prompt_padding, (0, written + 1)))[:, None, None]
        for layer, cache in zip(self.stack.layers, state.caches):
            x = layer.step(x, cache, bias=bias)
        return self.logits(self.stack.norm(x))[:, 0], state, None

    def logits(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., V)."""
        return linear(x, (self.embedding if self.output is None else self.output).weight, self.output_bias)


@MODELS.register
class CausalLanguageModel(DecoderOnly):
    """Decoder-only: predicts each token from those before it (Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners", whose sizes and norms the config gives).

    Args:
        target_vocabulary: a run sets its dataset's.
        target_size: of a vocabulary that is not given.
        decoding: see `DecodingSettings`.
    """

    def __init__(
        self,
        *,
        target_vocabulary: Vocabulary | None = None,
        target_size: int | None = None,
        num_layers: int = 12,
        settings: TextSettings = TextSettings(**BASE, norm_first=True),
        decoding: Mapping[str, Any] | DecodingSettings | None = None,
    ):
        size = vocabulary_size("target", target_vocabulary, target_size)
        super().__init__(target_vocabulary, size, num_layers, settings, decoding)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Predict the token that follows each position.

        Args:
            tokens: (B, T) int64, BOS and the text, then PAD.
            padding_mask: comes with every batch of texts. No token sees what follows it, padding included.
        Returns:
            logits: (B, T, V) of the tokens that follow.
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
    """Decoder-only, from one text to another: the source is a prefix, whose tokens all see each other, and the target
    follows it token by token (prefix language model; Raffel et al. 2020, section 3.2 and figures 3 and 4,
    https://arxiv.org/abs/1910.10683). Which task is meant, the source says in words, as "translate English to German:".

    Args:
        source_vocabulary, target_vocabulary: a run sets its dataset's; both are one.
        source_size, target_size: numbers of tokens, where no vocabulary is set.
        decoding: see `DecodingSettings`.
    Raises:
        ConfigError: a size is missing, or source and target have different vocabularies.
    """

    def __init__(
        self,
        *,
        source_vocabulary: Vocabulary | None = None,
        target_vocabulary: Vocabulary | None = None,
        source_size: int | None = None,
        target_size: int | None = None,
        num_layers: int = 12,
        settings: TextSettings = TextSettings(**BASE, norm_first=True),
        decoding: Mapping[str, Any] | DecodingSettings | None = None,
    ):
        size = vocabulary_size("target", target_vocabulary, target_size)
        if vocabulary_size("source", source_vocabulary, source_size) != size or not have_same_tokens(
            source_vocabulary, target_vocabulary
        ):
            raise ConfigError(
                "model: source and target of a prefix language model are one text, and have different vocabularies "
                "here; expected one. Build the data with a joint one (data.train.vocabulary.shared=True)."
            )
        super().__init__(target_vocabulary, size, num_layers, settings, decoding)

    def forward(self, source: Tensor, source_padding: Tensor | None, target_in: Tensor) -> dict[str, Tensor]:
        """Predict the token that follows each position of the target (teacher forcing).

        Args:
            source: (B, S) int64, ends with EOS, then PAD.
            source_padding: (B, S) bool, True = padding.
            target_in: (B, T) int64, BOS and the tokens, then PAD.
        Returns:
            logits: (B, T, V) of the tokens that follow.
        """
        if source_padding is None:
            source_padding = torch.zeros_like(source, dtype=torch.bool)
        source_length, target_length = source.shape[1], target_in.shape[1]
        # The target's positions follow the source's own, with its padding left out.
        positions = torch.cat(
            [
                torch.arange(source_length, device=source.device).expand_as(source),
                (~source_padding).sum(dim=1, keepdim=True) + torch.arange(target_length, device=source.device),
            ],
            dim=1,
        )
        x = self.positions(self.embedding(torch.cat([source, target_in], dim=1)), positions=positions)
        bias = mask_bias(prefix_mask(source_padding, target_length))[:, None]
        return {"logits": self.logits(self.stack(x, bias=bias)[:, source_length:])}

    def start(self, source: Tensor, source_padding: Tensor | None = None) -> PromptState:
        """Encode the sources; arguments as of `forward`."""
        if source_padding is None:
            source_padding = torch.zeros_like(source, dtype=torch.bool)
        return self.encode_prompt(source, source_padding, padding_bias(source_padding))


def prefix_mask(source_padding: Tensor, target_length: int) -> Tensor:
    """Return which keys each token must not see: a source's tokens see all of it, a target's the source and what is
    before them.

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
class MaskedLanguageModel(nn.Module):
    """Encoder-only: predicts tokens that are hidden, from both sides (Devlin et al. 2019, section 3.1,
    https://arxiv.org/abs/1810.04805).

    A share `mask_share` of the tokens is chosen; 80 % of these become the mask token, 10 % a random one, 10 % stay. In
    evaluation the choice is the same every time.

    Args:
        target_vocabulary: a run sets its dataset's; it has a mask token (`vocabulary.mask_id`).
        target_size, mask_id: of the vocabulary, where none is set.
        mask_share: 0.15 in the paper.
    Raises:
        ConfigError: a size is missing, there is no mask token, or mask_share is not in 0..1.
    """

    def __init__(
        self,
        *,
        target_vocabulary: Vocabulary | None = None,
        target_size: int | None = None,
        mask_id: int | None = None,
        mask_share: float = 0.15,
        num_layers: int = 12,
        settings: TextSettings = TextSettings(**BASE, max_length=512),
    ):
        super().__init__()
        size = vocabulary_size("target", target_vocabulary, target_size)
        if target_vocabulary is not None and mask_id is None:
            mask_id = target_vocabulary.mask_id
        if mask_id is None:
            raise ConfigError("model.mask_id: the vocabulary has no mask token. Train it with mask=True.")
        if not 0 < mask_share < 1:
            raise ConfigError(f"model.mask_share: got {mask_share}; expected above 0 and below 1.")
        self.vocabulary = target_vocabulary
        self.mask_id = mask_id
        self.mask_share = mask_share
        d_model = settings.d_model
        self.embedding = ScaledEmbedding(size, d_model)
        self.positions = TextPositions(settings)
        self.encoder = TransformerEncoder(num_layers, d_model, settings, final_norm=settings.final_norm)
        self.head = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model))
        self.output = None if settings.tied_output else Linear(d_model, size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(size))
        init_matrices(self)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Mask some of the tokens, and predict the token at each position.

        Args:
            tokens: (B, S) int64, the text, then PAD.
            padding_mask: (B, S) bool, True = padding.
        Returns:
            logits: (B, S, V) of the token at each position.
            masked: (B, S) bool, the positions that were chosen; the loss counts only these.
        """
        if padding_mask is None:
            padding_mask = tokens == PAD
        hidden, masked = self.mask(tokens)
        return {"logits": self.predict(hidden, padding_mask), "masked": masked}

    def predict(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Logits (B, S, V) of the token at each position, for texts that are masked already or not at all."""
        bias = None if padding_mask is None else padding_bias(padding_mask)
        x = self.encoder(self.positions(self.embedding(tokens)), bias=bias)
        table = self.embedding if self.output is None else self.output
        return linear(self.head(x), table.weight, self.output_bias)

    def mask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) int64 -> the tokens with some hidden, and which were chosen, (B, S) bool."""
        # Drawn on the CPU, so that they are the same on every device.
        generator = None if self.training else torch.Generator().manual_seed(0)
        chance, fate = torch.rand(2, *tokens.shape, generator=generator).to(tokens.device)
        others = torch.randint(EOS + 1, len(self.output_bias), tokens.shape, generator=generator).to(tokens.device)
        masked = (tokens > EOS) & (chance < self.mask_share)
        hidden = tokens.masked_fill(masked & (fate < 0.8), self.mask_id)
        return torch.where(masked & (fate >= 0.9), others, hidden), masked
