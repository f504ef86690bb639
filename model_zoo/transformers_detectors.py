"""Key names of the transformers library's DETR, DETR with masks, and Deformable DETR, both ways."""

import re
from collections.abc import Sequence

import torch
from torch import nn

from vitkit.model_zoo.converter import State
from vitkit.model_zoo.key_table import Alias, Custom, Join, KeyTable, Rename, Rule, aliases, below
from vitkit.model_zoo.transformers_backbones import resnet_rules

ENCODER_LAYER = (("self_attn_layer_norm.", "norm1."), ("final_layer_norm.", "norm2."))
DECODER_LAYER = (
    ("self_attn_layer_norm.", "norm1."),
    ("encoder_attn_layer_norm.", "norm2."),
    ("final_layer_norm.", "norm3."),
)
DEFORMABLE_DECODER_LAYER = (
    ("self_attn_layer_norm.", "norm2."),
    ("encoder_attn_layer_norm.", "norm1."),
    ("final_layer_norm.", "norm3."),
)
"""Names of a layer's norms in the library and in vitkit; in the last table, norm1 is that of the cross-attention."""


def layer_rules(theirs: str, ours: str, norms: Sequence[tuple[str, str]], *, joined: Sequence[str]) -> list[Rule]:
    """Return the rules of a stack of transformer layers.

    Args:
        theirs, ours: prefixes of the stack.
        norms: names of the norms in the library and in vitkit.
        joined: the attentions whose projections to queries, keys and values are one matrix in vitkit.
    """
    old, new = f"{theirs}layers.{{i}}.", f"{ours}layers.{{i}}."
    return [
        # Newer versions of the library have these names in memory.
        *(Alias(f"^{old}{name}.o_proj.", f"^{old}{name}.out_proj.") for name in ("self_attn", "encoder_attn")),
        *(Alias(f"^{old}mlp.fc{k}.", f"^{old}fc{k}.") for k in (1, 2)),
        Rename(f"^{old}", f"^{new}"),
        *below(new, new, norms),
        *below(new, new, [("fc1.", "ffn.linear1."), ("fc2.", "ffn.linear2."), ("encoder_attn.", "cross_attn.")]),
        *(
            Join([f"^{new}{name}.{x}_proj.{{leaf}}" for x in "qkv"], f"^{new}{name}.in_proj_{{leaf}}")
            for name in joined
        ),
    ]


def backbone_rules(prefix: str) -> list[Rule]:
    """Return the rules of a detector's ResNet, timm's or the library's."""
    timm = f"{prefix}backbone.conv_encoder.model."
    return [
        Alias(f"^{prefix}backbone.model.", f"^{timm}"),
        Alias(f"^{timm}_backbone.", f"^{timm}"),
        *aliases(resnet_rules(timm, timm)),
        Rename(f"^{timm}", "^backbone."),
    ]


def detr_rules(prefix: str) -> list[Rule]:
    """Return the rules of DETR below a prefix."""
    model = f"{prefix}model."
    return [
        *backbone_rules(model),
        *layer_rules(f"{model}encoder.", "head.encoder.", ENCODER_LAYER, joined=["self_attn"]),
        *layer_rules(f"{model}decoder.", "head.decoder.", DECODER_LAYER, joined=["self_attn", "cross_attn"]),
        *below(
            model,
            "",
            [
                ("decoder.layernorm.", "head.decoder.norm."),
                ("input_projection.", "neck.projections.res5."),
                ("query_position_embeddings.", "head.query_embed."),
            ],
        ),
        *below(
            prefix, "", [("class_labels_classifier.", "head.class_embed."), ("bbox_predictor.", "head.bbox_embed.")]
        ),
    ]


DETR = KeyTable(detr_rules(""))
DETR_WITH_MASKS = KeyTable(
    [
        *(
            Alias(f"^{new}", f"^{old}")
            for new, old in (
                ("bbox_attention.q_proj.", "bbox_attention.q_linear."),
                ("bbox_attention.k_proj.", "bbox_attention.k_linear."),
                *((f"mask_head.conv{i}.conv.", f"mask_head.lay{i}.") for i in (1, 2)),
                *((f"mask_head.conv{i}.norm.", f"mask_head.gn{i}.") for i in (1, 2)),
                *((f"mask_head.fpn_stages.{i}.fpn_adapter.", f"mask_head.adapter{i + 1}.") for i in range(3)),
                *((f"mask_head.fpn_stages.{i}.refine.conv.", f"mask_head.lay{i + 3}.") for i in range(3)),
                *((f"mask_head.fpn_stages.{i}.refine.norm.", f"mask_head.gn{i + 3}.") for i in range(3)),
                ("mask_head.output_conv.", "mask_head.out_lay."),
            )
        ),
        *detr_rules("detr."),
    ]
)

_HEADS = {"class_embed": "head.class_embed", "bbox_embed": "head.decoder.bbox_embed"}
"""The library's name of the heads of the decoder's layers -> vitkit's name."""
_THEIR_HEAD = re.compile(r"(?:model\.decoder\.)?(class_embed|bbox_embed)\.(\d+)\.(.*)")


def read_heads(state: State, model: nn.Module) -> State:
    """Rename the heads of Deformable DETR: the library has each under two names, and may omit copies of the first."""
    heads: dict[tuple[str, str], State] = {}
    for key in list(state):
        if match := _THEIR_HEAD.fullmatch(key):
            name, index, rest = match.groups()
            heads.setdefault((name, rest), {})[index] = state.pop(key)
    num_layers = len({key.split(".")[3] for key in state if key.startswith("head.decoder.layers.")})
    # Without refinement, all layers share the first head.
    refines = any(not torch.equal(value, each.get("0", value)) for each in heads.values() for value in each.values())
    for (name, rest), each in heads.items():
        for i in range(num_layers if refines else 1):
            state[f"{_HEADS[name]}.{i}.{rest}"] = each.get(str(i), each.get("0", next(iter(each.values()))))
        if "head.proposals.enc_output.weight" in state:
            state[f"head.proposals.{name}.{rest}"] = each.get(str(num_layers), each.get("0"))
    return state


def write_heads(state: State, model: nn.Module, *, decoder: str = "model.decoder.") -> State:
    """Write the heads under all of the library's names; `decoder` is the prefix of the second names."""
    num_layers = len({key.split(".")[3] for key in state if key.startswith("head.decoder.layers.")})
    written = {}
    for key in list(state):
        for name, ours in _HEADS.items():
            if key.startswith(f"{ours}."):
                index, _, rest = key.removeprefix(f"{ours}.").partition(".")
                refines = f"{ours}.1.{rest}" in state
                for i in [int(index)] if refines else range(num_layers):
                    written[f"{name}.{i}.{rest}"] = state[key]
            elif key.startswith(f"head.proposals.{name}."):
                written[f"{name}.{num_layers}.{key.removeprefix(f'head.proposals.{name}.')}"] = state[key]
        if key.startswith((*(f"{ours}." for ours in _HEADS.values()), *(f"head.proposals.{n}." for n in _HEADS))):
            del state[key]
    two_stage = "head.proposals.enc_output.weight" in state
    refines = f"{_HEADS['bbox_embed']}.1.layers.0.weight" in model.state_dict()
    second_names = [name for name, has in (("bbox_embed", refines), ("class_embed", two_stage)) if has]
    written |= {f"{decoder}{k}": v.clone() for k, v in written.items() if k.startswith(tuple(second_names))}
    return state | written


DEFORMABLE_DETR = KeyTable(
    [
        *backbone_rules("model."),
        *layer_rules("model.encoder.", "head.encoder.", ENCODER_LAYER, joined=[]),
        *layer_rules("model.decoder.", "head.decoder.", DEFORMABLE_DECODER_LAYER, joined=["self_attn"]),
        *below(
            "model.",
            "",
            [
                ("input_proj.", "neck.levels."),
                ("query_position_embeddings.", "head.query_embed."),
                ("level_embed", "head.level_embed"),
                ("reference_points.", "head.reference_points."),
                *((f"{name}.", f"head.proposals.{name}.") for name in ("enc_output", "enc_output_norm")),
                *((f"{name}.", f"head.proposals.{name}.") for name in ("pos_trans", "pos_trans_norm")),
            ],
        ),
        Custom(read_heads, write_heads),
    ]
)
