"""Runs that overfit a handful of images: the minimum that data, model, losses and evaluation must achieve together."""
