"""Augmentation and resizing; the only package that uses albumentations."""

# Importing a module registers its classes.
from vitkit.data.transforms import by_epoch, classification, clips, grid_mosaic, mixing, mosaic_mixup, pipelines  # noqa: F401
