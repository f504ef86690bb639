"""Key names of the transformers library's MaskFormer and Mask2Former, both ways; with its ResNet or its Swin."""

import math
from collections.abc import Callable

import torch
from torch import nn

from vitkit.model_zoo.converter import State
from vitkit.model_zoo.key_table import Alias, Custom, Drop, Join, KeyTable, Rename, Rule, aliases, below
from vitkit.model_zoo.transformers_backbones import resnet_rules, swin_rules, with_counters, without_last_norm
from vitkit.model_zoo.transformers_detectors import DECODER_LAYER, layer_rules

_ENCODER = "model.pixel_level_module.encoder."
_PIXEL_DECODER = "model.pixel_level_module.decoder."
_TRANSFORMER = "model.transformer_module."
_COARSE_TO_FINE = ("res4", "res3", "res2")
"""The backbone maps that MaskFormer's FPN adds, in the order of its layers."""


def write_empty_weight(state: State, model: nn.Module) -> State:
    """Write the loss weights of the classes, which are a buffer in the library."""
    rows = len(state["head.class_embed.bias"])
    return state | {"criterion.empty_weight": torch.tensor([1.0] * (rows - 1) + [0.1])}


def write_position_indices(state: State, model: nn.Module) -> State:
    """Write each pixel pair's index into a window's bias table, which is a buffer in MaskFormer's Swin."""
    indices = {}
    for key, table in state.items():
        if key.endswith(".relative_position_bias_table"):
            side = (math.isqrt(len(table)) + 1) // 2
            pixels = torch.cartesian_prod(torch.arange(side), torch.arange(side))
            offsets = pixels[:, None] - pixels + side - 1
            index = offsets[..., 0] * (2 * side - 1) + offsets[..., 1]
            indices[key.replace("bias_table", "index")] = index
    return state | indices


def _only_writing(write: Callable[[State, nn.Module], State]) -> Custom:
    return Custom(lambda state, _: state, write)


def unused_norm(theirs: str) -> Custom:
    """Write the unused last norm of a Swin Transformer, which the library has and vitkit does not."""

    def write(state: State, model: nn.Module) -> State:
        norm = state.get("backbone.norm3.weight")
        if norm is not None:
            state |= {f"{theirs}layernorm.weight": torch.ones_like(norm), f"{theirs}layernorm.bias": norm * 0}
        return state

    return _only_writing(write)


def resnet_backbone() -> list[Rule]:
    """Return the rules of the library's ResNet and of timm's."""
    return [
        with_counters(_ENCODER),
        Alias(f"^{_ENCODER}_backbone.", f"^{_ENCODER}"),
        *resnet_rules(_ENCODER, "backbone."),
        *aliases([Rename(f"^{_ENCODER}{name}", f"^backbone.{name}") for name in ("conv1.", "bn1.", "layer{i}.")]),
    ]


MASKFORMER_RULES: list[Rule] = [
    Drop("^criterion."),
    *below(
        _PIXEL_DECODER,
        "neck.",
        [
            ("fpn.stem.", "top."),
            *((f"fpn.layers.{i}.proj.", f"path.lateral.{name}.") for i, name in enumerate(_COARSE_TO_FINE)),
            *((f"fpn.layers.{i}.block.", f"path.output.{name}.") for i, name in enumerate(_COARSE_TO_FINE)),
            ("mask_projection.", "mask_features."),
        ],
    ),
    *layer_rules(f"{_TRANSFORMER}decoder.", "head.decoder.", DECODER_LAYER, joined=["self_attn", "cross_attn"]),
    *below(
        _TRANSFORMER,
        "head.",
        [
            ("decoder.layernorm.", "decoder.norm."),
            ("queries_embedder.", "query_embed."),
            ("input_projection.", "input_proj."),
        ],
    ),
    Rename("^class_predictor.", "^head.class_embed."),
    Rename("^mask_embedder.{i}.0.", "^head.mask_embed.layers.{i}."),
    _only_writing(write_empty_weight),
]
MASKFORMER_RESNET = KeyTable([*resnet_backbone(), *MASKFORMER_RULES])
MASKFORMER_SWIN = KeyTable(
    [
        _only_writing(write_position_indices),
        *swin_rules(f"{_ENCODER}model.", "backbone.", stage=""),
        # The norms of the feature maps are outside of the Swin model that computes these maps.
        *below(_ENCODER, "backbone.", [(f"hidden_states_norms.{i}.", f"norm{i}.") for i in range(4)]),
        without_last_norm("backbone."),
        unused_norm(f"{_ENCODER}model."),
        *MASKFORMER_RULES,
    ]
)

_LAYER = "head.layers.{i}."

MASK2FORMER_RULES: list[Rule] = [
    Drop("^criterion."),
    *layer_rules(
        f"{_PIXEL_DECODER}encoder.",
        "neck.encoder.",
        [("self_attn_layer_norm.", "norm1."), ("final_layer_norm.", "norm2.")],
        joined=[],
    ),
    *below(
        _PIXEL_DECODER,
        "neck.",
        [
            ("level_embed", "level_embed"),
            ("input_projections.", "input_proj."),
            ("adapter_1.", "path.lateral.res2."),
            ("layer_1.", "path.output.res2."),
            ("mask_projection.", "mask_features."),
        ],
    ),
    Rename(f"^{_TRANSFORMER}decoder.layers.{{i}}.", f"^{_LAYER}"),
    Alias(f"^{_LAYER}self_attn.o_proj.", f"^{_LAYER}self_attn.out_proj."),
    *(Alias(f"^{_LAYER}mlp.fc{k}.", f"^{_LAYER}fc{k}.") for k in (1, 2)),
    *below(
        _LAYER,
        _LAYER,
        [
            ("cross_attn_layer_norm.", "norm1."),
            ("self_attn_layer_norm.", "norm2."),
            ("final_layer_norm.", "norm3."),
            ("fc1.", "ffn.linear1."),
            ("fc2.", "ffn.linear2."),
        ],
    ),
    Join([f"^{_LAYER}self_attn.{x}_proj.{{leaf}}" for x in "qkv"], f"^{_LAYER}self_attn.in_proj_{{leaf}}"),
    *below(
        _TRANSFORMER,
        "head.",
        [
            ("decoder.layernorm.", "decoder_norm."),
            ("decoder.mask_predictor.mask_embedder.{i}.0.", "mask_embed.layers.{i}."),
            ("queries_embedder.", "query_embed."),
            ("queries_features.", "query_feat."),
            ("input_projections.", "input_proj."),
            ("level_embed.", "level_embed."),
        ],
    ),
    Rename("^class_predictor.", "^head.class_embed."),
    _only_writing(write_empty_weight),
]
MASK2FORMER_RESNET = KeyTable([*resnet_backbone(), *MASK2FORMER_RULES])
MASK2FORMER_SWIN = KeyTable(
    [
        Alias(f"^{_ENCODER}swin.", f"^{_ENCODER}"),
        *swin_rules(_ENCODER, "backbone."),
        without_last_norm("backbone."),
        *MASK2FORMER_RULES,
    ]
)
