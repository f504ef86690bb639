"""Datasets of images with boxes, masks, label maps, classes or captions."""
