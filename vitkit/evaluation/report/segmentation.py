"""The reports of semantic and of panoptic maps."""

from typing import Any

import numpy as np

from vitkit.evaluation.bootstrap import bootstrap_weights, estimate
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.report.elements import (
    escape,
    figure,
    number,
    overall_section,
    section,
    table,
    value_rows,
    warning,
)
from vitkit.evaluation.report.matrix import Picture, matrix_part, ranked
from vitkit.evaluation.report.pictures import PictureBudget
from vitkit.evaluation.sample_statistics import SemanticStatistics
from vitkit.evaluation.semantic import SemanticEvaluator, boundary_counts
from vitkit.structures import IGNORE_INDEX, PanopticMap
from vitkit.visualization.canvas import to_picture
from vitkit.visualization.masks import draw_panoptic, draw_semantic
from vitkit.words import counted

_SIDE, _CELL_SIDE = 420, 300
_RANKED = 6
_CELLS, _PER_CELL = 40, 3
_OVERALL = "Below each value stands its 95 % interval, by a bootstrap over the images."
_IMAGES = "Truth, prediction, and where they differ (red; pixels that do not count are black)."
_CONFUSION = (
    "Part of the true class's pixels in percent, columns being predicted classes. Choose a cell to see where: its "
    "pixels in red, in the images with most of them."
)


def semantic_sections(evaluator: SemanticEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report sections for an evaluator after `compute`."""
    dataset, statistics = evaluator.dataset, evaluator.statistics()

    def maps(k: int) -> tuple[np.ndarray, np.ndarray]:
        return dataset.load_semantic(k), evaluator.predicted_map(statistics.sample_ids[k])

    def drawn(k: int, image: np.ndarray) -> list[np.ndarray]:
        return [draw_semantic(image, labels, dataset.classes) for labels in maps(k)]

    weights = bootstrap_weights(len(statistics.sample_ids))
    scores = statistics.scores(weights)
    columns = [name for name in ("IoU", "boundary IoU", "accuracy") if name in next(iter(scores.by_class.values()))]
    shares = (100 * statistics.true.sum(axis=0) / max(statistics.true.sum(), 1)).tolist()
    rows = [[*row, share] for row, share in zip(value_rows(scores.by_class, columns), shares)]
    parts = [
        overall_section(scores.overall, *_missing(evaluator)),
        section("Classes", table(("class", *columns, "% of pixels"), rows)),
        section(
            "Confusion matrix", _confusions(statistics, evaluator.confusion_matrix(), maps, pictures), note=_CONFUSION
        ),
    ]
    return [*parts, _images(statistics, maps, drawn, pictures)]


def panoptic_sections(evaluator: PanopticEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report sections for an evaluator after `compute`."""
    dataset, statistics = evaluator.dataset, evaluator.statistics()
    ids = statistics.sample_ids

    def maps(k: int) -> tuple[np.ndarray, np.ndarray]:
        return label_map(dataset.load_panoptic(k)), label_map(evaluator.predicted_map(ids[k]))

    def drawn(k: int, image: np.ndarray) -> list[np.ndarray]:
        both = dataset.load_panoptic(k), evaluator.predicted_map(ids[k])
        return [draw_panoptic(image, *segments, dataset.classes) for segments in both]

    weights = bootstrap_weights(len(ids))
    scores = statistics.scores(weights)
    of_pixels, matrix = pixel_statistics(ids, dataset.classes, maps)
    pixel_scores = of_pixels.scores(weights)
    by_class = {name: {**values, **pixel_scores.by_class[name]} for name, values in scores.by_class.items()}
    columns = ("PQ", "SQ", "RQ", "IoU", "boundary IoU")
    segments = statistics.matches[:, :, [1, 3]].sum(axis=(0, 2)).astype(int)
    counts = {name: int(n) for name, n in zip(dataset.classes, segments)}
    overall = [
        [name or "all", *(estimate(scores.overall[f"{metric}{suffix}"]) for metric in ("PQ", "SQ", "RQ"))]
        for name, suffix in (("all", ""), ("things", "_things"), ("stuff", "_stuff"))
    ]
    pixels = [[name, estimate(values)] for name, values in pixel_scores.overall.items()]
    return [
        section(
            "Panoptic quality",
            *_missing(evaluator),
            table(("", "PQ", "SQ", "RQ"), overall),
            table(("of pixels, by class", "value"), pixels),
            note=_OVERALL,
        ),
        section("Classes", table(("class", "segments", *columns), value_rows(by_class, columns, counts))),
        section("Confusion matrix", _confusions(of_pixels, matrix, maps, pictures), note=_CONFUSION),
        _images(statistics, maps, drawn, pictures),
    ]


def label_map(segments: PanopticMap) -> np.ndarray:
    """Return the (H, W) uint8 class of each pixel, `IGNORE_INDEX` outside all segments."""
    labels = np.full(segments.panoptic.shape, IGNORE_INDEX, np.uint8)
    for segment in segments.segments_info:
        labels[segments.panoptic == segment["id"]] = segment["label"]
    return labels


def pixel_statistics(ids: list, class_names: Any, maps: Any) -> tuple[SemanticStatistics, np.ndarray]:
    """Count the pixels of panoptic maps by class.

    Returns:
        each image's contribution to IoU and boundary IoU, and (C, C + 1) pixel counts: rows true, columns predicted,
        the last column no prediction.
    """
    num_classes = len(class_names)
    counts, boundaries = np.zeros((2, len(ids), 3, num_classes))
    total = np.zeros((num_classes, num_classes + 1), np.int64)
    for k in range(len(ids)):
        truth, predicted = maps(k)
        counted = truth != IGNORE_INDEX
        codes = truth[counted].astype(np.int64) * (num_classes + 1) + np.minimum(predicted[counted], num_classes)
        matrix = np.bincount(codes, minlength=total.size).reshape(total.shape)
        counts[k] = matrix.diagonal(), matrix[:, :-1].sum(axis=0), matrix.sum(axis=1)
        boundaries[k] = boundary_counts(truth, predicted, num_classes)
        total += matrix
    return SemanticStatistics(ids, class_names, *counts.transpose(1, 0, 2), boundaries), total


def _missing(evaluator: Any) -> list[str]:
    count = len(evaluator.dataset.image_ids)
    missing = count - len(evaluator.answers)
    text = f"{counted(missing, 'images', 'have', of=count)} no prediction, which counts as missed."
    return [warning("There is no prediction: everything is missed." if missing == count else text)] if missing else []


def _confusions(statistics: SemanticStatistics, matrix: np.ndarray, maps: Any, pictures: PictureBudget) -> str:
    """Return the confusion matrix; a cell opens the images with the most pixels of its confusion."""
    missed = statistics.true - statistics.right
    names = [*statistics.class_names, "(nothing)"]

    def pictures_of(row: int, column: int) -> list[Picture]:
        worth = statistics.right[:, row] if row == column else missed[:, row]
        candidates = [k for k in np.argsort(-worth, kind="stable")[: 2 * _PER_CELL].tolist() if worth[k]]
        shown = []
        for k in candidates:
            truth, predicted = maps(k)
            chosen = (truth == row) & (np.minimum(predicted, len(matrix)) == column)
            image = pictures.image(k) if chosen.any() else None
            if image is not None and len(shown) < _PER_CELL:
                url = pictures.embed(highlight(image, chosen), long_side=_CELL_SIDE)
                part = 100 * chosen.sum() / max((truth == row).sum(), 1)
                text = f"{statistics.sample_ids[k]}: {part:.1f} % of {names[row]} is {names[column]}"
                shown += [Picture(url, text)] if url else []
        return shown

    return matrix_part(matrix, statistics.class_names, pictures_of, percent=True, most_cells=_CELLS)


def highlight(image: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return an image in dimmed grey, with the pixels chosen by an (H, W) mask in red."""
    grey = (0.7 * np.asarray(to_picture(image).convert("L")) + 40).clip(0, 255).astype(np.uint8)
    result = np.repeat(grey[:, :, None], 3, axis=2)
    result[chosen] = (0.4 * result[chosen] + 0.6 * np.array([230, 30, 40])).astype(np.uint8)
    return result


def error_map(image: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return the image with wrong pixels in red, and ignored ones in black."""
    result = highlight(image, (truth != predicted) & (truth != IGNORE_INDEX))
    result[truth == IGNORE_INDEX] = 0
    return result


def _images(statistics: Any, maps: Any, drawn: Any, pictures: PictureBudget) -> str:
    """Return the images with the lowest and the highest values, each with truth, prediction and error map."""
    metric, values = statistics.sample_scores()
    galleries = []
    for title, indices in zip((f"lowest {metric}", f"highest {metric}"), ranked(values, _RANKED)):
        groups = []
        for k in indices:
            image = pictures.image(k)
            if image is None:
                continue
            cards = []
            panels = (*drawn(k, image), error_map(image, *maps(k)))
            for what, panel in zip(("truth", "prediction", "errors"), panels):
                if url := pictures.embed(panel, long_side=_SIDE):
                    text = f"{statistics.sample_ids[k]}: {metric} {number(values[k])}, {what}"
                    cards.append(figure(url, text))
            groups.append(f"<div class='triple'>{''.join(cards)}</div>")
        galleries.append(f"<h3>{escape(title)}</h3><div class='gallery'>{''.join(groups)}</div>" if groups else "")
    return section("Images", *galleries, note=_IMAGES) if any(galleries) else ""
