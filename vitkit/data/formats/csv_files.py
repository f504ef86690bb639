"""CSV: one line per box, with the columns named by a header, or `FILE,X0,Y0,X1,Y1,CLASS` without one.

An image without a box is part of the dataset only if a line names it and leaves the box empty. Columns of the image's
width and height, as TensorFlow writes them, are the size that it was annotated at. VIA's table of regions is also read.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitkit.data.formats.annotated import AnnotatedImages, add_image_file, single_file
from vitkit.data.formats.exporters import TURNS
from vitkit.data.formats.sizes import MAX_FRACTION
from vitkit.data.formats.via import SHAPES, read_via_rows
from vitkit.errors import DataError
from vitkit.io.folders import ImageFiles, data_files, split_of
from vitkit.io.parsing import coordinate
from vitkit.io.segmentations import is_side, polygon_fields

_FILE = ("filename", "file_name", "file", "image", "image_path", "path", "img", "image_name", "imageid", "image_id")
_CLASS = ("class", "label", "category", "class_name", "name", "labelname", "category_name")
_SPLIT = ("split", "subset", "set")
_FLAGS = {"isgroupof": "iscrowd", "iscrowd": "iscrowd", "difficult": "difficult"}
"""Columns of flags -> their fields; Open Images' first one marks boxes around several objects, which are crowds."""
_SET = ("1", "1.0", "true", "yes")
_CORNERS = (("xmin", "ymin", "xmax", "ymax"), ("x0", "y0", "x1", "y1"), ("x1", "y1", "x2", "y2"),
            ("left", "top", "right", "bottom"))  # fmt: skip
_SIZES = (("x", "y", "w", "h"), ("x", "y", "width", "height"), ("bbox_x", "bbox_y", "bbox_width", "bbox_height"),
          ("xmin", "ymin", "w", "h"))  # fmt: skip
_CENTERS = (("cx", "cy", "w", "h"), ("x_center", "y_center", "width", "height"), ("xc", "yc", "w", "h"))
_QUADRILATERALS = [[f"{axis}{k}" for k in range(first, first + 4) for axis in "xy"] for first in (0, 1)]
_LISTS = (("bbox",), ("box",), ("bounding_box",))
"""Columns that hold the whole box, "[x, y, width, height]", as in Kaggle's tables."""
_IMAGE_SIZES = (("width", "height"), ("image_width", "image_height"), ("img_width", "img_height"),
                ("imagewidth", "imageheight"), ("imgwidth", "imgheight"))  # fmt: skip
_NUMBER = re.compile(r"\s*[-+]?\d*\.?\d*([eE][-+]?\d+)?\s*")
_NO_HEADER = ("file", "xmin", "ymin", "xmax", "ymax", "class")


def read_csv(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read a table of boxes, or one in the folder of each split.

    Args:
        annotations: the file, a folder with one CSV file, or one with a folder for each split, such as train, that has
            one, as Roboflow writes _annotations.csv.
        images: folder of the images; None: the folder of the file, or of the splits.
    Raises:
        DataError: columns are missing or ambiguous, or a line is invalid.
    """
    tables = _find_tables(annotations)
    if len(tables) == 1 and SHAPES in tables[0].columns:
        return read_via_rows(tables[0].rows, annotations, images or tables[0].path.parent)
    files = ImageFiles(images or (annotations if annotations.is_dir() else annotations.parent))
    data = AnnotatedImages("csv", annotations, files.folder)
    # Each once, in order.
    files.expect({table.names_of(row): None for table in tables for _, row in table.rows})
    by_name: dict[str, dict | None] = {}
    for table in tables:
        _add_table(data, files, table, by_name)
    data.leave_out("images that are in no line", *(name for name in files.names if name not in by_name))
    data.sort_classes()
    return data


class _Table(NamedTuple):
    """A CSV file."""

    path: Path
    columns: list[str]
    rows: list[tuple[int, dict[str, str]]]
    """The lines with their numbers."""
    inside: str = ""
    """The folder of a split that the file is in, with a slash; "" if the file is the only one."""

    @property
    def split(self) -> str | None:
        return split_of(PurePosixPath(self.inside).name)

    def names_of(self, row: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names that the image of a line may have."""
        listed = row[_column(self.columns, _FILE, "the file", self.path)].strip()
        return (f"{self.inside}{listed}", listed) if self.inside else (listed,)


def _find_tables(annotations: Path) -> list[_Table]:
    """Read the file, the only one of the folder, or those in folders of splits."""
    if annotations.is_dir() and not any(annotations.glob("*.csv")):
        paths = [path for path in data_files(annotations) if path.suffix.lower() == ".csv"]
        inside = {path: path.parent.relative_to(annotations).as_posix() for path in paths}
        if paths and len({*inside.values()}) == len(paths) and all(split_of(path.parent.name) for path in paths):
            return [_Table(path, *_read_rows(path), inside=f"{folder}/") for path, folder in inside.items()]
        if paths:
            names = ", ".join(str(path.relative_to(annotations)) for path in paths[:3])
            raise DataError(
                f"annotations: '{annotations}' has {len(paths)} files *.csv in its folders ({names}); expected one, "
                "or one in each of the folders train, val and test. Name it."
            )
    path = single_file(annotations, "*.csv")
    return [_Table(path, *_read_rows(path))]


def _add_table(data: AnnotatedImages, files: ImageFiles, table: _Table, by_name: dict[str, dict | None]) -> None:
    """Add the images and boxes of a file; `by_name` has the entries of images, None for those that cannot be read."""
    path, columns, num_before = table.path, table.columns, len(data.annotations)
    boxes, order = _box_columns(columns, path)
    turned = (name for name in TURNS if name in columns and any(row[name].strip(" 0.") for _, row in table.rows))
    data.notes.extend(f"the column {name!r} of {path.name} is not read: boxes stay upright" for name in turned)
    class_column = None
    if len(boxes) > 1 or {*_CLASS} & {*columns}:
        class_column = first = _column(columns, _CLASS, "the class", path)
        present = [name for name in _CLASS if name in columns]
        texts = [name for name in present if not all(_NUMBER.fullmatch(row[name]) for _, row in table.rows)]
        if first not in texts and (class_column := next(iter(texts), first)) != first:
            data.notes.append(f"the class is the column {class_column!r} of {path.name}, as {first!r} has only numbers")
    else:  # Kaggle's tables of a single class
        data.notes.append(f"no column of {path.name} is the class: all objects are called 'object'")
    split_column = next((name for name in _SPLIT if name in columns), None)
    parsed = [(number, row, _box(row, boxes, f"{path.name} line {number}")) for number, row in table.rows]
    fractions = _are_fractions([(number, box) for number, _, box in parsed if box], path)
    if fractions:
        data.notes.append("no number is above 1, apart from rounding: the boxes are fractions of their image")
    size_columns = next((names for names in _IMAGE_SIZES if {*names} <= {*columns} - {*boxes}), None)
    listed_sizes: dict[str, tuple[int, int]] = {}
    for number, row, box in parsed:
        listed = table.names_of(row)
        name = files.find(*listed, split=table.split)
        if name is None:
            data.leave_out("lines without an image", f"line {number} ({listed[0]})")
            continue
        if name not in by_name:
            by_name[name] = add_image_file(data, files, name)
        image = by_name[name]
        if image is None:
            continue
        if size := _size(row, size_columns, f"{path.name} line {number}"):
            if listed_sizes.setdefault(name, size) != size:
                raise DataError(
                    f"{path.name} line {number}: {listed[-1]!r} is {size[0]}x{size[1]} pixels here and "
                    f"{'x'.join(map(str, listed_sizes[name]))} in an earlier line. Correct one."
                )
            image["width"], image["height"] = size
        split = (split_of(row[split_column]) if split_column else None) or table.split
        if split:
            data.add_to_split(image["id"], split)
        if box is None:
            continue
        label = row[class_column] if class_column else "object"
        label = data.strip_name(label, f"{path.name} line {number}: the class")
        sides = (image["width"], image["height"])
        fields = _fields([min(value, 1.0) * sides[k % 2] for k, value in enumerate(box)] if fractions else box, order)
        if min(fields["bbox"][2:]) < 0:
            raise DataError(f"{path.name} line {number}: the box {box} ends before it begins. Swap its ends.")
        flags = {field: 1 for column, field in _FLAGS.items() if row.get(column, "").strip().lower() in _SET}
        data.add_object(image["id"], label, **fields, **flags)
    if len(boxes) == 1:
        data.notes.append(f"the column {boxes[0]!r} is read as [x, y, width, height]")
        _check_sizes(data, num_before, f"{path.name}: the column {boxes[0]!r}")


def _fields(numbers: Sequence[float], order: str) -> dict[str, Any]:
    """Return the `bbox`, and `segmentation` if it has one, of an object in pixels."""
    if order == "polygon":
        return polygon_fields([numbers])
    a, b, c, d = numbers
    return {"bbox": {"xyxy": [a, b, c - a, d - b], "xywh": [a, b, c, d], "cxcywh": [a - c / 2, b - d / 2, c, d]}[order]}


def _check_sizes(data: AnnotatedImages, start: int, context: str) -> None:
    """Raise DataError if what was read as the sizes of the boxes from `start` on seems to be their second corners."""
    sides = {image["id"]: (image["width"], image["height"]) for image in data.images}
    boxes = [(*annotation["bbox"], *sides[annotation["image_id"]]) for annotation in data.annotations[start:]]
    beyond = sum(x + width > right + 1 or y + height > bottom + 1 for x, y, width, height, right, bottom in boxes)
    if 10 * beyond > len(boxes) and all(width > x and height > y for x, y, width, height, *_ in boxes):
        raise DataError(
            f"{context} holds lists, read as [x, y, width, height], by which {beyond} of {len(boxes)} boxes reach out "
            "of their images. If they are corners, write them into columns xmin, ymin, xmax, ymax."
        )


def has_box_columns(path: Path) -> bool:
    """Whether a file has columns of boxes, or VIA's regions; raises like `read_csv`."""
    columns = _read_rows(path)[0]
    return SHAPES in columns or bool(_box_columns(columns, path))


def _are_fractions(boxes: Sequence[tuple[int, Sequence[float]]], path: Path) -> bool:
    """Return whether most boxes are fractions of their image; raise a DataError that names a line that differs."""
    # Fractions that were computed may exceed 1 by rounding.
    alike = [max(box) <= MAX_FRACTION and any(not value.is_integer() for value in box) for _, box in boxes]
    fractions = sum(alike) > sum(max(box) > MAX_FRACTION for _, box in boxes)
    for (number, box), is_fraction in zip(boxes, alike):
        if is_fraction != fractions and (is_fraction or max(box) > MAX_FRACTION):
            kinds = ("pixels", "fractions") if fractions else ("fractions", "pixels")
            raise DataError(
                f"{path.name} line {number}: {list(box)} are {kinds[0]}, most other lines have {kinds[1]}. Correct it."
            )
    return fractions


def _size(row: Mapping[str, str], columns: Sequence[str] | None, context: str) -> tuple[int, int] | None:
    """Return the (width, height) of the image that a line states; None if it states none."""
    texts = [row[name].strip() for name in columns or ()]
    if not any(texts):
        return None
    values = [coordinate(text, f"{context}: the image's size") for text in texts]
    width, height = map(int, values)
    if not is_side(width) or not is_side(height) or [width, height] != values:
        raise DataError(f"{context}: the image's size is {'x'.join(texts)!r:.200}; expected whole numbers. Correct it.")
    return width, height


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
    if len(first) == len(_NO_HEADER) and all(_NUMBER.fullmatch(text) or not text for text in first[1:5]):
        columns = list(_NO_HEADER)
    else:
        columns = [name.strip().lower() for name in first]
        lines = lines[1:]
    if repeated := [name for name in columns if name and columns.count(name) > 1]:
        remedy = "Remove or rename one"
        if _NUMBER.fullmatch(repeated[0]):
            remedy = "If it has no header, write one as the first line, such as file,xmin,ymin,xmax,ymax,class"
        raise DataError(f"{path.name}: two columns are called {repeated[0]!r:.200}. {remedy}.")
    for number, row in lines:
        if len(row) != len(columns):
            raise DataError(f"{path.name} line {number}: {len(row)} columns; expected {len(columns)}, as in the first.")
    return columns, [(number, dict(zip(columns, row))) for number, row in lines]


def _box_columns(columns: Sequence[str], path: Path) -> tuple[Sequence[str], str]:
    """Return the columns of the box and their order: "xyxy", "xywh", "cxcywh" or "polygon"."""
    if corners := next((names for names in _QUADRILATERALS if {*names} <= {*columns}), None):
        return corners, "polygon"
    options = [("xyxy", _CORNERS), ("xywh", _SIZES), ("cxcywh", _CENTERS)]
    if not any({*names} <= {*columns} for _, groups in options for names in groups):
        options = [("xywh", _LISTS)]
    matches = [(names, order) for order, groups in options for names in groups if set(names) <= set(columns)]
    if len({order for _, order in matches}) > 1:
        texts = " or ".join(f"{','.join(names)} ({order})" for names, order in matches[:2])
        raise DataError(f"{path.name}: the columns may mean {texts}. Remove those that are not the box.")
    if not matches:
        raise DataError(
            f"{path.name}: no columns of a box among {', '.join(columns)!r:.300}; expected xmin,ymin,xmax,ymax, "
            "or x,y,w,h, or cx,cy,w,h, or bbox with lists [x, y, w, h]. Rename them."
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
    """Return the numbers of a line's box or polygon, or None if all of them are empty."""
    texts = [row[name].strip() for name in columns]
    if len(texts) == 1:
        texts = texts[0].strip("[]() ").replace(",", " ").replace(";", " ").split()
    if not any(texts):
        return None
    count = max(4, len(columns))
    if len(texts) != count or not all(map(_NUMBER.fullmatch, texts)):
        raise DataError(f"{context}: the box is {','.join(texts)!r:.200}; expected {count} numbers. Correct it.")
    return [coordinate(text, f"{context}: a number of the box") for text in texts]
