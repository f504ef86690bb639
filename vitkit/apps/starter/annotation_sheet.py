"""A sheet of images with their annotations, for a visual check."""

from pathlib import Path

import numpy as np

from vitkit.apps.datasets.image_groups import read_shown
from vitkit.apps.visualization.boxes import draw_detections
from vitkit.apps.visualization.canvas import save_grid
from vitkit.apps.visualization.masks import draw_masks
from vitkit.data.formats import AnnotatedImages
from vitkit.data.formats.sizes import check_size
from vitkit.io.image_files import path_inside
from vitkit.io.segmentations import decode_segmentation
from vitkit.text_format import pluralize

NUM_DRAWN = 12
"""The number of images on a sheet."""
_MAX_DRAWN, _MAX_MASK_PIXELS = 200, 1 << 28
"""The maximum numbers of objects of an image that are drawn, and of pixels of their masks: one may have thousands."""


def draw_sheet(data: AnnotatedImages, path: Path) -> None:
    """Save a PNG of images with their objects, evenly spread over those that were changed in reading or repairing, or
    else over those that have any and, with splits, are in one."""
    objects: dict[int, list[dict]] = {}
    for annotation in data.annotations:
        objects.setdefault(annotation["image_id"], []).append(annotation)
    # In no split are, for instance, images whose file cannot be read.
    in_splits = {image_id for ids in data.splits.values() for image_id in ids}
    written = [image for image in data.images if image["id"] in in_splits or not in_splits]
    changed = [image for image in written if image["id"] in data.changed]
    images = changed or [image for image in written if image["id"] in objects] or written
    names = [category["name"] for category in data.categories]
    label_of = {category["id"]: label for label, category in enumerate(data.categories)}
    chosen = np.unique(np.linspace(0, len(images) - 1, min(NUM_DRAWN, len(images))).round().astype(int)).tolist()
    panels, titles = [], []
    for image in (images[k] for k in chosen):
        annotations = objects.get(image["id"], [])
        labels = [label_of[annotation["category_id"]] for annotation in annotations]
        pixels = read_shown(path_inside(data.folder, image["file_name"], data.source.name))
        check_size(image, (pixels.shape[1], pixels.shape[0]))
        titles.append(image["file_name"])
        limit = min(_MAX_DRAWN, max(1, _MAX_MASK_PIXELS // (image["height"] * image["width"])))
        if len(annotations) > limit:
            titles[-1] += f" ({limit} of {pluralize(len(annotations), 'objects')})"
            annotations, labels = annotations[:limit], labels[:limit]
        if annotations and all(annotation.get("segmentation") for annotation in annotations):
            size = pixels.shape[:2]
            masks = np.stack([decode_segmentation(a["segmentation"], *size) for a in annotations]).astype(bool)
            panels.append(draw_masks(pixels, masks, labels, names, shades=True))
        else:
            boxes = np.array([annotation["bbox"] for annotation in annotations], np.float32).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            panels.append(draw_detections(pixels, boxes, labels, names))
    save_grid(panels, titles, path)
