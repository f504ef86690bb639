"""A small ViT for tests, its inputs, and random values for its parameters."""

import torch
from torch import nn

from vitkit.registry import BACKBONES

build = BACKBONES.build
SMALL = dict(patch_size=8, d_model=24, depth=3, num_heads=2, image_size=32)


def randomize(model):
    """Set random values, with which a forgotten entry would be noticed."""
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3 if p.ndim < 3 else 1.0)
    return model.eval()


def images(*size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))
