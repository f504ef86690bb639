"""Augmentation and resizing; the only package that uses albumentations."""
