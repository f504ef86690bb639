"""Augmentation and resizing; the only package that uses albumentations."""

# Importing a module registers its classes.
from vitkit.data.transforms import (  # noqa: F401
    by_epoch,
    classification,
    clips,
    grid_mosaic,
    mixing,
    mosaic_mixup,
    multi_crop,
    pipelines,
)
