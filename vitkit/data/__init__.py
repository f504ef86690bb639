"""Datasets, transforms, collation and loading.

A dataset has `len()`, `dataset[index]` and `dataset[(index, seed)]` -> Sample, `classes`, `category_ids`, `image_ids`,
`aspect_ratios()`, `load_image(index)` and `ground_truth()`; `CocoDetection` describes them.
"""

from vitkit.data import classification_transforms, coco, collate, image_folder, loader, mixing, shapes, transforms

__all__ = [
    "classification_transforms",
    "coco",
    "collate",
    "image_folder",
    "loader",
    "mixing",
    "shapes",
    "transforms",
]
