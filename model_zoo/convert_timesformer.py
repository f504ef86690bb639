"""Key names of the original TimeSformer, which are those of a ViT with the prefix `model.`."""

from vitkit.model_zoo.converter import Converter

CONVERTERS = [
    Converter(
        name="facebookresearch/TimeSformer",
        marks=("model.cls_token", "model.pos_embed", "model.blocks.0.attn.qkv.weight"),
        renames=((r"^model\.", ""),),
    )
]
