"""CSV: one line per box, with the columns named by a header, or `FILE,X0,Y0,X1,Y1,CLASS` without one.

An image without a box is part of the dataset only if a line names it and leaves the box empty.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitkit.data.formats.annotated import SPLIT_NAMES, AnnotatedImages, ImageFiles, add_image_file, single_file
from vitkit.errors import DataError
from vitkit.io.parsing import coordinate

_FILE = ("filename", "file_name", "file", "image", "image_path", "path", "img", "image_name", "imageid", "image_id")
_CLASS = ("class", "label", "category", "class_name", "name", "labelname", "category_name")
_SPLIT = ("split", "subset", "set")
_CORNERS = (("xmin", "ymin", "xmax", "ymax"), ("x0", "y0", "x1", "y1"), ("x1", "y1", "x2", "y2"),
            ("left", "top", "right", "bottom"))  # fmt: skip
_SIZES = (("x", "y", "w", "h"), ("x", "y", "width", "height"), ("bbox_x", "bbox_y", "bbox_width", "bbox_height"),
          ("xmin", "ymin", "w", "h"))  # fmt: skip
_CENTERS = (("cx", "cy", "w", "h"), ("x_center", "y_center", "width", "height"), ("xc", "yc", "w", "h"))
_NO_HEADER = ("file", "xmin", "ymin", "xmax", "ymax", "class")


def read_csv(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read a table of boxes.

    Args:
        annotations: the file, or a folder with one CSV file.
        images: folder of the images; None: the folder of the file.
    Raises:
        DataError: columns are missing or ambiguous, or a line is invalid.
    """
    path = single_file(annotations, "*.csv")
    columns, rows = _read_rows(path)
    boxes, order = _box_columns(columns, path)
    file_column, class_column = _column(columns, _FILE, "the file", path), _column(columns, _CLASS, "the class", path)
    split_column = next((name for name in _SPLIT if name in columns), None)
    files = ImageFiles(images or path.parent)
    data = AnnotatedImages("csv", annotations, files.folder)
    parsed = [(number, row, _box(row, boxes, f"{path.name} line {number}")) for number, row in rows]
    numbers = [value for _, _, box in parsed for value in box or ()]
    fractions = bool(numbers) and max(numbers) <= 1 and any(not value.is_integer() for value in numbers)
    for number, _, box in () if fractions else parsed:
        if box and max(box) <= 1 and any(not value.is_integer() for value in box):
            raise DataError(f"{path.name} line {number}: {box} are fractions, others are pixels. Use one of the two.")
    if fractions:
        data.notes.append("all numbers are at most 1: the boxes are fractions of their image")
    by_name: dict[str, dict | None] = {}
    for number, row, box in parsed:
        listed, label = row[file_column].strip(), row[class_column]
        name = files.find(listed)
        if name is None:
            data.leave_out("lines without an image", f"line {number} ({listed})")
            continue
        if name not in by_name:
            split = SPLIT_NAMES.get(row[split_column].strip().lower()) if split_column else None
            by_name[name] = add_image_file(data, files, name, split)
        image = by_name[name]
        if image is None or box is None:
            continue
        label = data.stripped_name(label, f"{path.name} line {number}: the class")
        width, height = (image["width"], image["height"]) if fractions else (1, 1)
        a, b, c, d = (value * side for value, side in zip(box, (width, height, width, height)))
        xywh = {"xyxy": [a, b, c - a, d - b], "xywh": [a, b, c, d], "cxcywh": [a - c / 2, b - d / 2, c, d]}[order]
        if min(xywh[2:]) < 0:
            raise DataError(f"{path.name} line {number}: the box {box} ends before it begins. Swap its ends.")
        data.add_object(image["id"], label, xywh)
    for name in files.names:
        if name not in by_name:
            data.leave_out("images that are in no line", name)
    if not data.images:
        raise DataError(f"'{path}': none of its images is below '{files.folder}'. Give the images' folder.")
    data.sort_classes()
    return data


def has_box_columns(path: Path) -> bool:
    """Whether a file has columns of boxes; raises like `read_csv`."""
    return bool(_box_columns(_read_rows(path)[0], path))


def _read_rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Read the names of the columns, in lower case, and the rows with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            sample = file.read(4096)
            file.seek(0)
            delimiter = max(",;\t", key=sample.partition("\n")[0].count)
            lines = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=delimiter), start=1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"annotations: cannot read '{path}' as CSV: {error}. Save it as UTF-8 text.") from error
    if not lines:
        raise DataError(f"annotations: '{path}' is empty. Expected a line for each box.")
    first = lines[0][1]
    if len(first) == len(_NO_HEADER) and all(_is_number(text) or not text for text in first[1:5]):
        columns = list(_NO_HEADER)
    else:
        columns = [name.strip().lower() for name in first]
        lines = lines[1:]
    if repeated := [name for name in columns if name and columns.count(name) > 1]:
        raise DataError(f"{path.name}: two columns are called {repeated[0]!r:.200}. Remove or rename one.")
    for number, row in lines:
        if len(row) != len(columns):
            raise DataError(f"{path.name} line {number}: {len(row)} columns; expected {len(columns)}, as in the first.")
    return columns, [(number, dict(zip(columns, row))) for number, row in lines]


def _box_columns(columns: Sequence[str], path: Path) -> tuple[Sequence[str], str]:
    """Return the columns of the box and their order: "xyxy", "xywh" or "cxcywh"."""
    options = [("xyxy", _CORNERS), ("xywh", _SIZES), ("cxcywh", _CENTERS)]
    matches = [(names, order) for order, groups in options for names in groups if set(names) <= set(columns)]
    if len({order for _, order in matches}) > 1:
        texts = " or ".join(f"{','.join(names)} ({order})" for names, order in matches[:2])
        raise DataError(f"{path.name}: the columns may mean {texts}. Remove those that are not the box.")
    if not matches:
        raise DataError(
            f"{path.name}: no columns of a box among {', '.join(columns)!r:.300}; expected xmin,ymin,xmax,ymax, "
            "or x,y,w,h, or cx,cy,w,h. Rename them."
        )
    return matches[0]


def _column(columns: Sequence[str], names: Sequence[str], what: str, path: Path) -> str:
    column = next((name for name in names if name in columns), None)
    if column is None:
        raise DataError(
            f"{path.name}: no column of {what} among {', '.join(columns)!r:.300}; expected {names[0]}. Rename it."
        )
    return column


def _box(row: Mapping[str, str], columns: Sequence[str], context: str) -> list[float] | None:
    """Return the four numbers of a line, or None if all of them are empty."""
    texts = [row[name].strip() for name in columns]
    if not any(texts):
        return None
    if not all(map(_is_number, texts)):
        raise DataError(f"{context}: the box is {','.join(texts)!r:.200}; expected four numbers. Correct it.")
    return [coordinate(text, f"{context}: a number of the box") for text in texts]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
