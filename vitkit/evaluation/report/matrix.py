"""A confusion matrix whose cells open images, and image galleries."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vitkit.evaluation.report.elements import data_block, escape, figure, scrolling_table

MOST_CLASSES = 25
PICTURES_PER_CELL = 6


class Picture(NamedTuple):
    """An image of a page."""

    url: str
    text: str
    """What the image shows, in plain text."""
    caption: str | None = None
    """HTML to show below it; None: the text."""


def shown_classes(matrix: np.ndarray, most: int = MOST_CLASSES) -> list[int]:
    """Return the rows of a (C, C…) matrix to show: all if they are few, else those with the most confusions."""
    num_classes = len(matrix)
    if num_classes <= most:
        return list(range(num_classes))
    square = matrix[:, :num_classes] * (1 - np.eye(num_classes, dtype=matrix.dtype))
    wrong = square.sum(axis=0) + matrix.sum(axis=1) - matrix.diagonal()
    return sorted(np.argsort(-wrong, kind="stable")[:most].tolist())


def frequent_cells(matrix: np.ndarray, rows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the cells with the most confusions among the shown classes, followed by those on the diagonal."""
    columns = [*rows, *range(len(matrix), matrix.shape[1])]
    cells = [(r, c) for r in rows for c in columns if matrix[r, c]]
    return sorted(cells, key=lambda cell: (cell[0] == cell[1], -matrix[cell]))[:most]


def matrix_part(
    matrix: np.ndarray,
    class_names: Sequence[str],
    pictures_of: Callable[[int, int], Sequence[Picture]],
    *,
    percent: bool = False,
    most_cells: int = 60,
) -> str:
    """Return the matrix, and images for its most frequent cells.

    Args:
        matrix: (C, C) or (C, C + 1) counts, rows true, columns predicted; column C + 1 means no prediction.
        pictures_of: returns the images of a cell, given its row and column; [] when the page has no more room.
        percent: show cells as a percentage of their row.
    """
    if not matrix[:, len(matrix) :].any():
        matrix = matrix[:, : len(matrix)]
    rows = shown_classes(matrix)
    columns = [*rows, *range(len(matrix), matrix.shape[1])]
    names = [*class_names, "(nothing)"]
    totals = np.maximum(matrix.sum(axis=1), 1)
    urls: list[str] = []
    cells: dict[str, list[tuple[int, str]]] = {}
    for row, column in frequent_cells(matrix, rows, most_cells):
        if pictures := pictures_of(row, column):
            cells[f"{row},{column}"] = [(k, each.text) for k, each in enumerate(pictures, start=len(urls))]
            urls += [each.url for each in pictures]
    head = "".join(f"<th scope='col'>{escape(names[column])}</th>" for column in columns)
    lines = []
    for row in rows:
        tds = []
        for column in columns:
            count = int(matrix[row, column])
            part = count / totals[row]
            text = f"{100 * part:.1f}" if percent else str(count)
            color = "20, 110, 60" if row == column else "190, 40, 40"
            description = f"true {names[row]}, predicted {names[column]}: {text}{' %' if percent else ''}"
            style = f"background:rgba({color}, {0.08 + 0.55 * part:.2f})"
            cell = f"data-cell='{row},{column}' aria-label='{escape(description)}' style='{style}'"
            tds.append(f"<td><button type='button' {cell}>{text}</button></td>" if count else "<td></td>")
        lines.append(f"<tr><th scope='row'>{escape(names[row])}</th>{''.join(tds)}</tr>")
    note = "" if len(rows) == len(matrix) else f"<p class='note'>{len(rows)} of {len(matrix)} classes.</p>"
    table = f"<thead><tr><th scope='col'>true \\ predicted</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    dialog = "<dialog><form method='dialog'><h3></h3><button>close</button></form><div class='gallery'></div></dialog>"
    data = data_block("data", {"pictures": urls, "cells": cells})
    return f"<div class='cell-pictures'>{data}{note}{scrolling_table(table, 'confusion')}{dialog}</div>"


def gallery(title: str, pictures: Sequence[Picture]) -> str:
    """Return a titled gallery; "" if there are no pictures."""
    figures = "".join(figure(*each) for each in pictures)
    return f"<h3>{escape(title)}</h3><div class='gallery'>{figures}</div>" if pictures else ""


def ranked(values: np.ndarray, most: int) -> tuple[list[int], list[int]]:
    """Return the indices of the lowest and of the highest values, none in both; NaN is ignored."""
    order = [k for k in np.argsort(values, kind="stable").tolist() if values[k] == values[k]]
    count = min(most, len(order) // 2 or len(order))
    return order[:count], [k for k in order[::-1] if k not in order[:count]][:most]
