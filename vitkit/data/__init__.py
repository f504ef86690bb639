"""Datasets, transforms, collation and loading.

A dataset has `len()`, `dataset[index]` and `dataset[(index, seed)]` -> Sample, `classes`, `category_ids`, `image_ids`,
`aspect_ratios()`, `load_image(index)` and what its evaluator asks for: `ground_truth()` (see `CocoDetection`),
`load_semantic(index)` (`SemanticFolder`), `load_panoptic(index)` and `things` (`SegmentationDataset`).
"""

from vitkit.data import (
    classification_transforms,
    coco,
    collate,
    image_folder,
    loader,
    mixing,
    panoptic,
    segments,
    semantic,
    shapes,
    transforms,
)

__all__ = [
    "classification_transforms",
    "coco",
    "collate",
    "image_folder",
    "loader",
    "mixing",
    "panoptic",
    "segments",
    "semantic",
    "shapes",
    "transforms",
]
