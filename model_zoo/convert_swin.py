"""Key names of torchvision's Swin Transformers, and of the backbones of official detectors and segmenters.

The official names and timm's are the same as vitkit's.
"""

from torch import nn

from vitkit.model_zoo.converter import Converter, State

_TORCHVISION = (
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    *((rf"^features\.{2 * i + 1}\.", f"layers.{i}.blocks.") for i in range(4)),
    *((rf"^features\.{2 * i + 2}\.", f"layers.{i}.downsample.") for i in range(3)),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
)


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


def _backbone_alone(state: State, model: nn.Module) -> State:
    """Take only a detector's backbone if the model is a backbone itself."""
    if "patch_embed.proj.weight" not in model.state_dict():
        return state
    return {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}


CONVERTERS = [
    Converter(
        name="torchvision Swin",
        marks=("features.0.2.weight", "features.1.0.attn.relative_position_bias_table"),
        renames=_TORCHVISION,
    ),
    Converter(
        name="torchvision Swin V2",
        marks=("features.0.2.weight", "features.1.0.attn.logit_scale"),
        renames=_TORCHVISION,
        transform=_split_biases,
    ),
    Converter(
        name="SwinTransformer/Swin-Transformer-Object-Detection",
        marks=("backbone.patch_embed.proj.weight", "backbone.layers.0.blocks.0.attn.relative_position_bias_table"),
        transform=_backbone_alone,
    ),
]
