"""Key names of Deformable DETR, fundamentalvision's and the transformers library's, and of IDEA-Research/DINO."""

import re

import torch
from torch import nn

from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters import mmdetection
from vitkit.model_zoo.converters.detr import SELF_ATTENTION, detrex_backbone, library_backbone, official_backbone
from vitkit.model_zoo.converters.key_table import Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import DEFORMABLE_DECODER_NORMS, ENCODER_NORMS, library_stack, torch_stack
from vitkit.model_zoo.converters.resnet import with_counters

_HEADS = {"class_embed": "head.class_embed", "bbox_embed": "head.decoder.bbox_embed"}
"""Their name of the heads of the decoder's layers -> vitkit's name."""
_PROPOSALS = ("enc_output", "enc_output_norm", "pos_trans", "pos_trans_norm")


def _heads(decoder: str, *, may_lack_copies: bool = False) -> Custom:
    """Return the rule of the heads, which both projects store under two names.

    Args:
        decoder: the beginning of the second names.
        may_lack_copies: whether files may have only one name of each head, and only one head if all are equal.
    """
    second, their_head = (
        f"{decoder}bbox_embed.",
        re.compile(rf"(?:{re.escape(decoder)})?(class_embed|bbox_embed)\.(\d+)\.(.*)"),
    )

    def read(state: State, model: nn.Module) -> State:
        # Only a decoder that refines boxes has heads of its own; without refinement, all layers share the first head.
        refines = any(key.startswith(second) for key in state)
        heads: dict[tuple[str, str], State] = {}
        for key in list(state):
            if match := their_head.fullmatch(key):
                name, index, rest = match.groups()
                heads.setdefault((name, rest), {})[index] = state.pop(key)
        num_layers = len({key.split(".")[3] for key in state if key.startswith("head.decoder.layers.")})
        if may_lack_copies:
            refines |= any(not torch.equal(v, each.get("0", v)) for each in heads.values() for v in each.values())
        for (name, rest), each in heads.items():
            for i in range(num_layers if refines else 1):
                state[f"{_HEADS[name]}.{i}.{rest}"] = each.get(str(i), each.get("0", next(iter(each.values()))))
            if "head.proposals.enc_output.weight" in state:
                state[f"head.proposals.{name}.{rest}"] = each.get(str(num_layers), each.get("0"))
        return state

    def write(state: State, model: nn.Module) -> State:
        num_layers = len({key.split(".")[3] for key in state if key.startswith("head.decoder.layers.")})
        refines = f"{_HEADS['bbox_embed']}.1.layers.0.weight" in state
        two_stage = "head.proposals.enc_output.weight" in state
        written = {}
        for name, ours in _HEADS.items():
            for key in [key for key in state if key.startswith(f"{ours}.")]:
                index, _, rest = key.removeprefix(f"{ours}.").partition(".")
                value = state.pop(key)
                written |= {f"{name}.{i}.{rest}": value for i in ([index] if refines else range(num_layers))}
            for key in [key for key in state if key.startswith(f"head.proposals.{name}.")]:
                written[f"{name}.{num_layers}.{key.removeprefix(f'head.proposals.{name}.')}"] = state.pop(key)
        twice = [name for name, has in (("bbox_embed", refines), ("class_embed", two_stage)) if has]
        written |= {f"{decoder}{key}": value.clone() for key, value in written.items() if key.startswith(tuple(twice))}
        return state | written

    return Custom(read, write)


def _without_second_names(state: State, model: nn.Module) -> State:
    """Keep one name of each head: DINO has each head under two names, and shared heads once for each layer."""
    expected = model.state_dict()
    kept = {}
    for key, value in state.items():
        if re.match(r"(class|bbox)_embed\.", key):
            continue  # the decoder's heads are the same
        key = re.sub(r"^head\.decoder\.class_embed\.", "head.class_embed.", key)
        is_shared = re.match(r"head\.(class_embed|decoder\.bbox_embed)\.[1-9]", key) and key not in expected
        if not is_shared:
            kept[key] = value
    return kept


_COMMON: list[Rule] = [
    *official_backbone(""),
    Rename("^input_proj.", "^neck.levels."),
    *below("transformer.", "head.proposals.", [f"{name}." for name in _PROPOSALS]),
    *below("transformer.", "head.", ["level_embed", "reference_points."]),
    *torch_stack("transformer.encoder.", "head.encoder."),
    *torch_stack("transformer.decoder.", "head.decoder.", cross="cross_attn."),
    Rename("^query_embed.", "^head.query_embed."),
]
"""The rules that Deformable DETR shares with DINO."""

_ENCODER, _DECODER = "encoder.layers.{i}.", "decoder.layers.{i}."
_MMDETECTION: list[Rule] = [
    with_counters("backbone."),
    *mmdetection.SWIN,
    mmdetection.channel_mapper(),
    *mmdetection.stack(_ENCODER, f"head.{_ENCODER}", mmdetection.ENCODER_NORMS, sampling=["self_attn"]),
    *mmdetection.stack(
        _DECODER,
        f"head.{_DECODER}",
        mmdetection.DEFORMABLE_DECODER_NORMS,
        attentions=["self_attn"],
        sampling=["cross_attn"],
    ),
    Rename("^level_embed", "^head.level_embed"),
    Rename("^memory_trans_fc.", "^head.proposals.enc_output."),
    Rename("^memory_trans_norm.", "^head.proposals.enc_output_norm."),
    *mmdetection.BRANCHES,
]
"""The rules that Deformable DETR and DINO share in mmdetection."""

_DETREX: list[Rule] = [
    *detrex_backbone(),
    *(Drop(f"^transformer.decoder.{name}_embed.") for name in ("class", "bbox")),  # the same heads once more
    mmdetection.channel_mapper("norm", has_biases=True),
    *mmdetection.detrex_stack(
        f"transformer.{_ENCODER}", f"head.{_ENCODER}", mmdetection.ENCODER_NORMS, ("attentions.0.", "self_attn.")
    ),
    *mmdetection.detrex_stack(
        f"transformer.{_DECODER}",
        f"head.{_DECODER}",
        mmdetection.DEFORMABLE_DECODER_NORMS,
        SELF_ATTENTION,
        ("attentions.1.", "cross_attn."),
    ),
    Rename("^transformer.level_embeds", "^head.level_embed"),
    Rename("^transformer.reference_points.", "^head.reference_points."),
    *below("transformer.", "head.proposals.", [f"{name}." for name in _PROPOSALS]),
    *below("transformer.decoder.", "head.decoder.", ["norm.", "ref_point_head."]),
]
"""The rules that Deformable DETR and DINO share in detrex."""

_OURS = ("neck.levels.0.0.weight", "backbone.conv1.weight")

TRANSFORMERS = [
    Format(
        "transformers Deformable DETR",
        KeyTable(
            [
                *library_backbone("model."),
                *library_stack("model.encoder.", "head.encoder.", ENCODER_NORMS),
                *library_stack("model.decoder.", "head.decoder.", DEFORMABLE_DECODER_NORMS, joined=["self_attn"]),
                Rename("^model.input_proj.", "^neck.levels."),
                Rename("^model.query_position_embeddings.", "^head.query_embed."),
                *below("model.", "head.", ["level_embed", "reference_points."]),
                *below("model.", "head.proposals.", [f"{name}." for name in _PROPOSALS]),
                _heads("model.decoder.", may_lack_copies=True),
            ]
        ),
        marks=("model.level_embed", "model.input_proj.0.0.weight"),
        model="DeformableDETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    )
]
OFFICIAL = [
    Format(
        "IDEA-Research/DINO",
        KeyTable(
            [
                *_COMMON,
                Rename("^transformer.enc_out_class_embed.", "^head.proposals.class_embed."),
                Rename("^transformer.enc_out_bbox_embed.", "^head.proposals.bbox_embed."),
                Rename("^transformer.tgt_embed.", "^head.proposals.content."),
                Rename("^label_enc.", "^training_queries.denoising.label_embed."),
                Custom(_without_second_names),
            ]
        ),
        marks=("transformer.level_embed", "transformer.decoder.ref_point_head.layers.0.weight", "label_enc.weight"),
        classes=COCO_CLASSES,
    ),
    Format(
        "fundamentalvision/Deformable-DETR",
        KeyTable([*_COMMON, _heads("head.decoder.")]),
        marks=("transformer.level_embed", "input_proj.0.0.weight", "bbox_embed.0.layers.0.weight"),
        model="DeformableDETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
]
_MMDETECTION_MARKS = (
    *("level_embed", "encoder.layers.0.self_attn.sampling_offsets.weight", "decoder.layers.0.norms.0.weight"),
    *("bbox_head.cls_branches.0.weight", "bbox_head.reg_branches.0.4.weight"),
)
MMDETECTION = [
    Format(
        "open-mmlab/mmdetection DINO",
        KeyTable(
            [
                *_MMDETECTION,
                *below("decoder.", "head.decoder.", ["norm.", "ref_point_head."]),
                Rename("^query_embedding.", "^head.proposals.content."),
                mmdetection.layer_heads(),
                Rename("^dn_query_generator.label_embedding.weight", f"^{mmdetection.LABELS}"),
                mmdetection.last_label_row(),
            ]
        ),
        marks=(*_MMDETECTION_MARKS, "decoder.ref_point_head.layers.0.weight", "query_embedding.weight"),
        model="DINO",
        ours=("neck.levels.0.0.weight", "head.class_embed.1.weight"),
        classes=COCO_CLASSES,
    ),
    Format(
        "open-mmlab/mmdetection Deformable DETR",
        KeyTable(
            [
                *_MMDETECTION,
                Rename("^pos_trans_fc.", "^head.proposals.pos_trans."),
                Rename("^pos_trans_norm.", "^head.proposals.pos_trans_norm."),
                Rename("^reference_points_fc.", "^head.reference_points."),
                Rename("^query_embedding.", "^head.query_embed."),
                mmdetection.layer_heads(),
            ]
        ),
        marks=_MMDETECTION_MARKS,
        model="DeformableDETR",
        ours=("neck.levels.0.0.weight",),
        classes=COCO_CLASSES,
    ),
]
_DETREX_MARKS = (
    *("transformer.level_embeds", "transformer.decoder.layers.0.attentions.1.sampling_offsets.weight"),
    *("neck.convs.0.conv.weight", "class_embed.0.weight"),
)
DETREX = [
    Format(
        "IDEA-Research/detrex DINO",
        KeyTable(
            [
                *_DETREX,
                Rename("^transformer.tgt_embed.", "^head.proposals.content."),
                Rename("^label_enc.", f"^{mmdetection.LABELS.removesuffix('weight')}"),
                mmdetection.layer_heads(),
                mmdetection.last_label_row(),
            ]
        ),
        marks=(*_DETREX_MARKS, "transformer.tgt_embed.weight", "transformer.decoder.ref_point_head.layers.0.weight"),
        model="DINO",
        ours=("neck.levels.0.0.weight", "head.class_embed.1.weight"),
        classes=COCO_CLASSES,
    ),
    Format(
        "IDEA-Research/detrex Deformable DETR",
        KeyTable([*_DETREX, Rename("^query_embedding.", "^head.query_embed."), mmdetection.layer_heads()]),
        marks=_DETREX_MARKS,
        model="DeformableDETR",
        ours=("neck.levels.0.0.weight",),
        classes=COCO_CLASSES,
    ),
]
