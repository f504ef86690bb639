"""YOLO: one text file per image, a line `CLASS CX CY W H` in fractions for each object, and a YAML of the names.

Polygons (`CLASS X Y X Y X Y ...`) and the layouts of Ultralytics and Roboflow are also read. An image without a text
file has no objects. Class ids are those of the text files.
"""

import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from os.path import exists
from pathlib import Path, PurePosixPath
from typing import Any

from vitkit.data.formats.annotated import (
    SPLIT_NAMES,
    AnnotatedImages,
    ImageFiles,
    add_image_file,
    polygon_fields,
    read_head,
)
from vitkit.data.formats.class_files import read_class_file
from vitkit.errors import DataError
from vitkit.io.folders import data_files, is_hidden
from vitkit.io.parsing import check_count, check_distinct, class_name, class_number, is_name, read_yaml
from vitkit.io.text_files import read_lines
from vitkit.text_format import pluralize

_NAME_FILES = ("classes.txt", "obj.names", "labels.txt", "_darknet.labels")
_MAX_BYTES = 1 << 25
"""Size of the largest text file of an image."""
_LARGEST_FRACTION = 1.5
"""Numbers above this are not fractions of an image, even with rounding or a box that crosses the border."""
_LINE = re.compile(rb"\s*\d+(\.0*)?(\s+[-+.\deE]+){4,}\s*")


def is_yolo_yaml(path: Path) -> bool:
    """Whether a YAML file looks like YOLO's; raises like `read_yaml_settings`."""
    return bool(read_yaml_settings(path))


def is_yolo_text(path: Path) -> bool:
    """Whether a text file looks like one of YOLO's, by its first line."""
    head = read_head(path)
    if len(head) < path.stat().st_size:  # a number may be cut in two
        head = head[: head.rfind(b" ") + 1]
    line = next(filter(None, map(bytes.strip, head.splitlines())), b"")
    return _LINE.fullmatch(line) is not None


def read_yolo(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read YOLO's labels.

    Args:
        annotations: data.yaml, or the folder of the text files, which may also contain the images.
        images: folder of the images; None: the one that data.yaml names, or `images` beside `labels`.
    Raises:
        DataError: a file is missing or a line is invalid.
    """
    if annotations.is_file():
        return _read_yaml(annotations, images)
    labels = annotations / "labels" if (annotations / "labels").is_dir() else annotations
    if images is None:
        sibling = labels.parent / "images"
        images = sibling if labels.name == "labels" and sibling.is_dir() else labels
    files = ImageFiles(images)
    data = AnnotatedImages("yolo", annotations, images)
    reader = _Reader(data, files, _settings_near(labels), labels)
    splits = {PurePosixPath(name).parts[0] for name in files.names if "/" in name}
    use_splits = bool(splits) and splits <= SPLIT_NAMES.keys()
    used = set()
    for name in files.names:
        path = PurePosixPath(name)
        label_file = _label_file(images / name, labels, path)
        used.add(label_file)
        # Images beside the folders of the splits belong to none of them.
        reader.add(name, label_file, SPLIT_NAMES.get(path.parts[0]) if use_splits else None)
    others = {path for path in data_files(labels) if path.suffix == ".txt"} - used
    for file in sorted(others):
        if file.name not in _NAME_FILES and not file.name.startswith("README"):
            data.leave_out("label files without an image", file.name)
    if used == {None}:
        raise DataError(
            f"'{labels}' has no label files for the images in '{images}', such as '{PurePosixPath(files.names[0]).stem}"
            ".txt'. Give the two folders that belong together."
        )
    return data


def read_yaml_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file that must hold `names`.

    Raises:
        DataError: the file cannot be read, or has no class names.
    """
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
    reader = _Reader(data, files, settings, path.parent)
    has_labels = False
    for key, split in SPLIT_NAMES.items():
        value = settings.get(key)
        for entry in value if isinstance(value, list) else [value] if value else []:
            if not is_name(entry):
                raise DataError(
                    f"{path.name}: {key} is {reprlib.repr(entry)}; expected a folder or a file. Correct it."
                )
            names = list(_split_names(str(entry), settings, path, root, files))
            if not names and split == "test":
                data.notes.append(f"{path.name} names a test split, '{entry}', which does not exist")
            elif not names:
                raise DataError(
                    f"{path.name}: {key} is '{entry}', and there is no such image below '{root}'. Correct it, or give "
                    "the folder that it is relative to as the images."
                )
            for name in names:
                label_file = _label_file(root / name, None, PurePosixPath(name))
                has_labels |= label_file is not None
                reader.add(name, label_file, split)
    if not data.images:
        raise DataError(f"{path.name}: has neither train nor val; expected folders of images. Add them.")
    if not has_labels:
        raise DataError(
            f"{path.name}: no image has a label file, a .txt in `labels` beside `images`, or beside the image. Put "
            "the label files there."
        )
    for (a, ids), (b, others) in combinations(data.splits.items(), 2):
        if shared := _names_of(data, ids) & _names_of(data, others):
            data.notes.append(f"{pluralize(len(shared), 'images', 'are')} in both {a} and {b}, such as {min(shared)}")
    return data


def _names_of(data: AnnotatedImages, ids: list[int]) -> set[str]:
    return {data.images[image_id - 1]["file_name"] for image_id in ids}


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
                if name is None:
                    raise DataError(f"'{location}' lists {line!r:.200}, which is not below '{root}'. Correct it.")
                yield name
            return
        prefix = location.relative_to(root.resolve()).as_posix() + "/"
        yield from (name for name in files.names if prefix == "./" or name.startswith(prefix))
        return


def _label_file(image: Path, labels: Path | None, name: PurePosixPath) -> Path | None:
    """Return an image's text file: in the folder of labels, in `labels` beside `images`, or beside the image."""
    candidates = [] if labels is None else [labels / name.with_suffix(".txt"), labels / f"{name.stem}.txt"]
    parts = image.parts
    if "images" in parts[:-1]:
        k = len(parts) - 1 - parts[::-1].index("images", 1)
        candidates.append(Path(*parts[:k], "labels", *parts[k + 1 :]).with_suffix(".txt"))
    candidates.append(image.with_suffix(".txt"))
    return next((file for file in candidates if file.is_file()), None)


def _settings_near(labels: Path) -> dict[str, Any]:
    """Return the data.yaml that belongs to a folder of text files; {} if there is none."""
    for folder in (labels, labels.parent, labels.parent.parent):
        for path in sorted(p for p in folder.glob("*.y*ml") if p.suffix in (".yaml", ".yml") and not is_hidden(p.name)):
            try:
                return read_yaml_settings(path)
            except DataError:
                if path.stem == "data":
                    raise
                continue  # a YAML file of another kind
    return {}


def _named_classes(settings: Mapping[str, Any], folder: Path) -> dict[int, str]:
    """Return the class names by number, from the YAML or a text file in a folder or above it; {} if there are none."""
    names = settings.get("names")
    if names is None:
        files = (location / name for location in (folder, folder.parent) for name in _NAME_FILES)
        file = next((file for file in files if file.is_file()), None)
        return read_class_file(file) if file else {}
    pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
    context = f"'{folder}': names of the classes"
    numbered = {class_number(key, f"{context}: a key"): class_name(v, f"{context}: {key!r:.50}") for key, v in pairs}
    check_distinct(numbered.values(), context)
    return dict(sorted(numbered.items()))


class _Reader:
    """Adds images, with the objects of their text files, to a dataset."""

    def __init__(self, data: AnnotatedImages, files: ImageFiles, settings: Mapping[str, Any], folder: Path):
        self.data, self.files = data, files
        self.names = _named_classes(settings, folder)
        self.is_named = bool(self.names)
        if not self.is_named:
            data.notes.append("no data.yaml or classes.txt names the classes: they are called class_0, class_1, …")
        data.categories.extend({"id": number, "name": name} for number, name in self.names.items())
        shape = settings.get("kpt_shape") or ["0"]
        if not isinstance(shape, list) or not all(isinstance(n, str) and re.fullmatch(r"\d{1,3}", n) for n in shape):
            raise DataError(
                f"'{folder}': kpt_shape is {shape!r:.100}; expected [points, 2 or 3]. Correct the YAML file."
            )
        self.num_keypoint_values = math.prod(map(int, shape))

    def add(self, name: str, label_file: Path | None, split: str | None) -> None:
        """Add an image, with its objects if it has a text file."""
        image = add_image_file(self.data, self.files, name, split)
        if image is None or label_file is None:
            return
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
        if len(values) == 4 + self.num_keypoint_values:
            values = values[:4]
        if label not in self.names and self.is_named:
            numbers = f"{min(self.names)} to {max(self.names)}"
            raise DataError(
                f"{context}: no class is numbered {label} (they are {numbers}). Correct it, or name the class."
            )
        if label not in self.names:
            self.names[label] = f"class_{label}"
            self.data.categories.append({"id": label, "name": self.names[label]})
        _check_fractions(values if len(values) > 5 else values[:4], context)
        width, height = image["width"], image["height"]
        if len(values) <= 5:  # the fifth is a confidence
            center_x, center_y, box_width, box_height = values[:4]
            if box_width < 0 or box_height < 0:
                raise DataError(f"{context}: a size is negative; expected `CLASS CX CY W H`. Correct the line.")
            x, y = (center_x - box_width / 2) * width, (center_y - box_height / 2) * height
            self.data.add_object(image["id"], label, [x, y, box_width * width, box_height * height])
            return
        if len(values) % 2:
            raise DataError(
                f"{context}: {len(values)} numbers are not a polygon; expected pairs x y. Correct the line."
            )
        polygon = [value * (height if k % 2 else width) for k, value in enumerate(values)]
        self.data.add_object(image["id"], label, **polygon_fields([polygon]))


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
