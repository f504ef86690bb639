"""Checkpoints: written atomically, read without running code, and loaded into models with a report."""

from vitkit.checkpoint.files import link_checkpoint, read_checkpoint, save_checkpoint
from vitkit.checkpoint.weights import LoadReport, classes_of, load_weights, state_dict_of

__all__ = [
    "LoadReport",
    "classes_of",
    "link_checkpoint",
    "load_weights",
    "read_checkpoint",
    "save_checkpoint",
    "state_dict_of",
]
