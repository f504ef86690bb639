"""Key names of Grounding DINO: IDEA-Research's, mmdetection's (MM-Grounding-DINO) and the transformers library's."""

from collections.abc import Sequence

from torch import Tensor, nn

from vitkit.model_zoo.converters import mmdetection
from vitkit.model_zoo.converters.key_table import Alias, Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.language_models import bert_encoder
from vitkit.model_zoo.converters.layers import DEFORMABLE_DECODER_NORMS, ENCODER_NORMS, join_qkv, torch_stack
from vitkit.model_zoo.converters.swin import library_swin

_PROPOSALS = "head.proposals."
_HEADS = {"class_embed": "head.class_embed.", "bbox_embed": "head.decoder.bbox_embed."}
"""Their name of the heads of the decoder's layers -> vitkit's prefix."""
_FUSION = (
    ("v_proj.", "image_proj."),
    ("l_proj.", "text_proj."),
    ("values_v_proj.", "image_values."),
    ("values_l_proj.", "text_values."),
    ("out_v_proj.", "image_out."),
    ("out_l_proj.", "text_out."),
)
_LIBRARY_FUSION = tuple((theirs.replace("v_", "vision_").replace("l_", "text_"), ours) for theirs, ours in _FUSION)


def _heads(theirs: Sequence[str]) -> Custom:
    """Return the rule of the heads, of which other projects have one for each decoder layer, under several names.

    Args:
        theirs: the beginnings of their names, of which the first is read.
    """
    first, *seconds = theirs

    def read(state: State, model: nn.Module) -> State:
        expected = model.state_dict()
        for name, ours in _HEADS.items():
            mine = f"{first}{name}."
            layers = {key.removeprefix(mine): state.pop(key) for key in list(state) if key.startswith(mine)}
            for key in [key for key in state if key.startswith(tuple(f"{second}{name}." for second in seconds))]:
                del state[key]
            for key in [key for key in expected if key.startswith(ours)]:
                layer, _, leaf = key.removeprefix(ours).partition(".")
                # Files may have one copy of heads that all layers share.
                value = layers.get(f"{layer}.{leaf}", layers.get(f"0.{leaf}"))
                if value is not None:
                    state[key] = value.reshape(expected[key].shape) if name == "class_embed" else value
        return state

    def write(state: State, model: nn.Module) -> State:
        for name, ours in _HEADS.items():
            heads = {key.removeprefix(ours): state.pop(key) for key in list(state) if key.startswith(ours)}
            for key, value in heads.items():
                layer, _, leaf = key.partition(".")
                for i in [layer] if f"1.{leaf}" in heads else range(num_layers(state)):
                    state |= {f"{prefix}{name}.{i}.{leaf}": value.clone() for prefix in theirs}
        return state

    def num_layers(state: State) -> int:
        return len({key.split(".")[3] for key in state if key.startswith("head.decoder.layers.")})

    return Custom(read, write)


def _library_attention(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of an attention whose projections the library has one by one."""
    joined = join_qkv(theirs, f"{theirs}in_proj_", names=("query", "key", "value"))
    return [joined, *below(theirs, ours, ["in_proj_", "out_proj."])]


_THEIRS, _OURS = "model.encoder.layers.{i}.", "head.encoder."
_TEXT, _IMAGE, _FUSED = (f"{_OURS}{name}layers.{{i}}." for name in ("text_", "", "fusion_"))
_LIBRARY_DECODER, _DECODER = "model.decoder.layers.{i}.", "head.decoder.layers.{i}."
_BACKBONE = "model.backbone.conv_encoder.model."
_LIBRARY: list[Rule] = [
    Drop(f"^{_BACKBONE}swin.layernorm."),
    Drop(f"^{_BACKBONE}layernorm."),
    Alias(f"^{_BACKBONE}swin.", f"^{_BACKBONE}"),  # in memory
    *library_swin(_BACKBONE, "backbone."),
    Rename("^model.input_proj_vision.", "^neck.levels."),
    *bert_encoder("model.text_backbone.", "text_encoder."),
    Rename("^model.text_projection.", "^text_projection."),
    Rename("^model.level_embed", "^head.level_embed"),
    Rename("^model.query_position_embeddings.", f"^{_PROPOSALS}content."),
    *below("model.", _PROPOSALS, ["enc_output.", "enc_output_norm."]),
    Rename("^model.encoder_output_bbox_embed.", f"^{_PROPOSALS}bbox_embed."),
    Rename("^model.encoder_output_class_embed.", f"^{_PROPOSALS}class_embed."),
    *_library_attention(f"{_THEIRS}text_enhancer_layer.self_attn.", f"{_TEXT}self_attn."),
    *below(
        f"{_THEIRS}text_enhancer_layer.",
        _TEXT,
        [
            ("fc1.", "ffn.linear1."),
            ("fc2.", "ffn.linear2."),
            ("layer_norm_before.", "norm1."),
            ("layer_norm_after.", "norm2."),
        ],
    ),
    *below(f"{_THEIRS}fusion_layer.attn.", f"{_FUSED}attn.", _LIBRARY_FUSION),
    *below(
        f"{_THEIRS}fusion_layer.",
        _FUSED,
        [
            ("layer_norm_vision.", "image_norm."),
            ("layer_norm_text.", "text_norm."),
            ("vision_param", "image_scale"),
            ("text_param", "text_scale"),
        ],
    ),
    *below(
        f"{_THEIRS}deformable_layer.",
        _IMAGE,
        ["self_attn.", *ENCODER_NORMS, ("fc1.", "ffn.linear1."), ("fc2.", "ffn.linear2.")],
    ),
    *_library_attention(f"{_LIBRARY_DECODER}self_attn.", f"{_DECODER}self_attn."),
    *_library_attention(f"{_LIBRARY_DECODER}encoder_attn_text.", f"{_DECODER}text_attn."),
    *below(
        _LIBRARY_DECODER,
        _DECODER,
        [
            ("encoder_attn_text_layer_norm.", "text_norm."),
            *DEFORMABLE_DECODER_NORMS,
            ("encoder_attn.", "cross_attn."),
            ("fc1.", "ffn.linear1."),
            ("fc2.", "ffn.linear2."),
        ],
    ),
    Rename("^model.decoder.layer_norm.", "^head.decoder.norm."),
    Rename("^model.decoder.reference_points_head.", "^head.decoder.ref_point_head."),
    _heads(["", "model.decoder."]),
]

_OFFICIAL_FUSION = (
    ("layer_norm_v.", "image_norm."),
    ("layer_norm_l.", "text_norm."),
    ("gamma_v", "image_scale"),
    ("gamma_l", "text_scale"),
)
_OFFICIAL: list[Rule] = [
    Rename("^backbone.0.", "^backbone."),
    Drop(".relative_position_index$"),
    Rename("^input_proj.", "^neck.levels."),
    *bert_encoder("bert.", "text_encoder."),
    Rename("^feat_map.", "^text_projection."),
    *below("transformer.", _PROPOSALS, ["enc_output.", "enc_output_norm."]),
    Rename("^transformer.enc_out_bbox_embed.", f"^{_PROPOSALS}bbox_embed."),
    Rename("^transformer.tgt_embed.", f"^{_PROPOSALS}content."),
    Rename("^transformer.level_embed", "^head.level_embed"),
    Drop("^transformer.decoder.bbox_embed."),  # the same heads once more
    *torch_stack("transformer.encoder.", "head.encoder."),
    *torch_stack("transformer.decoder.", "head.decoder.", cross="cross_attn."),
    *below(f"{_FUSED}attn.", f"{_FUSED}attn.", _FUSION),
    *below(_FUSED, _FUSED, _OFFICIAL_FUSION),
    *below(_TEXT, _TEXT, [("linear1.", "ffn.linear1."), ("linear2.", "ffn.linear2.")]),
    *below(_DECODER, _DECODER, [("ca_text.", "text_attn."), ("catext_norm.", "text_norm.")]),
    _heads(["", "transformer.decoder."]),
]


def _read_mm(state: State, model: nn.Module) -> State:
    """Rename the heads of the decoder's layers and, which is the last, of the first stage."""
    result = dict(state)
    last = max((int(key.split(".")[2]) for key in result if key.startswith("bbox_head.reg_branches.")), default=0)
    for kind, name in (("reg_branches", "bbox_embed"), ("cls_branches", "class_embed")):
        for key in [key for key in result if key.startswith(f"bbox_head.{kind}.")]:
            index, _, leaf = key.removeprefix(f"bbox_head.{kind}.").partition(".")
            if kind == "reg_branches":
                layer, _, leaf = leaf.partition(".")
                leaf = f"layers.{int(layer) // 2}.{leaf}"
            value = result.pop(key)
            target = f"{_PROPOSALS}{name}." if int(index) == last else f"{name}.{index}."
            result[f"{target}{leaf}"] = value.reshape(()) if kind == "cls_branches" else value
    return result


def _write_mm(state: State, model: nn.Module) -> State:
    num_layers = len({key.split(".")[1] for key in state if key.startswith("bbox_embed.")})
    return dict(_write_mm_head(key, value, num_layers) for key, value in state.items())


def _write_mm_head(key: str, value: Tensor, num_layers: int) -> tuple[str, Tensor]:
    for kind, name in (("reg_branches", "bbox_embed"), ("cls_branches", "class_embed")):
        for prefix, is_encoder in ((f"{_PROPOSALS}{name}.", True), (f"{name}.", False)):
            if key.startswith(prefix):
                index, leaf = num_layers, key.removeprefix(prefix)
                if not is_encoder:
                    index, _, leaf = leaf.partition(".")
                if kind == "reg_branches":
                    _, layer, leaf = leaf.split(".")
                    leaf = f"{2 * int(layer)}.{leaf}"
                return f"bbox_head.{kind}.{index}.{leaf}", value.reshape(1) if kind == "cls_branches" else value
    return key, value


_OF_LLMDET = ("lmm", "connector", "region_connector", "image_seperate", "ref_point_head")
"""What LLMDet's files (https://github.com/iSEE-Laboratory/LLMDet) have besides the detector: its language model."""
_MM: list[Rule] = [
    *(Drop(f"^{part}.") for part in _OF_LLMDET),
    Custom(_read_mm, _write_mm),
    *mmdetection.SWIN,
    mmdetection.channel_mapper(has_biases=True),
    *bert_encoder("language_model.language_backbone.body.model.", "text_encoder."),
    Rename("^text_feat_map.", "^text_projection."),
    Rename("^level_embed", "^head.level_embed"),
    Rename("^memory_trans_fc.", f"^{_PROPOSALS}enc_output."),
    Rename("^memory_trans_norm.", f"^{_PROPOSALS}enc_output_norm."),
    Rename("^query_embedding.", f"^{_PROPOSALS}content."),
    Rename("^dn_query_generator.label_embedding.weight", f"^{mmdetection.LABELS}"),
    mmdetection.last_label_row(),
    *below("encoder.fusion_layers.{i}.attn.", f"{_FUSED}attn.", _FUSION),
    *below("encoder.fusion_layers.{i}.", _FUSED, _OFFICIAL_FUSION),
    *mmdetection.stack("encoder.text_layers.{i}.", _TEXT, mmdetection.ENCODER_NORMS, ["self_attn"]),
    *mmdetection.stack("encoder.layers.{i}.", _IMAGE, mmdetection.ENCODER_NORMS, sampling=["self_attn"]),
    *below(
        "decoder.layers.{i}.",
        _DECODER,
        [
            ("self_attn.attn.", "self_attn."),
            ("cross_attn_text.attn.", "text_attn."),
            "cross_attn.",
            *mmdetection.FFN,
            ("norms.0.", "norm2."),
            ("norms.1.", "text_norm."),
            ("norms.2.", "norm1."),
            ("norms.3.", "norm3."),
        ],
    ),
    *below("decoder.", "head.decoder.", ["norm.", "ref_point_head."]),
    _heads([""]),
]

_SCALES = "head.encoder.fusion_layers.0.image_scale"
_SWIN = "backbone.patch_embed.proj.weight"

TRANSFORMERS = [
    Format(
        "transformers Grounding DINO",
        KeyTable(_LIBRARY),
        marks=("model.encoder.layers.0.fusion_layer.vision_param", "model.text_projection.weight"),
        model="GroundingDINO",
        ours=(_SCALES, _SWIN),
    )
]
MMDETECTION = [
    Format(
        "open-mmlab/mmdetection, Grounding DINO",
        KeyTable(_MM),
        marks=("encoder.fusion_layers.0.gamma_v", "text_feat_map.weight", "memory_trans_fc.weight"),
        model="GroundingDINO",
        ours=(_SCALES, _SWIN, "head.class_embed.0.bias"),
    )
]
OFFICIAL = [
    *MMDETECTION,  # for MM-Grounding-DINO, which has no other
    Format(
        "IDEA-Research/GroundingDINO",
        KeyTable(_OFFICIAL),
        marks=("transformer.encoder.fusion_layers.0.gamma_v", "feat_map.weight"),
        model="GroundingDINO",
        ours=(_SCALES, _SWIN),
    ),
]
