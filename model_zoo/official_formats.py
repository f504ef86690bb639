"""The formats of the original repositories, in which vitkit's weights can be written; converters read them."""

from torch import nn

from vitkit.data.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converter import State
from vitkit.model_zoo.dfine import OFFICIAL_DFINE
from vitkit.model_zoo.formats import Format
from vitkit.model_zoo.key_table import Custom, KeyTable, Rename, Rule, below
from vitkit.model_zoo.official_rt_detr import RESNET_VD, RT_DETR, RT_DETR_V2
from vitkit.model_zoo.rf_detr import official_formats as rf_detr_formats
from vitkit.model_zoo.transformers_detectors import write_heads
from vitkit.model_zoo.transformers_masks import write_empty_weight

_FEED_FORWARD = [("linear1.", "ffn.linear1."), ("linear2.", "ffn.linear2.")]
_PIXEL_DECODER, _PREDICTOR = "sem_seg_head.pixel_decoder.", "sem_seg_head.predictor."


def _stacks(theirs: str, ours: str, *parts: str, cross: str = "multihead_attn.") -> list[Rule]:
    """Return rules for stacks of layers with the names of torch.nn.Transformer; `cross` names the cross-attention."""
    rules: list[Rule] = [Rename(f"^{theirs}{part}.", f"^{ours}{part}.") for part in parts]
    for part in parts:
        layer = f"{ours}{part}.layers.{{i}}."
        rules += below(layer, layer, [(cross, "cross_attn."), *_FEED_FORWARD])
    return rules


def _detr(prefix: str) -> KeyTable:
    """Return the table of facebookresearch/detr, whose model with masks has the detector below a prefix."""
    names = ("class_embed", "bbox_embed", "query_embed")
    return KeyTable(
        [
            Rename(f"^{prefix}backbone.0.body.", "^backbone."),
            Rename(f"^{prefix}input_proj.", "^neck.projections.res5."),
            *_stacks(f"{prefix}transformer.", "head.", "encoder", "decoder"),
            *(Rename(f"^{prefix}{name}.", f"^head.{name}.") for name in names),
        ]
    )


def _write_deformable_heads(state: State, model: nn.Module) -> State:
    return write_heads(state, model, decoder="transformer.decoder.")


_PROPOSALS = ("enc_output", "enc_output_norm", "pos_trans", "pos_trans_norm")
DEFORMABLE_DETR = KeyTable(
    [
        Rename("^backbone.0.body.", "^backbone."),
        Rename("^input_proj.", "^neck.levels."),
        *(Rename(f"^transformer.{name}.", f"^head.proposals.{name}.") for name in _PROPOSALS),
        Rename("^transformer.level_embed", "^head.level_embed"),
        Rename("^transformer.reference_points.", "^head.reference_points."),
        *_stacks("transformer.", "head.", "encoder", "decoder", cross="cross_attn."),
        Rename("^query_embed.", "^head.query_embed."),
        Custom(lambda state, _: state, _write_deformable_heads),
    ]
)
_RESNET: list[Rule] = [
    Rename("^backbone.stem.conv1.norm.", "^backbone.bn1."),
    Rename("^backbone.stem.conv1.", "^backbone.conv1."),
    *(Rename(f"^backbone.res{i + 1}.", f"^backbone.layer{i}.") for i in range(1, 5)),
    *(
        rule
        for i in range(1, 5)
        for rule in below(
            f"backbone.layer{i}.{{i}}.",
            f"backbone.layer{i}.{{i}}.",
            [
                ("shortcut.norm.", "downsample.1."),
                ("shortcut.", "downsample.0."),
                *((f"conv{j}.norm.", f"bn{j}.") for j in (1, 2, 3)),
            ],
        )
    ),
]
_PYRAMID = [
    pair
    for i, name in enumerate(("res2", "res3", "res4"), start=1)
    for pair in (
        (f"adapter_{i}.norm.", f"path.lateral.{name}.1."),
        (f"adapter_{i}.", f"path.lateral.{name}.0."),
        (f"layer_{i}.norm.", f"path.output.{name}.1."),
        (f"layer_{i}.", f"path.output.{name}.0."),
    )
]
_MASKFORMER: list[Rule] = [
    *below(
        _PIXEL_DECODER,
        "neck.",
        [
            *_PYRAMID,
            ("layer_4.norm.", "top.1."),
            ("layer_4.", "top.0."),
            ("mask_features.", "mask_features."),
            ("input_proj.", "input_proj."),
        ],
    ),
    *_stacks(f"{_PIXEL_DECODER}transformer.", "neck.", "encoder"),
    *_stacks(f"{_PREDICTOR}transformer.", "head.", "encoder", "decoder"),
    *below(
        _PREDICTOR, "head.", [(f"{n}.", f"{n}.") for n in ("class_embed", "mask_embed", "query_embed", "input_proj")]
    ),
    Custom(lambda state, _: state, write_empty_weight),
]
_LAYER = "head.layers.{i}."
_QUERY_PARTS = ("query_feat", "query_embed", "level_embed", "decoder_norm", "class_embed", "mask_embed", "input_proj")
_MASK2FORMER: list[Rule] = [
    *below(
        _PIXEL_DECODER,
        "neck.",
        [
            *_PYRAMID[:4],
            ("transformer.level_embed", "level_embed"),
            ("mask_features.", "mask_features."),
            ("input_proj.", "input_proj."),
        ],
    ),
    *_stacks(f"{_PIXEL_DECODER}transformer.", "neck.", "encoder"),
    *below(
        _PREDICTOR,
        "head.",
        [
            ("transformer_cross_attention_layers.{i}.multihead_attn.", "layers.{i}.cross_attn."),
            ("transformer_cross_attention_layers.{i}.norm.", "layers.{i}.norm1."),
            ("transformer_self_attention_layers.{i}.self_attn.", "layers.{i}.self_attn."),
            ("transformer_self_attention_layers.{i}.norm.", "layers.{i}.norm2."),
            ("transformer_ffn_layers.{i}.norm.", "layers.{i}.norm3."),
            ("transformer_ffn_layers.{i}.", "layers.{i}.ffn."),
            *((f"{name}.", f"{name}.") for name in _QUERY_PARTS),
        ],
    ),
    Custom(lambda state, _: state, write_empty_weight),
]


def _write_tables(state: State, model: nn.Module) -> State:
    """Name the embedding "embedding" if it is shared, otherwise "target_embedding"."""
    name = "target_embedding" if "source_embedding.weight" in state else "embedding"
    state[f"{name}.weight"] = state.pop("decoder.embedding.weight")
    return state


TRANSFORMER = KeyTable(
    [
        *_stacks("transformer.", "", "encoder"),
        Rename("^transformer.decoder.", "^decoder.stack."),
        *below(
            "decoder.stack.layers.{i}.",
            "decoder.stack.layers.{i}.",
            [("multihead_attn.", "cross_attn."), *_FEED_FORWARD],
        ),
        Rename("^output.", "^decoder.output."),
        Custom(lambda state, _: state, _write_tables),
    ]
)
_SAME = KeyTable([])
_RES5, _MASK2FORMER_KEYS = "neck.projections.res5.weight", ("head.query_feat.weight", "neck.level_embed")
_MASKFORMER_KEYS = ("head.query_embed.weight", "neck.top.0.weight", "head.decoder.norm.weight")
_RT_DETR_STEM, _RT_DETR_HEAD = "conv1.conv1_1.conv.weight", "decoder.dec_score_head.0.weight"
_OUR_RT_DETR = ("backbone.conv1.6.weight", "neck.pan_blocks.0.conv1.0.weight", "head.proposals.class_embed.weight")
_RESNET_KEY, _SWIN_KEY = "backbone.conv1.weight", "backbone.layers.0.blocks.0.attn.relative_position_bias_table"

REAL_TIME_FORMATS = [
    Format(
        "lyuwenyu/RT-DETR",
        (f"backbone.{_RT_DETR_STEM}", _RT_DETR_HEAD, "encoder.input_proj.0.0.weight"),
        RT_DETR,
        "RTDETR",
        _OUR_RT_DETR,
        COCO_CLASSES,
    ),
    Format(
        "lyuwenyu/RT-DETR, v2",
        (f"backbone.{_RT_DETR_STEM}", _RT_DETR_HEAD, "encoder.input_proj.0.conv.weight"),
        RT_DETR_V2,
        "RTDETRv2",
        _OUR_RT_DETR,
        COCO_CLASSES,
    ),
    Format(
        "Peterande/D-FINE",
        ("decoder.pre_bbox_head.layers.0.weight", "decoder.decoder.lqe_layers.0.reg_conf.layers.0.weight"),
        OFFICIAL_DFINE,
        "DFINE",
        ("backbone.net.stem.stem1.conv.weight", "head.quality_embed.0.reg_conf.layers.0.weight"),
        COCO_CLASSES,
    ),
    Format("lyuwenyu/RT-DETR, backbone", (_RT_DETR_STEM,), RESNET_VD, "ResNetVD", ("conv1.6.weight",)),
]
"""The formats that are read by the same tables as they are written."""

FORMATS = [
    *REAL_TIME_FORMATS,
    Format("facebookresearch/detr, with masks", (), _detr("detr."), "DETRSegmentation", (_RES5, _RESNET_KEY)),
    Format("facebookresearch/detr", (), _detr(""), "DETR", (_RES5, _RESNET_KEY)),
    Format(
        "fundamentalvision/Deformable-DETR",
        (),
        DEFORMABLE_DETR,
        "DeformableDETR",
        ("neck.levels.0.0.weight", _RESNET_KEY),
    ),
    *(
        Format(f"facebookresearch/{model}", (), KeyTable([*backbone, *rules]), model, (*keys, key))
        for model, rules, keys in (
            ("Mask2Former", _MASK2FORMER, _MASK2FORMER_KEYS),
            ("MaskFormer", _MASKFORMER, _MASKFORMER_KEYS),
        )
        for backbone, key in ((_RESNET, _RESNET_KEY), ([], _SWIN_KEY))
    ),
    *rf_detr_formats(COCO_CLASSES),
    Format("facebookresearch/TimeSformer", (), KeyTable([Rename("^model.", "^")]), "TimeSformer"),
    Format("torch.nn.Transformer", (), TRANSFORMER, "Transformer", ("encoder.norm.weight",)),
    Format("microsoft/Swin-Transformer", (), _SAME, "Swin"),
    Format("microsoft/Swin-Transformer, V2", (), _SAME, "SwinV2"),
    Format("timm ViT", (), _SAME, "ViT"),
    Format("facebookresearch MViT", (), _SAME, "MViT"),
    Format("torchvision ResNet", (), _SAME, "ResNet"),
]
