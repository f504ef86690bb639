"""Show, Attend and Tell: an LSTM that attends to locations of the image for each word
(Xu et al. 2015, https://arxiv.org/abs/1502.03044)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.additive_attention import AdditiveScore
from vitkit.nn.attention import attention_weights, mask_bias, record_weights
from vitkit.registry import MODELS, Spec
from vitkit.seq2seq.captioner import Captioner, FeatureMap
from vitkit.seq2seq.decoding import State, StepResult
from vitkit.structures import PAD


@dataclass
class CaptionState(State):
    """The decoder's state of N rows, and the image features shared by all rows of an image."""

    annotations: Tensor
    """(B, S, C), a feature vector for each location."""
    keys: Tensor
    """(B, S, d_attention), keys for the alignment score."""
    bias: Tensor
    """(B, 1, S), masks padded locations."""
    hidden: Tensor
    """(N, d_model), like the cell; rows of the same image are consecutive."""
    cell: Tensor
    sampled: Tensor | None = None
    """(N,) bool: rows for which a location is sampled; None in evaluation."""

    def select(self, rows: Tensor) -> "CaptionState":
        rows_per_image = len(self.hidden) // len(self.annotations)
        return self.select_beams(rows, beams=1, sources=rows // rows_per_image)

    def select_beams(self, rows: Tensor, *, beams: int, sources: Tensor | None) -> "CaptionState":
        per_image = (self.annotations, self.keys, self.bias)
        if sources is not None:
            per_image = (part[sources] for part in per_image)
        return CaptionState(*per_image, hidden=self.hidden[rows], cell=self.cell[rows])


@MODELS.register
class ShowAttendTell(Captioner):
    """An LSTM that writes a caption and attends to the image's feature map at each word.

    Soft attention passes the expected annotation to the decoder; it is trained by backpropagation, with the penalty in
    `CaptionLoss` that encourages attending to each location once (doubly stochastic attention, section 4.2.1). Hard
    attention passes the annotation of one location, sampled by the weights; `CaptionLoss` trains the weights by the
    reward of the sampled locations (section 4.1). For a random half of the images in training, chosen again each time,
    it passes the expectation instead.

    Details follow the paper where it specifies them. The networks for the initial state and the output layer have one
    tanh each. Dropout is applied before the LSTM and before the last layer.

    Args:
        backbone, freeze_backbone: see `Captioner`.
        attention: "soft" or "hard".
        gated: whether the context is multiplied by beta, a factor in 0..1 that depends on the state.
        expected_probability: for hard attention, the fraction of images for which training uses the expectation.
        hard_inference: what hard attention reads in evaluation: "argmax", the location with the largest weight, or
            "expected", the expectation.
        d_embedding: number of channels of the words.
        d_model: number of channels of the LSTM.
        d_attention: number of channels of the alignment score.
        dropout: dropout probability, before the LSTM and before the last layer.
        scheduled_sampling: in training, the fraction of words that are replaced by the model's own (Bengio et al.
            2015, https://arxiv.org/abs/1506.03099).
        options: the other arguments of `Captioner`.
    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        freeze_backbone: bool = True,
        attention: Literal["soft", "hard"] = "soft",
        gated: bool = True,
        expected_probability: float = 0.5,
        hard_inference: Literal["argmax", "expected"] = "argmax",
        d_embedding: int = 512,
        d_model: int = 1024,
        d_attention: int = 512,
        dropout: float = 0.5,
        scheduled_sampling: float = 0.0,
        **options: Any,
    ):
        if attention not in ("soft", "hard"):
            raise ConfigError(f"attention={attention!r}: expected 'soft' or 'hard'.")
        if hard_inference not in ("argmax", "expected"):
            raise ConfigError(f"hard_inference={hard_inference!r}: expected 'argmax' or 'expected'.")
        if not 0 <= expected_probability <= 1:
            raise ConfigError(f"expected_probability={expected_probability}: expected 0 to 1.")
        if not 0 <= scheduled_sampling <= 1:
            raise ConfigError(f"scheduled_sampling={scheduled_sampling}: expected 0 to 1.")
        super().__init__(backbone, freeze_backbone=freeze_backbone, **options)
        size, channels = self.target_size, self.feature_channels
        self.hard = attention == "hard"
        self.expected_probability = expected_probability
        self.hard_inference = hard_inference
        self.scheduled_sampling = scheduled_sampling
        self.embedding = nn.Embedding(size, d_embedding, padding_idx=PAD)
        self.initial_hidden = nn.Linear(channels, d_model)
        self.initial_cell = nn.Linear(channels, d_model)
        self.score = AdditiveScore(d_model, channels, d_attention)
        self.gate = nn.Linear(d_model, 1) if gated else None
        self.cell = nn.LSTMCell(d_embedding + channels, d_model)
        self.hidden_to_output = nn.Linear(d_model, d_embedding)
        self.context_to_output = nn.Linear(channels, d_embedding, bias=False)
        self.classifier = nn.Linear(d_embedding, size)
        self.dropout = nn.Dropout(dropout)
        if self.hard:
            # A buffer, so that checkpoints contain it: its value, and how often it was updated; see CaptionLoss.
            self.register_buffer("reward_baseline", torch.zeros(2))
            self.new_parts = ("reward_baseline",)  # training may start from weights of soft attention, which lack it

    def describe(self, target_in: Tensor, map_: FeatureMap) -> dict[str, Tensor]:
        """Predict from a feature map; see `Captioner`.

        Returns:
            logits: (B, T, V).
            attention: (B, T, S), the weights of the map's locations; each row sums to 1.
            annotation_padding: (B, S) bool, True = padding.
            With hard attention also sampled_log_weights, (B, T): the log weights of the sampled locations, 0 where none
            was sampled; and reward_baseline, the buffer, which `CaptionLoss` updates.
        """
        state = self.start_from(map_)
        if self.hard and self.training:
            state.sampled = torch.rand(len(target_in), device=target_in.device) >= self.expected_probability
        embedded, steps = [], []
        for word in self.dropout(self.embedding(target_in)).unbind(1):
            if steps and self.training and self.scheduled_sampling > 0:
                word = self._replace_randomly(word, self._predict(embedded[-1], *steps[-1][:2]))
            embedded.append(word)
            steps.append(self._advance(word, state))
        embedded = torch.stack(embedded, 1)
        hidden, contexts, weights, sampled_log_weights = (torch.stack(parts, 1) for parts in zip(*steps))
        outputs = {
            "logits": self._predict(embedded, hidden, contexts),
            "attention": weights,
            "annotation_padding": map_.padding(),
        }
        if self.hard:
            outputs |= {"sampled_log_weights": sampled_log_weights, "reward_baseline": self.reward_baseline}
        return outputs

    def set_sampling(self, fraction: float) -> None:
        """Set `scheduled_sampling`."""
        self.scheduled_sampling = fraction

    def _replace_randomly(self, words: Tensor, logits: Tensor) -> Tensor:
        """Replace randomly chosen words, (B, d_embedding), by the most probable ones after those before."""
        predicted = self.dropout(self.embedding(logits.detach().argmax(-1)))
        is_predicted = torch.rand(len(words), 1, device=words.device) < self.scheduled_sampling
        return torch.where(is_predicted, predicted, words)

    def step(self, tokens: Tensor, state: CaptionState, *, with_attention: bool = False) -> StepResult[CaptionState]:
        """Predict the next word of each row; the unknown word is masked.

        The attention is what the decoder received: for hard attention, only the location that was read.
        """
        embedded = self.embedding(tokens)
        hidden, context, weights, _ = self._advance(embedded, state)
        logits = self.mask_unknown(self._predict(embedded, hidden, context))
        return logits, state, self._locations(weights, state)[0] if with_attention else None

    def start_from(self, map_: FeatureMap) -> CaptionState:
        annotations, padding_mask = map_.annotations(), map_.padding()
        real = ~padding_mask[..., None]
        mean = (annotations * real).sum(1) / real.sum(1).clamp(min=1)
        return CaptionState(
            annotations=annotations,
            keys=self.score.keys(annotations),
            bias=mask_bias(padding_mask)[:, None],
            hidden=self.initial_hidden(mean).tanh(),
            cell=self.initial_cell(mean).tanh(),
        )

    def _advance(self, embedded: Tensor, state: CaptionState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Advance `state` by one word, in place.

        Args:
            embedded: (N, d_embedding).
        Returns:
            hidden (N, d_model), context (N, C), weights (N, S), log weights of the sampled locations (N,).
        """
        # The rows of an image are passed as queries of one sequence.
        queries = state.hidden.unflatten(0, (state.annotations.shape[0], -1))
        weights = attention_weights(self.score(queries, state.keys), state.bias)  # (B, N / B, S)
        record_weights(weights[:, None])
        weights = weights.flatten(0, 1)
        looked_at, sampled_log_weights = self._locations(weights, state)
        looked_at = looked_at.to(state.annotations.dtype).unflatten(0, (state.annotations.shape[0], -1))
        context = (looked_at @ state.annotations).flatten(0, 1)
        if self.gate is not None:
            context = self.gate(state.hidden).sigmoid() * context
        state.hidden, state.cell = self.cell(torch.cat([embedded, context], dim=-1), (state.hidden, state.cell))
        return state.hidden, context, weights, sampled_log_weights

    def _locations(self, weights: Tensor, state: CaptionState) -> tuple[Tensor, Tensor]:
        """Return the weight of each location in the context, (N, S), and the log weights of the sampled ones, (N,)."""
        none_drawn = weights.new_zeros(weights.shape[0])
        if not self.hard or (state.sampled is None and self.hard_inference == "expected"):
            return weights, none_drawn
        if state.sampled is None:
            return _one_hot(weights, weights.argmax(-1)), none_drawn
        drawn = torch.multinomial(weights.detach(), 1)[:, 0]
        log_weights = weights.gather(1, drawn[:, None])[:, 0].clamp(min=1e-12).log()
        looked_at = torch.where(state.sampled[:, None], _one_hot(weights, drawn), weights)
        return looked_at, log_weights * state.sampled

    def _predict(self, embedded: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        """Compute the next word's logits from word, state and context by the deep output layer (equation 7)."""
        mixed = embedded + self.hidden_to_output(self.dropout(hidden)) + self.context_to_output(context)
        return self.classifier(self.dropout(mixed.tanh()))


def _one_hot(weights: Tensor, locations: Tensor) -> Tensor:
    return torch.zeros_like(weights).scatter_(1, locations[:, None], 1.0)
