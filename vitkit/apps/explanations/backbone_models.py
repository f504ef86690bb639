"""Backbones by name, with weights that need not have a classifier's head, and those that learned without labels, as
models whose attention is drawn."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.videos import VideoPredictor
from vitkit.config.overrides import apply_override, split_override
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.errors import CheckpointError, ConfigError
from vitkit.models.classifier import Classifier
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import BACKBONES
from vitkit.weights import LoadReport, load_pretrained
from vitkit.weights.locate import locate
from vitkit.weights.transformers_folder import CONFIG, read_object

IMAGE_SIZE = dict(short_side=480, max_size=640)
"""The size of images, in pixels: DINO's figures have 480 x 480."""
CLIP_SIZE = dict(short_side=224, max_size=300)
FRAME_RATE = 4
"""The distance between the frames of a clip."""


class _OtherKind(Exception):
    """A folder of the transformers library does not have a DINOv2 or DINOv3."""


def is_backbone(model: Any) -> bool:
    """Whether a model's name is that of a backbone, or of DINOv2 or DINOv3 as the transformers library saves them."""
    return (isinstance(model, str) and model in BACKBONES) or dino_folder(model) is not None


def dino_folder(model: Any) -> Path | None:
    """Return the folder of a DINOv2 or DINOv3 of the transformers library, or of its copy of a hub's ("hf:OWNER/NAME");
    None for all other models.

    Raises:
        CheckpointError: the hub has no such model, or cannot be reached.
    """
    located = locate(model, ("hub", "library")) if isinstance(model, str | Path) else None
    try:
        folder = None if located is None else located.fetch(_require_dino)
        if folder is None or not (folder / CONFIG).is_file():
            return None
        _require_dino(folder / CONFIG)
    except _OtherKind:
        return None
    return folder


def _require_dino(config: Path) -> None:
    if read_object(config).get("model_type") not in ("dinov2", "dinov2_with_registers", "dinov3_vit"):
        raise _OtherKind


def dino_spec(folder: Path) -> dict[str, Any]:
    """Return the spec of the ViT that a folder's `config.json` describes.

    Raises:
        ConfigError: it has settings that vitkit's ViT does not have.
        CheckpointError: the file is damaged.
    """
    values = read_object(folder / CONFIG)
    try:
        is_v3, width = values["model_type"] == "dinov3_vit", values["hidden_size"]
        is_gated = bool(values.get("use_gated_mlp" if is_v3 else "use_swiglu_ffn"))
        if is_v3:
            hidden = values["intermediate_size"]
        else:  # two thirds of the width without gates, rounded up to a multiple of 8
            hidden = int(width * values.get("mlp_ratio", 4))
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8 if is_gated else hidden
        registers = values.get("num_register_tokens", 0)
        biases = "qv" if values.get("query_bias", True) else "none"
        spec = dict(
            type="ViT",
            patch_size=values["patch_size"],
            image_size=values["image_size"],
            d_model=width,
            depth=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            mlp="swiglu" if is_gated else "gelu",
            mlp_ratio=hidden / width,
            num_registers=registers,
            positions="rotary" if is_v3 else "patches" if registers else "all",
            blocks=dict(layer_scale=1e-5, norm_eps=values["layer_norm_eps"], qkv_bias=biases if is_v3 else "qkv"),
        )
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG}: has no {error.args[0]}. Get the file again.") from error
    expected = {"hidden_act": "silu" if is_v3 and is_gated else "gelu", "rope_theta": 100.0, "apply_layernorm": True}
    for name, value in expected.items():
        if values.get(name, value) != value:
            raise ConfigError(f"{folder / CONFIG}: {name} is {values[name]!r}; vitkit's ViT has {value!r}.")
    return spec


def load_backbone(
    name: str, weights: str | Path | None = None, *, overrides: Sequence[str] = (), device: str | torch.device = "cpu"
) -> Predictor:
    """Load a backbone as a classifier, whose head keeps its random weights if the file has none.

    Args:
        name: a name for which `is_backbone` is true.
        weights: a value of the backbone's argument `pretrained`: a file, a folder of the transformers library or
            "hf:OWNER/NAME", "timm/NAME" or a URL; None: the published weights of the backbone's family.
        overrides: `key=value` for the backbone's arguments; pretrained=false leaves its random weights.
    Raises:
        ConfigError: an argument is wrong, or there are no published weights.
        CheckpointError: the weights cannot be read, or do not fit.
    """
    folder = None if str(name) in BACKBONES else dino_folder(name)
    config: dict[str, Any] = {"model": {"type": "Classifier"}}
    config["model"]["backbone"] = {"type": name} if folder is None else {**dino_spec(folder), "pretrained": str(folder)}
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
        source = load_pretrained(backbone)
    except ConfigError as error:
        if weights is not None:
            raise
        raise ConfigError(
            f"{name}: has no published weights. Give a file of weights after the name, or pretrained=false to see "
            "random ones."
        ) from error
    except CheckpointError as error:
        if weights is not None:
            raise
        raise CheckpointError(f"{error} With explain, a file follows the backbone's name.") from error
    num_frames, model = with_defaults(backbone, Backbone).num_frames, Classifier(backbone).to(device)
    report = None if source is None else LoadReport(source)
    if num_frames is not None:
        sampling = ClipSampling(num_frames, FRAME_RATE)
        return VideoPredictor(
            model, (), sampling=sampling, transforms=dict(type="EvalResize", **CLIP_SIZE), report=report
        )
    return Predictor(
        model,
        (),
        transforms=dict(type="EvalResize", **IMAGE_SIZE),
        report=report,
        channels=None if backbone.in_channels == 3 else backbone.in_channels,
    )


def drop_training_parts(predictor: Predictor) -> Predictor:
    """Return a predictor whose self-supervised model has only its backbone; other predictors are returned as they
    are."""
    if "features" not in predictor.model.returns:
        return predictor
    predictor = copy.copy(predictor)
    # Only for its attention: what it returns in place of logits are maps.
    predictor.model = Classifier(predictor.model.trained_backbone).eval()
    return predictor
