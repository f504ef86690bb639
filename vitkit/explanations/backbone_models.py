"""Backbones by name, with weights that need not have a classifier's head, as models whose attention is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.backbones.mvit import FRAME_STRIDE, MViT
from vitkit.backbones.nonlocal_resnet import ClipResNet
from vitkit.backbones.timesformer import TimeSformer
from vitkit.checkpoint import LoadReport
from vitkit.config.overrides import apply_override, split_override
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.errors import ConfigError
from vitkit.inference.predictor import Predictor
from vitkit.models.classifier import Classifier
from vitkit.registry import BACKBONES

IMAGE_SIZE = dict(short_side=480, max_size=640)
"""The size of images, in pixels: DINO's figures have 480 x 480."""
CLIP_SIZE = dict(short_side=224, max_size=300)
FRAME_RATE = 4
"""The distance between the frames of a clip."""


def is_backbone(model: Any) -> bool:
    """Whether a model's name is that of a backbone."""
    return isinstance(model, str) and model in BACKBONES


def load_backbone(
    name: str, weights: str | Path | None = None, *, overrides: Sequence[str] = (), device: str | torch.device = "cpu"
) -> Predictor:
    """Load a backbone as a classifier, whose head keeps its random weights if the file has none.

    Args:
        weights: a value of the backbone's argument `pretrained`: a file, a folder of the transformers library or
            "hf:OWNER/NAME", "timm/NAME" or an address; None: the published weights of the backbone's family.
        overrides: `key=value` for the backbone's arguments; pretrained=false leaves its random weights.
    Raises:
        ConfigError: an argument is wrong, or there are no published weights.
        CheckpointError: the weights cannot be read, or do not fit.
    """
    config: dict[str, Any] = {"model": {"type": "Classifier", "backbone": {"type": name}}}
    for text in overrides:
        key, raw = split_override(text)
        apply_override(config, f"model.backbone.{key}", raw)
    spec = config["model"]["backbone"]
    if weights is not None:
        spec["pretrained"] = str(weights)
    elif "pretrained" not in spec:
        spec["pretrained"] = True
    backbone = Classifier(spec).backbone
    try:
        source = backbone.load_pretrained()
    except ConfigError as error:
        if weights is not None:
            raise
        raise ConfigError(
            f"{name}: has no published weights. Give a file of weights after the name, or pretrained=false to see "
            "random ones."
        ) from error
    num_frames = frames_of(backbone)
    return Predictor(
        Classifier(backbone).to(device),
        (),
        transforms=dict(type="EvalResize", **(IMAGE_SIZE if num_frames is None else CLIP_SIZE)),
        report=None if source is None else LoadReport(source),
        sampling=None if num_frames is None else ClipSampling(num_frames, FRAME_RATE),
        channels=None if backbone.in_channels == 3 else backbone.in_channels,
    )


def frames_of(backbone: nn.Module) -> int | None:
    """Return the number of frames of the clips that a backbone is made for; None for a backbone of images."""
    if isinstance(backbone, MViT) and backbone.axes == 3:
        return backbone.grid[0] * FRAME_STRIDE
    if isinstance(backbone, TimeSformer):
        return 8 if backbone.time_embed is None else backbone.time_embed.shape[1]
    return (32 if backbone.paper_pooling else 8) if isinstance(backbone, ClipResNet) else None
