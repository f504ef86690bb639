"""Key names of tue-mps/eomt, on timm's or transformers' ViT, and of transformers' own EoMT."""

import re

import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converter import Converter, State

_TRANSFORMERS_VIT = (
    (r"^backbone\.(?:embeddings|patch_embed)\.(cls_token|register_tokens|mask_token)$", r"backbone.\1"),
    (r"^backbone\.(?:embeddings|patch_embed)\.patch_embeddings\.(?:projection\.)?", "backbone.patch_embed.proj."),
    (r"^backbone\.(?:model\.)?(?:layers?|blocks)\.(\d+)\.", r"backbone.blocks.\1."),
    (r"^(backbone\.blocks\.\d+)\.attention\.(?:o_proj|out_proj)\.", r"\1.attn.proj."),
    (r"^(backbone\.blocks\.\d+)\.attention\.", r"\1.attn."),
    (r"^(backbone\.blocks\.\d+)\.layer_scale([12])\.lambda1$", r"\1.ls\2.gamma"),
    (r"^(backbone\.blocks\.\d+\.mlp)\.weights_in\.", r"\1.fc1."),
    (r"^(backbone\.blocks\.\d+\.mlp)\.weights_out\.", r"\1.fc2."),
)
"""Renames from transformers' names of DINOv2 and DINOv3 to timm's, except for projections, which are separate there."""


def _join_projections(state: State) -> State:
    """Join the projections to queries, keys and values, and those of a gated MLP to gate and values."""
    joined: State = {}
    for key, value in state.items():
        match = re.match(r"(backbone\.blocks\.\d+)\.(attn\.[qkv]|mlp\.(?:gate|up|down))_proj\.(weight|bias)$", key)
        if match is None:
            joined[key] = value
            continue
        block, part, leaf = match.groups()
        if part == "mlp.down":
            joined[f"{block}.mlp.fc2.{leaf}"] = value
        elif part == "mlp.up":
            gate = state.get(f"{block}.mlp.gate_proj.{leaf}")
            joined[f"{block}.mlp.fc1.{leaf}"] = value if gate is None else torch.cat((gate, value))
        elif part == "attn.q":
            rest = [state.get(f"{block}.attn.{name}_proj.{leaf}", torch.zeros_like(value)) for name in "kv"]
            joined[f"{block}.attn.qkv.{leaf}"] = torch.cat((value, *rest))
    return joined


def _fit_official(state: State, model: nn.Module) -> State:
    """Check how pixels are normalised, and drop entries without a counterpart.

    Raises:
        CheckpointError: the weights expect another normalisation of pixels than the model's backbone.
    """
    for name, expected in dict(mean=model.backbone.pixel_mean, std=model.backbone.pixel_std).items():
        values = state.pop(f"encoder.pixel_{name}", None)
        if values is not None and not torch.allclose(values.flatten().float().cpu(), torch.tensor(expected), atol=1e-3):
            raise CheckpointError(
                f"encoder.pixel_{name}: the weights expect images normalised by {values.flatten().tolist()}; the "
                f"model normalises by {list(expected)}: set model.backbone.pixel_{name}."
            )
    return _join_projections({key: value for key, value in state.items() if not key.startswith("criterion.")})


def _fit_transformers(state: State, model: nn.Module) -> State:
    """Give positions their batch axis, and drop entries without a counterpart."""
    positions = state.pop("position_embeddings", None)
    if positions is not None:
        state["backbone.pos_embed"] = positions[None]
    return _join_projections({key: value for key, value in state.items() if not key.startswith("criterion.")})


CONVERTERS = [
    Converter(
        name="tue-mps/eomt",
        marks=(".class_head.weight", ".mask_head.0.weight", ".upscale.0.conv1.weight"),
        renames=(
            (r"^network\.", ""),
            (r"^encoder\.backbone\.", "backbone."),
            (r"^q\.", "head.query_embed."),
            (r"^class_head\.", "head.class_embed."),
            (r"^mask_head\.", "head.mask_embed."),
            (r"^upscale\.", "head.upscale."),
            *_TRANSFORMERS_VIT,
        ),
        transform=_fit_official,
    ),
    Converter(
        name="transformers EoMT",
        marks=("query.weight", "class_predictor.weight", "upscale_block.block.0.conv1.weight"),
        renames=(
            (r"^embeddings\.position_embeddings\.weight$", "position_embeddings"),
            (r"^(?:embeddings|layers)\.", r"backbone.\g<0>"),
            (r"^(?:layernorm|norm)\.", "backbone.norm."),
            (r"^query\.", "head.query_embed."),
            (r"^class_predictor\.", "head.class_embed."),
            (r"^mask_head\.fc1\.", "head.mask_embed.0."),
            (r"^mask_head\.fc2\.", "head.mask_embed.2."),
            (r"^mask_head\.fc3\.", "head.mask_embed.4."),
            (r"^upscale_block\.block\.(\d+)\.layernorm2d\.", r"head.upscale.\1.norm."),
            (r"^upscale_block\.block\.", "head.upscale."),
            *_TRANSFORMERS_VIT,
        ),
        transform=_fit_transformers,
    ),
]
