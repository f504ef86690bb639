"""The contribution of each image, or sentence, to metrics that are sums: for maps, classes, captions and texts.

See `SampleStatistics` for their common interface.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics.base import Metric
from scipy.sparse import csr_array

from vitkit.evaluation.bootstrap import Scores, Values, mean_of_finite, weighted_ratio
from vitkit.evaluation.caption_metrics import bleu_of_counts


class SemanticStatistics(NamedTuple):
    """Pixel counts of semantic maps."""

    sample_ids: list
    class_names: Sequence[str]
    correct: np.ndarray
    """(N, C) pixels of each class that are predicted as that class."""
    predicted: np.ndarray
    true: np.ndarray
    boundaries: np.ndarray | None
    """(N, 3, C) pixels near edges: in both maps, in the true one, in the predicted one; None: not computed."""

    def scores(self, weights: np.ndarray) -> Scores:
        """Return the evaluator's metrics, and IoU, accuracy and boundary IoU of each class."""
        union = self.true + self.predicted - self.correct
        per_class = {
            "IoU": weighted_ratio(weights, self.correct, union),
            "accuracy": weighted_ratio(weights, self.correct, self.true),
        }
        is_true = weights @ self.true > 0
        if self.boundaries is not None:
            both, near_true, near_predicted = self.boundaries.transpose(1, 0, 2)
            per_class["boundary IoU"] = weighted_ratio(weights, both, near_true + near_predicted - both)
            per_class["boundary IoU"][weights @ near_true == 0] = np.nan
        for values in per_class.values():
            values[~is_true] = np.nan
        overall = {
            "mIoU": mean_of_finite(per_class["IoU"]),
            "pixel_accuracy": weighted_ratio(weights, self.correct.sum(axis=1), self.true.sum(axis=1)),
            "mean_accuracy": mean_of_finite(per_class["accuracy"]),
        }
        if self.boundaries is not None:
            overall["boundary_mIoU"] = mean_of_finite(per_class["boundary IoU"])
        return Scores(overall, _by_class(self.class_names, per_class))

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return each image's mean IoU over the classes in it."""
        union = self.true + self.predicted - self.correct
        iou = np.where(self.true > 0, self.correct / np.maximum(union, 1), np.nan)
        return "mIoU", mean_of_finite(iou)


class PanopticStatistics(NamedTuple):
    """Counts of matched segments."""

    sample_ids: list
    class_names: Sequence[str]
    things: np.ndarray
    """(C,) bool, whether each class is a thing."""
    matches: np.ndarray
    """(N, C, 4), see `match_segments`."""

    def scores(self, weights: np.ndarray) -> Scores:
        """Return PQ, SQ and RQ over all classes, things and stuff, and for each class."""
        iou, correct, too_many, missed = np.moveaxis(np.tensordot(weights, self.matches, 1), 2, 0)  # (R, C) each
        quality = _panoptic_quality(iou, correct, too_many, missed)
        overall: Values = {}
        for suffix, chosen in (("", self.things | True), ("_things", self.things), ("_stuff", ~self.things)):
            overall |= {f"{name}{suffix}": mean_of_finite(values[:, chosen]) for name, values in quality.items()}
        return Scores(overall, _by_class(self.class_names, quality))

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return each image's PQ."""
        return "PQ", mean_of_finite(_panoptic_quality(*np.moveaxis(self.matches, 2, 0))["PQ"])


def _panoptic_quality(iou: np.ndarray, correct: np.ndarray, too_many: np.ndarray, missed: np.ndarray) -> Values:
    """Return PQ, SQ and RQ; NaN for classes without any segment."""
    weight = correct + 0.5 * too_many + 0.5 * missed
    divisor = np.maximum(weight, 0.5)
    quality = {"PQ": iou / divisor, "SQ": iou / np.maximum(correct, 1), "RQ": correct / divisor}
    return {name: np.where(weight > 0, values, np.nan) for name, values in quality.items()}


class ClassificationStatistics(NamedTuple):
    """True classes and predicted scores of images."""

    sample_ids: list
    class_names: Sequence[str]
    labels: np.ndarray
    """(N,) true classes; -1 for an image without a prediction, whose class is unknown."""
    best: np.ndarray
    """(N, K) predicted classes, best first."""
    best_scores: np.ndarray
    """(N, K) scores of these classes, in 0..1."""
    prefix: str = ""
    """What the names of the overall metrics begin with."""

    def scores(self, weights: np.ndarray) -> Scores:
        """Return top-1 and top-5 accuracy, and recall, precision and F1 of each class."""
        hits = self.best == self.labels[:, None]
        all_images = np.ones(len(self.labels))
        overall = {
            f"{self.prefix}top1": weighted_ratio(weights, hits[:, 0], all_images),
            f"{self.prefix}top5": weighted_ratio(weights, hits.any(axis=1), all_images),
        }
        true, predicted = self._by_label(weights, self.labels), self._by_label(weights, self.best[:, 0])
        correct = self._by_label(weights, np.where(hits[:, 0], self.labels, -1))
        ratios = {"accuracy": (correct, true), "precision": (correct, predicted), "F1": (2 * correct, true + predicted)}
        per_class = {
            name: np.divide(part, total, out=np.full(part.shape, np.nan), where=total > 0)
            for name, (part, total) in ratios.items()
        }
        return Scores(overall, _by_class(self.class_names, per_class))

    def _by_label(self, weights: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the (R, C) sums of the weights of the images with each label; negative labels are ignored."""
        labeled = np.flatnonzero(labels >= 0)
        of_label = csr_array((np.ones(len(labeled)), (labels[labeled], labeled)), (len(self.class_names), len(labels)))
        return (of_label @ weights.T).T

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return the true class's score (0 if not among the best five), minus the best score if that is wrong."""
        hits = self.best == self.labels[:, None]
        of_true = np.where(hits, self.best_scores, 0.0).sum(axis=1)
        return "score of the true class", of_true - np.where(hits[:, 0], 0.0, self.best_scores[:, 0])


class CaptionStatistics(NamedTuple):
    """Scores of captions. CIDEr-D's document frequencies are those of all images, whatever is resampled."""

    sample_ids: list
    bleu_counts: np.ndarray
    """(N, 10), see `bleu_counts`."""
    means: Mapping[str, np.ndarray]
    """Metric that is a mean over images -> the (N,) values of the images."""
    class_names: Sequence[str] = ()

    def scores(self, weights: np.ndarray) -> Scores:
        """Return the evaluator's metrics."""
        bleu = bleu_of_counts(weights @ self.bleu_counts)
        ones = np.ones(len(self.sample_ids))
        means = {name: weighted_ratio(weights, values, ones) for name, values in self.means.items()}
        return Scores({**{f"BLEU-{n}": bleu[:, n - 1] for n in range(1, 5)}, **means}, {})

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return CIDEr-D of each image."""
        return "CIDEr-D", np.asarray(self.means["CIDEr-D"])


class TextStatistics(NamedTuple):
    """The counts that sacrebleu sums over sentences."""

    sample_ids: list
    reported: Sequence[str]
    """Those of "bleu", "chrf" and "exact_match" that are reported."""
    metrics: Mapping[str, Metric]
    """sacrebleu's metric objects for "bleu" and "chrf"."""
    sums: Mapping[str, np.ndarray]
    """Metric -> (N, S) counts of each sentence, see `sacrebleu_sums`."""
    exact: np.ndarray
    """(N,) bool, whether each text equals a reference."""
    groups: Mapping[str, np.ndarray]
    """Name of a group of sentences, such as "1 to 5 words" -> (N,) bool of its members."""
    class_names: Sequence[str] = ()

    def scores(self, weights: np.ndarray) -> Scores:
        """Return the evaluator's metrics, over all sentences and for groups by length."""
        overall = {name: self._score(name, weights) for name in self.reported}
        groups = {
            group: {name: self._score(name, weights * chosen) for name in self.reported}
            for group, chosen in self.groups.items()
        }
        return Scores(overall, groups)

    def _score(self, name: str, weights: np.ndarray) -> np.ndarray:
        if name == "exact_match":
            return weighted_ratio(weights, self.exact, np.ones(len(self.exact)))
        values = self._of_sums(name, weights @ self.sums[name])
        return np.where(weights.any(axis=1), values, np.nan)

    def _of_sums(self, name: str, sums: np.ndarray) -> np.ndarray:
        metric = self.metrics[name]
        return np.array([metric._compute_score_from_stats(row.astype(int).tolist()).score for row in sums])

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return each sentence's chrF."""
        return "chrF", self._of_sums("chrf", self.sums["chrf"])


def sacrebleu_sums(metric: Metric, texts: Sequence[str], references: Sequence[Sequence[str | None]]) -> np.ndarray:
    """Return the (N, S) counts of each sentence, from whose sums sacrebleu computes its score, as in its own bootstrap.

    Args:
        references: those of the corpus: K lists of N, with None where a sentence has fewer than K.
    """
    return np.array(metric._extract_corpus_statistics(texts, references), np.float64)


class LikelihoodStatistics(NamedTuple):
    """Tokens of sentences, and their likelihood under a language model."""

    sample_ids: list
    tokens: np.ndarray
    correct: np.ndarray
    log_likelihoods: np.ndarray
    class_names: Sequence[str] = ()

    def scores(self, weights: np.ndarray) -> Scores:
        """Return perplexity, log-likelihood and token accuracy."""
        mean = weighted_ratio(weights, self.log_likelihoods, self.tokens)
        accuracy = weighted_ratio(weights, self.correct, self.tokens)
        return Scores({"perplexity": np.exp(-mean), "log_likelihood": mean, "token_accuracy": accuracy}, {})

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return each sentence's mean log-likelihood per token."""
        return "log_likelihood", self.log_likelihoods / np.maximum(self.tokens, 1)


def _by_class(names: Sequence[str], metrics: Mapping[str, np.ndarray]) -> dict[str, Values]:
    """Convert (R, C) values of each metric to class -> metric -> (R,)."""
    return {name: {metric: values[:, k] for metric, values in metrics.items()} for k, name in enumerate(names)}
