"""Pascal VOC: one XML file per image, with boxes in pixels (http://host.robots.ox.ac.uk/pascal/VOC/).

Coordinates begin at 1 and both ends belong to the box, as VOC defines it. In a dataset where a coordinate is 0, they
are taken to begin at 0 with exclusive ends, as some tools write them, and so are fractions. Classes are in the order of
classes.txt, if it exists, otherwise by name. The flags `difficult`, `truncated` and `occluded` are kept.
"""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np

from vitkit.data.formats.annotated import AnnotatedImages, add_image_file, note_other_images, read_head
from vitkit.data.formats.class_files import parse_class_file
from vitkit.data.formats.sizes import MAX_FRACTION
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, ImageFiles, data_files, is_hidden, one_form, split_of
from vitkit.io.parsing import coordinate, read_xml
from vitkit.io.segmentations import rotate_box
from vitkit.io.text_files import read_lines

_FLAGS = ("difficult", "truncated", "occluded")
_ROTATION = "attributes/attribute[name='rotation']/value"
"""Where CVAT writes by how many degrees a box is turned."""
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def is_voc_file(path: Path) -> bool:
    """Whether an XML file looks like one of Pascal VOC's."""
    head = read_head(path).replace(b"\0", b"")  # UTF-16
    return b"<annotation" in head and b"<annotations" not in head


def read_voc(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read the XML files of a folder, or a single one.

    Args:
        annotations: folder of the XML files, or its parent (VOCdevkit/VOC2012).
        images: folder of the images; None: JPEGImages beside the XML files' folder, or that folder itself.
    Raises:
        DataError: a file is invalid.
    """
    single = annotations if annotations.is_file() else None
    folder = annotations.parent if single else annotations
    if (folder / "Annotations").is_dir():
        folder = folder / "Annotations"
    if images is None:
        siblings = (folder.parent / name for name in ("JPEGImages", "images"))
        images = next((path for path in siblings if path.is_dir()), folder)
    files = ImageFiles(images)
    data = AnnotatedImages("voc", annotations, images)
    paths = [single] if single else [path for path in data_files(folder) if path.suffix.lower() == ".xml"]
    roots = {path: read_xml(path) for path in paths}
    objects = {path: _objects(root, path) for path, root in roots.items()}
    corners = np.array([numbers for of_file in objects.values() for _, numbers in of_file]).reshape(-1, 4)
    fractions = bool(corners.max(initial=0) <= MAX_FRACTION and (corners % 1).any())
    origin = int(not fractions and (corners[:, :2] > 0).all())
    if fractions:
        data.notes.append("no number is above 1, apart from rounding: the boxes are fractions of their image")
    elif not origin:
        data.notes.append("coordinates begin at 0, not at 1 as VOC defines: the ends do not belong to the boxes")
    listed = _read_classes(folder)
    for name in listed:
        data.category_id(name)
    used = set()
    names = {}
    for path, root in roots.items():
        inside = path.relative_to(folder).parent.as_posix()
        names[path] = f"{inside}/{path.stem}", f"{inside}/{_text(root, 'filename', path) or path.stem}"
    files.expect(names.values())
    note_other_images(data, files, names)
    for path, root in roots.items():
        name = files.find(*names[path])
        if name is None:
            data.leave_out("XML files without an image", path.name)
            continue
        used.add(name)
        _add_file(data, files, name, path, root, objects[path], origin, fractions)
    if single is None:
        data.leave_out("images without an XML file", *(name for name in files.names if name not in used))
    if turned := sum("segmentation" in annotation for annotation in data.annotations):
        data.notes.append(f"boxes turned by the attribute rotation, as CVAT writes it, which became polygons: {turned}")
    if not listed:
        data.sort_classes()
    _add_splits(data, folder.parent)
    return data


def _add_file(
    data: AnnotatedImages,
    files: ImageFiles,
    name: str,
    path: Path,
    root: ElementTree.Element,
    objects: Iterable[tuple[ElementTree.Element, list[float]]],
    origin: int,
    fractions: bool,
) -> None:
    width, height = (_number(root, f"size/{side}", path, default=0) for side in ("width", "height"))
    size = (int(width), int(height))
    image = add_image_file(data, files, name, size=size if size == (width, height) else (0, 0))
    for obj, corners in objects:
        if image is None:
            return
        sides = (image["width"], image["height"]) if fractions else (1, 1)
        x0, y0, x1, y1 = (corner * side for corner, side in zip(corners, sides * 2))
        label = data.strip_name(_text(obj, "name", path), f"annotations: '{path}': the name of an object")
        flags = {flag: 1 for flag in _FLAGS if _number(obj, flag, path, default=0)}
        for shape in obj.iterfind("polygon"):
            data.leave_out(f"shapes of type {shape.tag} beside a box", f"{path.name} {label!r}")
        box = [x0 - origin, y0 - origin, x1 - x0 + origin, y1 - y0 + origin]
        if min(box[2:]) < 0:
            raise DataError(f"annotations: '{path}': {label!r} from {x0:g}, {y0:g} to {x1:g}, {y1:g}. Swap its ends.")
        fields = {"bbox": box}
        if (degrees := _number(obj, _ROTATION, path, default=0)) % 360:
            fields = rotate_box(box[0], box[1], box[0] + box[2], box[1] + box[3], degrees)
        data.add_object(image["id"], label, **fields, **flags)


def _objects(root: ElementTree.Element, path: Path) -> list[tuple[ElementTree.Element, list[float]]]:
    """Return the object and the corners of each box: some tools write all boxes of a class into one object."""
    objects = []
    for obj in root.iter("object"):
        boxes = obj.findall("bndbox")
        if not boxes:
            others = ", ".join(child.tag for child in obj)[:100] or "nothing"
            raise DataError(f"annotations: '{path}': an object has no bndbox, but {others}. Export it with boxes.")
        objects += [(obj, [_number(box, corner, path) for corner in _CORNERS]) for box in boxes]
    return objects


def _text(element: ElementTree.Element, tag: str, path: Path) -> str:
    """Return the text of the only element with a tag, "" if there is none; raise a DataError if there are several."""
    found = element.findall(tag)
    if len(found) > 1:
        raise DataError(
            f"annotations: '{path}': {element.tag} has {len(found)} elements '{tag}'; expected one. Correct it."
        )
    return (found[0].text or "") if found else ""


def _number(element: ElementTree.Element, tag: str, path: Path, default: float | None = None) -> float:
    text = _text(element, tag, path).strip()
    if not text and default is not None:
        return default
    return coordinate(text, f"annotations: '{path}': {element.tag}/{tag}")


def _read_classes(folder: Path) -> list[str]:
    files = (parent / name for parent in (folder.parent, folder) for name in ("classes.txt", "labels.txt"))
    file = next((file for file in files if file.is_file()), None)
    return list(parse_class_file(file).names.values()) if file else []


def _keys(name: str) -> list[str]:
    """Return what the name of an image may be known by: its path and its last parts, in one case, without ending."""
    path = PurePosixPath(one_form(name).replace("\\", "/").casefold())
    parts = (path.with_suffix("") if path.suffix in IMAGE_SUFFIXES else path).parts
    return ["/".join(parts[k:]) for k in range(len(parts))]


def _add_splits(data: AnnotatedImages, folder: Path) -> None:
    """Set the splits that ImageSets/Main names."""
    files = [path for path in sorted((folder / "ImageSets" / "Main").glob("*.txt")) if not is_hidden(path.name)]
    lists = {path: split_of(path.stem) for path in files}
    if "train" not in lists.values():
        lists |= {path: "train" for path in lists if path.stem == "trainval"}
    ids: dict[str, set[int]] = {}
    for image in data.images:
        for key in _keys(image["file_name"]):
            ids.setdefault(key, set()).add(image["id"])
    ids |= {_keys(image["file_name"])[0]: {image["id"]} for image in data.images}
    lists = {path: split for path, split in lists.items() if split}
    for path, split in lists.items():
        for _, line in read_lines(path, "annotations", remedy="Expected an image's name in each line."):
            # After a name, which may have blanks, a class's list has a number, others the path of the XML file.
            texts = (line, line.rsplit(maxsplit=1)[0], line.split()[0])
            found = next((ids[key] for text in texts for key in _keys(text) if len(ids.get(key, ())) == 1), None)
            if found:
                data.add_to_split(*found, split)
            else:
                data.leave_out(f"names in {path.name} without annotated image", line)
