"""Key names of the original TimeSformer, which are a ViT's below `model.`, and of the transformers library's."""

from vitkit.model_zoo.converter import Converter

CONVERTERS = [
    Converter(
        name="facebookresearch/TimeSformer",
        marks=("model.cls_token", "model.pos_embed", "model.blocks.0.attn.qkv.weight"),
        renames=((r"^model\.", ""),),
    ),
    Converter(
        name="transformers TimeSformer",
        marks=(".embeddings.position_embeddings", ".encoder.layer.0.attention.attention.qkv.weight"),
        renames=(
            (r"^timesformer\.", ""),
            (r"^embeddings\.cls_token$", "cls_token"),
            (r"^embeddings\.position_embeddings$", "pos_embed"),
            (r"^embeddings\.time_embeddings$", "time_embed"),
            (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
            (r"^encoder\.layer\.", "blocks."),
            (r"\.(temporal_)?attention\.attention\.qkv\.", r".\1attn.qkv."),
            (r"\.(temporal_)?attention\.output\.dense\.", r".\1attn.proj."),
            (r"\.temporal_dense\.", ".temporal_fc."),
            (r"\.temporal_layernorm\.", ".temporal_norm1."),
            (r"\.layernorm_before\.", ".norm1."),
            (r"\.layernorm_after\.", ".norm2."),
            (r"\.intermediate\.dense\.", ".mlp.fc1."),
            (r"\.output\.dense\.", ".mlp.fc2."),
            (r"^layernorm\.", "norm."),
            (r"^classifier\.", "head."),
        ),
    ),
]
