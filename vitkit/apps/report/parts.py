"""Prepares parts for the page's template: chooses what a matrix shows, and embeds images."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitkit.apps.report.images import ImageBudget
from vitkit.apps.report.sections import ConfusionMatrix, Gallery, Image

MAX_CLASSES = 25


class Shown(NamedTuple):
    """An embedded image."""

    url: str
    image: Image


class ShownGallery(NamedTuple):
    """A titled gallery with at least one image."""

    title: str
    groups: Sequence[Sequence[Shown]]


class MatrixCell(NamedTuple):
    """A cell of a confusion matrix."""

    key: str
    text: str
    """The number that it shows; "" for none."""
    description: str
    is_correct: bool
    fraction: float
    """Its count divided by the total of its row, in 0..1."""


class ShownMatrix(NamedTuple):
    """A confusion matrix, and the images of its most frequent cells."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[MatrixCell]]]
    num_classes: int
    data: dict[str, Any]
    """`urls` of images, and `cells`: key -> (index of the image, text)."""


class Review(NamedTuple):
    """Suspicious labels, which are accepted or rejected one after the other."""

    kinds: Sequence[str]
    data: dict[str, Any]
    """`classes`, `images`, `errors` and `corrections` for the script."""


def choose_shown_classes(matrix: np.ndarray, most: int = MAX_CLASSES) -> list[int]:
    """Return the rows of a (C, C…) matrix to show: all if they are few, else those with the most confusions."""
    num_classes = len(matrix)
    if num_classes <= most:
        return list(range(num_classes))
    square = matrix[:, :num_classes] * (1 - np.eye(num_classes, dtype=matrix.dtype))
    wrong = square.sum(axis=0) + matrix.sum(axis=1) - matrix.diagonal()
    return sorted(np.argsort(-wrong, kind="stable")[:most].tolist())


def find_frequent_cells(
    matrix: np.ndarray, rows: Sequence[int], columns: Sequence[int], most: int
) -> list[tuple[int, int]]:
    """Return the cells with the most confusions, followed by those on the diagonal."""
    cells = [(r, c) for r in rows for c in columns if matrix[r, c]]
    return sorted(cells, key=lambda cell: (cell[0] == cell[1], -matrix[cell]))[:most]


def show_matrix(part: ConfusionMatrix, images: ImageBudget) -> ShownMatrix:
    """Choose the classes of a matrix, and embed images for its most frequent cells."""
    matrix = part.counts
    if not matrix[:, len(matrix) :].any():
        matrix = matrix[:, : len(matrix)]
    rows = choose_shown_classes(matrix)
    columns = [*rows, *range(len(matrix), matrix.shape[1])]
    names = [*part.class_names, "(nothing)"]
    urls: list[str] = []
    cells: dict[str, list[tuple[int, str]]] = {}
    for row, column in find_frequent_cells(matrix, rows, columns, part.max_cells):
        shown: list[tuple[int, str]] = []
        for image in part.images_of(row, column) if images.left > 0 else ():
            if len(shown) == part.max_images or images.left <= 0:
                break
            if url := images.embed(image, long_side=part.long_side):
                shown.append((len(urls), image.text))
                urls.append(url)
        if shown:
            cells[f"{row},{column}"] = shown
    totals = np.maximum(matrix.sum(axis=1), 1)

    def cell(row: int, column: int) -> MatrixCell:
        count, fraction = int(matrix[row, column]), float(matrix[row, column] / totals[row])
        text = f"{100 * fraction:.1f}" if part.percent else str(count)
        description = f"true {names[row]}, predicted {names[column]}: {text}{' %' if part.percent else ''}"
        return MatrixCell(f"{row},{column}", text if count else "", description, row == column, fraction)

    lines = [(names[row], [cell(row, column) for column in columns]) for row in rows]
    return ShownMatrix([names[column] for column in columns], lines, len(matrix), {"urls": urls, "cells": cells})


def show_gallery(part: Gallery, images: ImageBudget) -> ShownGallery | None:
    """Embed the images of a gallery; None without any."""
    groups = []
    for group in part.groups:
        if images.left <= 0:
            break
        shown = [Shown(url, image) for image in group if (url := images.embed(image, long_side=part.long_side))]
        groups += [shown] if shown else []
    return ShownGallery(part.title, groups) if groups else None
