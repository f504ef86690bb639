"""Predictions as annotations for labeling tools: a model labels first, and people correct its labels."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from vitkit.apps.datasets.writing import NUM_SHOWN, WRITERS, describe_left_out, writing_text
from vitkit.apps.inference.journal import REVIEW_ORDER
from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.errors import ConfigError, DataError
from vitkit.io.keypoints import keypoint_fields
from vitkit.io.segmentations import decode_segmentation, round_pixels
from vitkit.structures import KeypointInfo


def write_labels(predictions: Mapping[str, Any], format: str, folder: Path) -> list[Path]:
    """Write the objects of images as annotations of a format, and the images in the order in which to look at them.

    They are written image by image; of all images, only names and sizes are in memory.

    Args:
        predictions: `images`, `classes` and, if there are any, `category_ids` and `keypoints` as in predictions.json;
            the images are iterated twice.
        format: one of WRITERS; scores are kept in COCO, CVAT and Label Studio.
        folder: annotations are written to its subfolder of the format's name, and names to review_order.txt in it, the
            least certain image first.
    Raises:
        ConfigError: the predictions have no objects of images.
        DataError: an image cannot be named in the format, or a file cannot be written.
    """
    images, classes, category_ids = (predictions.get(key) for key in ("images", "classes", "category_ids"))
    if "objects" not in next(iter(images or ()), ()):
        raise ConfigError(f"--format {format}: writes objects in images, and the model predicts none. Leave it out.")
    info = None if predictions.get("keypoints") is None else KeypointInfo.from_json(predictions["keypoints"])
    target, data = folder / format, PredictedImages(images, classes, category_ids, info)
    if format == "coco":
        written = [_write_coco(data, target / "instances.json")]
    else:
        lost = _FirstNames()
        written = WRITERS[format](data, target, lost)
        for note in data.notes:
            print(f"  note: {note}")
        for line in describe_left_out(lost):
            print(f"  lost: {line}")
    order = target / REVIEW_ORDER
    with writing_text(order, below=folder) as file:
        for negative, name in sorted(zip((-value for value in data.uncertainties), data.names)):
            file.write(f"{-negative:.3f} {name}\n")
    return [*written, order]


class PredictedImages(AnnotatedImages):
    """Objects of predictions.json as annotations, made image by image; `file_name`s are relative to the images' common
    folder.

    Args:
        entries: the images of predictions.json, which are iterated here and for each iteration over the objects.
        classes, category_ids: the names of the classes, and their ids; None: they are numbered from 1.
        info: the model's keypoints, if they are known.
    Raises:
        DataError: images lie on the network, or on several drives.
    """

    def __init__(
        self,
        entries: Iterable[Mapping[str, Any]],
        classes: Sequence[str],
        category_ids: Sequence[int] | None = None,
        info: KeypointInfo | None = None,
    ):
        self._entries, self._has_masks = entries, False
        self.names: list[str] = []
        """The image of each entry."""
        self.uncertainties: list[float] = []
        self._sizes: list[tuple[int, int]] = []
        folder, keypoints = None, {}
        for entry in entries:
            folder = _common_folder(folder, entry["image"])
            self.names.append(entry["image"])
            self.uncertainties.append(entry["uncertainty"])
            self._sizes.append((entry["width"], entry["height"]))
            self._has_masks = self._has_masks or any("mask" in found for found in entry["objects"])
            keypoints = keypoints or next(
                (found["keypoints"] for found in entry["objects"] if "keypoints" in found), {}
            )
        if not category_ids or not all(type(number) is int for number in category_ids):
            category_ids = range(1, len(classes) + 1)
        fields = keypoint_fields(info) if info is not None and keypoints else {}
        fields = fields or ({"keypoints": [*keypoints], "flip_pairs": []} if keypoints else {})
        categories = [{"id": number, "name": name, **fields} for number, name in zip(category_ids, classes)]
        super().__init__("predictions", Path(folder), Path(folder), {"categories": categories})

    @property
    def images(self) -> Iterator[dict[str, Any]]:
        """COCO's images, from the first one on each time."""
        for image_id, (path, (width, height)) in enumerate(zip(self.names, self._sizes), start=1):
            name = Path(os.path.abspath(path)).relative_to(self.folder).as_posix()
            yield {"id": image_id, "file_name": name, "width": width, "height": height}

    @property
    def annotations(self) -> Iterator[dict[str, Any]]:
        """COCO's annotations, from the first one on each time."""
        return (annotation for _, annotations in self.each_image() for annotation in annotations)

    def any_object_has(self, key: str) -> bool:
        """Whether an object has a field: each one's score, and the masks of a model that predicts them."""
        return self._has_masks if key == "segmentation" else key == "score"

    def each_image(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield COCO's entry of each image, and those of its objects."""
        ids = {category["name"]: category["id"] for category in self.categories}
        num_objects = 0
        for image, entry in zip(self.images, self._entries):
            of_image = AnnotatedImages("predictions", self.folder, self.folder)
            for found in entry["objects"]:
                x0, y0, x1, y1 = found["box_xyxy"]
                fields = {"score": found["score"]}
                if "mask" in found:
                    area = int(decode_segmentation(found["mask"], image["height"], image["width"]).sum())
                    fields |= {"segmentation": found["mask"], "area": area}
                if "keypoints" in found:
                    # A point that the model doubts is not labeled; hidden ones are not told apart.
                    points = [[x, y, 2] if score >= 0.5 else [0, 0, 0] for x, y, score in found["keypoints"].values()]
                    fields |= {"keypoints": [round_pixels(v) for point in points for v in point]}
                    fields |= {"num_keypoints": sum(point[2] > 0 for point in points)}
                of_image.add_object(image["id"], ids[found["class"]], [x0, y0, x1 - x0, y1 - y0], **fields)
            for annotation in of_image.annotations:
                num_objects += 1
                annotation["id"] = num_objects
            yield image, of_image.annotations


def _common_folder(folder: str | None, image: str) -> str:
    """Return the deepest folder that contains an image and, if given, another folder.

    Raises:
        DataError: the image is not on this disk, or on another drive.
    """
    if not os.path.exists(image):
        raise DataError(f"--format: '{image}' is not a file on this disk. Download it first.")
    own = os.path.dirname(os.path.abspath(image))
    try:
        return own if folder is None else os.path.commonpath([folder, own])
    except ValueError as error:
        raise DataError("--format: the images lie on several drives. Copy them into one folder.") from error


def _write_coco(data: PredictedImages, path: Path) -> Path:
    """Write the file of `write_coco` without holding all objects in memory."""
    with writing_text(path, below=path.parent) as file, TemporaryFile("w+", dir=path.parent) as objects:
        file.write('{"images": [')
        num_objects = 0
        for number, (image, annotations) in enumerate(data.each_image()):
            file.write(f"{', ' if number else ''}{json.dumps(image)}")
            for annotation in annotations:
                objects.write(f"{', ' if num_objects else ''}{json.dumps(annotation)}")
                num_objects += 1
        file.write('], "annotations": [')
        objects.seek(0)
        shutil.copyfileobj(objects, file)
        file.write(f'], "categories": {json.dumps(data.categories)}}}')
    return path


class _FirstNames(dict[str, "_Counted"]):
    """Counts of what a format cannot hold, see `Lost`, with the names that messages show."""

    def setdefault(self, reason: str, names: list[str]) -> "_Counted":
        return super().setdefault(reason, _Counted())


class _Counted(list[str]):
    """A list that counts all names and keeps the first ones."""

    def __init__(self) -> None:
        self._count = 0

    def append(self, name: str) -> None:
        self._count += 1
        if self._count <= NUM_SHOWN:
            super().append(name)

    def __len__(self) -> int:
        return self._count
