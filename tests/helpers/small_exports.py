"""Tiny models with random weights for the tests of exported files."""

import numpy as np
import torch

from vitkit import build_model, load_config
from vitkit.apps.export_writing.export import ExportSettings, export_model
from vitkit.apps.export_writing.metadata import describe
from vitkit.apps.inference import Predictor

TINY = "model.backbone=dict(type='ViT', d_model=32, depth=1, num_heads=2, pretrained=False)"
"""Overrides for a tiny model, as tracing and converting take time for each operation."""

LAYERS = ["model.head.num_encoder_layers=1", "model.head.num_decoder_layers=1", "model.head.d_ffn=32"]

CLASSES = ["circle", "square", "triangle", "star", "ring", "cross"]


WITHOUT_TORCH = """
import importlib.abc, runpy, sys
class WithoutTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "torchvision", "vitkit", "cv2", "timm"):
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, WithoutTorch())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that runs another one, whose path and arguments follow, on a machine without PyTorch."""


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


IMAGES = [noise(70, 90), noise(96, 64, seed=1)]


def predictor_of(config, overrides=(), **arguments):
    """A predictor with random weights, and its config."""
    cfg = load_config(config, list(overrides))
    torch.manual_seed(0)
    return Predictor(build_model(cfg["model"]), arguments.pop("classes", CLASSES), **arguments), cfg


def export(predictor, cfg, out, **settings):
    metadata = describe(predictor, cfg, name="tiny", license="CC0")
    return export_model(predictor, out, ExportSettings(**settings), images=IMAGES, metadata=metadata)
