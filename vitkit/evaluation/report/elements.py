"""HTML elements of a report: sections, tables, numbers with their intervals."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vitkit.evaluation.bootstrap import Estimate, estimate
from vitkit.visualization.html import script_json

escape = html.escape


class Change(NamedTuple):
    """By how much a metric of one model differs from another's."""

    difference: Estimate
    is_better: bool | None
    """Whether the model is better than the other; None: the difference is not significant."""


Cell = str | int | float | Estimate | Change


def number(value: float, digits: int = 3) -> str:
    """Return a number as text; "–" for NaN."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def cell(value: Cell, digits: int = 3) -> str:
    """Return a table cell: text is left-aligned and escaped, an estimate is shown with its interval below."""
    if isinstance(value, str):
        return f"<td class='text'>{escape(value)}</td>"
    if isinstance(value, Change):
        change, low, high = (f"{x:+.{digits}f}" if math.isfinite(x) else "" for x in value.difference)
        verdicts = {True: ("won", "better"), False: ("lost", "worse"), None: ("", "not significant")}
        style, verdict = verdicts[value.is_better]
        interval = f"{low} to {high}, " if low else ""
        return f"<td class='{style}'>{change or '–'}<small>{interval}{verdict}</small></td>"
    if isinstance(value, Estimate):
        interval = ""
        if math.isfinite(value.low):
            interval = f"<small>{number(value.low, digits)} to {number(value.high, digits)}</small>"
        return f"<td>{number(value.value, digits)}{interval}</td>"
    return f"<td>{value if isinstance(value, int) else number(value, digits)}</td>"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, caption: str = "", digits: int = 3) -> str:
    """Return a table; each row begins with its name."""
    style = [" class='text'" if k and rows and isinstance(rows[0][k], str) else "" for k in range(len(columns))]
    head = "".join(f"<th scope='col'{kind}>{escape(column)}</th>" for column, kind in zip(columns, style))
    body = "".join(
        f"<tr><th scope='row'>{escape(name)}</th>{''.join(cell(value, digits) for value in values)}</tr>"
        for name, *values in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return scrolling_table(f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


def scrolling_table(content: str, kind: str = "") -> str:
    """Return a table, given its HTML, in a box of its own that scrolls if the window is narrower than the table.

    Args:
        kind: the table's class; "" for none.
    """
    style = f" class='{kind}'" if kind else ""
    # A scrollable part must be focusable, or the keyboard cannot scroll it.
    return f"<div class='wide' tabindex='0'><table{style}>{content}</table></div>"


def value_rows(
    values: Mapping[str, Mapping[str, np.ndarray]], columns: Sequence[str], counts: Mapping[str, int] | None = None
) -> list[list[Cell]]:
    """Return a table row for each name: the name, its count if there are counts, and its metrics with intervals."""
    rows: list[list[Cell]] = []
    for name, metrics in values.items():
        count = [] if counts is None else [counts[name]]
        rows.append([name, *count, *(estimate(metrics[column]) for column in columns)])
    return rows


def overall_section(metrics: Mapping[str, np.ndarray], *warnings: str, noun: str = "images") -> str:
    """Return the section with the metrics over all images, or over what `noun` says, each with its interval."""
    rows = [[name, estimate(values)] for name, values in metrics.items()]
    note = f"Below each value stands its 95 % interval, by a bootstrap over the {noun}."
    return section("Overall", *warnings, table(("", "value"), rows), note=note)


def section(title: str, *parts: str, note: str = "") -> str:
    """Return a section with a heading, a note in smaller print, and its parts."""
    text = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{''.join(parts)}</section>"


def details(summary: str, *parts: str) -> str:
    """Return parts that are collapsed until the reader opens them."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def warning(text: str) -> str:
    """Return a sentence that stands out as a warning."""
    return f"<p class='warning' role='note'>{escape(text)}</p>"


def data_block(name: str, data: object) -> str:
    """Return a block of data for the page's script."""
    return f"<script type='application/json' class='{name}'>{script_json(data)}</script>"


def figure(url: str, text: str, caption: str | None = None) -> str:
    """Return a figure with an image.

    Args:
        text: alternative text of the image.
        caption: HTML to show below it; None: the text.
    """
    caption = escape(text) if caption is None else caption
    return f"<figure><img alt='{escape(text, quote=True)}' src='{url}'><figcaption>{caption}</figcaption></figure>"
