"""Datasets, transforms, collation and loading.

A dataset has `len()`, `dataset[index]` and `dataset[(index, seed)]` -> Sample, `classes`, `category_ids`, `image_ids`,
`aspect_ratios()`, `load_image(index)` and what its evaluator asks for: `ground_truth()` (see `CocoDetection`),
`load_semantic(index)` (`SemanticFolder`), `load_panoptic(index)` and `things` (`SegmentationDataset`).

One of text has `target_vocabulary`, `source_vocabulary` where it is translated from, `use_vocabularies_of(dataset)` and
`lengths()` (`TextDataset`) in place of classes and images. A dataset's own `collate` makes its batches.
"""

import os

# albumentations asks the network for a newer version when it is imported; loading data must not.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

from vitkit.data import (
    captions,
    cityscapes,
    classification_transforms,
    coco,
    collate,
    image_folder,
    loader,
    mixing,
    monolingual,
    number_words,
    panoptic,
    segments,
    semantic,
    shapes,
    text,
    text_pairs,
    transforms,
)

__all__ = [
    "captions",
    "cityscapes",
    "classification_transforms",
    "coco",
    "collate",
    "image_folder",
    "loader",
    "mixing",
    "monolingual",
    "number_words",
    "panoptic",
    "segments",
    "semantic",
    "shapes",
    "text",
    "text_pairs",
    "transforms",
]
