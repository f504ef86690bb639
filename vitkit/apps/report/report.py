"""Writes the report of an evaluation as a page."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.apps.report import charts
from vitkit.apps.report.detections import DetectionBrowser, collect_detections
from vitkit.apps.report.html import render_page
from vitkit.apps.report.images import ImageBudget
from vitkit.apps.report.pages import extra_values, report_sections
from vitkit.apps.report.parts import Review, show_gallery, show_matrix
from vitkit.apps.report.sections import (
    Alert,
    Bars,
    ConfusionMatrix,
    Details,
    Gallery,
    LineChart,
    Reliability,
    Section,
    Table,
    Text,
    number,
)
from vitkit.io.output import write_text
from vitkit.protocols.evaluator import Evaluator
from vitkit.registry import require_base
from vitkit.text_format import pluralize

IMAGE_BYTES = 6_500_000
"""Total size of all images in a page, so that it stays below 10 MB with its numbers."""
_KINDS = (Alert, Bars, ConfusionMatrix, Details, DetectionBrowser, Gallery, LineChart, Reliability, Review, Table, Text)
_THRESHOLD = (
    "Predictions with at least this score, at an IoU of {}. The confusion matrix and the images below follow. Here, a "
    "prediction is matched with objects of its class; in the matrix, with objects of any class."
)
_CONFUSION = (
    "Rows are true classes, columns predicted ones, at an IoU of {}. Choose a cell to see its crops: truth in black "
    "and white, predictions in the color of their class."
)
_RANKED = "Images with the lowest and the highest F1, at the threshold with the highest F1 over all images."


def write_report(evaluator: Evaluator, path: str | Path, *, title: str, facts: Mapping[str, str] | None = None) -> Path:
    """Write the report of an evaluation: a single file below 10 MB that needs no network.

    Args:
        evaluator: the evaluator, after `compute`, on the main process.
        path: path of the HTML file; its folder is created.
        title: title of the page.
        facts: what was evaluated, such as {"model": "runs/a1"}; written below the title.
    Returns:
        the file.
    Raises:
        ConfigError: the evaluator does not derive from `vitkit.Evaluator`.
    """
    require_base("evaluator", type(evaluator), Evaluator)
    parts, sections = evaluator.parts, []
    for part in parts:
        images = ImageBudget(evaluator.dataset, IMAGE_BYTES // len(parts))
        sections.append(([*report_sections(part), *_extra_metrics(part)], images))
    return write_page(path, title, sections, {**(facts or {}), "data": describe_data(evaluator)})


def _extra_metrics(evaluator: Evaluator) -> list[Section]:
    """Return a section of the metrics that a subclass adds and that the page of its base does not show."""
    values = extra_values(evaluator)
    if not values:
        return []
    note = f"Added by {type(evaluator).__name__}."
    return [Section("Further metrics", [Table(("", "value"), [list(row) for row in values.items()])], note)]


def describe_data(evaluator: Evaluator) -> str:
    """Describe the evaluator's dataset: "CocoDetection of instances_val.json, 87 images, 3 classes"."""
    dataset = evaluator.dataset
    file = dataset.annotation_file
    words = [type(dataset).__name__ + (f" of {Path(file).name}" if file else ""), f"{len(dataset)} {dataset.noun}"]
    if dataset.classes is not None:
        words.append(pluralize(len(dataset.classes), "classes"))
    return ", ".join(words)


def write_page(
    path: str | Path, title: str, sections: Sequence[tuple[Sequence[Section], ImageBudget]], facts: Mapping[str, str]
) -> Path:
    """Write sections as a page with a link to each.

    Args:
        sections: lists of sections, each with the room that it has for its images.
    Returns:
        the file.
    """
    shown: list[_Shown] = []
    groups = (f"group-{number}" for number in itertools.count())
    for several, images in sections:
        for section in several:
            shown += _show_section(section, images, groups)
    page = render_page(
        Path(__file__).with_suffix(".html"),
        title=title,
        facts=facts,
        sections=shown,
        charts=charts,
        number=number,
        signed=_format_signed,
    )
    write_text(Path(path), page)
    return Path(path)


class _Shown(NamedTuple):
    """A section as the template shows it."""

    title: str
    note: str
    parts: Sequence[tuple[str, Any]]
    """Kind and content of each part."""
    group: str = ""
    """CSS class that sections share which follow the same score threshold."""


def _show_section(section: Section, images: ImageBudget, groups: Iterator[str]) -> Iterator[_Shown]:
    """Yield the shown parts of a section: nothing if it has only images and none has room; several for detections."""
    parts = list(_show_parts(section.parts, images))
    for part in section.parts:
        if isinstance(part, DetectionBrowser):
            data, iou, group = collect_detections(part, images), f"{part.iou:g}", next(groups)
            threshold = {"group": group, "data": data, "chart": part.chart}
            yield _Shown(section.title, _THRESHOLD.format(iou), [("Threshold", threshold), *parts], group)
            yield _Shown("Confusion matrix", _CONFUSION.format(iou), [("Confusions", None)], group)
            if data["lowest"] or data["highest"]:
                yield _Shown("Images", _RANKED, [("RankedImages", None)], group)
            return
    if parts or not section.parts:
        yield _Shown(section.title, section.note, parts)


def _show_parts(parts: Sequence[Any], images: ImageBudget) -> Iterator[tuple[str, Any]]:
    for kind, several in itertools.groupby(parts, key=type):
        if kind not in _KINDS:
            names = ", ".join(each.__name__ for each in _KINDS if each is not Review)
            raise TypeError(f"a section has a part of type {kind.__name__}; expected one of {names}.")
        if kind is LineChart:
            yield "Charts", list(several)
            continue
        for part in several:
            content = part
            if kind is Gallery:
                content = show_gallery(part, images)
            elif kind is ConfusionMatrix:
                content = show_matrix(part, images)
            elif kind is Details:
                content = Details(part.summary, list(_show_parts(part.parts, images)))
            if content is not None and kind is not DetectionBrowser:
                yield kind.__name__, content


def _format_signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}" if math.isfinite(value) else "–"
