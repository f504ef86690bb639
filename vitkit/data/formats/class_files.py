"""Files that name the classes of label images, shared by all splits."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.data.io.image_files import MAX_PIXELS, read_image
from vitkit.data.io.json_files import read_json
from vitkit.data.io.text_files import read_lines
from vitkit.errors import DataError
from vitkit.ops.label_maps import colors_to_ids, replace_values

CLASS_FILES = ("classes.txt", "classes.json", "labels.txt", "labelmap.txt")
_COLORED_LINE = re.compile(r"(.+?):(\d+),(\d+),(\d+)(:.*)?")
_NO_VALUE = (1 << 16) - 1


class ClassFile(NamedTuple):
    """The content of a file of class names."""

    names: dict[int, str]
    """Pixel value (or number) of each class -> its name."""
    colors: dict[int, int]
    """R + 256 G + 65536 B in colour-coded label images -> pixel value; empty if the file names no colours."""
    ignored: int | None
    """The pixel value that has no class, or None if the file does not state it."""


def read_class_file(path: str | Path) -> dict[int, str]:
    """Read the name of each class by pixel value (or number); see `parse_class_file`."""
    return parse_class_file(path).names


def parse_class_file(path: str | Path) -> ClassFile:
    """Read the names and, if the file has them, the colours of classes.

    Args:
        path: a text file with one name per line, the first for 0, or `NAME:R,G,B` as CVAT writes labelmap.txt; or
            JSON: a list of names, a list of objects with `name`, `id` (or `index`, `value`) and optionally `color`, or
            an object of numbers and names; any of these may be in an object under `classes`, next to `ignore_index`,
            the value without a class.
    Raises:
        DataError: there is no such file, or it has no class names.
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        lines = read_lines(path, "classes", remedy="Give a file with a name in each line.")
        ignored, entries = None, _entries_of([line for _, line in lines])
    else:
        entries = read_json(path, key="classes", remedy="Give a file with the names of the classes.")
        ignored = entries.get("ignore_index") if isinstance(entries, dict) else None
        if isinstance(entries, dict) and isinstance(entries.get("classes"), list | dict):
            entries = entries["classes"]
    try:
        names = {number: name for number, name in sorted(_numbered(entries)) if number != ignored}
        colors = _colors(entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"classes: '{path}' contains {json.dumps(entries)[:80]} ({type(error).__name__}: {error}); expected names: "
            '["sky", "road"], [{"id": 0, "name": "sky"}] or {"0": "sky"}.'
        ) from error
    if not names:
        raise DataError(f"classes: '{path}' contains no class name. Write one in each line.")
    return ClassFile(names, colors, ignored)


def read_colored_labels(path: Path, colors: dict[int, int], *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a colour-coded label image.

    Args:
        colors: see `ClassFile`.
    Returns:
        (H, W) uint16 values.
    Raises:
        DataError: the file cannot be read, or contains a colour that is not in `colors`.
    """
    ids = colors_to_ids(read_image(path, "labels", max_pixels=max_pixels))
    values = replace_values(ids, colors, dtype=np.uint16, default=_NO_VALUE)
    if (values == _NO_VALUE).any():
        wrong = int(ids[values == _NO_VALUE][0])
        rgb = wrong & 255, wrong >> 8 & 255, wrong >> 16
        raise DataError(
            f"labels '{path}': colour {rgb} at {int((ids == wrong).sum())} pixels is not one of the "
            f"{len(colors)} in the class file. Add it there, or save the image without smoothing, as PNG."
        )
    return values


def class_file_near(folder: Path) -> Path | None:
    """Return the file of class names in a folder or up to two levels above it, or None if there is none."""
    files = (near / name for near in (folder, folder.parent, folder.parent.parent) for name in CLASS_FILES)
    return next((file for file in files if file.is_file()), None)


def _numbered(names: Any) -> list[tuple[int, str]]:
    if isinstance(names, dict):
        return [(int(number), str(name)) for number, name in names.items()]
    if all(isinstance(name, str) for name in names):
        return list(enumerate(names))
    return [(_number(entry), entry["name"]) for entry in names]


def _entries_of(lines: list[str]) -> list[Any]:
    """Return names or, if every line has a colour, objects with `id`, `name` and `color`."""
    lines = [line for line in lines if not line.startswith("#")]
    matches = [_COLORED_LINE.fullmatch(line) for line in lines]
    if not lines or not all(matches):
        return lines
    return [{"id": k, "name": match[1], "color": [int(match[i]) for i in (2, 3, 4)]} for k, match in enumerate(matches)]


def _colors(entries: Any) -> dict[int, int]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "color" in entry for entry in entries):
        return {}
    packed = {}
    for entry in entries:
        red, green, blue = map(int, entry["color"])
        packed[red | green << 8 | blue << 16] = _number(entry)
    return packed


def _number(entry: dict[str, Any]) -> int:
    key = next((key for key in ("id", "index", "value") if key in entry), "id")
    return int(entry[key])
