"""Predictions as annotations, which tools for labeling open: a model labels first, and people correct it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.data.formats.annotated import AnnotatedImages, left_out_lines
from vitkit.data.formats.writing import WRITERS, Lost
from vitkit.errors import ConfigError, DataError
from vitkit.io.output import write_text
from vitkit.io.segmentations import decode_segmentation


def write_labels(predictions: Mapping[str, Any], format: str, folder: Path) -> list[Path]:
    """Write the objects of images as annotations of a format, and the images in the order in which to look at them.

    Args:
        predictions: the content of predictions.json.
        format: one of WRITERS; scores are kept in COCO, CVAT and Label Studio.
        folder: annotations are written to its subfolder of the format's name, and names to review_order.txt in it, the
            least certain image first.
    Raises:
        ConfigError: the predictions have no objects of images.
        DataError: an image cannot be named in the format, or a file cannot be written.
    """
    images = predictions.get("images", ())
    if not images or "objects" not in images[0]:
        raise ConfigError(f"--format {format}: writes objects in images, and the model predicts none. Leave it out.")
    data = as_annotations(images, predictions["classes"])
    lost: Lost = {}
    target = folder / format
    written = WRITERS[format](data, target, lost)
    for line in left_out_lines(lost):
        print(f"  lost: {line}")
    order = sorted(images, key=lambda image: (-image["uncertainty"], image["image"]))
    write_text(target / "review_order.txt", "".join(f"{i['uncertainty']:.3f} {i['image']}\n" for i in order))
    return [*written, target / "review_order.txt"]


def as_annotations(images: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> AnnotatedImages:
    """Return objects of predictions.json as annotations, whose `file_name`s are relative to the images' common folder.

    Raises:
        DataError: images lie on the network, or on several drives.
    """
    remote = next((image["image"] for image in images if not os.path.exists(image["image"])), None)
    if remote is not None:
        raise DataError(f"--format: '{remote}' is not a file on this disk. Download it first.")
    paths = [os.path.abspath(image["image"]) for image in images]
    try:
        folder = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    except ValueError as error:
        raise DataError("--format: the images lie on several drives. Copy them into one folder.") from error
    data = AnnotatedImages("predictions", folder, folder)
    for number, name in enumerate(classes, start=1):
        data.categories.append({"id": number, "name": name})
    ids = {name: number for number, name in enumerate(classes, start=1)}
    for path, image in zip(paths, images):
        image_id = data.add_image(Path(path).relative_to(folder).as_posix(), image["width"], image["height"])
        for found in image["objects"]:
            x0, y0, x1, y1 = found["box_xyxy"]
            fields = {"score": found["score"]}
            if "mask" in found:
                area = int(decode_segmentation(found["mask"], image["height"], image["width"]).sum())
                fields |= {"segmentation": found["mask"], "area": area}
            data.add_object(image_id, ids[found["class"]], [x0, y0, x1 - x0, y1 - y0], **fields)
    return data
