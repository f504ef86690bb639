"""YOLO: one text file per image, a line `CLASS CX CY W H` in fractions for each object, and a YAML of the names.

Polygons (`CLASS X Y X Y X Y ...`), the layouts of Ultralytics and Roboflow, and Darknet's obj.data, as CVAT writes it,
are also read. Poses (`CLASS CX CY W H`, then points) have keypoints if the YAML's `kpt_shape` says so, otherwise their
boxes are read. An image without a text file has no objects.
Class ids are those of the text files.
"""

import codecs
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from os.path import exists
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitkit.data.formats.annotated import AnnotatedImages, add_image_file, read_head
from vitkit.data.formats.class_files import parse_class_file
from vitkit.errors import DataError
from vitkit.io.folders import ImageFiles, data_files, is_hidden, one_form, split_of
from vitkit.io.parsing import check_count, check_distinct, class_name, class_number, read_yaml
from vitkit.io.segmentations import polygon_fields, round_pixels
from vitkit.io.text_files import read_lines
from vitkit.text_format import is_name

_NAME_FILES = ("classes.txt", "obj.names", "labels.txt", "_darknet.labels")
_NO_SUBSETS = ("classes", "names", "backup", "eval", "top")
"""Keys of obj.data that do not name a list of images."""
_POSE_MARGIN = 1.2
"""How far, in half sides of its box, a point of a pose may lie from the center: some tools draw boxes narrowly."""
_MIN_POSES = 3
_MAX_BYTES = 1 << 25
"""Size of the largest text file of an image."""
_LARGEST_FRACTION = 1.5
"""Numbers above this are not fractions of an image, even with rounding or a box that crosses the border."""
_LINE = re.compile(rb"\s*\d+(\.0*)?(\s+[-+.\deE]+){4,}\s*")


def is_yolo_yaml(path: Path) -> bool:
    """Whether a YAML file looks like YOLO's; raises like `read_yaml_settings`."""
    return bool(read_yaml_settings(path))


def is_obj_data(path: Path) -> bool:
    """Whether a file is Darknet's obj.data."""
    return bool(_read_obj_data(path))


def is_yolo_text(path: Path) -> bool:
    """Whether a text file looks like one of YOLO's, by its first line."""
    head = read_head(path)
    if len(head) < path.stat().st_size:  # a number may be cut in two
        head = head[: head.rfind(b" ") + 1]
    line = next(filter(None, map(bytes.strip, head.removeprefix(codecs.BOM_UTF8).splitlines())), b"")
    return _LINE.fullmatch(line) is not None


def read_yolo(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read YOLO's labels.

    Args:
        annotations: data.yaml, obj.data, or the folder of the text files, which may also contain the images.
        images: folder of the images; None: the one that data.yaml names, or `images` beside `labels`.
    Raises:
        DataError: a file is missing or a line is invalid.
    """
    obj_data = annotations / "obj.data" if annotations.is_dir() else annotations
    if obj_data.suffix.lower() == ".data" and obj_data.is_file() and (lists := _read_obj_data(obj_data)):
        return _read_lists(obj_data, lists, images)
    if annotations.is_file():
        return _read_yaml(annotations, images)
    labels = annotations / "labels" if (annotations / "labels").is_dir() else annotations
    if images is None:
        sibling = labels.parent / "images"
        images = sibling if labels.name == "labels" and sibling.is_dir() else labels
    files = ImageFiles(images)
    data = AnnotatedImages("yolo", annotations, images)
    yaml, settings = _settings_near(labels)
    reader = _Reader(data, files, settings, labels, labels)
    root, below = annotations.resolve(), images.resolve()
    listed: dict[str, list[str]] = {}
    if yaml and yaml.parent.resolve() == root and below.is_relative_to(root):
        prefix = f"{below.relative_to(root).as_posix()}/".removeprefix("./")
        every = ImageFiles(annotations) if prefix else files
        try:
            for split, name in _listed_images(settings, yaml, annotations, every, data.notes):
                listed.setdefault(name.removeprefix(prefix), []).append(split)
        except DataError as error:
            data.notes.append(f"the splits of {yaml.name} are not read: {error}")
            listed = {}
    if len({*map(tuple, listed.values())}) < 2:  # nothing is apart from anything
        listed = {}
    for name in files.names:
        for split in listed.get(name, [None]):
            reader.add(name, split)
    reader.finish()
    if data.images and not reader.image_of:
        raise DataError(
            f"'{labels}' has no label files for the images in '{images}', such as '{PurePosixPath(files.names[0]).stem}"
            ".txt'. Give the two folders that belong together."
        )
    return data


def _read_obj_data(path: Path) -> dict[str, Path]:
    """Return the lists of images that Darknet's obj.data names, by subset: `Train = data/Train.txt`; {} for none."""
    lines = [line.partition("=") for _, line in read_lines(path, "annotations", remedy="Expected lines KEY = VALUE.")]
    if not all(separator for _, separator, _ in lines):
        return {}
    values = {key.strip(): value.strip() for key, _, value in lines if key.strip() not in _NO_SUBSETS}
    # The paths are those of Darknet's folder; the files lie beside obj.data.
    files = {key: path.parent / PurePosixPath(value.replace("\\", "/")).name for key, value in values.items()}
    return {key: file for key, file in files.items() if file.is_file()}


def _read_lists(path: Path, lists: Mapping[str, Path], images: Path | None) -> AnnotatedImages:
    """Read the images that obj.data lists, by subset; subsets that are not splits stay together when data are split."""
    root = images or path.parent
    data = AnnotatedImages("yolo", path, root)
    files = ImageFiles(root)
    reader = _Reader(data, files, {}, path.parent, path.parent)
    for subset, file in lists.items():
        split = split_of(subset)
        for _, line in read_lines(file, "annotations", remedy="Expected an image's path in each line."):
            name = files.find(line)
            if name is None:
                data.leave_out(f"images that {file.name} lists but the folder does not have", line)
                continue
            image = reader.add(name, split)
            if image is not None and split is None:
                data.recordings[image["id"]] = f"subset {subset}"
    data.leave_out("images that no list names", *(name for name in files.names if name not in reader.images))
    reader.finish()
    return data


def read_yaml_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file that must hold `names`; raise a DataError if the file cannot be read, or has no class names."""
    settings = read_yaml(path)
    if not isinstance(settings, dict) or not isinstance(settings.get("names"), list | dict):
        raise DataError(
            f"annotations: '{path}' has no class names; expected YOLO's data.yaml: `train:` and `val:`, folders of "
            "images, and `names:`, a list or numbers with names."
        )
    return settings


def _read_yaml(path: Path, images: Path | None) -> AnnotatedImages:
    settings = read_yaml_settings(path)
    root = images or path.parent
    data = AnnotatedImages("yolo", path, root)
    files = ImageFiles(root)
    reader = _Reader(data, files, settings, path.parent, None)
    base = settings.get("path")
    parts = PurePosixPath(str(base).replace("\\", "/")).parts
    own_names = {root.resolve().name, os.path.basename(os.path.abspath(root))}
    if images is None and ("/" in parts or ".." in parts) and parts[-1] not in own_names:
        data.notes.append(f"path: {base!r:.200} leads out of '{root}', and is not followed: give the images' folder")
    for split, name in _listed_images(settings, path, root, files, data.notes):
        reader.add(name, split)
    if not data.images:
        raise DataError(f"{path.name}: has neither train nor val; expected folders of images. Add them.")
    if not reader.image_of:
        raise DataError(
            f"{path.name}: no image has a label file, a .txt in `labels` beside `images`, or beside the image. Put "
            "the label files there."
        )
    tops = {name.partition("/")[0] for name in reader.images}  # others may be other datasets
    unnamed = (name for name in files.names if name not in reader.images and name.partition("/")[0] in tops)
    data.leave_out(f"images that {path.name} does not name", *unnamed)
    reader.finish()
    return data


def _listed_images(
    settings: Mapping[str, Any], path: Path, root: Path, files: ImageFiles, notes: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield the split and the name of each image that a YAML names; raise a DataError if there are none of a split."""
    for key, value in settings.items():
        split = split_of(key)
        if split is None:
            continue
        for entry in value if isinstance(value, list) else [value] if value else []:
            if not is_name(entry):
                raise DataError(
                    f"{path.name}: {key} is {reprlib.repr(entry)}; expected a folder or a file. Correct it."
                )
            names = list(_split_names(str(entry), settings, path, root, files))
            if not names and split == "test":
                notes.append(f"{path.name} names a test split, '{entry}', which does not exist")
            elif not names:
                raise DataError(
                    f"{path.name}: {key} is '{entry}', and there is no such image below '{root}'. Correct it, or give "
                    "the folder that it is relative to as the images."
                )
            yield from ((split, name) for name in names)


def _split_names(entry: str, settings: Mapping[str, Any], path: Path, root: Path, files: ImageFiles) -> Iterator[str]:
    """List the images of a split, a folder or a list of files, according to the layouts in use."""
    # Roboflow writes ../train/images for a folder beside the YAML; `path` may be from another machine.
    entry = entry.replace("\\", "/")
    stripped = entry.lstrip("./")
    base = settings.get("path") or "."
    base = Path(base if is_name(base) else ".")
    for location in (root / base / entry, path.parent / base / entry, root / entry, root / stripped):
        location = Path(location).resolve()
        if not location.is_relative_to(root.resolve()) or not exists(location):
            continue
        if location.is_file():
            for _, line in read_lines(location, "annotations", remedy="Expected an image's path in each line."):
                name = files.find(line.removeprefix("./"))
                if name is None and is_hidden(PurePosixPath(line.replace("\\", "/")).name):
                    continue
                if name is None:
                    raise DataError(f"'{location}' lists {line!r:.200}, which is not below '{root}'. Correct it.")
                yield name
            return
        prefix = location.relative_to(root.resolve()).as_posix() + "/"
        yield from (name for name in files.names if prefix == "./" or name.startswith(prefix))
        return


def _settings_near(labels: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the YAML file that belongs to a folder of text files, and its content; None and {} if there is none.

    Raises:
        DataError: data.yaml is invalid, or several files of the dataset name other classes.
    """
    labels = Path(os.path.abspath(labels))
    dataset = labels.parent if labels.name == "labels" else labels
    for folder in (labels, *labels.parents[:2]):
        found: dict[Path, dict[str, Any]] = {}
        for path in sorted(p for p in folder.glob("*.y*ml") if p.suffix in (".yaml", ".yml") and not is_hidden(p.name)):
            try:
                found[path] = read_yaml_settings(path)
            except DataError:
                if path.stem == "data":
                    raise
        if folder == dataset.parent:  # a folder of several datasets, perhaps
            own = {p: s for p, s in found.items() if dataset.name in (p.stem, *_folders_of(s))}
            found = own or {p: s for p, s in found.items() if not any(exists(folder / f) for f in _folders_of(s))}
        found = {p: s for p, s in found.items() if p.stem == "data"} or found
        if len({repr(sorted(_numbered(settings["names"]).items())) for settings in found.values()}) == 1:
            return next(iter(found.items()))
        if found and folder != dataset.parent:
            names = ", ".join(path.name for path in found)
            raise DataError(f"'{labels}': {names} in '{folder}' name other classes. Give the one that belongs to it.")
    return None, {}


def _folders_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the last folder of a YAML's `path`, or the first one of its `train`, unless that is the folder of a split:
    the dataset that it is of."""
    path, train = (str(settings.get(key) or "").replace("\\", "/").lstrip("./") for key in ("path", "train"))
    names = [*PurePosixPath(path).parts[-1:], *PurePosixPath(train).parts[:-1][:1]]
    return [name for name in names if not split_of(name)]


def _numbered(names: list | dict) -> dict[str, Any]:
    """Return a YAML's names by number."""
    return dict(names.items() if isinstance(names, Mapping) else ((str(k), name) for k, name in enumerate(names)))


def _find_class_names(settings: Mapping[str, Any], folder: Path) -> dict[int, str]:
    """Return the class names by number, from the YAML or a text file in a folder or above it; {} if there are none."""
    names = settings.get("names")
    if names is None:
        files = (location / name for location in (folder, folder.parent) for name in _NAME_FILES)
        file = next((file for file in files if file.is_file()), None)
        if file is None:  # as beside the text files of each split
            below: dict[Path, dict[int, str]] = {}
            for path in data_files(folder):
                if path.name in _NAME_FILES and not is_yolo_text(path):
                    with suppress(DataError):  # as an empty one
                        below[path] = parse_class_file(path).names
            file = min(below, default=None)
            if file and (other := next((path for path, names in below.items() if names != below[file]), None)):
                raise DataError(f"'{file}' and '{other}' name other classes. Convert their folders one by one.")
        return parse_class_file(file).names if file else {}
    pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
    context = f"'{folder}': names of the classes"
    numbered = {class_number(key, f"{context}: a key"): class_name(v, f"{context}: {key!r:.50}") for key, v in pairs}
    check_distinct(numbered.values(), context)
    return dict(sorted(numbered.items()))


class _Long(NamedTuple):
    """A line with more numbers than a box has, read as a polygon."""

    annotation: dict[str, Any]
    values: list[float]
    width: int
    height: int
    context: str


class _Reader:
    """Adds images, with the objects of their text files, to a dataset."""

    def __init__(
        self, data: AnnotatedImages, files: ImageFiles, settings: Mapping[str, Any], folder: Path, labels: Path | None
    ):
        self.data, self.files, self.labels = data, files, labels
        self.images: dict[str, dict[str, Any] | None] = {}
        """The images that were added, by name; None for those that cannot be read."""
        self.long_lines: list[_Long] = []
        """The lines with more numbers than a box has, as long as all of them may be poses."""
        self.may_be_poses = True
        self.label_names: dict[Path, dict[str, Path]] = {}
        self.image_of: dict[Path, str] = {}
        """The image of each text file that was read."""
        self.names = _find_class_names(settings, folder)
        self.is_named = bool(self.names)
        if not self.is_named:
            data.notes.append("no data.yaml or classes.txt names the classes: they are called class_0, class_1, …")
        data.categories.extend({"id": number, "name": name} for number, name in self.names.items())
        shape = settings.get("kpt_shape") or ["0", "0"]
        is_shape = isinstance(shape, list) and all(isinstance(n, str) and re.fullmatch(r"\d{1,3}", n) for n in shape)
        if not is_shape or len(shape) != 2 or shape[1] not in ("0", "2", "3"):
            raise DataError(
                f"'{folder}': kpt_shape is {shape!r:.100}; expected [points, 2 or 3]. Correct the YAML file."
            )
        self.num_keypoints, self.keypoint_size = map(int, shape)
        self.keypoint_fields = _keypoint_fields(settings, self.num_keypoints, folder) if self.num_keypoints else {}
        for category in data.categories:
            category.update(self.keypoint_fields)

    def _label_file(self, name: str) -> Path | None:
        """Return an image's text file: in the folder of labels, in `labels` beside `images`, or beside the image."""
        path, image = PurePosixPath(name), self.files.folder / name
        candidates = [] if self.labels is None else [self.labels / path, self.labels / path.name]
        parts = image.parts
        if "images" in parts[:-1]:
            k = len(parts) - 1 - parts[::-1].index("images", 1)
            candidates.append(Path(*parts[:k], "labels", *parts[k + 1 :]))
        candidates = [file.with_suffix(".txt") for file in (*candidates, image)]
        exact = (file for file in candidates if file.is_file())
        return next(chain(exact, filter(None, map(self._in_other_form, candidates))), None)

    def _in_other_form(self, file: Path) -> Path | None:
        """Return the file whose name is the same but for its case and Unicode form."""
        folder = file.parent
        if folder not in self.label_names:
            entries = folder.iterdir() if folder.is_dir() else ()
            self.label_names[folder] = {one_form(entry.name).casefold(): entry for entry in entries}
        return self.label_names[folder].get(one_form(file.name).casefold())

    def add(self, name: str, split: str | None) -> dict[str, Any] | None:
        """Add an image, with its objects if it has a text file, unless it was added for another split; return its
        entry."""
        is_new = name not in self.images
        if is_new:
            self.images[name] = add_image_file(self.data, self.files, name)
        image = self.images[name]
        if image is not None and split is not None:
            self.data.add_to_split(image["id"], split)
        if image is not None and is_new and (label_file := self._label_file(name)):
            if (other := self.image_of.setdefault(label_file, name)) != name:
                raise DataError(
                    f"'{label_file}' is the only text file of two images, {other} and {name}. Put the text files into "
                    "folders like those of the images, or give each image a unique name."
                )
            self._add_objects(image, label_file)
        return image

    def finish(self) -> None:
        """Count text files without an image; reduce lines to boxes if all are poses, which no `kpt_shape` tells."""
        self._count_unused()
        if not _are_poses([long.values for long in self.long_lines]):
            self._take_as_polygons()
        for annotation, (x, y, width, height, *_), image_width, image_height, context in self.long_lines:
            del annotation["segmentation"]
            corner = (x - width / 2) * image_width, (y - height / 2) * image_height
            box = [round_pixels(v) for v in (*corner, width * image_width, height * image_height)]
            annotation |= {"bbox": box, "area": round_pixels(box[2] * box[3])}
            self.data.leave_out("poses, although no kpt_shape says so, of which only the box is read", context[:100])

    def _count_unused(self) -> None:
        if self.labels:
            files = data_files(self.labels)
        else:
            folders = {*self.label_names, *(file.parent for file in self.image_of)}
            files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
        # Images that belong to no split, or cannot be read, have text files that were not read.
        used = {*self.image_of, *(self._label_file(name) for name in self.files.names if not self.images.get(name))}
        for file in sorted({file for file in files if file.suffix.lower() == ".txt"} - used):
            with suppress(OSError):
                if not is_hidden(file.name) and (not file.stat().st_size or is_yolo_text(file)):
                    self.data.leave_out("label files without an image", file.name)

    def _take_as_polygons(self) -> None:
        """Check the lines that might have been poses as the polygons that they were read as."""
        for long in self.long_lines:
            _check_polygon(long.values, long.context)
            _check_fractions(long.values, long.context)
        self.long_lines, self.may_be_poses = [], False

    def _add_objects(self, image: dict[str, Any], label_file: Path) -> None:
        seen = set()
        lines = read_lines(label_file, "annotations", remedy="Expected lines of text.", max_bytes=_MAX_BYTES)
        check_count(len(lines), f"'{label_file}'")
        for number, line in lines:
            tokens = tuple(line.split())
            if tokens in seen:
                self.data.leave_out("duplicate lines", f"{label_file.name} line {number}")
            else:
                seen.add(tokens)
                self._add_object(image, tokens, f"'{label_file}' line {number}: {line[:80]!r}")

    def _add_object(self, image: Mapping[str, Any], tokens: Sequence[str], context: str) -> None:
        label, values = _numbers(tokens, context)
        points: dict[str, Any] = {}
        if self.num_keypoints and len(values) > 5:
            shape, count = (self.num_keypoints, self.keypoint_size), 4 + self.num_keypoints * self.keypoint_size
            if len(values) != count:
                raise DataError(
                    f"{context}: got {len(values)} numbers after the class; kpt_shape {[*shape]} needs {count}. "
                    "Correct the line, or kpt_shape."
                )
            points = _read_points(values[4:], self.keypoint_size, image, context)
            values = values[:4]
        if len(values) == 5 and not 0 <= values[4] <= 1:
            raise DataError(
                f"{context}: the fifth number {values[4]:g} is not a confidence, 0 to 1. If it is the angle of a "
                "turned box: write its four corners, `CLASS X Y X Y X Y X Y`."
            )
        if label not in self.names and self.is_named:
            numbers = f"{min(self.names)} to {max(self.names)}"
            raise DataError(
                f"{context}: no class is numbered {label} (they are {numbers}). Correct it, or name the class."
            )
        if label not in self.names:
            self.names[label] = f"class_{label}"
            self.data.categories.append({"id": label, "name": self.names[label], **self.keypoint_fields})
        # The flags of a pose are no fractions.
        is_pose = self.may_be_poses and len(values) > 5 and _is_pose(values, 3)
        is_polygon = len(values) > 5 and not is_pose
        if is_polygon:
            _check_polygon(values, context)
        _check_fractions(values if is_polygon else values[:4], context)
        width, height = image["width"], image["height"]
        if len(values) == 5:
            self.data.leave_out("fifth numbers of lines, taken as confidences", context[:100])
        if len(values) <= 5:
            center_x, center_y, box_width, box_height = values[:4]
            if box_width < 0 or box_height < 0:
                raise DataError(f"{context}: a size is negative; expected `CLASS CX CY W H`. Correct the line.")
            x, y = (center_x - box_width / 2) * width, (center_y - box_height / 2) * height
            self.data.add_object(image["id"], label, [x, y, box_width * width, box_height * height], **points)
            return
        polygon = [value * (height if k % 2 else width) for k, value in enumerate(values[: len(values) // 2 * 2])]
        self.data.add_object(image["id"], label, **polygon_fields([polygon]))
        if self.may_be_poses:
            self.long_lines.append(_Long(self.data.annotations[-1], values, width, height, context))
            if not is_pose and not _is_pose(values, 2):
                self._take_as_polygons()


def _keypoint_fields(settings: Mapping[str, Any], count: int, folder: Path) -> dict[str, Any]:
    """Return the fields of categories with the YAML's keypoints: `kpt_names` and `flip_idx`, if it has them."""
    names = settings.get("kpt_names")
    names = next(iter(names.values()), None) if isinstance(names, Mapping) else names
    names = [f"point_{k}" for k in range(count)] if names is None else names
    if not isinstance(names, list) or len(names) != count or not all(map(is_name, names)):
        raise DataError(f"'{folder}': kpt_names is {names!r:.200}; expected {count} names. Correct the YAML file.")
    order = settings.get("flip_idx")
    if order is None:
        return {"keypoints": names}
    is_order = isinstance(order, list) and sorted(map(str, order)) == sorted(map(str, range(count)))
    if not is_order or any(int(order[int(k)]) != place for place, k in enumerate(order)):
        raise DataError(
            f"'{folder}': flip_idx is {order!r:.200}; expected each number 0 to {count - 1} once, so that two points "
            "exchange their places or one keeps its own. Correct the YAML file."
        )
    pairs = [[place + 1, int(k) + 1] for place, k in enumerate(order) if place < int(k)]
    return {"keypoints": names, "flip_pairs": pairs}


def _read_points(values: Sequence[float], size: int, image: Mapping[str, Any], context: str) -> dict[str, Any]:
    """Return an object's keypoints of `size` numbers each: fractions of the image and, of three, visibility."""
    keypoints = []
    for x, y, *flag in zip(*(values[k::size] for k in range(size))):
        seen = flag[0] if flag else 2 * ((x, y) != (0, 0))
        if seen not in (0, 1, 2):
            raise DataError(f"{context}: {seen:g} is not a visibility, 0, 1 or 2. Correct the line, or kpt_shape.")
        if seen and not (0 <= x <= 1 and 0 <= y <= 1):
            raise DataError(f"{context}: the point ({x:g}, {y:g}) is outside the image, 0 to 1. Correct the line.")
        pixels = [round_pixels(x * image["width"]), round_pixels(y * image["height"])]
        keypoints += [*pixels, int(seen)] if seen else [0, 0, 0]
    return {"keypoints": keypoints, "num_keypoints": sum(map(bool, keypoints[2::3]))}


def _is_pose(values: Sequence[float], size: int) -> bool:
    """Whether numbers may be a box and points in it (or absent) of `size` numbers, the third a flag 0, 1 or 2."""
    x, y, width, height, *points = values
    if len(points) % size or not points:
        return False
    if size == 3 and not {*points[2::3]} <= {0.0, 1.0, 2.0}:
        return False
    reach_x, reach_y = (side / 2 * _POSE_MARGIN for side in (width, height))
    return all(
        (a == b == 0) or (abs(a - x) <= reach_x and abs(b - y) <= reach_y)
        for a, b in zip(points[::size], points[1::size])
    )


def _check_polygon(values: Sequence[float], context: str) -> None:
    if len(values) % 2:
        raise DataError(
            f"{context}: {len(values)} numbers are not a polygon; expected pairs x y. Correct the line, or add "
            "kpt_shape to data.yaml if it is a pose."
        )


def _are_poses(lines: Sequence[Sequence[float]]) -> bool:
    """Whether all lines with more numbers than a box are poses.

    Points with flags are recognized in a single line; without them, only several lines with equally many points of
    three or more are, as the corners of a polygon near its image's far corner may look like a box with points inside.
    A polygon's second corner is among the others, a box's width and height are mostly not among its points.
    """
    if not lines:
        return False
    if all(_is_pose(values, 3) for values in lines):
        return len(lines) >= _MIN_POSES or any(2.0 in values[6::3] for values in lines)
    counts = {len(values) for values in lines}
    if len(counts) > 1 or len(lines) < _MIN_POSES or min(counts) < 10 or not all(_is_pose(v, 2) for v in lines):
        return False
    return 2 * sum(_second_is_apart(values) for values in lines) > len(lines)


def _second_is_apart(values: Sequence[float]) -> bool:
    """Whether the second of several points is farther from the others than half of their extent."""
    first, second, *others = zip(values[::2], values[1::2])
    for value, *rest in zip(second, first, *filter(any, others)):  # points at 0, 0 are absent
        margin = (max(rest) - min(rest)) / 2
        if not min(rest) - margin <= value <= max(rest) + margin:
            return True
    return False


def _numbers(tokens: Sequence[str], context: str) -> tuple[int, list[float]]:
    try:
        label, values = float(tokens[0]), [float(token) for token in tokens[1:]]
    except ValueError as error:
        raise DataError(
            f"{context}: {error!s:.200}; expected a class number and fractions. Correct the line."
        ) from error
    if not label.is_integer() or not 0 <= label < 2**31 or len(values) < 4 or not all(map(math.isfinite, values)):
        expected = "`CLASS CX CY W H`, or `CLASS X Y X Y X Y ...`"
        raise DataError(f"{context}: got {len(values)} numbers after the class; expected {expected}. Correct the line.")
    return int(label), values


def _check_fractions(values: Sequence[float], context: str) -> None:
    if max(map(abs, values)) > _LARGEST_FRACTION:
        raise DataError(
            f"{context}: {max(values, key=abs):g} is not a fraction of the image. Are these pixels? YOLO's numbers are "
            "divided by the image's width and height."
        )
