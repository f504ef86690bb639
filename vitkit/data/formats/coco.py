"""COCO's detection files: a single one, or a folder with one for each split, as Roboflow exports them."""

import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.data.formats.exporters import explain_issues, find_listed_files, read_exporters_fields
from vitkit.errors import DataError
from vitkit.io.coco_schema import detection_issues, raise_issues
from vitkit.io.folders import IMAGE_SUFFIXES, ImageFiles, data_files, is_hidden, is_output, split_words
from vitkit.io.image_files import ImageStore
from vitkit.io.json_files import pause_gc, read_json

_INSTANCES, _KEYPOINTS = "instances_", re.compile("(person_)?keypoints_")
"""Beginnings of the names of COCO's files: all objects, and people with keypoints in the same images."""
_NUM_LOOKED_UP = 10
"""Number of listed images that are looked for to find their folder."""


def read_coco(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read COCO's detection files, keeping their ids.

    Args:
        annotations: the file, or a folder of files.
        images: folder of the images; None: that of the file, or `images` beside it or beside its folder.
    Raises:
        DataError: a file is invalid, or files have different categories or share an id.
    """
    if annotations.is_file():
        content, notes = _read(annotations)
        folder = images or _images_of(annotations, [image["file_name"] for image in content["images"]])
        notes += find_listed_files(content, folder)
        return AnnotatedImages("coco", annotations, folder, content, notes=notes)
    paths = [p for p in data_files(annotations) if p.suffix.lower() == ".json" and is_coco_file(p)]
    beside = annotations / "images"
    files = ImageFiles(images or (beside if beside.is_dir() else annotations))
    data = AnnotatedImages("coco", annotations, files.folder)
    paths, keypoints = _without_keypoints(paths)
    data.notes += [
        f"{p.name}: left out, as {_INSTANCES}* has its images; give it alone for keypoints" for p in keypoints
    ]
    split_of = {path: _split_of(path, annotations) for path in paths}
    contents = {path: _read(path) for path in paths}
    ids = {
        part: [entry.get("id") for c, _ in contents.values() for entry in c[part]] for part in ("images", "annotations")
    }
    keeps = {part for part, listed in ids.items() if None not in listed and len({*listed}) == len(listed)}
    taken: set[str] = set()
    # Splits with a folder come first: others' images may be in it, but not those that are listed by the folder's split.
    for path, split in sorted(split_of.items(), key=lambda item: item[1] not in files.splits):
        content, notes = contents[path]
        data.notes += [f"{path.name}: {note}" for note in notes]
        if data.categories and data.categories != content["categories"]:
            raise DataError(f"'{path}' and '{paths[0]}' have different categories. Merge them by `vitkit data merge`.")
        data.categories[:] = content["categories"]
        _add_file(data, files, path, content, split, {*split_of.values()} - {split}, keeps, taken)
    return data


def _without_keypoints(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files without those of keypoints whose images COCO's layout also lists in a file of instances; and
    these."""
    instances = {path for path in paths if path.name.startswith(_INSTANCES)}
    repeated = [
        path
        for path in paths
        if (match := _KEYPOINTS.match(path.name)) and path.with_name(_INSTANCES + path.name[match.end() :]) in instances
    ]
    return [path for path in paths if path not in repeated], repeated


def is_coco_file(path: Path) -> bool:
    """Return whether a JSON file looks like a COCO detection file."""
    data = path.read_bytes()
    has_parts = all(f'"{key}"'.encode() in data for key in ("images", "annotations", "categories"))
    return has_parts and b'"segments_info"' not in data


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a valid file, and notes on what was converted to COCO's form."""
    with pause_gc():
        content = read_json(path)
        notes = read_exporters_fields(content)
        if issues := detection_issues(content):
            explain_issues(issues, path.name)
            raise_issues(issues, path.name)
    return {part: content[part] for part in ("images", "annotations", "categories")}, notes


def _add_file(
    data: AnnotatedImages,
    files: ImageFiles,
    path: Path,
    content: dict[str, Any],
    split: str,
    other_splits: set[str],
    keeps: Set[str],
    taken: set[str],
) -> None:
    """Add a file's images and annotations, under new ids unless `keeps` has "images" or "annotations"; those of a split
    with a folder are put into `taken`, and others' are not among these."""
    inside = path.parent.relative_to(data.source).as_posix()
    has_folder = split in files.splits
    ids = {}
    for image in content["images"]:
        listed = image["file_name"]
        # The splits may have images of the same names.
        names = (f"{inside}/{listed}", f"{split}/{listed}", listed)
        name = files.find(*names, split=split, other_splits=other_splits if has_folder else set())
        if name is None or (not has_folder and name in taken):
            data.leave_out(f"images that {path.name} lists but the folder does not have", listed)
            continue
        if has_folder:
            taken.add(name)
        new_id = image["id"] if "images" in keeps else len(data.images) + 1
        ids[image["id"]] = new_id
        data.images.append({"id": new_id, "file_name": name, "width": image["width"], "height": image["height"]})
        data.add_to_split(new_id, split)
    for annotation in content["annotations"]:
        if annotation["image_id"] in ids:
            number = annotation["id"] if "annotations" in keeps else len(data.annotations) + 1
            data.annotations.append({**annotation, "id": number, "image_id": ids[annotation["image_id"]]})


def _split_of(path: Path, root: Path) -> str:
    """Return the split named in a file's or its folder's name; otherwise the file's name."""
    for text in (path.stem, *reversed(path.parent.relative_to(root).parts)):
        if words := split_words(text):
            return words[-1][0]
    return path.stem


def _images_of(path: Path, names: Sequence[str]) -> Path:
    """Return the folder that has a file's images: one of the first of their names, or else any image."""
    folders = [path.parent, path.parent / "images", path.parent.parent / "images"]
    for folder in folders:
        if any(map(ImageStore(folder).has, names[:_NUM_LOOKED_UP])):
            return folder
    for folder in folders:
        if folder.is_dir() and any(
            file.suffix.lower() in IMAGE_SUFFIXES and not is_hidden(file.name) and not is_output(file)
            for file in folder.iterdir()
        ):
            return folder
    return path.parent
