"""Key names of EoMT: tue-mps/eomt's, on timm's or the transformers library's ViT, and the library's; only read."""

import re

import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters.key_table import Custom, Drop, Format, KeyTable, Rename, Rule, State, below

_BLOCK = "backbone.blocks.{i}."
_LIBRARY_VIT: list[Rule] = [
    *(
        rule
        for name in ("embeddings", "patch_embed")
        for rule in below(
            f"backbone.{name}.",
            "backbone.",
            [
                *(f"{token}$" for token in ("cls_token", "register_tokens", "mask_token")),
                ("patch_embeddings.projection.", "patch_embed.proj."),
                ("patch_embeddings.", "patch_embed.proj."),
            ],
        )
    ),
    *(
        Rename(f"^backbone.{model}{layers}.{{i}}.", f"^{_BLOCK}")
        for model in ("", "model.")
        for layers in ("layer", "layers", "blocks")
    ),
    *below(
        _BLOCK,
        _BLOCK,
        [
            ("attention.o_proj.", "attn.proj."),
            ("attention.out_proj.", "attn.proj."),
            ("attention.", "attn."),
            ("layer_scale1.lambda1$", "ls1.gamma$"),
            ("layer_scale2.lambda1$", "ls2.gamma$"),
            ("mlp.weights_in.", "mlp.fc1."),
            ("mlp.weights_out.", "mlp.fc2."),
        ],
    ),
]
"""Renames from the transformers library's names of DINOv2 and DINOv3 to timm's, except for separate projections."""


def _join_projections(state: State, model: nn.Module) -> State:
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


def _check_normalisation(state: State, model: nn.Module) -> State:
    """Check how pixels are normalised.

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
    return state


def _add_batch_axis(state: State, model: nn.Module) -> State:
    positions = state.pop("embeddings.position_embeddings.weight", None)
    return state if positions is None else state | {"backbone.pos_embed": positions[None]}


TRANSFORMERS = [
    Format(
        "transformers EoMT",
        KeyTable(
            [
                Drop("^criterion."),
                Custom(_add_batch_axis),
                *below("", "backbone.", ["embeddings.", "layers.", ("layernorm.", "norm."), "norm."]),
                Rename("^query.", "^head.query_embed."),
                Rename("^class_predictor.", "^head.class_embed."),
                *(Rename(f"^mask_head.fc{k + 1}.", f"^head.mask_embed.{2 * k}.") for k in range(3)),
                Rename("^upscale_block.block.{i}.layernorm2d.", "^head.upscale.{i}.norm."),
                Rename("^upscale_block.block.", "^head.upscale."),
                *_LIBRARY_VIT,
                Custom(_join_projections),
            ]
        ),
        marks=("query.weight", "class_predictor.weight", "upscale_block.block.0.conv1.weight"),
    )
]
OFFICIAL = [
    Format(
        "tue-mps/eomt",
        KeyTable(
            [
                Rename("^network.", "^"),
                Drop("^criterion."),
                Custom(_check_normalisation),
                Rename("^encoder.backbone.", "^backbone."),
                Rename("^q.", "^head.query_embed."),
                Rename("^class_head.", "^head.class_embed."),
                Rename("^mask_head.", "^head.mask_embed."),
                Rename("^upscale.", "^head.upscale."),
                *_LIBRARY_VIT,
                Custom(_join_projections),
            ]
        ),
        marks=(".class_head.weight", ".mask_head.0.weight", ".upscale.0.conv1.weight"),
    )
]
