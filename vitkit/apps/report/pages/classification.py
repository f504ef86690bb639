"""The page of a classifier."""

import numpy as np

from vitkit.apps.report.pages.base import report_sections
from vitkit.apps.report.sections import (
    ConfusionMatrix,
    Gallery,
    Image,
    Section,
    Table,
    calibration_counts,
    calibration_section,
    missing_samples,
    overall_section,
    rank,
    resample,
    value_rows,
)
from vitkit.evaluation.classification import ClassificationEvaluator

_RANKED = 12  # number of images that are shown of the most confident ones
_CONFUSION = "Rows are true classes, columns predicted ones. Choose a cell to see its images, the most confident first."
_CALIBRATION = (
    "How often images are classified correctly, by the score of their best class. The expected calibration error (ECE) "
    "is the mean distance from the diagonal."
)


@report_sections.register
def classification_sections(evaluator: ClassificationEvaluator) -> list[Section]:
    """Return the sections of the report: metrics, classes, confusions, images, calibration."""
    statistics, names = evaluator.statistics(), list(evaluator.dataset.classes)
    weights, scores = resample(statistics)
    labels, best, best_scores = statistics.labels, statistics.best[:, 0], statistics.best_scores[:, 0]
    missing = int((labels < 0).sum())

    def image(k: int) -> Image:
        predicted = f"predicted {names[best[k]]} {best_scores[k]:.2f}"
        return Image(k, f"{statistics.sample_ids[k]}: {names[labels[k]]}, {predicted}")

    def images_of(row: int, column: int) -> list[Image]:
        chosen = np.flatnonzero((labels == row) & (best == column))
        return [image(k) for k in chosen[np.argsort(-best_scores[chosen], kind="stable")].tolist()]

    lowest, highest = rank(np.where(labels >= 0, statistics.sample_scores()[1], np.nan), _RANKED)
    counts = {name: int((labels == k).sum()) for k, name in enumerate(names)}
    columns = ("accuracy", "precision", "F1")
    galleries = [
        Gallery(title, [[image(k)] for k in indices], long_side=220)
        for title, indices in (("most confidently wrong", lowest), ("most confidently correct", highest))
    ]
    seen = np.flatnonzero(labels >= 0)
    counts_by_score = calibration_counts(best_scores[seen], seen, best[seen] == labels[seen], len(labels))
    alerts = missing_samples(missing, len(labels), "no prediction, which counts as wrong.")
    return [
        overall_section(scores.overall, *alerts),
        Section("Classes", [Table(("class", "images", *columns), value_rows(scores.by_class, columns, counts))]),
        Section("Confusion matrix", [ConfusionMatrix(evaluator.confusion_matrix(), names, images_of)], _CONFUSION),
        Section("Images", galleries),
        calibration_section(counts_by_score, weights, _CALIBRATION),
    ]
