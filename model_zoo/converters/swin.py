"""Key names of Swin and Swin V2: the transformers library's, torchvision's, and those of official detectors.

The names of microsoft/Swin-Transformer and timm are the same as vitkit's. Newer versions of the transformers library
spell some of theirs differently in memory; files keep the spelling that is written here.
"""

import math

import torch
from torch import nn

from vitkit.model_zoo.converters.key_table import Alias, Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import join_qkv
from vitkit.model_zoo.converters.resnet import without_prefix

_QKV = ("query", "key", "value")
_SECOND_ATTENTION = (("query.bias", "q_bias"), ("value.bias", "v_bias"), ("continuous_position_bias_mlp.", "cpb_mlp."))


def library_swin(theirs: str, ours: str, *, second: bool = False, stage: str = "stage") -> list[Rule]:
    """Return the rules of the library's Swin Transformer below these prefixes.

    Args:
        theirs, ours: prefixes of the backbone.
        second: whether it is Swin V2.
        stage: the text before the number of a feature map's norm, counted from 1; "": counted from 0.
    """
    block = f"{ours}layers.{{i}}.blocks.{{j}}."
    attention = f"{block}attention.self."
    newer = [
        *((f"attention.{x}_proj.", f"attention.self.{name}.") for x, name in zip("qkv", _QKV)),
        ("attention.relative_position_bias.", "attention.self."),
        ("attention.o_proj.", "attention.output.dense."),
        ("mlp.fc1.", "intermediate.dense."),
        ("mlp.fc2.", "output.dense."),
    ]
    first_norm = 1 if stage else 0
    return [
        Drop(".relative_position_index$"),
        Drop(".relative_coords_table$"),
        Drop(f"^{theirs}embeddings.mask_token"),
        *below(
            theirs,
            ours,
            [
                ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
                ("embeddings.norm.", "patch_embed.norm."),
                ("encoder.layers.", "layers."),
                *((f"hidden_states_norms.{stage}{i + first_norm}.", f"norm{i}.") for i in range(4)),
                ("layernorm.", "norm."),
            ],
        ),
        *(Alias(f"^{block}{new}", f"^{block}{old}") for new, old in newer),
        # The keys of Swin V2 have no bias.
        join_qkv(attention, f"{attention}qkv.", names=_QKV, leaf="weight" if second else "{leaf}"),
        *below(attention, attention, _SECOND_ATTENTION if second else []),
        *below(
            block,
            block,
            [
                ("attention.self.", "attn."),
                ("attention.output.dense.", "attn.proj."),
                ("layernorm_before.", "norm1."),
                ("layernorm_after.", "norm2."),
                ("intermediate.dense.", "mlp.fc1."),
                ("output.dense.", "mlp.fc2."),
            ],
        ),
    ]


def write_position_indices(state: State, model: nn.Module) -> State:
    """Write each pixel pair's index into a window's bias table, which is a buffer in other projects."""
    indices = {}
    for key, table in state.items():
        if key.endswith(".relative_position_bias_table"):
            side = (math.isqrt(len(table)) + 1) // 2
            pixels = torch.cartesian_prod(torch.arange(side), torch.arange(side))
            offsets = pixels[:, None] - pixels + side - 1
            index = offsets[..., 0] * (2 * side - 1) + offsets[..., 1]
            indices[key.replace("bias_table", "index")] = index
    return state | indices


def without_last_norm(ours: str) -> Custom:
    """Return the rule that leaves out the classifier's last norm if the model has none below the prefix."""

    def read(state: State, model: nn.Module) -> State:
        # A classifier's backbone has the prefix "backbone.", which is added to the state later.
        missing = not {f"{ours}norm.weight", f"backbone.{ours}norm.weight"} & model.state_dict().keys()
        return {key: v for key, v in state.items() if not (missing and key.startswith(f"{ours}norm."))}

    return Custom(read)


_TORCHVISION: list[Rule] = [
    Rename("^features.0.0.", "^patch_embed.proj."),
    Rename("^features.0.2.", "^patch_embed.norm."),
    *(Rename(f"^features.{2 * i + 1}.", f"^layers.{i}.blocks.") for i in range(4)),
    *(Rename(f"^features.{2 * i + 2}.", f"^layers.{i}.downsample.") for i in range(3)),
    Rename(".mlp.0.", ".mlp.fc1."),
    Rename(".mlp.3.", ".mlp.fc2."),
]


def _split_biases(state: State, model: nn.Module) -> State:
    """Split the biases of torchvision's V2, which also stores one for keys but sets it to zero in use."""
    result = {}
    for key, value in state.items():
        if key.endswith("attn.qkv.bias"):
            stem = key.removesuffix("qkv.bias")
            result[f"{stem}q_bias"], _, result[f"{stem}v_bias"] = value.chunk(3)
        else:
            result[key] = value
    return result


def _only_backbone(state: State, model: nn.Module) -> State:
    """Take only a detector's backbone if the model is a backbone itself."""
    if "patch_embed.proj.weight" not in model.state_dict():
        return state
    return {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}


def _library(name: str, *, second: bool) -> KeyTable:
    """Return the table of the library's classifier, whose backbone has this name."""
    return KeyTable(
        [
            *without_prefix(f"{name}.", "embeddings.", "encoder.", "layernorm.", "hidden_states_norms."),
            *library_swin(f"{name}.", "", second=second),
            without_last_norm(""),
            Rename("^classifier.", "^head."),
        ]
    )


_PATCHES = ".embeddings.patch_embeddings.projection.weight"

TRANSFORMERS = [
    Format(
        "transformers Swin V2",
        _library("swinv2", second=True),
        marks=(_PATCHES, ".encoder.layers.0.blocks.0.attention.self.logit_scale"),
        model="SwinV2",
    ),
    Format(
        "transformers Swin",
        _library("swin", second=False),
        marks=(_PATCHES, ".encoder.layers.0.blocks.0.layernorm_before.weight"),
        model="Swin",
    ),
]
OFFICIAL = [
    Format("microsoft/Swin-Transformer", KeyTable(), model="Swin"),
    Format("microsoft/Swin-Transformer, V2", KeyTable(), model="SwinV2"),
    Format(
        "torchvision Swin",
        KeyTable(_TORCHVISION),
        marks=("features.0.2.weight", "features.1.0.attn.relative_position_bias_table"),
    ),
    Format(
        "torchvision Swin V2",
        KeyTable([*_TORCHVISION, Custom(_split_biases)]),
        marks=("features.0.2.weight", "features.1.0.attn.logit_scale"),
    ),
    Format(
        "facebookresearch/detectron2 Swin",
        KeyTable([Rename("^backbone.bottom_up.", "^backbone."), Custom(_only_backbone)]),
        marks=(
            "backbone.bottom_up.patch_embed.proj.weight",
            "backbone.bottom_up.layers.0.blocks.0.attn.relative_position_bias_table",
        ),
    ),
    Format(
        "SwinTransformer/Swin-Transformer-Object-Detection",
        KeyTable([Custom(_only_backbone)]),
        marks=("backbone.patch_embed.proj.weight", "backbone.layers.0.blocks.0.attn.relative_position_bias_table"),
    ),
]
