"""Published figures by the names of vitkit's metrics, and the intervals of measured ones."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitkit.apps.report.intervals import Estimate, estimate
from vitkit.apps.report.sections import resample
from vitkit.apps.reproduction.records import Figure
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.bootstrap import mean_of_finite
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.protocols.evaluator import Evaluator, is_measured

logger = logging.getLogger("vitkit")
_KINDS = {"box": "bbox", "mask": "segm", "keypoint": "keypoints"}
"""What a published AP is of -> the evaluator's name of it."""
_NAMES = {
    "PQ": "PQ",
    "PQ things": "PQ_things",
    "PQ stuff": "PQ_stuff",
    "SQ": "SQ",
    "RQ": "RQ",
    "mIoU": "mIoU",
    "top-1": "top1",
    "top-5": "top5",
}
_ON = ("COCO", "LVIS minival")
"""Data that a published figure may begin with, if its model is for any data."""
_PERCENT = 100


def metric_of(name: str, published: Mapping[str, float], data: str) -> str | None:
    """Return the evaluator's name of a published figure; None if `vitkit test` does not measure it.

    Args:
        name: such as "box AP", "AP50", "mask APs" or "COCO zero-shot box AP".
        published: all figures of the model: an AP50 by itself is of what the first AP is of.
        data: name of the evaluated data.
    """
    for on in _ON:
        if name.startswith(f"{on} "):
            if not data.startswith(on.removesuffix(" minival")):
                return None
            name = name.removeprefix(f"{on} ").removeprefix("zero-shot ")
    if name in _NAMES:
        return _NAMES[name]
    *kind, metric = name.split()
    if not metric.startswith("AP") or len(kind) > 1:
        return None
    if not kind:
        kind = next(([*each.split()][:1] for each in published if len(each.split()) == 2 and each.endswith(" AP")), [])
    return f"{_KINDS[kind[0]]}/{metric}" if kind and kind[0] in _KINDS else None


def compare_figures(
    stated: Mapping[str, float | None], metrics: Mapping[str, float], evaluator: Evaluator, *, data: str, own: bool
) -> tuple[list[Figure], list[str]]:
    """Return published figures beside the measured ones, and the names of those that were not measured.

    Args:
        stated: published figures by their names there, in percent; or vitkit's own, by its metrics and in their units.
            None: not published on these data.
        metrics: the evaluation's.
        evaluator: the evaluator, after `compute`.
        data: name of the evaluated data.
        own: whether the figures are vitkit's own.
    Raises:
        ConfigError: none of the figures was measured.
    """
    intervals, figures, others = estimate_metrics(evaluator), [], []
    for name, published in stated.items():
        metric, unit = (name, 1) if own else (metric_of(name, stated, data), _PERCENT)
        value = metrics.get(metric) if metric else None
        if value is None or not is_measured(value):
            others.append(name)
            continue
        interval = intervals.get(metric, Estimate(value, float("nan"), float("nan")))
        low, high = (unit * end if is_measured(end) else None for end in (interval.low, interval.high))
        figures.append(Figure(name, metric, None if published is None else float(published), unit * value, low, high))
    if stated and not figures:
        raise ConfigError(
            f"none of the published figures ({', '.join(stated)}) is among what was measured: {', '.join(metrics)}."
        )
    return figures, others


def estimate_metrics(evaluator: Evaluator) -> dict[str, Estimate]:
    """Return the metrics of which the evaluator's statistics give an interval, by a bootstrap over the samples."""
    estimates: dict[str, Estimate] = {}
    for part in evaluator.parts:
        try:
            statistics: Mapping[str, Any] = part.named_statistics()
        except (ConfigError, DataError) as error:
            logger.info("%s: no intervals (%s)", type(part).__name__, error)
            continue
        groups = part.groups if isinstance(part, CocoEvaluator) else {}
        for kind, each in statistics.items():
            scores = resample(each)[1]
            values = dict(scores.overall)
            for name, classes in groups.items():
                of_classes = np.stack([scores.by_class[each]["AP"] for each in classes], axis=1)
                values[f"{kind}/AP_{name}"] = mean_of_finite(of_classes)
            estimates |= {name: estimate(of_metric) for name, of_metric in values.items()}
    return estimates
