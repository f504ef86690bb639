"""How near generated text comes to its references, and how probable a language model finds text."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sacrebleu
from matplotlib.figure import Figure
from torch import Tensor

from vitkit.distributed import gather_objects, is_main
from vitkit.errors import ConfigError, DataError
from vitkit.registry import EVALUATORS
from vitkit.structures import PAD

_SHOWN = 3
LENGTH_STEP = 5
"""Source words per group of BLEU by length."""


class TextDataset(Protocol):
    """What the evaluator asks of a dataset."""

    def __len__(self) -> int: ...


class _Answer(NamedTuple):
    text: str
    source: str
    references: list[str]


class LengthGroup(NamedTuple):
    """Sentences of similar length."""

    first: int
    last: int
    """Words of the source, separated by blanks, from `first` to `last`."""
    count: int
    """Sentences."""
    bleu: float


@EVALUATORS.register
class TextEvaluator:
    """BLEU and chrF of sacrebleu (Post 2018, https://arxiv.org/abs/1804.08771), and the part that equals a reference.

    Text is compared as it stands, cased and not tokenised: sacrebleu tokenises both sides itself, and its signature,
    which the table ends with, says how. Every sentence of the dataset counts once.

    Args:
        dataset: the evaluated dataset.
        tokenize: sacrebleu's tokeniser for BLEU: "13a" of WMT for most languages, "zh", "ja-mecab", "char", "none", …
        lowercase: compare without case.
        smallest_group: BLEU by source length is of groups of this many sentences at least; smaller ones are joined.
    """

    def __init__(
        self, dataset: TextDataset, *, tokenize: str = "13a", lowercase: bool = False, smallest_group: int = 20
    ):
        self.dataset = dataset
        self.smallest_group = smallest_group
        try:
            self._bleu = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)
        except (ValueError, KeyError, ImportError, RuntimeError) as error:
            raise ConfigError(f"evaluator.tokenize={tokenize!r}: sacrebleu refuses it ({error}).") from error
        self._chrf = sacrebleu.CHRF(lowercase=lowercase)
        self._answers: dict[int, _Answer] = {}
        self._metrics: dict[str, float] = {}
        self._signatures: list[str] = []

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch; a sentence that was seen before is left out.

        Args:
            predictions: `text` each.
            targets: the same sentences' `index`, `source_text` and `references`.
        Raises:
            ConfigError: the model writes no text, or the dataset has no references.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            if "text" not in prediction or "references" not in target:
                raise ConfigError(
                    "evaluator TextEvaluator: is for models that write text, of datasets with references, such as "
                    "ParallelText. Set evaluator=LanguageModelEvaluator for language models."
                )
            answer = _Answer(prediction["text"], target["source_text"], list(target["references"]))
            self._answers.setdefault(int(target["index"]), answer)

    def gather(self) -> None:
        """Moves the texts of all ranks to the main process; a sentence that several ranks saw is kept once."""
        merged = {}
        for answers in gather_objects(self._answers):
            merged = answers | merged
        if is_main():
            self._answers = dict(sorted(merged.items()))

    def compute(self) -> dict[str, float]:
        """On the main process "bleu" and "chrf" in 0..100, as they are published, and "exact_match" in 0..1; an empty
        dict elsewhere.

        Raises:
            DataError: sentences of the dataset were not predicted.
        """
        if not is_main():
            return {}
        _check_all(self._answers, self.dataset)
        answers = list(self._answers.values())
        scores = [_score(metric, answers) for metric in (self._bleu, self._chrf)]
        right = sum(answer.text in answer.references for answer in answers)
        self._signatures = [str(metric.get_signature()) for metric in (self._bleu, self._chrf)]
        self._metrics = {"bleu": scores[0], "chrf": scores[1], "exact_match": right / len(answers)}
        return dict(self._metrics)

    def by_length(self) -> list[LengthGroup]:
        """BLEU of the sentences with 1 to 5 words, 6 to 10, and so on (Bahdanau et al. 2015, figure 2)."""
        groups: dict[int, list[_Answer]] = {}
        for answer in self._answers.values():
            groups.setdefault(max(len(answer.source.split()) - 1, 0) // LENGTH_STEP, []).append(answer)
        joined: list[tuple[int, int, list[_Answer]]] = []
        for number in sorted(groups):
            first, last = number * LENGTH_STEP + 1, (number + 1) * LENGTH_STEP
            if joined and min(len(joined[-1][2]), len(groups[number])) < self.smallest_group:
                before = joined.pop()
                joined.append((before[0], last, before[2] + groups[number]))
            else:
                joined.append((first, last, groups[number]))
        return [LengthGroup(first, last, len(some), _score(self._bleu, some)) for first, last, some in joined]

    def table(self) -> str:
        """The metrics of the last `compute()`, BLEU by length, some texts and the signatures; empty elsewhere."""
        if not self._metrics:
            return ""
        lines = [
            f"BLEU {self._metrics['bleu']:.2f}   chrF {self._metrics['chrf']:.2f}   "
            f"exact match {self._metrics['exact_match']:.4f}   {len(self._answers)} sentences",
            "BLEU by words of the source: "
            + "   ".join(f"{first}-{last}: {bleu:.1f} ({count})" for first, last, count, bleu in self.by_length()),
        ]
        for answer in list(self._answers.values())[:_SHOWN]:
            lines += [f"  {answer.source}", f"    got       {answer.text}", f"    reference {answer.references[0]}"]
        return "\n".join([*lines, f"BLEU {self._signatures[0]}", f"chrF {self._signatures[1]}"])

    def per_class(self) -> dict[str, float]:
        """Words of the source -> BLEU."""
        return {f"{first} to {last} words": bleu for first, last, _, bleu in self.by_length()}

    per_class_metric = "BLEU"

    def write_results(self, path: str | Path) -> list[Path]:
        """Writes metrics and texts as JSON, the texts alone, a line each, and BLEU by length as a picture.

        Returns:
            the files: `path`, NAME.txt and NAME_by_length.png for NAME.json.
        """
        path = Path(path)
        sentences = [{"index": index, **answer._asdict()} for index, answer in self._answers.items()]
        by_length = [group._asdict() for group in self.by_length()]
        signatures = dict(zip(("bleu", "chrf"), self._signatures))
        result = {**self._metrics, "signatures": signatures, "by_length": by_length, "sentences": sentences}
        path.write_text(json.dumps(result, ensure_ascii=False, indent=1), encoding="utf-8")
        texts, picture = path.with_suffix(".txt"), path.with_name(f"{path.stem}_by_length.png")
        texts.write_text("".join(f"{answer.text}\n" for answer in self._answers.values()), encoding="utf-8")
        draw_bleu_by_length({path.stem: self.by_length()}, picture)
        return [path, texts, picture]

    def load_results(self, path: str | Path) -> None:
        """Takes the texts of a file that `write_results` wrote.

        Raises:
            DataError: it is no such file.
        """
        try:
            sentences = json.loads(Path(path).read_text(encoding="utf-8"))["sentences"]
            self._answers = {
                row["index"]: _Answer(row["text"], row["source"], list(row["references"])) for row in sentences
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: no texts that tools/test.py wrote ({error!r}).") from error


class _Likelihood(NamedTuple):
    tokens: int
    right: int
    log_likelihood: float


@EVALUATORS.register
class LanguageModelEvaluator:
    """How probable a language model finds the text: perplexity, and the part of the tokens that it finds most probable.

    Args:
        dataset: the evaluated dataset.
    """

    takes_outputs = True
    """It needs the model's outputs and no generated text."""

    def __init__(self, dataset: TextDataset):
        self.dataset = dataset
        self._sentences: dict[int, _Likelihood] = {}
        self._metrics: dict[str, float] = {}

    def update(self, predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch; a sentence that was seen before is left out.

        Args:
            predictions: `logits` (T, V) each, T the batch's longest; `masked` (T,) bool, optional: only these count.
            targets: the same sentences' `index` and `tokens`, (T_i,) int64.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            tokens = target["tokens"]
            logits = prediction["logits"][: len(tokens)].float()
            chosen = tokens != PAD
            if "masked" in prediction:
                chosen = chosen & prediction["masked"][: len(tokens)]
            log_probs = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
            right = (logits.argmax(dim=-1) == tokens) & chosen
            found = _Likelihood(int(chosen.sum()), int(right.sum()), float(log_probs[chosen].double().sum()))
            self._sentences.setdefault(int(target["index"]), found)

    def gather(self) -> None:
        """Moves the sums of all ranks to the main process."""
        merged = {}
        for sentences in gather_objects(self._sentences):
            merged = sentences | merged
        if is_main():
            self._sentences = dict(sorted(merged.items()))

    def compute(self) -> dict[str, float]:
        """On the main process "perplexity", "log_likelihood" (of a token on average, in nats: the higher the better)
        and "token_accuracy" in 0..1; an empty dict elsewhere.

        Raises:
            DataError: sentences of the dataset were not seen.
        """
        if not is_main():
            return {}
        _check_all(self._sentences, self.dataset)
        tokens, right, log_likelihood = (sum(column) for column in zip(*self._sentences.values()))
        mean = log_likelihood / max(tokens, 1)
        self._metrics = {
            "perplexity": perplexity(-mean),
            "log_likelihood": mean,
            "token_accuracy": right / max(tokens, 1),
        }
        return dict(self._metrics)

    def table(self) -> str:
        """The metrics of the last `compute()`; empty elsewhere."""
        if not self._metrics:
            return ""
        tokens = sum(sentence.tokens for sentence in self._sentences.values())
        return (
            f"perplexity {self._metrics['perplexity']:.3f}   token accuracy {self._metrics['token_accuracy']:.4f}   "
            f"{tokens} tokens of {len(self._sentences)} sentences"
        )

    def write_results(self, path: str | Path) -> None:
        """Writes the metrics, and each sentence's tokens, right ones and log likelihood, as JSON; an infinite one as
        null."""
        sentences = [{"index": index, **found._asdict()} for index, found in self._sentences.items()]
        metrics = {name: value if math.isfinite(value) else None for name, value in self._metrics.items()}
        Path(path).write_text(json.dumps({**metrics, "sentences": sentences}), encoding="utf-8")


def perplexity(nll: float) -> float:
    """The exponential of a token's mean negative log probability (in nats); infinite beyond what a float holds."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _check_all(seen: Mapping[int, Any], dataset: TextDataset) -> None:
    if len(seen) != len(dataset):
        raise DataError(f"{len(seen)} of the dataset's {len(dataset)} sentences were predicted; expected all.")


def _score(metric: sacrebleu.BLEU | sacrebleu.CHRF, answers: Sequence[_Answer]) -> float:
    """sacrebleu wants the references by their number, and takes None where a sentence has fewer."""
    most = max(len(answer.references) for answer in answers)
    references = [
        [answer.references[i] if i < len(answer.references) else None for answer in answers] for i in range(most)
    ]
    return metric.corpus_score([answer.text for answer in answers], references).score


def draw_bleu_by_length(curves: Mapping[str, Sequence[LengthGroup]], path: str | Path) -> None:
    """Saves a PNG of BLEU by source length.

    Args:
        curves: a model's name -> its groups.
        path: of the PNG.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, groups in curves.items():
        middles = [(group.first + group.last) / 2 for group in groups]
        axes.plot(middles, [group.bleu for group in groups], marker="o", label=name)
    longest = max(curves.values(), key=len)
    ticks = [((group.first + group.last) / 2, f"{group.first}-{group.last}\n({group.count})") for group in longest]
    axes.set_xticks(*zip(*ticks))
    axes.set(xlabel="words of the source (sentences)", ylabel="BLEU")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
