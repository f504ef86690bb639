"""Images with boxes or masks in the fields of COCO's format, whichever format they were read from."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vitkit.errors import DataError
from vitkit.io.coco_schema import is_number
from vitkit.io.folders import IMAGE_SUFFIXES, data_files, is_hidden, log_unread, one_form, unread_images
from vitkit.io.image_files import FORMATS, MAX_PIXELS, upright_size
from vitkit.io.parsing import class_name
from vitkit.io.segmentations import describe_wrong_segmentation
from vitkit.text_format import pluralize

UNREADABLE = "images whose file cannot be read"
NUM_SHOWN = 3
"""The number of names in a line about items that were left out."""
SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Name of a folder or key -> the split that it stands for."""
_SPLIT_FOLDER = re.compile(rf"({'|'.join(SPLIT_NAMES)})\d*")
_MAX_FOLDERS = 16
"""How many of the last folders of a name are compared."""
_HEAD = 4096
_BLANKS = "blanks around class names"
_MAX_SHOWN = 500
_CORNERS_OF_ELLIPSE = 32
_DECIMALS = 3
"""Decimals of a box's pixels: finer than any annotation, and integer pixels survive a detour via other formats."""


@dataclass
class AnnotatedImages:
    """A detection dataset in memory, boxes and masks without the image pixels."""

    format: str
    """The format that it was read from, such as "yolo"."""
    source: Path
    """The file or folder of the annotations."""
    folder: Path
    """Folder that the images' `file_name` is relative to."""
    content: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"images": [], "annotations": [], "categories": []}
    )
    """COCO's `images`, `annotations` and `categories`."""
    splits: dict[str, list[int]] = field(default_factory=dict)
    """Split -> ids of its images, if the format names splits."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> names of what was left out for it."""
    notes: list[str] = field(default_factory=list)
    """The assumptions that were made in reading."""
    recordings: dict[int, str] = field(default_factory=dict)
    """Image id -> the recording, task or subset that it belongs to, where the format tells; they stay together."""
    changed: set[int] = field(default_factory=set)
    """Ids of the images whose objects or size were changed in reading or repairing."""

    def __post_init__(self) -> None:
        self._ids = {category["name"]: category["id"] for category in self.content["categories"]}
        self._split_ids: dict[str, set[int]] = {}

    @property
    def images(self) -> list[dict[str, Any]]:
        """COCO's images."""
        return self.content["images"]

    @property
    def annotations(self) -> list[dict[str, Any]]:
        """COCO's annotations."""
        return self.content["annotations"]

    @property
    def categories(self) -> list[dict[str, Any]]:
        """COCO's categories."""
        return self.content["categories"]

    def each_image(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield each image with its objects."""
        objects: dict[int, list[dict[str, Any]]] = {}
        for annotation in self.annotations:
            objects.setdefault(annotation["image_id"], []).append(annotation)
        for image in self.images:
            yield image, objects.get(image["id"], [])

    def any_object_has(self, key: str) -> bool:
        """Whether an object has a value other than none in a field, such as "segmentation"."""
        return any(annotation.get(key) not in (None, []) for annotation in self.annotations)

    def category_id(self, name: str) -> int:
        """Return the id of a class, adding the class if it is new."""
        if name not in self._ids:
            self._ids[name] = max(self._ids.values(), default=0) + 1
            self.categories.append({"id": self._ids[name], "name": name})
        return self._ids[name]

    def stripped_name(self, text: str, context: str) -> str:
        """Return a class's name without the blanks around it, which are recorded; those of indented XML are not.

        Args:
            context: what the name is, and in which file, for messages.
        Raises:
            DataError: it is not a name.
        """
        name = class_name(text.strip(), context)
        blanks = self.left_out.get(_BLANKS, ())
        if name != text and "\n" not in text and repr(text) not in blanks:
            self.leave_out(_BLANKS, repr(text))
        return name

    def add_image(self, file_name: str, width: int, height: int, split: str | None = None) -> int:
        """Add an image and return its id."""
        image_id = len(self.images) + 1
        self.images.append({"id": image_id, "file_name": file_name, "width": width, "height": height})
        if split is not None:
            self.add_to_split(image_id, split)
        return image_id

    def add_to_split(self, image_id: int, split: str) -> None:
        """Put an image into a split, unless it is in it."""
        ids = self.splits.setdefault(split, [])
        if len(self._split_ids.get(split, ())) != len(ids):
            self._split_ids[split] = {*ids}
        if image_id not in self._split_ids.setdefault(split, set()):
            self._split_ids[split].add(image_id)
            ids.append(image_id)

    def add_object(self, image_id: int, category: str | int, bbox: Sequence[float], **fields: Any) -> None:
        """Add an object to an image.

        Args:
            category: the name of its class, which is added if it is new, or the class's id.
            bbox: xywh, pixels.
            fields: other fields of the annotation, such as `segmentation`; `area` defaults to that of the box.
        """
        bbox = [round_pixels(value) for value in bbox]
        category_id = category if isinstance(category, int) else self.category_id(category)
        entry = {"id": len(self.annotations) + 1, "image_id": image_id, "category_id": category_id}
        fields.setdefault("area", round_pixels(bbox[2] * bbox[3]))
        self.annotations.append({**entry, "bbox": bbox, "iscrowd": 0, **fields})

    def leave_out(self, reason: str, name: str) -> None:
        """Record something that cannot be used, or that the target format cannot hold."""
        # A stranger's text may be as long as its file.
        short = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "…"
        self.left_out.setdefault(reason, []).append(short.replace("\n", "\\n"))

    def sort_classes(self) -> None:
        """Number the classes by name, from 1, for formats that have no order of classes."""
        names = sorted(self._ids)
        number = {self._ids[name]: k for k, name in enumerate(names, start=1)}
        for annotation in self.annotations:
            annotation["category_id"] = number[annotation["category_id"]]
        self._ids = {name: k for k, name in enumerate(names, start=1)}
        self.categories[:] = [{"id": k, "name": name} for name, k in self._ids.items()]

    def outside(self) -> list[str]:
        """Return the objects whose box or polygons have no part in their image: "annotation 3 of 'a.jpg'"."""
        images = {image["id"]: image for image in self.images}
        names = []
        for annotation in self.annotations:
            image, (x, y, width, height) = images[annotation["image_id"]], annotation["bbox"]
            is_outside = x >= image["width"] or y >= image["height"] or x + width <= 0 or y + height <= 0
            polygons = annotation.get("segmentation")
            if is_outside or (isinstance(polygons, list) and _are_outside(polygons, image["width"], image["height"])):
                names.append(f"annotation {annotation.get('id')} of {image['file_name']!r}")
        return names

    def select(self, image_ids: Iterable[int]) -> "AnnotatedImages":
        """Return only these images, in the dataset's order, with all classes."""
        chosen = set(image_ids)
        content = {
            **self.content,
            "images": [image for image in self.images if image["id"] in chosen],
            "annotations": [a for a in self.annotations if a["image_id"] in chosen],
        }
        recordings = {image_id: name for image_id, name in self.recordings.items() if image_id in chosen}
        changed = self.changed & chosen
        return AnnotatedImages(self.format, self.source, self.folder, content, recordings=recordings, changed=changed)

    def split(self, name: str | None) -> "AnnotatedImages":
        """Return the images of a split; None: all, if the dataset has no splits; "all": all.

        Raises:
            DataError: there is no such split, or there are several and `name` is None.
        """
        if name == "all" or (name is None and not self.splits):
            return self
        sizes = ", ".join(f"{split} ({len(ids)} images)" for split, ids in self.splits.items())
        if name is None and len(self.splits) > 1:
            raise DataError(f"'{self.source}' has the splits {sizes}. Choose one by split=, or split=all.")
        if name is not None and name not in self.splits:
            remedy = "Correct split=." if self.splits else "Leave split= out."
            raise DataError(f"'{self.source}' has no split {name!r}; it has {sizes or 'none'}. {remedy}")
        return self.select(next(iter(self.splits.values())) if name is None else self.splits[name])

    def summary(self) -> str:
        """Summarize the numbers: "292 images (205 train, 87 val), 3943 objects of 3 classes"."""
        parts = ", ".join(f"{len(ids)} {name}" for name, ids in self.splits.items())
        text = f"{pluralize(len(self.images), 'images')}{f' ({parts})' if parts else ''}, "
        text += f"{pluralize(len(self.annotations), 'objects')} of {pluralize(len(self.categories), 'classes')}"
        num_masks = sum(bool(a.get("segmentation")) for a in self.annotations)
        return text + (f", {num_masks} with masks" if num_masks else "")

    def class_counts(self) -> dict[str, int]:
        """Return the number of objects of each class."""
        names = {category["id"]: category["name"] for category in self.categories}
        counts = dict.fromkeys(names.values(), 0)
        for annotation in self.annotations:
            counts[names[annotation["category_id"]]] += 1
        return counts


class AnnotationFormat(NamedTuple):
    """A format that annotations are read in, a row of `vitkit.data.formats.detecting.FORMATS`."""

    text: str
    """What messages call it."""
    read: Callable[[Path, Path | None], AnnotatedImages]
    """Takes the file or folder of the annotations, and the folder of the images; None: the format's default."""
    looks_like: Mapping[str, Callable[[Path], bool]]
    """Extension -> whether a file with it seems to be in this format. It may raise OSError or DataError."""


def read_head(path: Path) -> bytes:
    """Return the first kilobytes of a file, by which a format is recognized."""
    with path.open("rb") as file:
        return file.read(_HEAD)


class ImageFiles:
    """The image files below a folder, to be looked up by the names that annotations use.

    Arrays (.npy), which may be something else than images, are found only if they are named with their ending.

    Args:
        folder: folder of the images.
    Raises:
        DataError: there is no such folder, or it contains no images.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise DataError(f"images: no folder '{folder}'. Give the folder of the images.")
        self.folder = folder
        files = data_files(folder)
        suffixes = {*IMAGE_SUFFIXES, ".npy"}
        names = sorted(path.relative_to(folder).as_posix() for path in files if path.suffix.lower() in suffixes)
        self.arrays = [name for name in names if name.lower().endswith(".npy")]
        self.names = sorted({*names} - {*self.arrays})
        log_unread(folder, unread_images(files), [folder / name for name in self.names])
        if not names:
            raise DataError(f"images: '{folder}' contains no images ({', '.join(FORMATS)}).")
        self._by_key: dict[str, list[str]] = {}
        for name in self.names:
            path = PurePosixPath(one_form(name))
            for key in {str(path), str(path.with_suffix("")), path.name, path.stem}:
                self._by_key.setdefault(key, []).append(name)
        for name in self.arrays:
            for key in {one_form(name), PurePosixPath(one_form(name)).name}:
                self._by_key.setdefault(key, []).append(name)
        folders = {name.rpartition("/")[0] for name in (*self.names, *self.arrays)}
        self.splits = set().union(*(splits_in(f"{folder}/a.jpg") for folder in folders))
        """The splits that have a folder."""

    def find(self, *names: str, split: str | None = None, other_splits: Set[str] = frozenset()) -> str | None:
        """Return the image file that the first matching name refers to, or None.

        A name may be a path on another machine, whose last folders and file name are looked for, the longest match
        first, its ending may be missing or another image's, and it may have another Unicode form. A name in a split's
        folder, such as "val2017/a.jpg", does not match a file in the folder of another split.

        Args:
            split: of several files that match a name, the one in a folder of this split is returned.
            other_splits: names outside the folders of splits do not match files in the folders of these.
        Raises:
            DataError: several images have that name.
        """
        for name in names:
            path = PurePosixPath(*one_form(name).replace("\\", "/").split("/")[-_MAX_FOLDERS - 1 :])
            stem = path.with_suffix("") if path.suffix.lower() in IMAGE_SUFFIXES else path
            named = splits_in(str(path)) & self.splits
            others = self.splits - named if named else other_splits
            for k in range(len(path.parts)):
                for key in ("/".join(path.parts[k:]), "/".join(stem.parts[k:])):
                    matches = self._by_key.get(key, ())
                    exact = [match for match in matches if one_form(match) == key]
                    if exact:  # only a folder with both Unicode forms of a name has two of them
                        matches = [name] if name in exact else exact[:1]
                    elif others:
                        matches = [m for m in matches if named & splits_in(m) or not others & splits_in(m)]
                    if len(matches) > 1 and split is not None:
                        matches = [match for match in matches if split in splits_in(match)] or matches
                    if len(matches) > 1:
                        raise DataError(
                            f"'{path}' names {len(matches)} images below '{self.folder}': {matches[0]} and "
                            f"{matches[1]}. Give each image a unique name, or read one folder at a time."
                        )
                    if matches:
                        return matches[0]
        return None

    def size(self, name: str) -> tuple[int, int]:
        """Read (width, height) of an image, upright; raises like `read_header`."""
        return upright_size(self.folder / name)


def splits_in(name: str) -> set[str]:
    """Return the splits that the folders of a file stand for: "val" for "val2017/a.jpg"."""
    folders = (_SPLIT_FOLDER.fullmatch(part.lower()) for part in PurePosixPath(name).parts[:-1])
    return {SPLIT_NAMES[folder[1]] for folder in folders if folder}


def add_image_file(data: AnnotatedImages, files: ImageFiles, name: str, split: str | None = None) -> dict | None:
    """Add an image with the size read from its file; return its entry, or None if the file cannot be read."""
    try:
        width, height = files.size(name)
    except DataError as error:
        data.leave_out(UNREADABLE, str(error))
        return None
    data.add_image(name, width, height, split)
    return data.images[-1]


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe what was left out: for each reason the number of items, and the first names."""
    lines = []
    for reason, names in left_out.items():
        more = f", and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
        lines.append(f"{len(names)} {reason}: {', '.join(names[:NUM_SHOWN])}{more}")
    return lines


def single_file(annotations: Path, pattern: str) -> Path:
    """Return a file, or the only file of a folder that matches a pattern.

    Raises:
        DataError: the folder has none, or several.
    """
    if annotations.is_file():
        return annotations
    files = sorted(path for path in annotations.glob(pattern) if not is_hidden(path.name))
    if len(files) != 1:
        names = f" ({', '.join(file.name for file in files[:3])})" if files else ""
        raise DataError(f"annotations: '{annotations}' has {len(files)} files {pattern}{names}; expected one. Name it.")
    return files[0]


def check_mask_size(image: Mapping[str, Any], context: str) -> None:
    """Raise DataError if an image is listed with more pixels than a mask may have."""
    if image["width"] * image["height"] > MAX_PIXELS:
        raise DataError(
            f"{context}: image {image['file_name']!r} is listed as {image['width']}x{image['height']} pixels and has a "
            f"mask; expected at most {MAX_PIXELS} pixels. Correct the size."
        )


def round_pixels(value: float) -> float:
    """Round pixels; integral values become int."""
    value = round(float(value), _DECIMALS)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _are_outside(polygons: Sequence[Any], width: int, height: int) -> bool:
    """Return whether no polygon overlaps the image; False if there is none, or one is not a polygon."""
    for polygon in polygons:
        # The first point decides for nearly all, before the slower check.
        is_list = isinstance(polygon, list) and len(polygon) >= 6 and is_number(polygon[0]) and is_number(polygon[1])
        if is_list and 0 <= polygon[0] < width and 0 <= polygon[1] < height:
            return False
        if describe_wrong_segmentation([polygon], height, width):
            return False
        x, y, box_width, box_height = polygon_box([polygon])
        if x < width and y < height and x + box_width > 0 and y + box_height > 0:
            return False
    return bool(polygons)


def polygon_box(polygons: Iterable[Sequence[float]]) -> list[float]:
    """Return the bounding box, xywh, of flat polygons."""
    xs = [x for polygon in polygons for x in polygon[::2]]
    ys = [y for polygon in polygons for y in polygon[1::2]]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def polygon_area(polygon: Sequence[float]) -> float:
    """Return the area enclosed by a flat polygon."""
    xs, ys = polygon[::2], polygon[1::2]
    pairs = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]])
    return abs(sum(x * next_y - next_x * y for x, y, next_x, next_y in pairs)) / 2


def polygon_fields(polygons: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the `bbox`, `segmentation` and `area` of an object given by flat polygons in pixels."""
    polygons = [[round_pixels(value) for value in polygon] for polygon in polygons]
    area = round_pixels(sum(map(polygon_area, polygons)))
    bbox = [round_pixels(value) for value in polygon_box(polygons)]
    return {"bbox": bbox, "segmentation": polygons, "area": area}


def rotated_box(x0: float, y0: float, x1: float, y1: float, degrees: float) -> dict[str, Any]:
    """Return the fields of `polygon_fields` of a box between two corners, turned clockwise around its center."""
    center = (x0 + x1) / 2, (y0 + y1) / 2
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    return polygon_fields([[value for corner in corners for value in rotate(corner, center, degrees)]])


def ellipse_polygon(center: tuple[float, float], radii: tuple[float, float], degrees: float = 0.0) -> list[float]:
    """Return a flat polygon with its corners on an ellipse, turned clockwise around its center."""
    angles = [k * math.tau / _CORNERS_OF_ELLIPSE for k in range(_CORNERS_OF_ELLIPSE)]
    edge = [(center[0] + radii[0] * math.cos(angle), center[1] + radii[1] * math.sin(angle)) for angle in angles]
    return [value for point in edge for value in rotate(point, center, degrees)]


def rotate(point: tuple[float, float], center: tuple[float, float], degrees: float) -> tuple[float, float]:
    """Rotate a point clockwise on the screen."""
    angle = math.radians(degrees)
    x, y = point[0] - center[0], point[1] - center[1]
    cos, sin = math.cos(angle), math.sin(angle)
    return center[0] + x * cos - y * sin, center[1] + x * sin + y * cos


def matches_any(file_name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file name matches a pattern, such as "0001TP_*", with or without folders and ending."""
    path = PurePosixPath(file_name)
    names = {one_form(name) for name in (file_name, str(path.with_suffix("")), path.name, path.stem)}
    return any(fnmatchcase(name, one_form(pattern)) for name in names for pattern in patterns)


def class_names(content: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each category id."""
    return {category["id"]: category["name"] for category in content["categories"]}
