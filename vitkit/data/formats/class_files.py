"""Files that name the classes of label images, shared by all splits."""

import os
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.errors import DataError
from vitkit.io.image_files import (
    MAX_PIXELS,
    ONE_CHANNEL_MODES,
    read_header,
    read_label_colors,
    read_label_map,
    read_palette,
)
from vitkit.io.json_files import read_json
from vitkit.io.parsing import check_distinct, class_name, class_number
from vitkit.io.text_files import read_lines
from vitkit.ops.label_maps import colors_to_ids, count_values, replace_values
from vitkit.structures import IGNORE_INDEX

CLASS_FILES = ("classes.txt", "classes.json", "labels.txt", "labelmap.txt")
_COLORED_LINE = re.compile(r"(.+?):(-?\d{1,9}),(-?\d{1,9}),(-?\d{1,9})(:.*)?")
_COMMENT = re.compile(r"#+(\s|$)")
"""The beginning of a comment, unlike that of the name "#7up"."""
_NO_VALUE = (1 << 16) - 1
_GRAY_STEP = 32
"""The least distance of gray levels that stand for classes in a drawing program; numbers of classes lie closer."""


class ClassFile(NamedTuple):
    """The content of a file of class names."""

    names: dict[int, str]
    """Pixel value (or number) of each class -> its name."""
    colors: dict[int, int]
    """R + 256 G + 65536 B in color-coded label images -> pixel value; empty if the file names no colors."""
    ignored: int | None
    """The pixel value that has no class, or None if the file does not state it."""


def parse_class_file(path: str | Path) -> ClassFile:
    """Read the names and, if the file has them, the colors of classes.

    Args:
        path: a text file with one name per line, the first for 0, or `NAME:R,G,B` as CVAT writes labelmap.txt; or
            JSON: a list of names, a list of objects with `name`, `id` (or `index`, `value`) and optionally `color`, or
            an object of numbers and names; any of these may be in an object under `classes`, next to `ignore_index`,
            the value without a class.
    Raises:
        DataError: there is no such file, or it has no class names.
    """
    path = Path(path)
    context = f"classes: '{path}'"
    if path.suffix.lower() != ".json":
        lines = read_lines(path, "classes", remedy="Give a file with a name in each line.")
        ignored, entries = None, _entries_of(lines, context)
    else:
        entries = read_json(path, key="classes", remedy="Give a file with the names of the classes.")
        ignored = entries.get("ignore_index") if isinstance(entries, dict) else None
        if isinstance(entries, dict) and isinstance(entries.get("classes"), list | dict):
            entries = entries["classes"]
    if not isinstance(entries, list | dict) or (ignored is not None and type(ignored) is not int):
        raise DataError(
            f"{context} contains {reprlib.repr(entries)}; expected names: "
            '["sky", "road"], [{"id": 0, "name": "sky"}] or {"0": "sky"}, and a number as ignore_index.'
        )
    numbered = _number_classes(entries, context)
    if repeated := [number for number, count in Counter(number for number, _ in numbered).items() if count > 1]:
        raise DataError(f"{context}: two classes have the number {repeated[0]}. Give each a unique number.")
    names = {number: name for number, name in sorted(numbered) if number != ignored}
    check_distinct(names.values(), context)
    colors = _colors(entries, context)
    if not names:
        raise DataError(f"classes: '{path}' contains no class name. Write one in each line.")
    return ClassFile(names, colors, ignored)


def has_one_channel(path: Path) -> bool:
    """Return whether a label image holds numbers rather than colors."""
    try:
        return read_header(path, "labels").mode in ONE_CHANNEL_MODES
    except DataError:
        return False


def read_class_values(path: Path, colors: dict[int, int], *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read a label image of classes, whose pixels hold their values or, where a class file names them, their colors.

    Args:
        colors: see `ClassFile`. An image with a palette has these colors if its palette has no others, apart from that
            of 255; otherwise its numbers are the values.
    Returns:
        (H, W) uint8 or uint16 values.
    Raises:
        DataError: the file cannot be read, or contains a color that is not in `colors`.
        LossyImageError: it is stored in a form that changes its values, such as JPEG.
    """
    mode = read_header(path, "labels", max_pixels=max_pixels).mode if colors else "L"
    numbers = read_label_map(path, max_pixels=max_pixels) if mode in ONE_CHANNEL_MODES else None
    if numbers is not None and mode != "P":
        return numbers
    ids = colors_to_ids(read_label_colors(path, max_pixels=max_pixels))
    values = replace_values(ids, colors, dtype=np.uint16, default=_NO_VALUE)
    if numbers is not None:
        void = (values == _NO_VALUE) & (numbers == IGNORE_INDEX)
        return np.where(void, numbers, values) if (void | (values != _NO_VALUE)).all() else numbers
    if (values == _NO_VALUE).any():
        wrong = int(ids[values == _NO_VALUE][0])
        rgb = wrong & 255, wrong >> 8 & 255, wrong >> 16
        raise DataError(
            f"labels '{path}': color {rgb} at {int((ids == wrong).sum())} pixels is not one of the "
            f"{len(colors)} in the class file. Add it there, or save the image without smoothing, as PNG."
        )
    return values


def check_palettes(paths: Iterable[Path]) -> None:
    """Raise a DataError if a color has another number in one label image with a palette than in another one, as where
    each palette is made for its image: the numbers are no classes."""
    first: dict[bytes, tuple[int, Path, bytes]] = {}
    known: set[bytes] = set()
    for path in paths:
        try:
            palette = read_palette(path)
            if palette is None or palette in known:
                continue
            used = np.flatnonzero(np.bincount(read_label_map(path).ravel())).tolist()
        except DataError:  # named where it is read for its classes
            continue
        known.add(palette)
        colors = [palette[start : start + 3] for start in range(0, len(palette), 3)]
        once = {color: number for number, color in enumerate(colors) if colors.count(color) == 1}
        for color, number in once.items():
            other, file, others = first.setdefault(color, (number, path, palette))
            if number in used and other != number and others[3 * number : 3 * number + 3] not in (color, b""):
                raise DataError(
                    f"labels '{path}': the color {(*color,)} has the number {number}, in '{file.name}' {other}: each "
                    "image has its own palette. Name the classes with their colors in classes.json beside them."
                )


def count_pixels(values: np.ndarray) -> Counter[int]:
    """Return how many pixels of a label image have each value."""
    return Counter(dict(zip(*(array.tolist() for array in count_values(values)))))


def has_gray_levels(values: Iterable[int]) -> bool:
    """Whether the values of all label images are gray levels as a drawing program writes them, such as 0, 128 and 255,
    rather than numbers of classes."""
    levels = sorted(values)
    return levels[:1] == [0] and levels[-1:] == [IGNORE_INDEX] and min(np.diff(levels)) >= _GRAY_STEP


def is_void(value: int, pixels: Mapping[int, int], names: Mapping[int, str]) -> bool:
    """Whether a value of label images stands for no class: 255, unless the class file names it or all values are gray
    levels (`has_gray_levels`).

    Args:
        pixels: the number of pixels of each value in all label images.
        names: the names in the class file, empty without one.
    """
    return value == IGNORE_INDEX and value not in names and (bool(names) or not has_gray_levels(pixels))


def describe_255(pixels: Mapping[int, int], names: Mapping[int, str]) -> list[str]:
    """Describe what 255 stands for, if there is any and no class file names it; see `is_void`."""
    if IGNORE_INDEX in names or not pixels.get(IGNORE_INDEX):
        return []
    share = f"{pixels[IGNORE_INDEX]} pixels ({pixels[IGNORE_INDEX] / sum(pixels.values()):.1%})"
    if is_void(IGNORE_INDEX, pixels, names):
        return [f"255 is no class, and left out: {share}. If it is one, name it in classes.json beside them"]
    levels = ", ".join(map(str, sorted(pixels)))
    return [f"255 is a class, as all values are gray levels ({levels}): {share}. Names in classes.json change that"]


def find_class_file(folder: Path) -> Path | None:
    """Return the file of class names in a folder or up to two levels above it, or None if there is none."""
    files = (near / name for near in (folder, *Path(os.path.abspath(folder)).parents[:2]) for name in CLASS_FILES)
    return next((file for file in files if file.is_file()), None)


def _number_classes(names: list | dict, context: str) -> list[tuple[int, str]]:
    if isinstance(names, dict):
        pairs = list(names.items())
    elif all(isinstance(name, str) for name in names):
        pairs = list(enumerate(names))
    else:
        pairs = [(_number(entry, context), entry.get("name")) for entry in names]
    return [
        (class_number(number, f"{context}: a number"), class_name(name, f"{context}: a name")) for number, name in pairs
    ]


def _entries_of(numbered: list[tuple[int, str]], context: str) -> list[Any]:
    """Return names or, if every line has a color, objects with `id`, `name` and `color`."""
    lines = [line for _, line in numbered if not line.startswith("#")]
    matches = [_COLORED_LINE.fullmatch(line) for line in lines]
    if not any(matches):
        if blank := next((k for k, (number, _) in enumerate(numbered, start=1) if number != k), None):
            raise DataError(
                f"{context}: line {blank} is blank, and names of classes follow, whose numbers are those of their "
                "lines. Write the name of a class there, or remove the line."
            )
        return [line for _, line in numbered if not _COMMENT.match(line)]
    if not all(matches):
        wrong = reprlib.repr(lines[matches.index(None)])
        raise DataError(f"{context}: {wrong} has no color NAME:R,G,B, and other lines have. Correct it.")
    return [{"id": k, "name": match[1], "color": [int(match[i]) for i in (2, 3, 4)]} for k, match in enumerate(matches)]


def _colors(entries: list | dict, context: str) -> dict[int, int]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "color" in entry for entry in entries):
        return {}
    packed: dict[int, int] = {}
    for entry in entries:
        color = entry["color"]
        is_color = isinstance(color, list) and len(color) == 3
        if not is_color or not all(type(value) is int and 0 <= value <= 255 for value in color):
            raise DataError(
                f"{context}: the color of {entry.get('name')!r:.50} is {reprlib.repr(color)}; expected three numbers, "
                "0 to 255. Correct it."
            )
        red, green, blue = color
        packed[red | green << 8 | blue << 16] = class_number(_number(entry, context), f"{context}: a number")
    if max(packed.values(), default=0) >= _NO_VALUE:
        raise DataError(f"{context}: the number {max(packed.values())} is too large; expected less than {_NO_VALUE}.")
    if len(packed) < len(entries):
        raise DataError(f"{context}: two classes have the same color. Give each a unique color.")
    return packed


def _number(entry: Any, context: str) -> Any:
    key = next((key for key in ("id", "index", "value") if isinstance(entry, dict) and key in entry), None)
    if key is None:
        raise DataError(
            f"{context} contains {reprlib.repr(entry)}; expected {{'id': number, 'name': text}}. Correct it."
        )
    return entry[key]
