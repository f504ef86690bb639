"""Key names of ECPose: Intellindust-AI-Lab/EdgeCrafter's, of its release edgecrafterv1.

The original numbers the classes by COCO's ids, so that its heads have two rows for persons alone, of which the first
has no objects. A model with one class has the second; written back, the first has so low a bias that it is never best.
"""

from collections.abc import Iterator

import torch
from torch import nn

from vitkit.model_zoo.converters.dfine import refuse_deployed, settings
from vitkit.model_zoo.converters.ecdet import official_maps
from vitkit.model_zoo.converters.key_table import Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import TORCH_FEED_FORWARD
from vitkit.model_zoo.converters.rt_detr import EVALUATED_SIZE

_LABELS = "training_queries.denoising.label_embed.weight"
_NEVER = -100.0
"""The bias of a class that has no objects."""


def _has_one_class(model: nn.Module) -> bool:
    return model.get_submodule("head.proposals.class_embed").out_features == 1


def _read_persons(state: State, model: nn.Module) -> State:
    """Keep the row of persons in files with one for no objects before it."""
    first = state.get("head.proposals.class_embed.bias")
    if not _has_one_class(model) or first is None or len(first) != 2:
        return state
    state = {key: value[1:] if ".class_embed." in key else value for key, value in state.items()}
    if _LABELS in state:
        state[_LABELS] = _exchange_first(state[_LABELS])
    return state


def _write_persons(state: State, model: nn.Module) -> State:
    if not _has_one_class(model):
        return state
    written = dict(state)
    for key, value in state.items():
        if ".class_embed." in key:
            fill = torch.zeros_like if value.ndim > 1 else lambda bias: torch.full_like(bias, _NEVER)
            written[key] = torch.cat((fill(value), value))
    if _LABELS in state:
        written[_LABELS] = _exchange_first(state[_LABELS])
    return written


def _exchange_first(rows: torch.Tensor) -> torch.Tensor:
    """Exchange the first two rows."""
    return torch.cat((rows[:2].flip(0), rows[2:]))


def _write_anchors(state: State, model: nn.Module) -> State:
    """Add the logits of the anchors at the evaluated size, and the frequencies of positions, which the original has as
    buffers."""
    levels = []
    for info in model.get_submodule("neck").feature_info.values():
        side = EVALUATED_SIZE // info.stride
        centers = (torch.arange(side) + 0.5) / side
        levels.append(torch.cartesian_prod(centers, centers).flip(-1))  # row by row, as (x, y)
    points = torch.cat(levels)[None]
    void = ~((points > 0.01) & (points < 0.99)).all(-1, keepdim=True)
    half = model.get_submodule("head").d_model // 2
    frequencies = 10000 ** (2 * (torch.arange(half, dtype=torch.float32) // 2) / half)
    anchors = {"decoder.anchors": torch.logit(points), "decoder.valid_mask": void}
    return state | anchors | {"decoder.decoder.dim_t": frequencies}


def _official() -> Iterator[Rule]:
    yield Custom(refuse_deployed)
    yield from settings(("decoder.",), None)
    yield Drop("^decoder.decoder.dim_t$")
    yield Custom(writing=_write_anchors)
    yield from official_maps()
    yield Rename("^decoder.decoder.layers.", "^head.decoder.layers.")
    norms = [("within_norm.", "norm1."), ("across_norm.", "norm2."), ("norm2.", "norm3.")]
    yield from below("head.decoder.layers.{i}.", "head.decoder.layers.{i}.", [*TORCH_FEED_FORWARD, *reversed(norms)])
    yield from below(
        "decoder.",
        "",
        [
            ("decoder.half_pose_ref_point_head.", "head.decoder.position_embed."),
            ("pre_pose_embed.", "head.decoder.keypoint_embed."),
            ("pose_embed.", "head.decoder.shift_embed."),
            ("lqe_embed.", "head.quality_embed."),
            ("enc_output.", "head.proposals.enc_output."),
            ("enc_output_norm.", "head.proposals.enc_output_norm."),
            ("enc_out_class_embed.", "head.proposals.class_embed."),
            ("enc_pose_embed.", "head.proposals.keypoint_embed."),
            ("class_embed.", "head.class_embed."),
            ("instance_embedding.", "head.instance_embed."),
            ("keypoint_embedding.", "head.keypoint_embed."),
            ("tgt_embed.", "head.query_embed."),
            ("label_enc.", "training_queries.denoising.label_embed."),
            ("pose_enc.", "training_queries.denoising.keypoint_embed."),
        ],
    )
    yield Custom(_read_persons, _write_persons)


TRANSFORMERS: list[Format] = []
OFFICIAL = [
    Format(
        "Intellindust-AI-Lab/EdgeCrafter, poses",
        KeyTable([*_official()]),
        marks=("backbone.backbone.register_token", "decoder.pre_pose_embed.layers.0.weight"),
        model="ECPose",
        ours=("backbone.patch_embed.convs.0.0.weight", "head.decoder.shift_embed.0.layers.0.weight"),
        classes=("person",),
    )
]
"""All formats: the original's; the transformers library has none."""
