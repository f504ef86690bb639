"""Augmentation and resizing; the only room that uses albumentations."""
