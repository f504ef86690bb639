"""Text metrics: how close generated text comes to its references, and a language model's perplexity."""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sacrebleu
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.base import SampleEvaluator, read_results
from vitkit.evaluation.sample_statistics import LikelihoodStatistics, TextStatistics, sacrebleu_sums
from vitkit.io.coco_schema import raise_issues, sentence_issues
from vitkit.io.output import write_text
from vitkit.registry import EVALUATORS
from vitkit.structures import PAD
from vitkit.text.vocabulary import normalize_text

logger = logging.getLogger("vitkit")
_NUM_EXAMPLES = 3
LENGTH_STEP = 5
"""Range of source words per group, for scores by length."""
METRICS = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match"}
"""Translation metrics: name in configs and results -> name as printed."""

_JOINED = re.compile("[\u0e00-\u0edf\u0f00-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff]")
"""Matches letters of scripts without blanks between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese."""


class _StoredText(NamedTuple):
    text: str
    source: str
    references: list[str]


class LengthGroup(NamedTuple):
    """A group of sentences of similar length."""

    min_words: int
    max_words: int
    """The source has `min_words` to `max_words` words, separated by blanks."""
    count: int
    """Number of sentences."""
    score: float
    """The group's value of one metric."""


@EVALUATORS.register
class TextEvaluator(SampleEvaluator):
    """sacrebleu's BLEU and chrF (Post 2018, https://arxiv.org/abs/1804.08771), and the fraction that equals a
    reference.

    BLEU counts up to four words in a row, so shorter texts have none: leave it out of `metrics` if most texts are
    short.

    Texts are compared as they are, cased and not tokenized: sacrebleu tokenizes both sides itself, and its signature,
    at the end of the table, says how. A text equals a reference if it does so with single blanks and composed
    characters (Unicode's NFC), in which vocabularies write. Every sentence of the dataset counts once.

    Args:
        dataset: the evaluated dataset.
        tokenize: sacrebleu's tokenizer for BLEU: "13a" (WMT's) for most languages, "zh", "ja-mecab", "char", "none", …
        lowercase: ignore case in comparisons.
        smallest_group: minimum number of sentences per group in scores by source length; smaller groups are merged.
        metrics: the keys of METRICS to report; the first one also by source length.
    Raises:
        ConfigError: there is no such metric or tokenizer.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        tokenize: str = "13a",
        lowercase: bool = False,
        smallest_group: int = 20,
        metrics: Sequence[str] = tuple(METRICS),
    ):
        super().__init__(dataset)
        self.lowercase, self._tokenize = lowercase, tokenize
        self.smallest_group = smallest_group
        if not metrics or not set(metrics) <= METRICS.keys():
            raise ConfigError(f"evaluator.metrics: got {list(metrics)}; expected one or more of {', '.join(METRICS)}.")
        self.reported = tuple(metrics)
        self.per_class_metric = METRICS[self.reported[0]]
        try:
            bleu = sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)
        except (ValueError, KeyError, ImportError, RuntimeError) as error:
            raise ConfigError(f"evaluator.tokenize={tokenize!r}: sacrebleu refuses it ({error}).") from error
        self._corpus_metrics = {"bleu": bleu, "chrf": sacrebleu.CHRF(lowercase=lowercase)}
        self._signatures: dict[str, str] = {}

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; sentences that were seen before are ignored.

        Args:
            predictions: `text` for each sentence.
            targets: `index`, `source_text` and `references` of the same sentences.
        Raises:
            ConfigError: the model's predictions have no text, or the dataset has no references.
        """
        if not self.stored_predictions:
            self._warn_of_joined_words("".join(text for target in targets for text in target.get("references", ())))
        for prediction, target in zip(predictions, targets, strict=True):
            if "text" not in prediction or "references" not in target:
                raise ConfigError(
                    "evaluator TextEvaluator: is for models that write text, of datasets with references, such as "
                    "ParallelText. Set evaluator=LanguageModelEvaluator for language models."
                )
            sentence = _StoredText(prediction["text"], target["source_text"], list(target["references"]))
            self.stored_predictions.setdefault(int(target["index"]), sentence)

    def _warn_of_joined_words(self, texts: str) -> None:
        """Warn if BLEU takes sentences for words, and so stays near 0."""
        by_blanks = "bleu" in self.reported and self._tokenize in ("13a", "intl", "none")
        if by_blanks and 2 * len(_JOINED.findall(texts)) > len(texts):
            logger.warning(
                f"evaluator.tokenize={self._tokenize}: the references have no blanks between words, so BLEU stays near "
                "0. Set it to zh for Chinese, ja-mecab for Japanese, or char."
            )

    def _compute(self) -> dict[str, float]:
        """Return those in `metrics` of bleu and chrf, in 0..100 as usually published, and exact_match, in 0..1; raise a
        DataError if sentences of the dataset have no prediction."""
        _require_all(self.stored_predictions, self.dataset)
        scores = {name: self._score(name, list(self.stored_predictions.values())) for name in self.reported}
        # A metric only knows the number of references after it was computed.
        self._signatures = {name: str(m.get_signature()) for name, m in self._corpus_metrics.items() if name in scores}
        return scores

    def _score(self, name: str, sentences: Sequence[_StoredText]) -> float:
        if name == "exact_match":
            return sum(map(self._is_exact, sentences)) / len(sentences)
        texts = [sentence.text for sentence in sentences]
        return self._corpus_metrics[name].corpus_score(texts, _references_by_number(sentences)).score

    def _is_exact(self, sentence: _StoredText) -> bool:
        # What a vocabulary writes has single blanks: a blank at the end of a reference is no other text.
        text, *references = (normalize_text(each) for each in (sentence.text, *sentence.references))
        if self.lowercase:
            return text.lower() in map(str.lower, references)
        return text in references

    def by_length(self) -> list[LengthGroup]:
        """Return the first metric for sentences of 1 to 5 words, 6 to 10, … (Bahdanau et al. 2015, figure 2)."""
        groups: dict[int, list[_StoredText]] = {}
        for sentence in self.stored_predictions.values():
            groups.setdefault(max(len(sentence.source.split()) - 1, 0) // LENGTH_STEP, []).append(sentence)
        joined: list[tuple[int, int, list[_StoredText]]] = []
        for number in sorted(groups):
            min_words, max_words = number * LENGTH_STEP + 1, (number + 1) * LENGTH_STEP
            if joined and min(len(joined[-1][2]), len(groups[number])) < self.smallest_group:
                before = joined.pop()
                joined.append((before[0], max_words, before[2] + groups[number]))
            else:
                joined.append((min_words, max_words, groups[number]))
        name = self.reported[0]
        return [LengthGroup(least, most, len(group), self._score(name, group)) for least, most, group in joined]

    def statistics(self) -> TextStatistics:
        sentences = list(self.stored_predictions.values())
        texts, references = [sentence.text for sentence in sentences], _references_by_number(sentences)
        sums = {name: sacrebleu_sums(metric, texts, references) for name, metric in self._corpus_metrics.items()}
        words = np.array([max(len(sentence.source.split()), 1) for sentence in sentences])
        groups = {
            f"{g.min_words} to {g.max_words} words": (words >= g.min_words) & (words <= g.max_words)
            for g in self.by_length()
        }
        exact = np.array([self._is_exact(sentence) for sentence in sentences])
        return TextStatistics(list(self.stored_predictions), self.reported, self._corpus_metrics, sums, exact, groups)

    def _table_lines(self) -> list[str]:
        """Return the metrics, the first one by length, example texts and the signatures."""
        digits = {"bleu": 2, "chrf": 2, "exact_match": 4}
        scores = "   ".join(f"{METRICS[name]} {self.metrics[name]:.{digits[name]}f}" for name in self.reported)
        decimals = digits[self.reported[0]] - 1
        lines = [
            f"{scores}   {len(self.stored_predictions)} sentences",
            f"{self.per_class_metric} by words of the source: "
            + "   ".join(f"{g.min_words}-{g.max_words}: {g.score:.{decimals}f} ({g.count})" for g in self.by_length()),
        ]
        for sentence in list(self.stored_predictions.values())[:_NUM_EXAMPLES]:
            lines += [
                f"  {sentence.source}",
                f"    got       {sentence.text}",
                f"    reference {sentence.references[0]}",
            ]
        return [*lines, *(f"{METRICS[name]} {signature}" for name, signature in self._signatures.items())]

    def per_class(self) -> dict[str, float]:
        """Return the first metric for each range of source words."""
        return {f"{group.min_words} to {group.max_words} words": group.score for group in self.by_length()}

    def write_results(self, path: str | Path) -> list[Path]:
        """Write metrics and texts as JSON, and only the texts, one per line.

        Returns:
            the files: `path`, and NAME.txt for NAME.json.
        """
        path = Path(path)
        sentences = [{"index": index, **sentence._asdict()} for index, sentence in self.stored_predictions.items()]
        by_length = [
            {"first": group.min_words, "last": group.max_words, "count": group.count, self.reported[0]: group.score}
            for group in self.by_length()
        ]
        result = {**self.metrics, "signatures": self._signatures, "by_length": by_length, "sentences": sentences}
        write_text(path, json.dumps(result, ensure_ascii=False, indent=1))
        texts = path.with_suffix(".txt")
        write_text(texts, "".join(f"{sentence.text}\n" for sentence in self.stored_predictions.values()))
        return [path, texts]

    def load_results(self, path: str | Path) -> None:
        """Read the texts of a file that `write_results` wrote.

        Raises:
            DataError: there is no such file, or its content is invalid.
        """
        content = read_results(path)
        raise_issues(sentence_issues(content, len(self.dataset)), f"results '{path}'")
        self.stored_predictions = {
            row["index"]: _StoredText(row["text"], row["source"], row["references"]) for row in content["sentences"]
        }


class _Likelihood(NamedTuple):
    tokens: int
    right: int
    log_likelihood: float


@EVALUATORS.register
class LanguageModelEvaluator(SampleEvaluator):
    """Perplexity of a language model, and the fraction of tokens to which it gives the highest probability."""

    takes_outputs = True
    lower_is_better = ("perplexity",)

    def update(self, predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; sentences that were seen before are ignored.

        Args:
            predictions: `logits` (T, V) each, T being the batch's longest; optionally `masked` (T,) bool: only those
                tokens count.
            targets: `index` and `tokens`, (T_i,) int64, of the same sentences.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            tokens = target["tokens"]
            logits = prediction["logits"][: len(tokens)].float()
            chosen = tokens != PAD
            if "masked" in prediction:
                chosen = chosen & prediction["masked"][: len(tokens)]
            log_probs = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
            right = (logits.argmax(dim=-1) == tokens) & chosen
            likelihood = _Likelihood(int(chosen.sum()), int(right.sum()), float(log_probs[chosen].double().sum()))
            self.stored_predictions.setdefault(int(target["index"]), likelihood)

    def _compute(self) -> dict[str, float]:
        """Return perplexity, log_likelihood (mean per token, in nats) and token_accuracy in 0..1; raise a DataError if
        sentences of the dataset were not evaluated."""
        _require_all(self.stored_predictions, self.dataset)
        tokens, right, log_likelihood = (sum(column) for column in zip(*self.stored_predictions.values()))
        mean = log_likelihood / max(tokens, 1)
        return {"perplexity": perplexity(-mean), "log_likelihood": mean, "token_accuracy": right / max(tokens, 1)}

    def statistics(self) -> LikelihoodStatistics:
        tokens, right, log_likelihoods = np.array(list(self.stored_predictions.values()), np.float64).reshape(-1, 3).T
        return LikelihoodStatistics(list(self.stored_predictions), tokens, right, log_likelihoods)

    def _table_lines(self) -> list[str]:
        tokens = sum(sentence.tokens for sentence in self.stored_predictions.values())
        return [
            f"perplexity {self.metrics['perplexity']:.3f}   token accuracy {self.metrics['token_accuracy']:.4f}   "
            f"{tokens} tokens of {len(self.stored_predictions)} sentences"
        ]

    def write_results(self, path: str | Path) -> None:
        """Write the metrics, and each sentence's tokens, correct tokens and log likelihood, as JSON, with null for
        infinite values."""
        sentences = [{"index": index, **sentence._asdict()} for index, sentence in self.stored_predictions.items()]
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        write_text(Path(path), json.dumps({**metrics, "sentences": sentences}))


def perplexity(nll: float) -> float:
    """Return the perplexity for a mean negative log probability per token, in nats; infinite beyond a float's range."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _require_all(predictions: Mapping[int, Any], dataset: Sized) -> None:
    if len(predictions) != len(dataset):
        raise DataError(f"{len(predictions)} of the dataset's {len(dataset)} sentences were predicted; expected all.")


def _references_by_number(sentences: Sequence[_StoredText]) -> list[list[str | None]]:
    """Return the first references of all sentences, the second ones, …, as sacrebleu expects; None for missing ones."""
    max_references = max(len(sentence.references) for sentence in sentences)
    return [
        [sentence.references[i] if i < len(sentence.references) else None for sentence in sentences]
        for i in range(max_references)
    ]
