"""Detects the format of a file or folder of annotations."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from vitkit.data.formats.annotated import AnnotationFormat
from vitkit.data.formats.class_files import find_class_file, has_one_channel, parse_class_file
from vitkit.data.formats.coco import is_coco_file, read_coco
from vitkit.data.formats.csv_files import has_box_columns, read_csv
from vitkit.data.formats.cvat import is_cvat_file, read_cvat
from vitkit.data.formats.label_images import CLASS_FACTOR, read_instance_maps, read_semantic_maps
from vitkit.data.formats.label_studio import is_label_studio_file, read_label_studio
from vitkit.data.formats.labelme import is_labelme_file, read_labelme
from vitkit.data.formats.odvg import is_odvg_file, read_odvg_classes
from vitkit.data.formats.via import is_via_file, read_via
from vitkit.data.formats.voc import is_voc_file, read_voc
from vitkit.data.formats.yolo import is_obj_data, is_yolo_text, is_yolo_yaml, read_yolo
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, data_files, is_hidden
from vitkit.io.image_files import read_label_colors, read_label_map
from vitkit.io.json_files import read_json

FORMATS = {
    "coco": AnnotationFormat("COCO's JSON of boxes", read_coco, {".json": is_coco_file}),
    "yolo": AnnotationFormat(
        "YOLO's text files, with data.yaml",
        read_yolo,
        {".yaml": is_yolo_yaml, ".yml": is_yolo_yaml, ".txt": is_yolo_text, ".data": is_obj_data},
    ),
    "voc": AnnotationFormat("Pascal VOC's XML files", read_voc, {".xml": is_voc_file}),
    "labelme": AnnotationFormat("LabelMe's JSON files", read_labelme, {".json": is_labelme_file}),
    "cvat": AnnotationFormat("CVAT for images 1.1, an XML file", read_cvat, {".xml": is_cvat_file}),
    "label-studio": AnnotationFormat("Label Studio's JSON", read_label_studio, {".json": is_label_studio_file}),
    "via": AnnotationFormat("VIA's JSON of regions", read_via, {".json": is_via_file}),
    "odvg": AnnotationFormat("ODVG's JSON lines of classes", read_odvg_classes, {".jsonl": is_odvg_file}),
    "csv": AnnotationFormat("a CSV file of boxes", read_csv, {".csv": has_box_columns}),
    "instance_maps": AnnotationFormat("label images of instances", read_instance_maps, {}),
    "semantic_maps": AnnotationFormat("label images of classes", read_semantic_maps, {}),
}
"""The formats that annotations are read in, by the names that `format=` takes."""
_SUFFIXES = tuple({suffix: None for form in FORMATS.values() for suffix in form.looks_like})
_FOREIGN = {
    b'"original_width"': "Label Studio's JSON-MIN: export it as JSON",
    b'"classTitle"': "Supervisely's JSON: export it as COCO",
    b'"data_row"': "Labelbox's JSON: convert it to COCO",
    b'"dm_format_version"': "Datumaro's JSON: export it as COCO",
}
"""What the JSON of other tools contains -> what it is."""
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
    if path.is_file():
        # What is wrong with the only file is more useful than that it has no known format.
        suffix = path.suffix.lower()
        try:
            name = _format_of(path, suffix if suffix in _SUFFIXES else ".json")
        except OSError as error:
            raise DataError(f"annotations: cannot read '{path}' ({error.strerror}).") from error
        formats = {name: path.name} if name else {}
        if not name and suffix == ".json":
            read_json(path)
            data = path.read_bytes()
            if foreign := next((text for mark, text in _FOREIGN.items() if mark in data), None):
                raise DataError(f"annotations: '{path}' is {foreign}.")
    else:
        formats = dict(_formats_of(data_files(path)))
    if not formats and path.is_dir() and images is not None and Path(images).resolve() != path.resolve():
        formats = _formats_of_label_images(path)
    if len(formats) == 1:
        return next(iter(formats))
    if formats:
        options = " and ".join(f"{FORMATS[name].text} ({evidence})" for name, evidence in formats.items())
        names = " or ".join(f"format={name}" for name in formats)
        raise DataError(f"'{path}' looks like {options}. Choose: {names} (in `vitkit data convert`: --from).")
    if path.is_dir():
        _check_for_label_images(path)
    formats = "; ".join(f"{name}: {form.text}" for name, form in FORMATS.items())
    raise DataError(
        f"annotations: '{path}' is in none of the supported formats ({formats}). Give a file or folder of one of them."
    )


def _check_for_label_images(folder: Path) -> None:
    """Raise DataError if the only annotations in a folder are label images, which have a folder of their own there."""
    for inside in sorted(path for path in folder.iterdir() if _LABEL_FOLDER.search(path.name) and path.is_dir()):
        if not is_hidden(inside.name) and _formats_of_label_images(inside):
            raise DataError(
                f"annotations: '{folder}' has label images in '{inside.name}'. Give '{inside}' as the annotations, and "
                "the folder of the images as images (in `vitkit data convert`: --images)."
            )


def _formats_of(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield each format that a file appears to have, with the first such file."""
    for suffix in _SUFFIXES:
        files = (path for path in paths if path.suffix.lower() == suffix and path.is_file())
        seen = set()
        for path in itertools.islice(files, _MAX_SNIFFED):
            try:
                name = _format_of(path, suffix)
            except (OSError, DataError):
                continue
            if name and name not in seen:
                seen.add(name)
                yield name, path.name


def _format_of(path: Path, suffix: str) -> str | None:
    """Return the format that a file appears to have, read as one with this extension."""
    forms = ((name, form.looks_like.get(suffix)) for name, form in FORMATS.items())
    return next((name for name, looks_like in forms if looks_like and looks_like(path)), None)


def _formats_of_label_images(folder: Path) -> dict[str, str]:
    """Return the possible kinds of label images: classes if a file names them, instances if values encode them."""
    files = (path for path in data_files(folder) if path.suffix.lower() in IMAGE_SUFFIXES)
    paths = list(itertools.islice(files, _MAX_SNIFFED))
    if not paths:
        return {}
    evidence = paths[0].name
    if not all(map(has_one_channel, paths)):
        read_label_colors(paths[0])  # as JPEG, they are not label images
        class_file = find_class_file(folder)
        return {"semantic_maps": evidence} if class_file and parse_class_file(class_file).colors else {}
    if any(read_label_map(path).max() >= CLASS_FACTOR for path in paths):
        return {"instance_maps": evidence}
    if find_class_file(folder):
        return {"semantic_maps": evidence}
    return {"semantic_maps": evidence, "instance_maps": evidence}
