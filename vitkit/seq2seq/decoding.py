"""Generates text with models that predict one token after another: greedily, by beam search, or by sampling.

A decodable model creates a `State` from its inputs and advances it by one token at each step; everything specific to
the model, such as caches of keys and values, is in the state. N is the number of rows that are decoded in parallel: one
row per source at first, then `beams` per source with beam search. The result for a source does not depend on the others
in its batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vitkit.distributed import accumulation_dtype
from vitkit.errors import ConfigError
from vitkit.protocols.model import Model
from vitkit.registry import check_names
from vitkit.structures import BOS, EOS, PAD
from vitkit.text.vocabulary import Vocabulary

METHODS = ("greedy", "beam", "sample")


class State(ABC):
    """The decoding state of N rows between two steps."""

    tokens: Tensor | None = None
    """(N,) int64, input of the first step, such as the last token of a prompt; None: BOS."""

    @abstractmethod
    def select(self, rows: Tensor) -> "State":
        """Return the state of other rows: repeated, reordered, or fewer. The old state may be overwritten.

        Args:
            rows: (M,) int64, in 0..N-1.
        """

    def select_beams(self, rows: Tensor, *, beams: int, sources: Tensor | None) -> "State":
        """Select rows as beam search does, for states that store data only once per source.

        Args:
            rows: (M,) int64; rows of one source stay consecutive and come from rows of that source.
            beams: number of rows per source from now on.
            sources: int64, indices of the sources that remain; None: all.
        """
        return self.select(rows)


StateT = TypeVar("StateT", bound=State)
StepResult = tuple[Tensor, StateT, Tensor | None]
"""Logits, the new state and the attention, see `Decodable.step`."""


class Decodable(Protocol):
    """A model that `decode` accepts."""

    def start(self, **inputs: Tensor) -> State:
        """Encode a batch's inputs, except `target_in`, with one row each."""

    def step(self, tokens: Tensor, state: State, *, with_attention: bool = False) -> StepResult[State]:
        """Advance every row by one token.

        Args:
            tokens: (N,) int64, the last token of each row.
            with_attention: whether to return the attention (which takes extra time for some models).
        Returns:
            logits (N, V) of the next token, the new state (the old one may be overwritten), and each row's attention to
            the source, (N, S) that sums to 1, or None if it was not requested.
        """


@dataclass(frozen=True)
class DecodingSettings:
    """Settings of text decoding.

    Raises:
        ConfigError: a value is invalid.
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    beams: int = 4
    """For beam search: number of hypotheses followed per source."""
    length_penalty: float = 0.6
    """Exponent a of ((5 + length) / 6) ** a, by which the summed log probability is divided (Wu et al. 2016,
    section 7, https://arxiv.org/abs/1609.08144); 0 for no penalty. The length includes the EOS."""
    n_best: int = 1
    """Number of hypotheses returned per source; greedy decoding has one."""
    max_length: int = 100
    """Maximum number of tokens, including the EOS. A row without an EOS by then is cut off."""
    min_length: int = 0
    """Minimum number of tokens before the EOS."""
    temperature: float = 1.0
    """For sampling: divisor of the logits."""
    top_k: int = 0
    """For sampling: only draw from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """For sampling: only draw from the most probable tokens that together have this probability (Holtzman et al. 2020,
    https://arxiv.org/abs/1904.09751)."""
    seed: int = 0
    """For sampling: row i draws from its own random stream, with seed + i."""

    def __post_init__(self) -> None:
        checks = {
            "method": (self.method in METHODS, f"one of {', '.join(METHODS)}"),
            "beams": (self.beams >= 1, "at least 1"),
            "length_penalty": (self.length_penalty >= 0, "at least 0"),
            "n_best": (1 <= self.n_best <= self._max_hypotheses(), f"1 to {self._max_hypotheses()}"),
            "max_length": (self.max_length >= 1, "at least 1"),
            "min_length": (0 <= self.min_length < self.max_length, "at least 0, below max_length"),
            "temperature": (self.temperature > 0, "above 0; use method='greedy' for the most probable tokens"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"decoding.{name}: got {getattr(self, name)!r}; expected {expected}.")

    def _max_hypotheses(self) -> int:
        """The maximum number of hypotheses that the method can return."""
        return {"greedy": 1, "beam": self.beams}.get(self.method, 10**6)

    def penalty(self, length: int) -> float:
        """Return the divisor of the summed log probability of `length` tokens."""
        return ((5 + length) / 6) ** self.length_penalty


@dataclass
class Hypothesis:
    """A decoded text."""

    tokens: list[int]
    """The token ids, without BOS and EOS."""
    score: float
    """Summed log probability of the tokens and the EOS, divided by the length penalty."""
    attention: Tensor | None = None
    """(len(tokens), S) float32 on the CPU: each token's attention, zero on padding; None if it was not requested."""


class TextGenerator(Model):
    """A decodable model that returns text; evaluation and tools call `generate`.

    Args:
        target_vocabulary: vocabulary of the written text; a run sets its dataset's. None: `generate` returns no "text".
        target_size: number of tokens, if there is no vocabulary.
        decoding: arguments of `DecodingSettings`.
    Raises:
        ConfigError: there is neither a vocabulary nor a size, or they disagree.
    """

    takes = ("source",)
    returns = ("text",)
    joins_source: bool = False
    """Whether source and target are read as a single sequence."""

    def __init__(
        self,
        *,
        target_vocabulary: Vocabulary | None = None,
        target_size: int | None = None,
        decoding: Mapping[str, Any] | DecodingSettings | None = None,
    ):
        super().__init__()
        self.vocabulary = target_vocabulary
        self.target_size = vocabulary_size("target", target_vocabulary, target_size)
        self.decoding = decoding_settings(decoding)

    def generate(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Decode a batch of inputs.

        Args:
            inputs: inputs of a batch; `target_in` is ignored.
        Returns:
            for each source `tokens`, `score`, `text`, and `n_best`, a list of such dicts, the best first.
        """
        results = []
        for hypotheses in decode(self, inputs, self.decoding):
            n_best = [self._as_dict(hypothesis) for hypothesis in hypotheses]
            results.append({**n_best[0], "n_best": n_best})
        return results

    def _as_dict(self, hypothesis: Hypothesis) -> dict[str, Any]:
        result = {"tokens": hypothesis.tokens, "score": hypothesis.score}
        if self.vocabulary is not None:
            result["text"] = self.vocabulary.decode(hypothesis.tokens)
        return result


def decoding_settings(settings: Mapping[str, Any] | DecodingSettings | None) -> DecodingSettings:
    """Build `DecodingSettings` from a dict of its arguments; None: the defaults.

    Raises:
        ConfigError: a name or a value is invalid.
    """
    if isinstance(settings, DecodingSettings):
        return settings
    check_names(DecodingSettings, settings or {}, "decoding")
    return DecodingSettings(**(settings or {}))


def vocabulary_size(side: Literal["source", "target"], vocabulary: Vocabulary | None, configured: int | None) -> int:
    """Return the number of tokens that a model reads or writes.

    Raises:
        ConfigError: there is neither a vocabulary nor a size, or they disagree.
    """
    size = configured if vocabulary is None else len(vocabulary)
    if size is None:
        raise ConfigError(f"{side}_size: not set; expected the number of tokens, or a {side}_vocabulary.")
    if configured not in (None, size):
        raise ConfigError(f"{side}_size={configured}, but the {side} vocabulary has {size} tokens. Leave the size out.")
    return size


@torch.no_grad()
def decode(
    model: Decodable, inputs: Mapping[str, Tensor], settings: DecodingSettings, *, return_attention: bool = False
) -> list[list[Hypothesis]]:
    """Decode a batch. The model should be in evaluation mode.

    Args:
        inputs: inputs of a batch; `target_in` is ignored.
        return_attention: whether hypotheses include their attention.
    Returns:
        for each source between one and `settings.n_best` hypotheses, the best first.
    """
    inputs = {name: value for name, value in inputs.items() if name != "target_in"}
    state = model.start(**inputs)
    tokens = state.tokens
    if tokens is None:
        any_input = next(iter(inputs.values()))
        tokens = torch.full((len(any_input),), BOS, device=any_input.device)
    if settings.method == "beam":
        return _beam_search(model, state, tokens, settings, with_attention=return_attention)
    return _row_by_row(model, state, tokens, settings, with_attention=return_attention)


def _row_by_row(
    model: Decodable, state: State, tokens: Tensor, settings: DecodingSettings, *, with_attention: bool
) -> list[list[Hypothesis]]:
    """Decode greedily or by sampling, where rows do not affect each other."""
    num_samples = settings.n_best
    if num_samples > 1:
        rows = torch.arange(len(tokens), device=tokens.device).repeat_interleave(num_samples)
        state, tokens = state.select(rows), tokens[rows]
    draws = None
    if settings.method == "sample":
        # One generator a row: its draws do not depend on the number of rows, or on when they finish.
        streams = [torch.Generator().manual_seed(settings.seed + row) for row in range(len(tokens))]
        draws = torch.stack([torch.rand(settings.max_length, generator=stream) for stream in streams]).to(tokens.device)

    running = torch.arange(len(tokens), device=tokens.device)  # the row of `written` that each row of the state writes
    written = torch.full((len(tokens), settings.max_length), PAD, device=tokens.device)
    sums = torch.zeros(len(tokens), device=tokens.device)
    attentions = []
    finished = torch.zeros_like(tokens, dtype=torch.bool)
    for step in range(settings.max_length):
        logits, state, attention = model.step(tokens, state, with_attention=with_attention)
        log_probs = _log_probs(logits, may_end=step >= settings.min_length)
        if draws is None:
            scores, tokens = log_probs.max(dim=-1)
        else:
            tokens = _sample(log_probs, draws[running, step], settings)
            scores = log_probs.gather(-1, tokens[:, None])[:, 0]
        tokens = tokens.masked_fill(finished, PAD)
        written[running, step] = tokens
        sums[running] += scores.masked_fill(finished, 0)
        if with_attention:
            attentions.append(attention.new_zeros(len(written), attention.shape[1]).index_copy_(0, running, attention))
        finished |= tokens == EOS
        left = len(finished) - int(finished.sum())
        if left == 0:
            break
        if _worth_dropping(left, len(finished)):
            rows = (~finished).nonzero()[:, 0]
            state, tokens, running, finished = state.select(rows), tokens[rows], running[rows], finished[rows]

    attention = torch.stack(attentions, dim=1).float().cpu() if with_attention else None
    hypotheses = []
    for row, (ids, total) in enumerate(zip(written.tolist(), sums.tolist())):
        length = settings.max_length - ids.count(PAD)
        row_tokens = ids[:length] if ids[length - 1] != EOS else ids[: length - 1]
        row_attention = None if attention is None else attention[row, : len(row_tokens)]
        hypotheses.append(Hypothesis(row_tokens, total / settings.penalty(length), row_attention))
    groups = [hypotheses[i : i + num_samples] for i in range(0, len(hypotheses), num_samples)]
    return [sorted(group, key=lambda hypothesis: -hypothesis.score) for group in groups]


def _worth_dropping(left: int, rows: int) -> bool:
    """Return whether so many rows have finished that it is worth moving the others together."""
    return left <= 0.75 * rows


def _log_probs(logits: Tensor, *, may_end: bool) -> Tensor:
    """Return log probabilities (N, V) float32, -inf for tokens that must not follow."""
    log_probs = logits.float().log_softmax(dim=-1)
    # The other tokens are not renormalized, so that a text's score is the model's probability of it.
    log_probs[:, [PAD, BOS] if may_end else [PAD, BOS, EOS]] = float("-inf")
    return log_probs


def _sample(log_probs: Tensor, draws: Tensor, settings: DecodingSettings) -> Tensor:
    """Return token ids (N,) by inverse transform sampling; `draws` (N,) in 0..1, the most probable token first."""
    num_candidates = min(settings.top_k or log_probs.shape[-1], log_probs.shape[-1])
    scores, tokens = (log_probs / settings.temperature).topk(num_candidates, dim=-1)
    dtype = accumulation_dtype(scores.device)
    cumulated = scores.to(dtype).softmax(dim=-1).cumsum(dim=-1)
    if settings.top_p < 1:
        # The last token of the nucleus is the first one at which the sum reaches top_p.
        nucleus = torch.full_like(cumulated[:, :1], settings.top_p)
        last = torch.searchsorted(cumulated, nucleus).clamp(max=num_candidates - 1)
        total = cumulated.gather(-1, last)
    else:
        total = cumulated[:, -1:]
    ranks = torch.searchsorted(cumulated, draws[:, None].to(dtype) * total, right=True).clamp(max=num_candidates - 1)
    return tokens.gather(-1, ranks)[:, 0]


def _beam_search(
    model: Decodable, state: State, tokens: Tensor, settings: DecodingSettings, *, with_attention: bool
) -> list[list[Hypothesis]]:
    """Follow the `beams` most probable prefixes of every source.

    An EOS counts if it is among the `beams` best continuations of a source. A source is done when `beams` of its
    hypotheses are finished, or when no running one can overtake the `n_best` best of them. Hypotheses cut off at
    `max_length` are only returned if too few are finished, and after those, as their score lacks an EOS. One
    beam is greedy decoding.
    """
    beams, device = settings.beams, tokens.device
    finished: list[list[Hypothesis]] = [[] for _ in range(len(tokens))]
    sources = list(range(len(tokens)))  # source of the state's rows
    running = torch.ones(len(tokens), 1, dtype=torch.bool, device=device)
    totals = torch.zeros(len(tokens), 1, device=device)
    written = tokens.new_empty(len(tokens), 0)
    attended = None
    for step in range(settings.max_length):
        logits, state, attention = model.step(tokens, state, with_attention=with_attention)
        log_probs = _log_probs(logits, may_end=step >= settings.min_length)
        scores, parents, next_tokens = _best_continuations(totals, log_probs, 2 * beams)
        if with_attention:
            attended = attention[:, None] if attended is None else torch.cat([attended, attention[:, None]], dim=1)

        is_end = next_tokens == EOS
        is_counted = is_end[:, :beams] & scores[:, :beams].isfinite() & running
        if is_counted.any():
            rows = parents[:, :beams][is_counted]
            ended = _hypotheses(scores[:, :beams][is_counted], written, attended, rows, settings.penalty(step + 1))
            for index, hypothesis in zip(is_counted.nonzero()[:, 0].tolist(), ended):
                finished[sources[index]].append(hypothesis)
        # At most one continuation of each beam is an EOS, so at least `beams` others remain.
        continuing = is_end.int().sort(dim=-1, stable=True).indices[:, :beams]
        totals, parents, tokens = (x.gather(1, continuing) for x in (scores, parents, next_tokens))

        best_running = totals[:, 0].tolist()
        remaining = [i for i, source in enumerate(sources) if not _is_done(finished[source], best_running[i], settings)]
        if not remaining:
            break
        kept_sources = torch.tensor(remaining, device=device)
        running = torch.zeros_like(running).index_fill_(0, kept_sources, True)
        if _worth_dropping(len(remaining), len(sources)):
            sources = [sources[i] for i in remaining]
            totals, parents, tokens, running = (x[kept_sources] for x in (totals, parents, tokens, running))
        else:
            kept_sources = None
        rows, tokens = parents.flatten(), tokens.flatten()
        written = torch.cat([written[rows], tokens[:, None]], dim=1)
        attended = None if attended is None else attended[rows]
        if step + 1 < settings.max_length:
            state = state.select_beams(rows, beams=beams, sources=kept_sources)
    best = [sorted(group, key=lambda hypothesis: -hypothesis.score)[: settings.n_best] for group in finished]
    for index, source in enumerate(sources):
        # A source can only have too few if the loop ran until max_length.
        if len(best[source]) < settings.n_best:
            rows = slice(index * beams, (index + 1) * beams)
            penalty = settings.penalty(settings.max_length)
            best[source] += _hypotheses(totals[index], written, attended, rows, penalty)
            del best[source][settings.n_best :]
    return best


def _best_continuations(totals: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most probable continuations of each source.

    Args:
        totals: (sources, beams), summed log probability of each beam.
        log_probs: (sources * beams, V).
    Returns:
        scores, parents (rows of `log_probs`) and tokens, each (sources, count), best first; the scores of missing ones
        are -inf.
    """
    sources, beams = totals.shape
    per_row = min(count, log_probs.shape[-1])
    values, tokens = log_probs.topk(per_row, dim=-1)
    scores = (totals.view(-1, 1) + values).view(sources, -1)
    scores, best = scores.topk(min(count, beams * per_row), dim=-1)
    tokens = tokens.view(sources, -1).gather(1, best)
    parents = best // per_row + torch.arange(sources, device=best.device)[:, None] * beams
    if missing := count - scores.shape[1]:
        scores = nn.functional.pad(scores, (0, missing), value=float("-inf"))
        tokens = nn.functional.pad(tokens, (0, missing), value=PAD)
        parents = torch.cat([parents, parents[:, :1].expand(-1, missing)], dim=1)
    return scores, parents, tokens


def _is_done(finished: Sequence[Hypothesis], best_running: float, settings: DecodingSettings) -> bool:
    if len(finished) >= settings.beams:
        return True
    # The probability can only decrease, and the penalty's divisor increases with the length.
    reachable = best_running / settings.penalty(settings.max_length)
    return sum(hypothesis.score >= reachable for hypothesis in finished) >= settings.n_best


def _hypotheses(
    totals: Tensor, written: Tensor, attended: Tensor | None, rows: Tensor | slice, penalty: float
) -> list[Hypothesis]:
    """Return the hypotheses that rows of `written` are, without those that are missing, whose total is -inf."""
    tokens = written[rows].tolist()
    attention = [None] * len(tokens) if attended is None else attended[rows, : written.shape[1]].float().cpu()
    return [
        Hypothesis(ids, total / penalty, weights)
        for ids, total, weights in zip(tokens, totals.tolist(), attention)
        if total != float("-inf")
    ]
