"""Key names of a `torch.nn.Transformer` called `transformer`, with its user's embeddings and output projection.

Source, target and output share one `embedding`; or there are `source_embedding`, `target_embedding` and, if the target
and the output do not share a table, `output`. The model is a `Transformer` with `final_norm`.
"""

from vitkit.model_zoo.converter import Converter

CONVERTERS = [
    Converter(
        name="torch.nn.Transformer",
        marks=(
            "transformer.encoder.layers.0.self_attn.in_proj_weight",
            "transformer.encoder.norm.weight",
            "transformer.decoder.layers.0.multihead_attn.in_proj_weight",
        ),
        renames=(
            (r"^transformer\.encoder\.", "encoder."),
            (r"^transformer\.decoder\.", "decoder.stack."),
            (r"\.multihead_attn\.", ".cross_attn."),
            (r"\.(linear[12])\.", r".ffn.\1."),
            (r"^(target_)?embedding\.", "decoder.embedding."),
            (r"^output\.", "decoder.output."),
        ),
    )
]
