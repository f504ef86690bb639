"""Key names of Vision Transformers, MAE and TimeSformer: the originals', the transformers library's, and others.

Others are torchvision's, and detectron2's ViTDet. timm's and DeiT's names are the same as vitkit's.
"""

import re
from functools import partial

import torch
from torch import Tensor, nn

from vitkit.model_zoo.converters.key_table import (
    Alias,
    Custom,
    Drop,
    Format,
    KeyTable,
    Rename,
    Rule,
    State,
    below,
    prefix_of,
)
from vitkit.model_zoo.converters.layers import join_qkv
from vitkit.model_zoo.converters.resnet import without_prefix

_JAX_NAMES = {
    "cls": "cls_token",
    "embedding": "patch_embed.proj",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "pos_embedding": "pos_embed",
    "Transformer/encoder_norm": "norm",
    "head": "head",
}
_JAX_BLOCK_NAMES = (
    (r"^LayerNorm_0$", "norm1"),
    (r"^LayerNorm_[12]$", "norm2"),
    (r"^MlpBlock_\d/Dense_0$", "mlp.fc1"),
    (r"^MlpBlock_\d/Dense_1$", "mlp.fc2"),
    (r"^MultiHeadDotProductAttention_\d/out$", "attn.proj"),
)
_JAX_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_JAX_QKV = re.compile(r"(.*)MultiHeadDotProductAttention_\d/(query|key|value)/(kernel|bias)$")


def _from_jax(state: State, model: nn.Module, *, prefix: str) -> State:
    """Rename and transpose JAX's arrays, and join queries, keys and values."""
    state = _unstack({key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)})
    converted, qkv = {}, {}
    for key, value in state.items():
        match = _JAX_QKV.match(key)
        if match:
            block, which, leaf = match.groups()
            qkv.setdefault((block, leaf), {})[which] = value
            continue
        layer, _, leaf = key.rpartition("/")
        if leaf == "kernel":
            value = _from_kernel(layer, value)
        name = f"{_jax_name(layer)}.{_JAX_LEAVES[leaf]}" if leaf in _JAX_LEAVES else _jax_name(key)
        converted[name] = value
    for (block, leaf), parts in qkv.items():
        # Each part is (d_model, heads, d), or (heads, d) for a bias.
        joined = torch.cat([parts[which].flatten(-2) for which in ("query", "key", "value")], dim=-1)
        converted[f"{_jax_name(block)}.attn.qkv.{_JAX_LEAVES[leaf]}"] = joined.T if leaf == "kernel" else joined
    return converted


def _unstack(state: State) -> State:
    """Separate the entries of all blocks, which big_vision may stack under one name."""
    stack = "Transformer/encoderblock/"
    result = {}
    for key, value in state.items():
        if key.startswith(stack):
            result |= {f"Transformer/encoderblock_{i}/{key.removeprefix(stack)}": v for i, v in enumerate(value)}
        else:
            result[key] = value
    return result


def _jax_name(name: str) -> str:
    match = re.match(r"Transformer/encoderblock_(\d+)/?(.*)$", name)
    if not match:
        return _JAX_NAMES.get(name, name.replace("/", "."))
    part = match[2]
    for pattern, replacement in _JAX_BLOCK_NAMES:
        part = re.sub(pattern, replacement, part)
    return f"blocks.{match[1]}.{part}".rstrip(".")


def _from_kernel(layer: str, kernel: Tensor) -> Tensor:
    """Transpose a kernel: JAX multiplies from the other side, with channels last."""
    if kernel.ndim == 4:
        return kernel.permute(3, 2, 0, 1)
    return kernel.flatten(0, -2).T if layer.endswith("/out") else kernel.T


def _from_vitdet(state: State, model: nn.Module) -> State:
    """Move a detector's backbone and feature pyramid to their prefixes in the model."""
    vit, keys = prefix_of(model, "patch_embed.proj.weight"), model.state_dict()
    pyramid = next((k.partition("levels.res")[0] for k in keys if re.search(r"(^|\.)levels\.res\d\.\d", k)), "neck.")
    renamed = {}
    for key, value in state.items():
        key = re.sub(r"^(backbone\.)?net\.", vit, key)
        renamed[re.sub(r"^(backbone\.)?simfp_(\d)\.", rf"{pyramid}levels.res\2.", key)] = value
    return renamed


_LAYER, _QKV = "vit.encoder.layer.{i}.", ("query", "key", "value")
_LIBRARY_BLOCK = (
    ("layernorm_before.", "norm1."),
    ("layernorm_after.", "norm2."),
    ("attention.output.dense.", "attn.proj."),
    ("intermediate.dense.", "mlp.fc1."),
    ("output.dense.", "mlp.fc2."),
)
_LIBRARY_PARTS = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("layernorm.", "norm."),
)


def _library_blocks(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of blocks, whose newer names in memory are only read."""
    return [
        *(
            Alias(f"^{theirs}attention.{x}_proj.", f"^{theirs}attention.attention.{name}.")
            for x, name in zip("qkv", _QKV)
        ),
        Alias(f"^{theirs}attention.o_proj.", f"^{theirs}attention.output.dense."),
        Alias(f"^{theirs}mlp.fc1.", f"^{theirs}intermediate.dense."),
        Alias(f"^{theirs}mlp.fc2.", f"^{theirs}output.dense."),
        join_qkv(f"{theirs}attention.attention.", f"{ours}attn.qkv.", names=_QKV),
        *below(theirs, ours, _LIBRARY_BLOCK),
    ]


_LIBRARY_VIT = KeyTable(
    [
        *without_prefix("vit.", "embeddings.", "encoder.", "layers.", "layernorm."),
        Drop("^pooler."),
        Drop("^vit.pooler."),
        Drop("^vit.embeddings.mask_token"),
        Alias("^vit.layers.{i}.", f"^{_LAYER}"),
        *_library_blocks(_LAYER, "blocks.{i}."),
        *below("vit.", "", _LIBRARY_PARTS),
        Rename("^classifier.", "^head."),
    ]
)
_MAE_DECODER = ("decoder_", "mask_token")


def _to_mae(state: State, model: nn.Module) -> State:
    """Move the encoder's entries to `backbone.` if the model is an MAE; a ViT leaves out the decoder's."""
    if "decoder_pos_embed" not in model.state_dict():
        return state
    return {key if key.startswith(_MAE_DECODER) else f"backbone.{key}": value for key, value in state.items()}


def _from_mae(state: State, model: nn.Module) -> State:
    return {key.removeprefix("backbone."): value for key, value in state.items()}


_MAE = Custom(_to_mae, _from_mae)
_LIBRARY_MAE = KeyTable(
    [
        # Version 5 of the library writes this name.
        Alias("^decoder.decoder_encoder.layer.{i}.", "^decoder.decoder_layers.{i}."),
        *_library_blocks("decoder.decoder_layers.{i}.", "decoder_blocks.{i}."),
        *below("decoder.", "", ["mask_token", "decoder_pos_embed", "decoder_embed.", "decoder_norm.", "decoder_pred."]),
        *_LIBRARY_VIT.rules,
        _MAE,
    ]
)
_BLOCK = "backbone.blocks.{i}."
LIBRARY_DINO: list[Rule] = [
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


def join_projections(state: State, model: nn.Module) -> State:
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


def _to_vit(state: State, model: nn.Module) -> State:
    """Move the entries from `backbone.` to where the model has its ViT."""
    prefix = prefix_of(model, "patch_embed.proj.weight")
    return {key.replace("backbone.", prefix, 1) if key.startswith("backbone.") else key: state[key] for key in state}


_DINO = KeyTable(
    [
        Drop("^classifier."),
        *(Rename(f"^{name}.", "^") for name in ("dinov2", "dinov2_with_registers", "dinov3_vit")),
        *below("", "backbone.", ["embeddings.", "layer.", ("layernorm.", "norm."), "norm."]),
        *(Rename(f"^{name}.layer.", "^backbone.layer.") for name in ("encoder", "model")),
        Rename("^backbone.embeddings.position_embeddings$", "^backbone.pos_embed$"),
        *(
            Rename(f"^backbone.layer.{{i}}.attention.{theirs}.", f"^backbone.layer.{{i}}.attention.{ours}.")
            for theirs, ours in (
                *((f"attention.{name}", f"{name[0]}_proj") for name in _QKV),
                ("output.dense", "o_proj"),
            )
        ),
        *LIBRARY_DINO,
        Custom(join_projections),
        Custom(_to_vit),
    ]
)
_LIBRARY_TIMESFORMER = KeyTable(
    [
        *without_prefix("timesformer.", "embeddings.", "encoder.", "layernorm."),
        *below(
            "timesformer.encoder.layer.{i}.",
            "blocks.{i}.",
            [
                ("temporal_attention.attention.qkv.", "temporal_attn.qkv."),
                ("temporal_attention.output.dense.", "temporal_attn.proj."),
                ("temporal_dense.", "temporal_fc."),
                ("temporal_layernorm.", "temporal_norm1."),
                ("attention.attention.qkv.", "attn.qkv."),
                *_LIBRARY_BLOCK,
            ],
        ),
        *below("timesformer.", "", [*_LIBRARY_PARTS, ("embeddings.time_embeddings", "time_embed")]),
        Rename("^classifier.", "^head."),
    ]
)
_TORCHVISION = KeyTable(
    [
        Rename(".class_token$", ".cls_token$"),
        Rename(".conv_proj.", ".patch_embed.proj."),
        Rename(".encoder.pos_embedding$", ".pos_embed$"),
        Rename(".encoder.ln.", ".norm."),
        Rename(".heads.head.", ".head."),
        *(
            Rename(f".encoder.layers.encoder_layer_{{i}}.{theirs}", f".blocks.{{i}}.{ours}")
            for theirs, ours in (
                ("ln_1.", "norm1."),
                ("ln_2.", "norm2."),
                ("self_attention.in_proj_", "attn.qkv."),
                ("self_attention.out_proj.", "attn.proj."),
                ("mlp.0.", "mlp.fc1."),
                ("mlp.linear_1.", "mlp.fc1."),
                ("mlp.3.", "mlp.fc2."),
                ("mlp.linear_2.", "mlp.fc2."),
            )
        ),
    ]
)

TRANSFORMERS = [
    Format(
        "transformers DINOv2 or DINOv3",
        _DINO,
        marks=(".embeddings.cls_token", ".embeddings.mask_token", ".layer.0.layer_scale1.lambda1"),
    ),
    Format(
        "transformers TimeSformer",
        _LIBRARY_TIMESFORMER,
        marks=(".embeddings.position_embeddings", ".encoder.layer.0.attention.attention.qkv.weight"),
        model="TimeSformer",
    ),
    Format(
        "transformers ViTMAE",
        _LIBRARY_MAE,
        marks=("vit.embeddings.cls_token", "decoder.mask_token", "decoder.decoder_pos_embed"),
        model="MAE",
        ours=("backbone.pos_embed", "backbone.cls_token"),
    ),
    Format(
        "transformers ViT",
        _LIBRARY_VIT,
        marks=(
            *(".embeddings.cls_token", ".embeddings.position_embeddings"),
            *(".embeddings.patch_embeddings.projection.weight", ".0.layernorm_before.weight"),
        ),
        model="ViT",
        ours=("cls_token",),
    ),
]
OFFICIAL = [
    Format(
        "facebookresearch/TimeSformer",
        KeyTable([Rename("^model.", "^")]),
        marks=("model.cls_token", "model.pos_embed", "model.blocks.0.attn.qkv.weight"),
        model="TimeSformer",
    ),
    Format(
        "facebookresearch/mae",
        KeyTable([_MAE]),
        marks=("patch_embed.proj.weight", "mask_token", "decoder_pos_embed"),
        model="MAE",
        ours=("backbone.pos_embed", "backbone.cls_token"),
    ),
    Format("timm ViT", KeyTable(), model="ViT"),
    Format(
        "facebookresearch/dinov2 training",  # its FSDP training divides the blocks into chunks: blocks.CHUNK.BLOCK.
        KeyTable([Alias(".blocks.{chunk}.{i}.", ".blocks.{i}.")]),
        marks=(".cls_token", ".blocks.0.0.norm1.weight"),
    ),
    *(
        Format(
            "google-research/vision_transformer",
            KeyTable([Custom(partial(_from_jax, prefix=prefix))]),
            marks=(f"{prefix}embedding/kernel", f"{prefix}Transformer/encoder_norm/scale"),
        )
        for prefix in ("", "opt/target/", "params/", "params/img/")
    ),
    Format("torchvision ViT", _TORCHVISION, marks=(".encoder.layers.encoder_layer_0.ln_1.weight",)),
    Format(
        "facebookresearch/detectron2 ViTDet",
        KeyTable([Custom(_from_vitdet)]),
        marks=(".net.blocks.0.attn.qkv.weight", ".net.patch_embed.proj.weight"),
    ),
]
