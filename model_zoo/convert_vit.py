"""Key names of the original JAX Vision Transformers, torchvision's, and detectron2's ViTDet.

timm's and DeiT's names are the same as vitkit's.
"""

import re
from functools import partial

import torch
from torch import Tensor, nn

from vitkit.model_zoo.converter import Converter, State, prefix_of

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


CONVERTERS = [
    *(
        Converter(
            name="google-research/vision_transformer",
            marks=(f"{prefix}embedding/kernel", f"{prefix}Transformer/encoder_norm/scale"),
            transform=partial(_from_jax, prefix=prefix),
        )
        for prefix in ("", "opt/target/", "params/", "params/img/")
    ),
    Converter(
        name="torchvision ViT",
        marks=(".encoder.layers.encoder_layer_0.ln_1.weight",),
        renames=(
            (r"(^|\.)class_token$", r"\1cls_token"),
            (r"(^|\.)conv_proj\.", r"\1patch_embed.proj."),
            (r"(^|\.)encoder\.pos_embedding$", r"\1pos_embed"),
            (r"(^|\.)encoder\.ln\.", r"\1norm."),
            (r"(^|\.)heads\.head\.", r"\1head."),
            (r"(^|\.)encoder\.layers\.encoder_layer_(\d+)\.", r"\1blocks.\2."),
            (r"(\.?blocks\.\d+)\.ln_([12])\.", r"\1.norm\2."),
            (r"(\.?blocks\.\d+)\.self_attention\.in_proj_", r"\1.attn.qkv."),
            (r"(\.?blocks\.\d+)\.self_attention\.out_proj\.", r"\1.attn.proj."),
            (r"(\.?blocks\.\d+)\.mlp\.(linear_1|0)\.", r"\1.mlp.fc1."),
            (r"(\.?blocks\.\d+)\.mlp\.(linear_2|3)\.", r"\1.mlp.fc2."),
        ),
    ),
    Converter(
        name="facebookresearch/detectron2 ViTDet",
        marks=(".net.blocks.0.attn.qkv.weight", ".net.patch_embed.proj.weight"),
        transform=_from_vitdet,
    ),
]
