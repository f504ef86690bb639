"""Detects the format of a file or folder of annotations."""

import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, data_files, is_hidden
from vitkit.io.json_files import read_json
from vitkit.text_format import pluralize


class AnnotationFormat(NamedTuple):
    """A format that annotations are read in; its module is imported when a file may have the format."""

    text: str
    """What messages call it."""
    module: str
    """The file of vitkit.data.formats that reads it."""
    reader: str
    """The function that takes the file or folder of the annotations, and the folder of the images; None: the format's
    default. It returns `AnnotatedImages`."""
    looks_like: Mapping[str, str] = {}
    """Extension -> the function that tells whether a file with it seems to be in this format. It may raise OSError or
    DataError."""

    def read(self, annotations: Path, images: Path | None) -> AnnotatedImages:
        """Read annotations by the format's reader."""
        return _function(self.module, self.reader)(annotations, images)

    def has(self, path: Path, suffix: str) -> bool:
        """Return whether a file, read as one with this extension, seems to be in this format."""
        return suffix in self.looks_like and _function(self.module, self.looks_like[suffix])(path)


def _function(module: str, name: str) -> Callable[..., Any]:
    return getattr(import_module(f"vitkit.data.formats.{module}"), name)


_YAML = "is_yolo_yaml"
FORMATS = {
    "coco": AnnotationFormat("COCO's JSON of boxes", "coco", "read_coco", {".json": "is_coco_file"}),
    "yolo": AnnotationFormat(
        "YOLO's text files, with data.yaml",
        "yolo",
        "read_yolo",
        {".yaml": _YAML, ".yml": _YAML, ".txt": "is_yolo_text", ".data": "is_obj_data"},
    ),
    "voc": AnnotationFormat("Pascal VOC's XML files", "voc", "read_voc", {".xml": "is_voc_file"}),
    "labelme": AnnotationFormat("LabelMe's JSON files", "labelme", "read_labelme", {".json": "is_labelme_file"}),
    "cvat": AnnotationFormat("CVAT for images 1.1, an XML file", "cvat", "read_cvat", {".xml": "is_cvat_file"}),
    "label-studio": AnnotationFormat(
        "Label Studio's JSON", "label_studio", "read_label_studio", {".json": "is_label_studio_file"}
    ),
    "via": AnnotationFormat("VIA's JSON of regions", "via", "read_via", {".json": "is_via_file"}),
    "odvg": AnnotationFormat("ODVG's JSON lines of classes", "odvg", "read_odvg_classes", {".jsonl": "is_odvg_file"}),
    "csv": AnnotationFormat("a CSV file of boxes", "csv_files", "read_csv", {".csv": "has_box_columns"}),
    "instance_maps": AnnotationFormat("label images of instances", "label_images", "read_instance_maps"),
    "semantic_maps": AnnotationFormat("label images of classes", "label_images", "read_semantic_maps"),
}
"""The formats that annotations are read in, by the names that `format=` takes."""
_SUFFIXES = tuple({suffix: None for form in FORMATS.values() for suffix in form.looks_like})
_FOREIGN = {
    b'"original_width"': "Label Studio's JSON-MIN: export it as JSON",
    b'"classTitle"': "Supervisely's JSON: export it as COCO",
    b'"data_row"': "Labelbox's JSON: convert it to COCO",
    b'"dm_format_version"': "Datumaro's JSON: export it as COCO",
    b'"slots"': "Darwin JSON of V7: export it as COCO",
    b'"fid_list"': "VIA 3's JSON: export it as COCO",
    b'"coordinates"': "Create ML's JSON, or GeoJSON: convert it to COCO",
}
"""What the JSON of other tools contains -> what it is."""
_CAPTIONS = re.compile(rb"(\xef\xbb\xbf)?(image(_name)?[,|].*(caption|comment)|[^\t\n]*\.\w+#\d+\t)")
"""The beginning of captions as text."""
_LABEL_FOLDER = re.compile("mask|label|annot|segm|^gt", re.IGNORECASE)
"""Names of folders of label images."""
_MAX_SNIFFED = 50
"""Maximum number of files per extension that are opened to detect the format."""


def detect_format(annotations: str | Path, images: str | Path | None = None) -> str:
    """Return the format of annotations, a key of FORMATS.

    Args:
        annotations: a file or a folder.
        images: folder of the images, if it is a different one.
    Raises:
        DataError: there is no such file, it has none of the formats, or it is ambiguous.
    """
    path = Path(annotations)
    if not path.exists():
        raise DataError(f"annotations: no file or folder '{path}'. Correct the path.")
    files = [path] if path.is_file() else data_files(path)
    if path.is_file():
        # What is wrong with the only file is more useful than that it has no known format.
        suffix = path.suffix.lower()
        try:
            name = _format_of(path, suffix if suffix in _SUFFIXES else ".json")
        except OSError as error:
            raise DataError(f"annotations: cannot read '{path}' ({error.strerror}).") from error
        formats = {name: path.name} if name else {}
    else:
        formats = _formats_of(files)
    if not formats and path.is_dir() and images is not None and Path(images).resolve() != path.resolve():
        formats = _detect_label_images(path)
    if len(formats) == 1:
        return next(iter(formats))
    if formats:
        options = " and ".join(f"{FORMATS[name].text} ({evidence})" for name, evidence in formats.items())
        names = " or ".join(f"format={name}" for name in formats)
        raise DataError(f"'{path}' looks like {options}. Choose: {names} (in `vitkit data convert`: --from).")
    if path.is_dir():
        _check_for_label_images(path)
        _check_for_images_alone(path, files)
    _check_for_other_tools(files)
    _check_for_captions(files)
    formats = "; ".join(f"{name}: {form.text}" for name, form in FORMATS.items())
    raise DataError(
        f"annotations: '{path}' is in none of the supported formats ({formats}). Give a file or folder of one of them."
    )


def _check_for_other_tools(files: list[Path]) -> None:
    """Raise DataError if a JSON file is damaged, another tool's, or lacks one of COCO's lists."""
    for file in itertools.islice((path for path in files if path.suffix.lower() == ".json"), _MAX_SNIFFED):
        read_json(file)
        data = file.read_bytes()
        if foreign := next((text for mark, text in _FOREIGN.items() if mark in data), None):
            raise DataError(f"annotations: '{file}' is {foreign}.")
        missing = [part for part in ("images", "annotations", "categories") if f'"{part}"'.encode() not in data]
        if len(missing) == 1 and b'"caption"' not in data:
            raise DataError(f"annotations: '{file}' looks like COCO's JSON, but has no list {missing[0]!r}. Add it.")


def _check_for_label_images(folder: Path) -> None:
    """Raise DataError if the only annotations in a folder are label images, which have a folder of their own there."""
    for inside in sorted(path for path in folder.iterdir() if _LABEL_FOLDER.search(path.name) and path.is_dir()):
        if not is_hidden(inside.name) and _detect_label_images(inside):
            raise DataError(
                f"annotations: '{folder}' has label images in '{inside.name}'. Give '{inside}' as the annotations, and "
                "the folder of the images as images (in `vitkit data convert`: --images)."
            )


def _check_for_images_alone(folder: Path, files: list[Path]) -> None:
    """Raise DataError if a folder has no files but images."""
    if all(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        found = f"{pluralize(len(files), 'images')} and no annotations" if files else "no files"
        raise DataError(
            f"annotations: '{folder}' has {found}. Give the file or folder of the annotations, as {', '.join(FORMATS)}."
        )


def _check_for_captions(files: list[Path]) -> None:
    """Raise DataError if the only file, or one of several, is a text of captions, which is read by another dataset."""
    for file in [path for path in files if len(files) == 1 or path.suffix.lower() in (".txt", ".csv")]:
        with suppress(OSError), file.open("rb") as opened:
            if _CAPTIONS.match(opened.read(300)):
                raise DataError(
                    f"annotations: '{file}' has captions and no boxes. Train on it with the dataset CocoCaptions, as "
                    f"data.train.annotations={file} and val's, or give annotations of boxes."
                )


def _formats_of(paths: list[Path]) -> dict[str, str]:
    """Return each format that a file appears to have, with the name of the first such file."""
    formats: dict[str, str] = {}
    for suffix in _SUFFIXES:
        files = (path for path in paths if path.suffix.lower() == suffix and path.is_file() and path.stat().st_size)
        for path in itertools.islice(files, _MAX_SNIFFED):
            with suppress(OSError, DataError):
                if name := _format_of(path, suffix):
                    formats.setdefault(name, path.name)
    return formats


def _format_of(path: Path, suffix: str) -> str | None:
    """Return the format that a file appears to have, read as one with this extension."""
    return next((name for name, form in FORMATS.items() if form.has(path, suffix)), None)


def _detect_label_images(folder: Path) -> dict[str, str]:
    return _function("label_images", "detect_label_images")(folder, _MAX_SNIFFED)
