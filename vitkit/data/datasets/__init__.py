"""Datasets of images with boxes, masks, label maps, classes or captions."""

# Importing a module registers its classes.
from vitkit.data.datasets import (  # noqa: F401
    captions,
    cityscapes,
    coco,
    grounding,
    image_folder,
    lvis,
    mixed,
    mnist,
    panoptic,
    semantic,
    unlabelled_images,
    video,
)
