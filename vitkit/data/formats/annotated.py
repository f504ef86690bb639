"""Images with boxes or masks in the fields of COCO's format, whichever format they were read from."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitkit.errors import DataError
from vitkit.io.coco_schema import is_number
from vitkit.io.folders import ImageFiles, is_hidden
from vitkit.io.image_files import MAX_PIXELS
from vitkit.io.parsing import class_name
from vitkit.io.segmentations import describe_wrong_segmentation, polygon_box, round_pixels
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

UNREADABLE = "images whose file cannot be read"
_HEAD = 4096
_BLANKS = "blanks around class names"
_MAX_SHOWN = 500


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
    """Split -> ids of its images, if the format or the folders of the images name splits."""
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

    def strip_name(self, text: str, context: str) -> str:
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

    def leave_out(self, reason: str, *names: str) -> None:
        """Record what cannot be used, or what the target format cannot hold."""
        for name in names:
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
        entries = {category["name"]: category for category in self.categories}
        self.categories[:] = [{**entries[name], "id": k} for name, k in self._ids.items()]

    def outside(self) -> list[str]:
        """Return the objects whose box or polygons lie outside their image: "annotation 3 of 'a.jpg'"."""
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
        """Return the images of a split; None: all, if the dataset has no splits; "all": all. Raise a DataError if there
        is no such split, or there are several and `name` is None."""
        if name == "all" or (name is None and not self.splits):
            return self
        sizes = ", ".join(f"{split} ({len(ids)} images)" for split, ids in self.splits.items())
        if name is None and len(self.splits) > 1:
            raise DataError(f"'{self.source}' has the splits {sizes}. Choose one by split=, or split=all.")
        if name is not None and name not in self.splits:
            remedy = "Correct split=." if self.splits else "Leave split= out."
            raise DataError(f"'{self.source}' has no split {name!r}; it has {sizes or 'none'}. {remedy}")
        return self.select(next(iter(self.splits.values())) if name is None else self.splits[name])

    def report(self, *, log: bool) -> None:
        """Log assumptions and omissions in reading; raise a DataError if images cannot be read."""
        for note in self.notes if log else ():
            logger.info("%s: %s", self.source, note)
        for reason, names in self.left_out.items():
            if reason == UNREADABLE:
                raise DataError(
                    f"{names[0]} {len(names)} of the images in '{self.source}' cannot be read; `vitkit data convert` "
                    "leaves them out."
                )
            if log:
                logger.warning("%s: left out %d %s, such as %s", self.source, len(names), reason, names[0])


def read_head(path: Path) -> bytes:
    """Return the first kilobytes of a file, by which a format is recognized."""
    with path.open("rb") as file:
        return file.read(_HEAD)


def add_image_file(
    data: AnnotatedImages, files: ImageFiles, name: str, split: str | None = None, *, size: tuple[Any, Any] = (0, 0)
) -> dict | None:
    """Add an image with its (width, height), read from its file if `size` is not one; return its entry, or None if the
    file cannot be read."""
    try:
        width, height = size if all(type(side) is int and side > 0 for side in size) else files.size(name)
    except DataError as error:
        data.leave_out(UNREADABLE, str(error))
        return None
    data.add_image(name, width, height, split)
    return data.images[-1]


def note_other_images(data: AnnotatedImages, files: ImageFiles, names: Mapping[Path, Sequence[str]]) -> None:
    """Note the annotation files that state another image than the one of their own name, which is taken."""
    others = [path.name for path, of_file in names.items() if len(files.matches(of_file)) > 1]
    if others:
        data.notes.append(
            f"{pluralize(len(others), 'files', 'state')} another image than that of their own name, which is taken, "
            f"such as {others[0]}"
        )


def single_file(annotations: Path, pattern: str) -> Path:
    """Return a file, or the only file of a folder that matches a pattern; raise a DataError if the folder has none, or
    several."""
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


def class_names(content: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each category id."""
    return {category["id"]: category["name"] for category in content["categories"]}
