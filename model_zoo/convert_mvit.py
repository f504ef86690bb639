"""Key names of timm's, torchvision's and detectron2's MViT.

The names of facebookresearch/mvit and SlowFast are the same as vitkit's.
"""

import re

from torch import nn

from vitkit.model_zoo.converter import Converter, State, prefix_of


def flatten_stages(state: State, model: nn.Module) -> State:
    """Rename timm's `stages.1.blocks.0.` to `blocks.N.`, counted over all stages."""
    pattern = re.compile(r"(?<![^.])stages\.(\d+)\.blocks\.(\d+)\.")
    blocks = sorted({(int(m[1]), int(m[2])) for m in map(pattern.search, state) if m})
    return {pattern.sub(lambda m: f"blocks.{blocks.index((int(m[1]), int(m[2])))}.", k): v for k, v in state.items()}


def take_backbone(state: State, model: nn.Module) -> State:
    """Move a detector's backbone to the prefix of the backbone in `model`, and drop the rest."""
    ours, theirs = prefix_of(model, "patch_embed.proj.weight"), "backbone.bottom_up."
    return {ours + key.removeprefix(theirs): value for key, value in state.items() if key.startswith(theirs)}


def add_batch_axis(state: State, model: nn.Module) -> State:
    """Give torchvision's class token and positions a first axis of length 1."""
    for key, value in state.items():
        name = key.rpartition(".")[2]
        if name == "cls_token" or name.startswith("pos_embed_"):
            state[key] = value.reshape(1, -1, value.shape[-1])
    return state


CONVERTERS = [
    Converter(
        name="timm MViTv2",
        marks=(".stages.0.blocks.0.attn.qkv.weight", ".stages.0.blocks.0.attn.rel_pos_h"),
        renames=((r"\.shortcut_proj_(attn|mlp)\.", ".proj."), (r"(^|\.)head\.fc\.", r"\1head.projection.")),
        transform=flatten_stages,
    ),
    Converter(
        name="torchvision MViT",
        marks=(".conv_proj.weight", ".pos_encoding.class_token"),
        renames=(
            (r"(^|\.)conv_proj\.", r"\1patch_embed.proj."),
            (r"(^|\.)pos_encoding\.class_token$", r"\1cls_token"),
            (r"(^|\.)pos_encoding\.(spatial|temporal|class)_pos$", r"\1pos_embed_\2"),
            (r"\.attn\.project\.0\.", ".attn.proj."),
            (r"\.project\.", ".proj."),
            (r"\.pool_(q|k|v)\.norm_act\.0\.", r".norm_\1."),
            (r"\.pool_(q|k|v)\.pool\.", r".pool_\1."),
            (r"\.mlp\.0\.", ".mlp.fc1."),
            (r"\.mlp\.3\.", ".mlp.fc2."),
            (r"(^|\.)head\.1\.", r"\1head.projection."),
        ),
        transform=add_batch_axis,
    ),
    Converter(
        name="facebookresearch/detectron2 MViTv2",
        marks=("backbone.bottom_up.patch_embed.proj.weight", "backbone.bottom_up.scale5_norm.weight"),
        transform=take_backbone,
    ),
]
