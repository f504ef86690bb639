"""Compares models on the same images: which differences are significant, and which images and classes won and lost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import CocoEvaluator, PanopticEvaluator, SemanticEvaluator
from vitkit.evaluation.bootstrap import Difference, SampleStatistics, Scores, bootstrap_weights, paired_difference
from vitkit.evaluation.report.elements import Cell, Change, details, figure, number, section, table
from vitkit.evaluation.report.pictures import PictureBudget
from vitkit.evaluation.report.report import describe_data, write_page
from vitkit.evaluation.report.segmentation import error_map, label_map
from vitkit.visualization.boxes import draw_detections
from vitkit.words import counted

PICTURE_BYTES = 6_000_000
_RANKED, _SIDE = 6, 420
_LOWER_IS_BETTER = frozenset(("perplexity", "nll", "loss"))
_DIFFERENCES = (
    "Difference to the first, with the 95 % interval of a paired bootstrap: all models are scored on the same "
    "resampled images. A difference whose interval leaves out zero is significant; one in twenty is "
    "so by chance."
)


class Compared(NamedTuple):
    """A model and its evaluation."""

    name: str
    evaluator: Any
    """The evaluator, after `compute`."""
    config: Mapping[str, Any] | None = None


class Comparison(NamedTuple):
    """The metrics of several models on the same samples."""

    names: list[str]
    sample_ids: list[Any]
    differences: list[dict[str, Difference]]
    """For each model but the first: metric -> difference to the first model."""
    by_class: list[dict[str, dict[str, Difference]]]
    """For each model but the first: class -> metric -> difference to the first model."""
    sample_metric: str
    samples: np.ndarray
    """(models, N) value of each image or sentence."""


def compare(models: Sequence[Compared]) -> Comparison:
    """Compare models on the same samples.

    Raises:
        ConfigError: an evaluator does not support resampling, or the evaluators are of different kinds.
        DataError: their images or classes differ; the error says how many match.
    """
    by_kind = [_statistics_of(model) for model in models]
    _check_same_samples([(model.name, next(iter(each.values()))) for model, each in zip(models, by_kind)])
    # If one model has no masks, only boxes are compared.
    shared = [kind for kind in by_kind[0] if all(kind in each for each in by_kind)]
    if not shared:
        raise ConfigError("compare: one model is scored on boxes and another on masks. Score them alike.")
    parts = [[each[kind] for kind in shared] for each in by_kind]
    weights = bootstrap_weights(len(parts[0][0].sample_ids))
    first, *others = [_scores_of(statistics, weights) for statistics in parts]
    # Some metrics, such as boundary IoU, may be computed for only some of the models.
    metrics = [m for m in first.overall if all(m in other.overall for other in others)]
    differences = [{m: paired_difference(first.overall[m], other.overall[m]) for m in metrics} for other in others]
    by_class = [
        {
            name: {m: paired_difference(of_class[m], v) for m, v in other.by_class[name].items() if m in of_class}
            for name, of_class in first.by_class.items()
            if name in other.by_class
        }
        for other in others
    ]
    ranks = [statistics[0].sample_scores() for statistics in parts]
    names = [model.name for model in models]
    values = np.stack([values for _, values in ranks])
    return Comparison(names, parts[0][0].sample_ids, differences, by_class, ranks[0][0], values)


def _scores_of(statistics: Sequence[SampleStatistics], weights: np.ndarray) -> Scores:
    """Return the metrics from several statistics of a model; class metrics are from the last one that has them."""
    overall, by_class = {}, {}
    for part in statistics:
        of_part = part.scores(weights)
        overall |= of_part.overall
        for name, values in of_part.by_class.items():
            by_class.setdefault(name, {}).update(values)
    return Scores(overall, by_class)


def _statistics_of(model: Compared) -> dict[str, SampleStatistics]:
    """Return the statistics of a model's evaluators, by evaluator; a detector's by "bbox" and "segm"."""
    evaluator = model.evaluator
    statistics: dict[str, SampleStatistics] = {}
    for part in evaluator.parts:
        name = type(part).__name__
        # Masks come last: class metrics are those of masks, as in the evaluator.
        boxes_and_masks = sorted(part.iou_types) if isinstance(part, CocoEvaluator) else ()
        statistics |= {kind: part.statistics(kind) for kind in boxes_and_masks} or {name: part.statistics()}
    return statistics


def _check_same_samples(models: Sequence[tuple[str, SampleStatistics]]) -> None:
    """Check that all models were evaluated on the same images and classes, by the same kind of evaluator.

    Raises:
        ConfigError: the evaluators are of different kinds.
        DataError: the images or classes differ.
    """
    (first_name, first), *others = models
    for name, other in others:
        if type(other) is not type(first):
            kinds = " and ".join(type(each).__name__.removesuffix("Statistics").lower() for each in (first, other))
            raise ConfigError(f"compare: {first_name} and {name} are of different tasks, {kinds}.")
        if other.sample_ids != first.sample_ids:
            raise DataError(
                f"compare: {first_name} was scored on {counted(len(first.sample_ids), 'images')} and {name} on "
                f"{len(other.sample_ids)}, of which {len({*first.sample_ids} & {*other.sample_ids})} match. Score them "
                "on the same data, such as by --data."
            )
        classes = [list(each.class_names) for each in (first, other)]
        if classes[0] != classes[1]:
            raise DataError(f"compare: {first_name} has the classes {classes[0][:5]} and {name} {classes[1][:5]}.")


def is_better(metric: str, difference: Difference) -> bool | None:
    """Return whether the second model is better, or None if the difference is not significant."""
    if not difference.significant:
        return None
    return (difference.difference.value > 0) != (metric in _LOWER_IS_BETTER)


def write_comparison(
    models: Sequence[Compared],
    path: str | Path,
    *,
    config_differences: Sequence[tuple[str, Sequence[str]]] = (),
    curves: str = "",
) -> Comparison:
    """Write a comparison as an HTML page.

    Args:
        models: at least two models.
        path: path of the HTML file.
        config_differences: key and its value in each model's config.
        curves: an image of the training curves, as a data URL.
    Returns:
        the comparison.
    """
    comparison = compare(models)
    names = comparison.names
    parts = []
    if any(model.config is not None for model in models):
        rows = [[key, *values] for key, values in config_differences]
        same = "<p>The configs do not differ.</p>"
        parts.append(section("Configs", table(("value", *names), rows) if rows else same))
    parts.append(section("Metrics", _metrics(comparison), note=_DIFFERENCES))
    if comparison.by_class[0]:
        parts.append(section("Classes", *_classes(comparison)))
    if curves:
        parts.append(section("Curves", figure(curves, f"training curves of {', '.join(names)}")))
    parts.append(section("Images", *_images(models, comparison), note=_IMAGES.format(comparison.sample_metric)))
    facts = {"models": ", ".join(names), "data": describe_data(models[0].evaluator)}
    write_page(path, " against ".join(names), parts, facts)
    return comparison


_IMAGES = "By {} of single images, of the last model less the first."


def _columns(first: str, others: Sequence[str]) -> list[str]:
    return ["", first, *(text for name in others for text in (name, "difference"))]


def _row(name: str, metric: str, differences: Sequence[Difference]) -> list[Cell]:
    """Return a table row: the first model's value of a metric, and for each other model its value and the change."""
    row: list[Cell] = [name, differences[0].first]
    for each in differences:
        row += [each.second, Change(each.difference, is_better(metric, each))]
    return row


def _metrics(comparison: Comparison) -> str:
    first, *others = comparison.names
    metrics = comparison.differences[0]
    rows = [_row(metric, metric, [of_model[metric] for of_model in comparison.differences]) for metric in metrics]
    return table(_columns(first, others), rows)


def _classes(comparison: Comparison) -> list[str]:
    """Return a table for each model but the first, with its main metric by class, the largest loss first."""
    first, *others = comparison.names
    parts = []
    for name, of_model in zip(others, comparison.by_class):
        metric = next(iter(next(iter(of_model.values()))))
        ordered = sorted(of_model.items(), key=lambda item: np.nan_to_num(item[1][metric].difference.value))
        rows = [_row(label, metric, [values[metric]]) for label, values in ordered]
        parts.append(table(_columns(first, [name]), rows, caption=metric))
    return parts


def _images(models: Sequence[Compared], comparison: Comparison) -> list[str]:
    """Return the images with the largest losses and gains between the first and the last model, side by side."""
    change = comparison.samples[-1] - comparison.samples[0]
    order = [k for k in np.argsort(change, kind="stable").tolist() if change[k] == change[k]]
    lost, won = ([k for k in ranked if sign * change[k] > 0] for sign, ranked in ((-1, order), (1, order[::-1])))
    counts = f"<p>{counted(len(won), 'images')} won, {len(lost)} lost, {len(change) - len(won) - len(lost)} equal.</p>"
    pictures = PictureBudget(models[0].evaluator.dataset, PICTURE_BYTES)
    parts = [counts]
    for title, indices in (("lost most", lost[:_RANKED]), ("won most", won[:_RANKED])):
        rows: list[list[Cell]] = []
        groups = []
        for k in indices:
            rows.append([str(comparison.sample_ids[k]), *comparison.samples[:, k].tolist(), float(change[k])])
            groups.append(_side_by_side(models, comparison, k, pictures))
        if rows:
            columns = ("image", *comparison.names, "change")
            parts.append(f"<h3>{title}</h3><div class='gallery'>{''.join(groups)}</div>")
            parts.append(details(f"{title}: values", table(columns, rows)))
    return parts


def _side_by_side(models: Sequence[Compared], comparison: Comparison, k: int, pictures: PictureBudget) -> str:
    """Return an image with each model's predictions; "" if none of them can be drawn."""
    image = pictures.image(k)
    figures = []
    for model, value in zip(models, comparison.samples[:, k]):
        drawn = None if image is None else _drawn(model.evaluator, image, k, comparison.sample_ids[k])
        url = None if drawn is None else pictures.embed(drawn, long_side=_SIDE)
        if url:
            text = f"{comparison.sample_ids[k]}, {model.name}: {comparison.sample_metric} {number(value)}"
            figures.append(figure(url, text))
    return f"<div class='triple'>{''.join(figures)}</div>" if figures else ""


def _drawn(evaluator: Any, image: np.ndarray, k: int, image_id: Any) -> np.ndarray | None:
    """Draw the boxes of an image above the threshold with the highest F1, or the errors of its map."""
    evaluator = evaluator.parts[0]
    if isinstance(evaluator, CocoEvaluator):
        thresholds = evaluator.score_thresholds()
        label_of = {raw: label for label, raw in enumerate(evaluator.dataset.category_ids)}
        answer = evaluator.answers.get(int(image_id))
        if answer is None:
            return image
        boxes = torch.as_tensor(np.asarray(answer.boxes_xywh), dtype=torch.float32).reshape(-1, 4).clone()
        boxes[:, 2:] += boxes[:, :2]
        labels = torch.tensor([label_of[int(raw)] for raw in answer.category_ids], dtype=torch.int64)
        scores = torch.as_tensor(np.asarray(answer.scores), dtype=torch.float32)
        kept = scores >= (thresholds.overall if thresholds else 0.5)
        return draw_detections(image, boxes[kept], labels[kept], evaluator.dataset.classes, scores[kept])
    if isinstance(evaluator, SemanticEvaluator):
        return error_map(image, evaluator.dataset.load_semantic(k), evaluator.predicted_map(image_id))
    if isinstance(evaluator, PanopticEvaluator):
        truth, predicted = evaluator.dataset.load_panoptic(k), evaluator.predicted_map(image_id)
        return error_map(image, label_map(truth), label_map(predicted))
    return image
