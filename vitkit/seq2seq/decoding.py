"""Text from models that predict one token after another: greedy, by beam search, or sampled.

A model that can be decoded starts a `State` from its inputs and takes it one token further at each step; all that
depends on the model, such as caches of keys and values, is in the state. N is the number of rows that are decoded side
by side: a row per source at first, with beam search then `beams` per source. What becomes of a source does not depend
on the others in its batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.registry import check_names
from vitkit.structures import BOS, EOS, PAD
from vitkit.vocabulary import Vocabulary

METHODS = ("greedy", "beam", "sample")


class State(ABC):
    """What a model knows of N rows between two steps."""

    tokens: Tensor | None = None
    """(N,) int64, what the first step takes, such as the last token of a prompt; None: BOS."""

    @abstractmethod
    def select(self, rows: Tensor) -> "State":
        """The state of other rows: repeated, in another order, or fewer. The old state may be overwritten.

        Args:
            rows: (M,) int64, of 0..N-1.
        """

    def select_beams(self, rows: Tensor, *, beams: int, sources: Tensor | None) -> "State":
        """`select` as beam search does it, for states that keep something only once per source.

        Args:
            rows: (M,) int64; those of one source stand together and come from rows of that source.
            beams: rows per source from now on.
            sources: int64, which sources remain, by their place among those there are; None: all.
        """
        return self.select(rows)


class Decodable(Protocol):
    """A model that `decode` can take."""

    def start(self, **inputs: Tensor) -> State:
        """Takes a batch's inputs except `target_in`; a row for each."""

    def step(
        self, tokens: Tensor, state: State, *, with_attention: bool = False
    ) -> tuple[Tensor, State, Tensor | None]:
        """
        Args:
            tokens: (N,) int64, the last token of each row.
            with_attention: whether the third result is wanted (it comes at a cost for some models).
        Returns:
            logits (N, V) of the next token, the new state (the old one may be overwritten), and what the row attends
            to in the source, (N, S) that sums to 1; None if it is not wanted.
        """


@dataclass(frozen=True)
class DecodingSettings:
    """
    Raises:
        ConfigError: a value is impossible.
    """

    method: Literal["greedy", "beam", "sample"] = "greedy"
    beams: int = 4
    """Of beam search: hypotheses that are followed per source."""
    length_penalty: float = 0.6
    """The exponent a of ((5 + length) / 6) ** a, by which the summed log probability is divided (Wu et al. 2016,
    section 7, https://arxiv.org/abs/1609.08144); 0 for none. The length counts the EOS."""
    n_best: int = 1
    """Hypotheses returned per source; greedy decoding has one."""
    max_length: int = 100
    """Tokens at most, the EOS counted. A row without EOS by then is cut."""
    min_length: int = 0
    """Tokens at least, before the EOS."""
    temperature: float = 1.0
    """Of sampling: logits are divided by it."""
    top_k: int = 0
    """Of sampling: only the k most probable tokens are drawn from; 0: all."""
    top_p: float = 1.0
    """Of sampling: only the most probable tokens that together have this probability (Holtzman et al. 2020,
    https://arxiv.org/abs/1904.09751)."""
    seed: int = 0
    """Of sampling: row i draws from a stream of its own, number seed + i."""

    def __post_init__(self) -> None:
        checks = {
            "method": (self.method in METHODS, f"one of {', '.join(METHODS)}"),
            "beams": (self.beams >= 1, "at least 1"),
            "length_penalty": (self.length_penalty >= 0, "at least 0"),
            "n_best": (1 <= self.n_best <= self._most_hypotheses(), f"1 to {self._most_hypotheses()}"),
            "max_length": (self.max_length >= 1, "at least 1"),
            "min_length": (0 <= self.min_length < self.max_length, "at least 0, below max_length"),
            "temperature": (self.temperature > 0, "above 0; use method='greedy' for the most probable tokens"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"decoding.{name}: got {getattr(self, name)!r}; expected {expected}.")

    def _most_hypotheses(self) -> int:
        """That the method can return."""
        return {"greedy": 1, "beam": self.beams}.get(self.method, 10**6)

    def with_hypotheses(self, n_best: int = 1, *, beams: int | None = None) -> "DecodingSettings":
        """These settings for so many hypotheses per source: greedy decoding, which has one, becomes beam search.

        Args:
            beams: beam search with so many, or with 1 greedy decoding; None: at least as many as there are hypotheses.
        Raises:
            ConfigError: more hypotheses than beams are asked for.
        """
        method = "beam" if self.method == "greedy" and n_best > 1 else self.method
        if beams is not None:
            method = "greedy" if beams == 1 else "beam"
        return replace(self, method=method, beams=max(self.beams, n_best) if beams is None else beams, n_best=n_best)

    def penalty(self, length: int) -> float:
        """What the summed log probability of `length` tokens is divided by."""
        return ((5 + length) / 6) ** self.length_penalty


@dataclass
class Hypothesis:
    """A decoded row."""

    tokens: list[int]
    """Without BOS and EOS."""
    score: float
    """Summed log probability of the tokens and the EOS, divided by the length penalty."""
    attention: Tensor | None = None
    """(len(tokens), S) float32 on the CPU: what each token attended to, zero on padding; if it was asked for."""


class GenerativeModel(nn.Module):
    """A decodable model that returns text: `generate` is what evaluation and tools call.

    Args:
        vocabulary: of the text it writes; None: `generate` returns no "text".
        decoding: `DecodingSettings` by name.
    """

    def __init__(self, vocabulary: Vocabulary | None, decoding: Mapping[str, Any] | DecodingSettings | None = None):
        super().__init__()
        self.vocabulary = vocabulary
        self.decoding = decoding_settings(decoding)

    def generate(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """
        Args:
            inputs: of a batch; `target_in` is left out.
        Returns:
            for each source `tokens`, `score`, `text`, and `n_best`, a list of dicts of these, the best first.
        """
        results = []
        for hypotheses in decode(self, inputs, self.decoding):
            n_best = [self._described(hypothesis) for hypothesis in hypotheses]
            results.append({**n_best[0], "n_best": n_best})
        return results

    def _described(self, hypothesis: Hypothesis) -> dict[str, Any]:
        described = {"tokens": hypothesis.tokens, "score": hypothesis.score}
        if self.vocabulary is not None:
            described["text"] = self.vocabulary.decode(hypothesis.tokens)
        return described


def decoding_settings(given: Mapping[str, Any] | DecodingSettings | None) -> DecodingSettings:
    """
    Raises:
        ConfigError: a name or a value is wrong.
    """
    if isinstance(given, DecodingSettings):
        return given
    check_names(DecodingSettings, given or {}, "decoding")
    return DecodingSettings(**(given or {}))


def vocabulary_size(side: Literal["source", "target"], vocabulary: Vocabulary | None, stated: int | None) -> int:
    """How many tokens a model reads or writes.

    Raises:
        ConfigError: neither a vocabulary nor a size is given, or they disagree.
    """
    size = stated if vocabulary is None else len(vocabulary)
    if size is None:
        raise ConfigError(f"model.{side}_size: not set; expected the number of tokens, or a {side}_vocabulary.")
    if stated not in (None, size):
        raise ConfigError(
            f"model.{side}_size={stated}, but the {side} vocabulary has {size} tokens. Leave the size out."
        )
    return size


@torch.no_grad()
def decode(
    model: Decodable, inputs: Mapping[str, Tensor], settings: DecodingSettings, *, return_attention: bool = False
) -> list[list[Hypothesis]]:
    """Decodes a batch. The model should be in evaluation mode.

    Args:
        inputs: of a batch; `target_in` is left out.
        return_attention: hypotheses carry their attention.
    Returns:
        for each source at most `settings.n_best` hypotheses, at least one, the best first.
    """
    inputs = {name: value for name, value in inputs.items() if name != "target_in"}
    state = model.start(**inputs)
    tokens = state.tokens
    if tokens is None:
        first = next(iter(inputs.values()))
        tokens = torch.full((len(first),), BOS, device=first.device)
    if settings.method == "beam":
        return _beam_search(model, state, tokens, settings, with_attention=return_attention)
    return _row_by_row(model, state, tokens, settings, with_attention=return_attention)


def _row_by_row(
    model: Decodable, state: State, tokens: Tensor, settings: DecodingSettings, *, with_attention: bool
) -> list[list[Hypothesis]]:
    """Greedy decoding and sampling: every row goes its own way."""
    copies = settings.n_best
    if copies > 1:
        rows = torch.arange(len(tokens), device=tokens.device).repeat_interleave(copies)
        state, tokens = state.select(rows), tokens[rows]
    draws = _uniform_draws(len(tokens), settings).to(tokens.device) if settings.method == "sample" else None

    running = torch.arange(len(tokens), device=tokens.device)  # the row of `written` that each state's row writes
    written = torch.full((len(tokens), settings.max_length), PAD, device=tokens.device)
    sums = torch.zeros(len(tokens), device=tokens.device)
    attentions = []
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for step in range(settings.max_length):
        logits, state, attention = model.step(tokens, state, with_attention=with_attention)
        log_probs = _log_probs(logits, may_end=step >= settings.min_length)
        if draws is None:
            scores, tokens = log_probs.max(dim=-1)
        else:
            tokens = _sample(log_probs, draws[running, step], settings)
            scores = log_probs.gather(-1, tokens[:, None])[:, 0]
        tokens = tokens.masked_fill(ended, PAD)
        written[running, step] = tokens
        sums[running] += scores.masked_fill(ended, 0)
        if with_attention:
            attentions.append(attention.new_zeros(len(written), attention.shape[1]).index_copy_(0, running, attention))
        ended |= tokens == EOS
        left = len(ended) - int(ended.sum())
        if left == 0:
            break
        if _worth_dropping(left, len(ended)):
            rows = (~ended).nonzero()[:, 0]
            state, tokens, running, ended = state.select(rows), tokens[rows], running[rows], ended[rows]

    attention = torch.stack(attentions, dim=1).float().cpu() if with_attention else None
    hypotheses = []
    for row, (ids, total) in enumerate(zip(written.tolist(), sums.tolist())):
        length = settings.max_length - ids.count(PAD)
        tokens_of_row = ids[:length] if ids[length - 1] != EOS else ids[: length - 1]
        of_row = None if attention is None else attention[row, : len(tokens_of_row)]
        hypotheses.append(Hypothesis(tokens_of_row, total / settings.penalty(length), of_row))
    groups = [hypotheses[i : i + copies] for i in range(0, len(hypotheses), copies)]
    return [sorted(group, key=lambda hypothesis: -hypothesis.score) for group in groups]


def _worth_dropping(left: int, rows: int) -> bool:
    """Whether enough rows have ended to pay for moving the others together."""
    return left <= 0.75 * rows


def _log_probs(logits: Tensor, *, may_end: bool) -> Tensor:
    """(N, V) float32; what must not follow is -inf. The others' are not raised for it, so that a text's score is the
    model's probability of it."""
    log_probs = logits.float().log_softmax(dim=-1)
    log_probs[:, [PAD, BOS] if may_end else [PAD, BOS, EOS]] = float("-inf")
    return log_probs


def _uniform_draws(rows: int, settings: DecodingSettings) -> Tensor:
    """(rows, max_length) in 0..1, each row from a stream of its own: what is drawn for one does not depend on how many
    there are, or on when they end."""
    streams = [torch.Generator().manual_seed(settings.seed + row) for row in range(rows)]
    return torch.stack([torch.rand(settings.max_length, generator=stream) for stream in streams])


def _sample(log_probs: Tensor, draws: Tensor, settings: DecodingSettings) -> Tensor:
    """(N,) token ids; `draws` (N,) in 0..1 say where in the cumulated probability, the most probable token first."""
    most = min(settings.top_k or log_probs.shape[-1], log_probs.shape[-1])
    scores, tokens = (log_probs / settings.temperature).topk(most, dim=-1)
    cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)
    if settings.top_p < 1:
        # The last one that counts is the first whose sum reaches top_p.
        kept = torch.searchsorted(cumulated, torch.full_like(cumulated[:, :1], settings.top_p)).clamp(max=most - 1)
        total = cumulated.gather(-1, kept)
    else:
        total = cumulated[:, -1:]
    places = torch.searchsorted(cumulated, draws[:, None].double() * total, right=True).clamp(max=most - 1)
    return tokens.gather(-1, places)[:, 0]


def _beam_search(
    model: Decodable, state: State, tokens: Tensor, settings: DecodingSettings, *, with_attention: bool
) -> list[list[Hypothesis]]:
    """Follows the `beams` most probable beginnings of every source.

    An end counts where it is among the `beams` best continuations of a source. A source is done when `beams` of its
    hypotheses have ended, or when none that still runs can overtake the `n_best` best of them. What is cut at
    `max_length` is returned only where too few have ended, and after them: it has not paid for its end. One beam is
    greedy decoding.
    """
    beams, device = settings.beams, tokens.device
    ended: list[list[Hypothesis]] = [[] for _ in range(len(tokens))]
    sources = list(range(len(tokens)))  # those that the state's rows belong to
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
        _collect(
            ended, sources, is_end[:, :beams] & scores[:, :beams].isfinite() & running,
            scores=scores, parents=parents, written=written, attended=attended, penalty=settings.penalty(step + 1),
        )  # fmt: skip
        # At most one continuation of each beam is an end, so at least `beams` are none.
        going_on = is_end.int().sort(dim=-1, stable=True).indices[:, :beams]
        totals, parents, tokens = (x.gather(1, going_on) for x in (scores, parents, next_tokens))

        best_running = totals[:, 0].tolist()
        left = [i for i, source in enumerate(sources) if not _is_done(ended[source], best_running[i], settings)]
        if not left:
            break
        kept = torch.tensor(left, device=device)
        running = torch.zeros_like(running).index_fill_(0, kept, True)
        if _worth_dropping(len(left), len(sources)):
            sources = [sources[i] for i in left]
            totals, parents, tokens, running = totals[kept], parents[kept], tokens[kept], running[kept]
        else:
            kept = None
        rows, tokens = parents.flatten(), tokens.flatten()
        written = torch.cat([written[rows], tokens[:, None]], dim=1)
        attended = None if attended is None else attended[rows]
        if step + 1 < settings.max_length:
            state = state.select_beams(rows, beams=beams, sources=kept)
    best = [sorted(found, key=lambda hypothesis: -hypothesis.score)[: settings.n_best] for found in ended]
    for index, source in enumerate(sources):
        # Only when every step was taken does a source still have too few.
        if len(best[source]) < settings.n_best:
            rows = slice(index * beams, (index + 1) * beams)
            best[source] += _cut(totals[index], written[rows], None if attended is None else attended[rows], settings)
            del best[source][settings.n_best :]
    return best


def _best_continuations(totals: Tensor, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable continuations of each source.

    Args:
        totals: (sources, beams), summed log probability of each beam.
        log_probs: (sources * beams, V).
    Returns:
        scores, parents (a row of `log_probs`) and tokens, each (sources, count), the best first; where there are fewer,
        the scores are -inf.
    """
    sources, beams = totals.shape
    of_row = min(count, log_probs.shape[-1])
    values, tokens = log_probs.topk(of_row, dim=-1)
    scores = (totals.view(-1, 1) + values).view(sources, -1)
    scores, places = scores.topk(min(count, beams * of_row), dim=-1)
    tokens = tokens.view(sources, -1).gather(1, places)
    parents = places // of_row + torch.arange(sources, device=places.device)[:, None] * beams
    missing = count - scores.shape[1]
    if missing:
        scores = nn.functional.pad(scores, (0, missing), value=float("-inf"))
        tokens = nn.functional.pad(tokens, (0, missing), value=PAD)
        parents = torch.cat([parents, parents[:, :1].expand(-1, missing)], dim=1)
    return scores, parents, tokens


def _collect(
    ended: list[list[Hypothesis]],
    sources: Sequence[int],
    is_end: Tensor,
    *,
    scores: Tensor,
    parents: Tensor,
    written: Tensor,
    attended: Tensor | None,
    penalty: float,
) -> None:
    """Adds the hypotheses that end at this step, `is_end` (sources, beams) of the best continuations."""
    places = is_end.nonzero()
    if not len(places):
        return
    where, rows = places.unbind(1), parents[places[:, 0], places[:, 1]]
    attention = None if attended is None else attended[rows].float().cpu()
    found = zip(places[:, 0].tolist(), scores[where].tolist(), written[rows].tolist())
    for i, (index, score, ids) in enumerate(found):
        of_hypothesis = None if attention is None else attention[i, : len(ids)]
        ended[sources[index]].append(Hypothesis(ids, score / penalty, of_hypothesis))


def _is_done(ended: Sequence[Hypothesis], best_running: float, settings: DecodingSettings) -> bool:
    if len(ended) >= settings.beams:
        return True
    # Probability only falls, and the penalty divides by the more the longer a text gets.
    reachable = best_running / settings.penalty(settings.max_length)
    return sum(hypothesis.score >= reachable for hypothesis in ended) >= settings.n_best


def _cut(totals: Tensor, written: Tensor, attended: Tensor | None, settings: DecodingSettings) -> list[Hypothesis]:
    """The beams of a source that still run at `max_length`, the best first."""
    attention = [None] * len(written) if attended is None else attended.float().cpu()
    penalty = settings.penalty(settings.max_length)
    return [
        Hypothesis(ids, total / penalty, of_row)
        for ids, total, of_row in zip(written.tolist(), totals.tolist(), attention)
        if total != float("-inf")
    ]
