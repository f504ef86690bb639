"""The report of a classifier."""

from collections.abc import Sequence

import numpy as np

from vitkit.evaluation.bootstrap import bootstrap_weights
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.report.calibration import calibration_section
from vitkit.evaluation.report.elements import overall_section, section, table, value_rows, warning
from vitkit.evaluation.report.matrix import PICTURES_PER_CELL, Picture, gallery, matrix_part, ranked
from vitkit.evaluation.report.pictures import PictureBudget
from vitkit.words import counted

_COLUMNS = ("accuracy", "precision", "F1")
_SIDE = 220
_RANKED = 12


def classification_sections(evaluator: ClassificationEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report sections for an evaluator after `compute`."""
    statistics = evaluator.statistics()
    weights = bootstrap_weights(len(statistics.sample_ids))
    scores, names = statistics.scores(weights), list(evaluator.dataset.classes)
    labels, best = statistics.labels, statistics.best[:, 0]
    counts = {name: int((labels == k).sum()) for k, name in enumerate(names)}

    def embedded(indices: Sequence[int]) -> list[Picture]:
        shown = []
        for k in indices:
            image = pictures.image(k)
            if image is not None and (url := pictures.embed(image, long_side=_SIDE)):
                score = f"predicted {names[best[k]]} {statistics.best_scores[k, 0]:.2f}"
                shown.append(Picture(url, f"{statistics.sample_ids[k]}: {names[labels[k]]}, {score}"))
        return shown

    def pictures_of(row: int, column: int) -> list[Picture]:
        chosen = np.flatnonzero((labels == row) & (best == column))
        chosen = chosen[np.argsort(-statistics.best_scores[chosen, 0], kind="stable")][:PICTURES_PER_CELL]
        return embedded(chosen.tolist())

    _, ranks = statistics.sample_scores()
    lowest, highest = ranked(np.where(labels >= 0, ranks, np.nan), _RANKED)
    missing = int((labels < 0).sum())
    text = f"{counted(missing, 'images', 'have', of=len(labels))} no prediction, which counts as wrong."
    warnings = [warning(text)] if missing else []
    galleries = [
        gallery("most confidently wrong", embedded(lowest)),
        gallery("most confidently right", embedded(highest)),
    ]
    return [
        overall_section(scores.overall, *warnings),
        section("Classes", table(("class", "images", *_COLUMNS), value_rows(scores.by_class, _COLUMNS, counts))),
        section("Confusion matrix", matrix_part(evaluator.confusion_matrix(), names, pictures_of), note=_CONFUSION),
        section("Images", *galleries) if any(galleries) else "",
        calibration_section(statistics.calibration_counts(), weights, "part that is right", _CALIBRATION),
    ]


_CONFUSION = "Rows are true classes, columns predicted ones. Choose a cell to see its images, the most confident first."
_CALIBRATION = (
    "How often images are right whose best class has a score. The expected calibration error (ECE) is the mean "
    "distance from the diagonal."
)
