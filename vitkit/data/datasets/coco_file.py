"""COCO's files of boxes, read and checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.errors import ConfigError
from vitkit.ops.coco_schema import Fault, annotation_entries, detection_faults, raise_faults, segmentation_faults
from vitkit.ops.json_files import read_json


class DetectionFile(NamedTuple):
    """The content of a file of boxes without what cannot be used."""

    content: dict[str, Any]
    """`images`, `annotations` and `categories` as in the file."""
    num_dropped: int
    """Annotations that are left out, as their boxes are empty or outside their images."""
    wrong_segmentations: list[Fault]
    """They are removed from their annotations."""


def read_coco_file(
    path: str | Path, *, masks: bool = True, drop_bad_boxes: bool = False, first: int | None = None
) -> DetectionFile:
    """Read a file of boxes and check everything in it that is used.

    Args:
        masks: every annotation needs a right segmentation; otherwise wrong ones are removed.
        drop_bad_boxes: leave out annotations whose box is empty or outside its image, in place of an error.
        first: see `first_images`.
    Raises:
        DataError: no such file, not JSON, or something in it is wrong.
    """
    path = Path(path)
    content = read_json(path)
    raise_faults(detection_faults(content), path.name)
    content = first_images(content, first)
    bad_boxes = bad_box_faults(content)
    if bad_boxes and not drop_bad_boxes:
        raise_faults(bad_boxes, path.name)
    dropped = {fault.position for fault in bad_boxes}
    if dropped:
        usable = [entry for position, entry in enumerate(content["annotations"]) if position not in dropped]
        content = {**content, "annotations": usable}
    wrong = segmentation_faults(content, required=masks)
    if masks:
        raise_faults(wrong, path.name)
    for fault in wrong:
        del content["annotations"][fault.position]["segmentation"]
    return DetectionFile(content, len(dropped), wrong)


def bad_box_faults(content: Mapping[str, Any]) -> list[Fault]:
    """Find the boxes without an area inside their image, in a file without `detection_faults`."""
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    annotations = annotation_entries(content)
    faults = []
    for position, annotation in enumerate(content["annotations"]):
        x, y, width, height = annotation["bbox"]
        image_width, image_height = sizes[annotation["image_id"]]
        if width > 0 and height > 0 and x < image_width and y < image_height and x + width > 0 and y + height > 0:
            continue
        expected = f"a box inside the image of {image_width}x{image_height} pixels"
        if width <= 0 or height <= 0:
            expected = f"a {'width' if width <= 0 else 'height'} above 0"
        remedy = "Correct it; boxes that are empty or outside their image may also be left out, by bad_boxes='drop'."
        faults.append(annotations.fault(position, "bbox", expected, remedy))
    return faults


def first_images(content: dict[str, Any], count: int | None) -> dict[str, Any]:
    """Return the content of an annotation file with only its first `count` images and their annotations; None: all.

    Raises:
        ConfigError: count is below 1.
    """
    if count is None:
        return content
    if count < 1:
        raise ConfigError(f"first: got {count}; expected at least 1, or none for all images.")
    images = content["images"][:count]
    image_ids = {image["id"] for image in images}
    annotations = [annotation for annotation in content["annotations"] if annotation["image_id"] in image_ids]
    return {**content, "images": images, "annotations": annotations}
