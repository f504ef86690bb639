"""Detects the format of a file or folder of annotations."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from vitkit.data.formats.annotated import IMAGE_SUFFIXES
from vitkit.data.formats.class_files import class_file_near, parse_class_file
from vitkit.data.formats.coco import is_coco_file
from vitkit.data.formats.csv_files import box_columns_of
from vitkit.data.formats.label_images import CLASS_FACTOR, has_one_channel
from vitkit.data.formats.yolo import read_yaml_settings
from vitkit.data.io.image_files import read_label_map
from vitkit.errors import DataError

FORMAT_NAMES = {
    "coco": "COCO's JSON of boxes",
    "yolo": "YOLO's text files, with data.yaml",
    "voc": "Pascal VOC's XML files",
    "labelme": "LabelMe's JSON files",
    "cvat": "CVAT for images 1.1, an XML file",
    "csv": "a CSV file of boxes",
    "instance_maps": "label images of instances",
    "semantic_maps": "label images of classes",
}
_MAX_SNIFFED = 50
"""Maximum number of files per extension that are opened to detect the format."""
_YOLO_LINE = re.compile(rb"\s*\d+(\.0*)?(\s+[-+.\deE]+){4,}\s*")
_HEAD = 4096
"""Bytes of text that are read to detect a format."""


def detect_format(annotations: str | Path, images: str | Path | None = None) -> str:
    """Return the format of annotations, a key of FORMAT_NAMES.

    Args:
        annotations: a file or a folder.
        images: folder of the images, if it is a different one.
    Raises:
        DataError: there is no such file, it has none of the formats, or it is ambiguous.
    """
    path = Path(annotations)
    if not path.exists():
        raise DataError(f"annotations: no file or folder '{path}'. Correct the path.")
    if path.is_file() and path.suffix.lower() in _SNIFFERS:
        # What is wrong with the only file is more useful than that it has no known format.
        name = _SNIFFERS[path.suffix.lower()](path)
        formats = {name: path.name} if name else {}
    else:
        formats = dict(_formats_of([path] if path.is_file() else sorted(path.rglob("*"))))
    if not formats and path.is_file() and path.suffix not in _SNIFFERS and _sniffed(_sniff_json, path):
        return str(_sniff_json(path))
    if not formats and path.is_dir() and images is not None and Path(images).resolve() != path.resolve():
        formats = _formats_of_label_images(path)
    if len(formats) == 1:
        return next(iter(formats))
    if formats:
        options = " and ".join(f"{FORMAT_NAMES[name]} ({evidence})" for name, evidence in formats.items())
        names = " or ".join(f"format={name}" for name in formats)
        raise DataError(f"'{path}' looks like {options}. Choose: {names} (in `vitkit data convert`: --from).")
    formats = "; ".join(f"{name}: {text}" for name, text in FORMAT_NAMES.items())
    raise DataError(f"annotations: '{path}' is in none of the supported formats ({formats}). Correct the path.")


def _formats_of(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield each format that a file appears to have, with the first such file."""
    for suffix, sniff in _SNIFFERS.items():
        files = [path for path in paths if path.suffix.lower() == suffix and path.is_file()]
        seen = set()
        for path in itertools.islice(files, _MAX_SNIFFED):
            name = _sniffed(sniff, path)
            if name and name not in seen:
                seen.add(name)
                yield name, path.name


def _sniffed(sniff: Callable[[Path], str | None], path: Path) -> str | None:
    try:
        return sniff(path)
    except (OSError, DataError):
        return None


def _sniff_json(path: Path) -> str | None:
    data = path.read_bytes()
    if b'"shapes"' in data and b'"points"' in data:
        return "labelme"
    return "coco" if is_coco_file(path) else None


def _sniff_yaml(path: Path) -> str | None:
    return "yolo" if read_yaml_settings(path) else None


def _sniff_text(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if len(head) == _HEAD:  # a number may be cut in two
        head = head[: head.rfind(b" ") + 1]
    line = next(filter(None, map(bytes.strip, head.splitlines())), b"")
    return "yolo" if _YOLO_LINE.fullmatch(line) else None


def _sniff_xml(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD).replace(b"\0", b"")  # UTF-16
    if b"<annotations" in head:
        return "cvat"
    return "voc" if b"<annotation" in head else None


def _sniff_csv(path: Path) -> str | None:
    return "csv" if box_columns_of(path) else None


_SNIFFERS = {
    ".json": _sniff_json,
    ".yaml": _sniff_yaml,
    ".yml": _sniff_yaml,
    ".txt": _sniff_text,
    ".xml": _sniff_xml,
    ".csv": _sniff_csv,
}


def _formats_of_label_images(folder: Path) -> dict[str, str]:
    """Return the possible kinds of label images: classes if a file names them, instances if values encode them."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES)
    paths = list(itertools.islice(files, _MAX_SNIFFED))
    if not paths:
        return {}
    evidence = paths[0].name
    if not all(map(has_one_channel, paths)):
        class_file = class_file_near(folder)
        return {"semantic_maps": evidence} if class_file and parse_class_file(class_file).colors else {}
    if any(read_label_map(path).max() >= CLASS_FACTOR for path in paths):
        return {"instance_maps": evidence}
    if class_file_near(folder):
        return {"semantic_maps": evidence}
    return {"semantic_maps": evidence, "instance_maps": evidence}
