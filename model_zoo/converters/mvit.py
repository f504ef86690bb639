"""Key names of timm's, torchvision's and detectron2's MViT.

The names of facebookresearch/mvit and SlowFast are the same as vitkit's.
"""

import re

from torch import nn

from vitkit.model_zoo.converters.key_table import Custom, Format, KeyTable, Rename, State, prefix_of


def _flatten_stages(state: State, model: nn.Module) -> State:
    """Rename timm's `stages.1.blocks.0.` to `blocks.N.`, counted over all stages."""
    pattern = re.compile(r"(?<![^.])stages\.(\d+)\.blocks\.(\d+)\.")
    blocks = sorted({(int(m[1]), int(m[2])) for m in map(pattern.search, state) if m})
    return {pattern.sub(lambda m: f"blocks.{blocks.index((int(m[1]), int(m[2])))}.", k): v for k, v in state.items()}


def _take_backbone(state: State, model: nn.Module) -> State:
    """Move a detector's backbone to the prefix of the backbone in `model`, and drop the rest."""
    ours, theirs = prefix_of(model, "patch_embed.proj.weight"), "backbone.bottom_up."
    return {ours + key.removeprefix(theirs): value for key, value in state.items() if key.startswith(theirs)}


def _add_batch_axis(state: State, model: nn.Module) -> State:
    """Give torchvision's class token and positions a first axis of length 1."""
    for key, value in state.items():
        name = key.rpartition(".")[2]
        if name == "cls_token" or name.startswith("pos_embed_"):
            state[key] = value.reshape(1, -1, value.shape[-1])
    return state


_TORCHVISION = KeyTable(
    [
        Rename(".conv_proj.", ".patch_embed.proj."),
        Rename(".pos_encoding.class_token$", ".cls_token$"),
        *(Rename(f".pos_encoding.{name}_pos$", f".pos_embed_{name}$") for name in ("spatial", "temporal", "class")),
        Rename(".attn.project.0.", ".attn.proj."),
        Rename(".project.", ".proj."),
        *(Rename(f".pool_{x}.norm_act.0.", f".norm_{x}.") for x in "qkv"),
        *(Rename(f".pool_{x}.pool.", f".pool_{x}.") for x in "qkv"),
        Rename(".mlp.0.", ".mlp.fc1."),
        Rename(".mlp.3.", ".mlp.fc2."),
        Rename(".head.1.", ".head.projection."),
        Custom(_add_batch_axis),
    ]
)

TRANSFORMERS: list[Format] = []
OFFICIAL = [
    Format("facebookresearch MViT", KeyTable(), model="MViT"),
    Format(
        "timm MViTv2",
        KeyTable(
            [
                Rename(".shortcut_proj_attn.", ".proj."),
                Rename(".shortcut_proj_mlp.", ".proj."),
                Rename(".head.fc.", ".head.projection."),
                Custom(_flatten_stages),
            ]
        ),
        marks=(".stages.0.blocks.0.attn.qkv.weight", ".stages.0.blocks.0.attn.rel_pos_h"),
    ),
    Format("torchvision MViT", _TORCHVISION, marks=(".conv_proj.weight", ".pos_encoding.class_token")),
    Format(
        "facebookresearch/detectron2 MViTv2",
        KeyTable([Custom(_take_backbone)]),
        marks=("backbone.bottom_up.patch_embed.proj.weight", "backbone.bottom_up.scale5_norm.weight"),
    ),
]
