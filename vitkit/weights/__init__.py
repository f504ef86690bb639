"""Checkpoints: written atomically, read without running code, and loaded into models with a report."""

from vitkit.weights.loading import LoadReport, classes_of, load_weights, state_dict_of
from vitkit.weights.reading import read_checkpoint
from vitkit.weights.writing import link_checkpoint, save_checkpoint

__all__ = [
    "LoadReport",
    "classes_of",
    "link_checkpoint",
    "load_weights",
    "read_checkpoint",
    "save_checkpoint",
    "state_dict_of",
]
