"""Runs that learn a handful of images by heart: the least that data, model, losses and evaluation must do together."""
