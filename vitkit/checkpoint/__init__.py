"""Checkpoints: written atomically, read without running code, and loaded into models with a report."""

from vitkit.checkpoint.files import read_checkpoint
from vitkit.checkpoint.weights import LoadReport, classes_of, load_weights, state_dict_of
from vitkit.checkpoint.writing import link_checkpoint, save_checkpoint

__all__ = [
    "LoadReport",
    "classes_of",
    "link_checkpoint",
    "load_weights",
    "read_checkpoint",
    "save_checkpoint",
    "state_dict_of",
]
