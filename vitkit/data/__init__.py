"""Datasets, transforms, collation and loading.

A dataset has `len()`, `dataset[index]` and `dataset[(index, seed)]` -> Sample, `classes`, `category_ids`, `image_ids`,
`aspect_ratios()`, `load_image(index)` and `ground_truth()`; `CocoDetection` describes them.
"""

from vitkit.data import coco, collate, loader, shapes, transforms

__all__ = ["coco", "collate", "loader", "shapes", "transforms"]
