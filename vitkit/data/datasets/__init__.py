"""Datasets of images with boxes, masks, label maps, classes or captions."""

# Importing a module registers its classes.
from vitkit.data.datasets import captions, cityscapes, coco, image_folder, lvis, mnist, panoptic, semantic, video  # noqa: F401
