"""Choose the page of an evaluator by its class; the default page of other evaluators.

A subclass has the page of its base. To give an evaluator a page of its own, register a function for its class:

    @report_sections.register
    def my_sections(evaluator: MyEvaluator) -> list[Section]: ...
"""

from functools import singledispatch

import numpy as np

from vitkit.apps.report.sections import Image, Section, Table, overall_section, resample, value_rows
from vitkit.errors import ConfigError
from vitkit.protocols.evaluator import Evaluator


@singledispatch
def report_sections(evaluator: Evaluator) -> list[Section]:
    """Return the sections of a report; by default the metrics overall and by class.

    Metrics have intervals if the evaluator has `statistics`. The evaluator's `compute` has been called.
    """
    try:
        statistics = evaluator.statistics()
    except ConfigError:
        rows = [[name, float(value)] for name, value in evaluator.compute().items()]
        note = f"{type(evaluator).__name__} has no per-sample statistics, so there are no intervals."
        return [Section("Overall", [Table(("", "value"), rows)], note)]
    _, scores = resample(statistics)
    sections = [overall_section(scores.overall, noun=evaluator.dataset.noun)]
    if scores.by_class:
        columns = list(dict.fromkeys(metric for values in scores.by_class.values() for metric in values))
        nothing = np.full(1, np.nan)
        rows = {name: {c: values.get(c, nothing) for c in columns} for name, values in scores.by_class.items()}
        sections.append(Section("Classes", [Table(("class", *columns), value_rows(rows, columns))]))
    return sections


def extra_values(evaluator: Evaluator) -> dict[str, float]:
    """Return an evaluator's `extra_metrics`; NaN for one that has no value, which evaluators write as -1."""
    if not evaluator.extra_metrics:
        return {}
    metrics = getattr(evaluator, "metrics", None) or evaluator.compute()  # COCO's take a while to compute again
    return {name: float("nan") if metrics[name] == -1 else float(metrics[name]) for name in evaluator.extra_metrics}


@singledispatch
def prediction_image(evaluator: Evaluator, index: int) -> Image:
    """Return the image that a comparison shows of the prediction for a sample; by default only the sample's image.

    Args:
        index: index into the dataset.
    """
    return Image(index, "")
