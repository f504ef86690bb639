"""Augmentation and resizing; the only package that uses albumentations."""

# Importing a module registers its classes.
from vitkit.data.transforms import classification, clips, mixing, pipelines, several_images  # noqa: F401
