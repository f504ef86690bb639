"""Key names of RF-DETR: roboflow/rf-detr's and the transformers library's.

Theirs have the learned queries and the first stages of all groups together; in vitkit, those of the groups after the
first are training queries.
"""

import re

import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters.key_table import Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import TORCH_FEED_FORWARD, join_qkv

_STAGE = re.compile(r"first_stage\.(\w+)\.(\d+)\.(.*)")
_OUR_STAGE = re.compile(r"(?:head\.proposals|training_queries\.groups\.proposals\.(\d+))\.(\w+)\.(.*)")
_GROUPS = "training_queries.groups.embed.weight"


def _groups_rule(points: str, content: str) -> Custom:
    """Return the rule for the groups; `points` and `content` are their names of the learned queries' two parts."""

    def read(state: State, model: nn.Module) -> State:
        stages = {key: match for key in state if (match := _STAGE.fullmatch(key))}
        num_groups = len({match[2] for match in stages.values()})
        for key, match in stages.items():
            name, group, rest = match[1], int(match[2]), match[3]
            owner = f"training_queries.groups.proposals.{group - 1}" if group else "head.proposals"
            state[f"{owner}.{name}.{rest}"] = state.pop(key)
        if points in state and content in state and num_groups:
            learned = torch.cat((state.pop(points), state.pop(content)), dim=1)
            state["head.query_embed.weight"], *others = learned.chunk(num_groups)
            if others:
                state[_GROUPS] = torch.cat(others)
        return state

    def write(state: State, model: nn.Module) -> State:
        for key in list(state):
            if match := _OUR_STAGE.fullmatch(key):
                group = 0 if match[1] is None else int(match[1]) + 1
                state[f"first_stage.{match[2]}.{group}.{match[3]}"] = state.pop(key)
        own = state.pop("head.query_embed.weight")
        learned = torch.cat((own, state.pop(_GROUPS, own[:0])))
        state[points], state[content] = (part.clone() for part in learned.split((4, learned.shape[1] - 4), dim=1))
        return state

    return Custom(read, write)


def _read_label_groups(state: State, model: nn.Module) -> State:
    """Make the groups of labels from the number of keypoints of each of the first classes."""
    state.pop("transformer.decoder.keypoint_class_mask", None)
    active = state.pop("_kp_active_mask", None)
    if active is None or not active.numel():
        return state
    counts, groups = active.sum(1).tolist(), torch.full((len(state["class_embed.bias"]),), -1)
    if len({*counts} - {0}) > 1:
        raise CheckpointError(
            f"the weights have {counts} keypoints of each class: expected one number for all that have any. Train on "
            "these classes separately."
        )
    with_points = [label for label, count in enumerate(counts) if count]
    groups[with_points] = torch.arange(len(with_points))
    return state | {"head.keypoint_head.label_groups": groups}


def _write_label_groups(state: State, model: nn.Module) -> State:
    groups = state.pop("head.keypoint_head.label_groups", None)
    if groups is None:
        return state
    count = int(groups.max()) + 1
    labels = [(groups == group).nonzero()[:, 0].tolist() for group in range(count)]
    if any(len(of_group) != 1 for of_group in labels):
        raise CheckpointError(
            f"{len(groups)} classes share their keypoints, which the original cannot: it has points for each class "
            "(model.head.keypoint_classes)."
        )
    num_keypoints = len(state["transformer.decoder.keypoint_pos_embed"]) // count
    active = torch.zeros(len(groups), num_keypoints, dtype=torch.bool)
    active[[of_group[0] for of_group in labels]] = True
    group = torch.cat((torch.tensor([-1]), torch.arange(count).repeat_interleave(num_keypoints)))
    separate = (group[:, None] != group) & (group[:, None] >= 0) & (group >= 0)
    return state | {"_kp_active_mask": active, "transformer.decoder.keypoint_class_mask": separate}


def _with_mask_token(key: str) -> list[Rule]:
    """Return the rules for a token that only pre-training uses."""

    def write(state: State, model: nn.Module) -> State:
        state[key] = torch.zeros_like(state[key.replace("mask_token", "cls_token")][0])
        return state

    return [Custom(writing=write), Drop(f"^{key}$")]


def _embedding_rules(theirs: str) -> list[Rule]:
    pairs = [
        ("embeddings.cls_token", "cls_token"),
        ("embeddings.position_embeddings", "pos_embed"),
        ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
        ("layernorm.", "norm."),
        ("encoder.layer.", "blocks."),
    ]
    scales = [(f"layer_scale{i}.lambda1", f"ls{i}.gamma") for i in (1, 2)]
    return [
        *_with_mask_token(f"{theirs}embeddings.mask_token"),
        *below(theirs, "backbone.", pairs),
        *below("backbone.blocks.{i}.", "backbone.blocks.{i}.", scales),
    ]


_BLOCK, _LAYER = "backbone.blocks.{i}.", "head.decoder.layers.{i}."
_FIRST_STAGE = (
    ("enc_output.", "first_stage.enc_output."),
    ("enc_output_norm.", "first_stage.enc_output_norm."),
    ("enc_out_class_embed.", "first_stage.class_embed."),
    ("enc_out_bbox_embed.", "first_stage.bbox_embed."),
    ("enc_out_keypoint_embed.", "first_stage.keypoint_embed."),
)
_PROJECTOR = [
    *((f"0.cv{k}.conv.", f"conv{k}.conv.") for k in (1, 2)),
    *((f"0.cv{k}.bn.", f"conv{k}.norm.") for k in (1, 2)),
    *((f"0.m.{{i}}.cv{k}.conv.", f"blocks.{{i}}.{k - 1}.conv.") for k in (1, 2)),
    *((f"0.m.{{i}}.cv{k}.bn.", f"blocks.{{i}}.{k - 1}.norm.") for k in (1, 2)),
    ("1.", "norm."),
]
_KEYPOINT_RULES = [
    *below(
        _LAYER,
        "head.keypoint_head.layers.{i}.",
        [
            ("kp_inst_self_attn.", "self_attn."),
            ("kp_inst_norm.", "query_norm."),
            ("kp_norm.", "norm1."),
            ("kp_cross_attn.", "cross_attn."),
            ("kp_cross_attn_norm.", "norm2."),
            ("kp_linear1.", "ffn.linear1."),
            ("kp_linear3.", "ffn.linear2."),
            ("kp_norm5.", "norm3."),
            ("instance_kp_layer_scale", "query_scale"),
        ],
    ),
    *(
        rule
        for theirs, ours in (("", "queries"), ("_enc", "first_queries"))
        for rule in below(
            f"transformer.keypoint_query_initializer{theirs}.",
            f"head.keypoint_head.{ours}.",
            ["queries", ("adaLN_modulation.", "modulation."), ("out_proj.", "proj.")],
        )
    ),
    *below("", "head.keypoint_head.", [("keypoint_embed.", "embed.")]),
]
BLOCK_MASKS = [
    ("blocks.{i}.dwconv.", "blocks.{i}.depthwise."),
    "blocks.{i}.norm.",
    ("blocks.{i}.pwconv1.", "blocks.{i}.pointwise."),
    ("spatial_features_proj.", "map_proj."),
    ("query_features_block.norm_in.", "query_norm."),
    ("query_features_block.layers.0.", "query_mlp.fc1."),
    ("query_features_block.layers.2.", "query_mlp.fc2."),
    ("query_features_proj.", "query_proj."),
    "bias",
]
"""The names of `BlockMasks` in RF-DETR-Seg and ECSeg, and ours."""
_OFFICIAL = KeyTable(
    [
        Custom(_read_label_groups, _write_label_groups),
        # A layer of an earlier network, which the published checkpoint still has.
        Drop("^keypoint_head."),
        *_embedding_rules("backbone.0.encoder.encoder."),
        join_qkv(f"{_BLOCK}attention.attention.", f"{_BLOCK}attn.qkv.", names=("query", "key", "value")),
        *below(_BLOCK, _BLOCK, [("attention.output.dense.", "attn.proj.")]),
        *below("backbone.0.cross_attn_projector.stages.0.", "neck.keypoints.", _PROJECTOR),
        *below("backbone.0.projector.stages.0.", "neck.", _PROJECTOR),
        Rename("^transformer.decoder.keypoint_pos_embed$", "^head.keypoint_head.positions$"),
        Rename("^transformer.decoder.", "^head.decoder."),
        *below(_LAYER, _LAYER, TORCH_FEED_FORWARD),
        *below("transformer.", "", _FIRST_STAGE),
        _groups_rule("refpoint_embed.weight", "query_feat.weight"),
        *below("", "head.", ["class_embed.", "bbox_embed."]),
        *_KEYPOINT_RULES,
        *below("segmentation_head.", "head.mask_head.", BLOCK_MASKS),
    ]
)


def _library_rules(prefix: str) -> list[Rule]:
    """Return the rules of the transformers library's detector below a prefix."""
    model = f"{prefix}model."
    return [
        *_embedding_rules(f"{model}backbone.backbone."),
        join_qkv(f"{_BLOCK}attention.", f"{_BLOCK}attn.qkv."),
        *below(_BLOCK, _BLOCK, [("attention.o_proj.", "attn.proj.")]),
        *below(
            f"{model}backbone.projector.",
            "neck.",
            [
                *((f"projector_layer.conv{k}.", f"conv{k}.") for k in (1, 2)),
                *((f"projector_layer.bottlenecks.{{i}}.conv{k}.", f"blocks.{{i}}.{k - 1}.") for k in (1, 2)),
                ("layer_norm.", "norm."),
            ],
        ),
        Rename(f"^{model}decoder.", "^head.decoder."),
        Rename("^head.decoder.layernorm.", "^head.decoder.norm."),
        join_qkv(f"{_LAYER}self_attn.", f"{_LAYER}self_attn.in_proj_"),
        *below(
            _LAYER,
            _LAYER,
            [
                ("self_attn.o_proj.", "self_attn.out_proj."),
                ("self_attn_layer_norm.", "norm1."),
                ("cross_attn_layer_norm.", "norm2."),
                ("layer_norm.", "norm3."),
                ("mlp.fc1.", "ffn.linear1."),
                ("mlp.fc2.", "ffn.linear2."),
            ],
        ),
        *below(model, "", _FIRST_STAGE),
        _groups_rule(f"{model}reference_point_embed.weight", f"{model}query_feat.weight"),
        *below(prefix, "head.", ["class_embed.", "bbox_embed."]),
    ]


_WITH_MASKS = KeyTable(
    [
        *_library_rules("model."),
        *below(
            "",
            "head.mask_head.",
            [
                ("blocks.{i}.depthwise_conv.", "blocks.{i}.depthwise."),
                ("blocks.{i}.layernorm.", "blocks.{i}.norm."),
                ("blocks.{i}.pointwise_conv.", "blocks.{i}.pointwise."),
                ("spatial_features_proj.", "map_proj."),
                ("query_features_block.norm.", "query_norm."),
                ("query_features_block.mlp.", "query_mlp."),
                ("query_features_proj.", "query_proj."),
                ("segmentation_bias", "bias"),
            ],
        ),
    ]
)

_OURS = ("backbone.blocks.0.ls1.gamma", "neck.conv1.norm.weight")


_MARKS = ("transformer.enc_out_class_embed.0.weight", "refpoint_embed.weight", "query_feat.weight")

TRANSFORMERS = [
    Format(
        "transformers RF-DETR, with masks",
        _WITH_MASKS,
        marks=("segmentation_bias", "model.model.reference_point_embed.weight"),
        model="RFDETRSeg",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
    Format(
        "transformers RF-DETR",
        KeyTable(_library_rules("")),
        marks=("class_embed.weight", "model.reference_point_embed.weight"),
        model="RFDETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
]
OFFICIAL = [
    Format(
        "roboflow/rf-detr, with masks",
        _OFFICIAL,
        marks=(*_MARKS, "segmentation_head.bias"),
        model="RFDETRSeg",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
    Format(
        "roboflow/rf-detr, with keypoints",
        _OFFICIAL,
        marks=(*_MARKS, "keypoint_embed.layers.0.weight"),
        model="RFDETRKeypoints",
        ours=(*_OURS, "head.keypoint_head.positions"),
        classes=COCO_CLASSES,
    ),
    Format("roboflow/rf-detr", _OFFICIAL, marks=_MARKS, model="RFDETR", ours=_OURS, classes=COCO_CLASSES),
]
