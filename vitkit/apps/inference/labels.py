"""Predictions as annotations, which tools for labeling open: a model labels first, and people correct it."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from vitkit.data.formats.annotated import AnnotatedImages, left_out_lines
from vitkit.data.formats.writing import WRITERS, Lost
from vitkit.errors import ConfigError, DataError
from vitkit.io.output import write_text, writing
from vitkit.io.segmentations import decode_segmentation


def write_labels(predictions: Mapping[str, Any], format: str, folder: Path) -> list[Path]:
    """Write the objects of images as annotations of a format, and the images in the order in which to look at them.

    COCO's are written image by image; for the other formats all objects are in memory.

    Args:
        predictions: `images` and `classes` as in predictions.json; the images are iterated several times.
        format: one of WRITERS; scores are kept in COCO, CVAT and Label Studio.
        folder: annotations are written to its subfolder of the format's name, and names to review_order.txt in it, the
            least certain image first.
    Raises:
        ConfigError: the predictions have no objects of images.
        DataError: an image cannot be named in the format, or a file cannot be written.
    """
    images, classes = predictions.get("images", ()), predictions["classes"]
    if "objects" not in next(iter(images), ()):
        raise ConfigError(f"--format {format}: writes objects in images, and the model predicts none. Leave it out.")
    target = folder / format
    if format == "coco":
        written = [_write_coco(images, classes, target / "instances.json")]
    else:
        lost: Lost = {}
        written = WRITERS[format](as_annotations(images, classes), target, lost)
        for line in left_out_lines(lost):
            print(f"  lost: {line}")
    order = sorted((-image["uncertainty"], image["image"]) for image in images)
    write_text(target / "review_order.txt", "".join(f"{-negative:.3f} {name}\n" for negative, name in order))
    return [*written, target / "review_order.txt"]


def as_annotations(images: Iterable[Mapping[str, Any]], classes: Sequence[str]) -> AnnotatedImages:
    """Return objects of predictions.json as annotations, whose `file_name`s are relative to the images' common folder.

    Raises:
        DataError: images lie on the network, or on several drives.
    """
    folder = _common_folder(images)
    data = AnnotatedImages("predictions", folder, folder, _content(classes))
    for image, annotations in _each_annotated(images, classes, folder):
        data.images.append(image)
        data.annotations.extend(annotations)
    return data


def _write_coco(images: Iterable[Mapping[str, Any]], classes: Sequence[str], path: Path) -> Path:
    """Write what `write_coco` would, without holding all objects in memory."""
    folder = _common_folder(images)
    with (
        writing(path) as temporary,
        temporary.open("x", encoding="utf-8") as file,
        TemporaryFile("w+", dir=path.parent) as objects,
    ):
        file.write('{"images": [')
        num_objects = 0
        for number, (image, annotations) in enumerate(_each_annotated(images, classes, folder)):
            file.write(f"{', ' if number else ''}{json.dumps(image)}")
            for annotation in annotations:
                objects.write(f"{', ' if num_objects else ''}{json.dumps(annotation)}")
                num_objects += 1
        file.write('], "annotations": [')
        objects.seek(0)
        shutil.copyfileobj(objects, file)
        file.write(f'], "categories": {json.dumps(_content(classes)["categories"])}}}')
    return path


def _common_folder(images: Iterable[Mapping[str, Any]]) -> Path:
    folder = None
    for image in images:
        if not os.path.exists(image["image"]):
            raise DataError(f"--format: '{image['image']}' is not a file on this disk. Download it first.")
        own = os.path.dirname(os.path.abspath(image["image"]))
        try:
            folder = own if folder is None else os.path.commonpath([folder, own])
        except ValueError as error:
            raise DataError("--format: the images lie on several drives. Copy them into one folder.") from error
    return Path(folder)


def _content(classes: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, start=1)]
    return {"images": [], "annotations": [], "categories": categories}


def _each_annotated(
    images: Iterable[Mapping[str, Any]], classes: Sequence[str], folder: Path
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield COCO's entry of each image, and those of its objects."""
    ids = {name: number for number, name in enumerate(classes, start=1)}
    num_objects = 0
    for image_id, image in enumerate(images, start=1):
        data = AnnotatedImages("predictions", folder, folder)
        name = Path(os.path.abspath(image["image"])).relative_to(folder).as_posix()
        data.add_image(name, image["width"], image["height"])
        for found in image["objects"]:
            x0, y0, x1, y1 = found["box_xyxy"]
            fields = {"score": found["score"]}
            if "mask" in found:
                area = int(decode_segmentation(found["mask"], image["height"], image["width"]).sum())
                fields |= {"segmentation": found["mask"], "area": area}
            data.add_object(image_id, ids[found["class"]], [x0, y0, x1 - x0, y1 - y0], **fields)
        for annotation in data.annotations:
            num_objects += 1
            annotation["id"] = num_objects
        yield data.images[0] | {"id": image_id}, data.annotations
