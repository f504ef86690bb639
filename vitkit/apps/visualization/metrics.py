"""Figures of metrics: the confusions of classes, and a metric of texts by their length."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from vitkit.apps.visualization.canvas import save_figure
from vitkit.apps.visualization.colors import text_color
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.combined import CombinedEvaluator
from vitkit.evaluation.text import METRICS, LengthGroup, TextEvaluator
from vitkit.protocols.evaluator import Evaluator

_MAX_NAMED = 40  # with more classes, the figure does not name them
_MAX_COUNTED = 20  # with more classes, the figure's cells show no counts


def draw_metrics(evaluator: Evaluator, path: Path) -> list[Path]:
    """Draw the metrics of classes and texts beside a results file, after `compute`.

    Args:
        path: the results file, which `write_results` has written.
    Returns:
        the figures: NAME_confusion.png and NAME_by_length.png for NAME.json; none for other evaluators.
    """
    if isinstance(evaluator, CombinedEvaluator):
        files = zip(evaluator.parts, evaluator.files_of_parts(path))
        return [figure for part, file in files for figure in draw_metrics(part, file)]
    if isinstance(evaluator, ClassificationEvaluator):
        figure, dataset = path.with_name(f"{path.stem}_confusion.png"), evaluator.dataset
        draw_confusion_matrix(evaluator.confusion_matrix(), dataset.classes, figure, what=dataset.noun)
    elif isinstance(evaluator, TextEvaluator):
        figure = path.with_name(f"{path.stem}_by_length.png")
        draw_by_length({path.stem: evaluator.by_length()}, figure, metric=evaluator.per_class_metric)
    else:
        return []
    return [figure]


def draw_confusion_matrix(
    matrix: np.ndarray, class_names: Sequence[str], path: str | Path, *, what: str = "images"
) -> None:
    """Save the confusion matrix as a PNG: each cell is the fraction of its row's images, from white to dark.

    Args:
        matrix: (C, C) counts, rows true, columns predicted.
        class_names: C names, shown if there are few.
        path: path of the PNG.
        what: what is counted, in the plural.
    """
    num_classes = len(class_names)
    parts = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = min(4.0 + 0.3 * num_classes, 12.0)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    # Confusions are rare: on a linear scale only the diagonal would be visible.
    least = 10 ** np.floor(np.log10(1 / max(matrix.sum(axis=1).max(), 10)))
    shown = axes.imshow(np.where(parts > 0, parts, np.nan), cmap="Blues", norm=LogNorm(least, 1.0))
    figure.colorbar(shown, ax=axes, label=f"fraction of the class's {what}", shrink=0.8)
    axes.set(xlabel="predicted", ylabel="true", title=f"{int(matrix.trace())} of {int(matrix.sum())} {what} correct")
    if num_classes <= _MAX_NAMED:
        axes.set_xticks(range(num_classes), class_names, rotation=90)
        axes.set_yticks(range(num_classes), class_names)
    if num_classes <= _MAX_COUNTED:
        for row, column in np.argwhere(matrix):
            color = text_color(shown.to_rgba(parts[row, column]))
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=color)
    save_figure(figure, path, dpi=120)


def draw_by_length(
    curves: Mapping[str, Sequence[LengthGroup]], path: str | Path, *, metric: str = METRICS["bleu"]
) -> None:
    """Save a PNG of a metric by source length.

    Args:
        curves: name of each model -> its groups.
        path: path of the PNG.
        metric: the metric's name as printed.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, groups in curves.items():
        middles = [(group.min_words + group.max_words) / 2 for group in groups]
        axes.plot(middles, [group.score for group in groups], marker="o", label=name)
    longest = max(curves.values(), key=len)
    ticks = [
        ((group.min_words + group.max_words) / 2, f"{group.min_words}-{group.max_words}\n({group.count})")
        for group in longest
    ]
    axes.set_xticks(*zip(*ticks))
    axes.set(xlabel="words of the source (sentences)", ylabel=metric)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save_figure(figure, path, dpi=120)
