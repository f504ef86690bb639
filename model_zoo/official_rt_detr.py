"""Key names of lyuwenyu/RT-DETR, both ways: of RT-DETR, of its second version, and of their backbone alone."""

from collections.abc import Iterator

import torch
from torch import nn

from vitkit.model_zoo.converter import State
from vitkit.model_zoo.key_table import Custom, Drop, KeyTable, Rule, below
from vitkit.model_zoo.transformers_rt_detr import point_scales

_FUSION = ("lateral_convs", "downsample_convs", "fpn_blocks", "pan_blocks")
_EVALUATED_SIZE = 640
"""Height and width of the images that the second version's files hold anchors for."""


def _backbone(prefix: str) -> Iterator[Rule]:
    """Yield the rules of ResNet-vd below a prefix, whose first shortcut does not average."""
    stem = [("conv1.0.", "conv1.1."), ("conv1.3.", "conv1.4."), ("conv1.6.", "bn1.")]
    for i, (conv, norm) in enumerate(stem, start=1):
        yield from below(f"{prefix}conv1.conv1_{i}.", prefix, [("conv.", conv), ("norm.", norm)])
    for stage in range(4):
        shortcut = "short." if stage == 0 else "short.conv."
        pairs = [(f"{shortcut}conv.", "downsample.1."), (f"{shortcut}norm.", "downsample.2.")]
        pairs += [(f"branch2{x}.conv.", f"conv{k}.") for k, x in enumerate("abc", start=1)]
        pairs += [(f"branch2{x}.norm.", f"bn{k}.") for k, x in enumerate("abc", start=1)]
        yield from below(f"{prefix}res_layers.{stage}.blocks.{{i}}.", f"{prefix}layer{stage + 1}.{{i}}.", pairs)


def _encoder() -> Iterator[Rule]:
    """Yield the rules of the hybrid encoder, except those of its projections, which depend on the version."""
    pairs = [(f"{name}.", f"{name}.") for name in ("self_attn", "norm1", "norm2")]
    pairs += [("linear1.", "ffn.linear1."), ("linear2.", "ffn.linear2.")]
    yield from below("encoder.encoder.0.layers.0.", "neck.encoder.", pairs)
    inside = [("conv.", "0."), ("norm.", "1.")]
    for name in _FUSION:
        yield from below(f"encoder.{name}.{{i}}.", f"neck.{name}.{{i}}.", inside)
        for k in (1, 2, 3):
            for theirs, ours in ((f"conv{k}.", f"conv{k}."), (f"bottlenecks.{{j}}.conv{k}.", f"blocks.{{j}}.conv{k}.")):
                yield from below(f"encoder.{name}.{{i}}.{theirs}", f"neck.{name}.{{i}}.{ours}", inside)


def _decoder() -> Iterator[Rule]:
    """Yield the rules of the decoder, except those of the query selection's projection."""
    # norm1 is that of the self-attention here, and of the cross-attention in vitkit.
    pairs = [("norm1.", "norm2."), ("norm2.", "norm1."), ("linear1.", "ffn.linear1."), ("linear2.", "ffn.linear2.")]
    pairs += [(f"{name}.", f"{name}.") for name in ("self_attn", "cross_attn", "norm3")]
    yield from below("decoder.decoder.layers.{i}.", "head.decoder.layers.{i}.", pairs)
    yield from below("decoder.input_proj.{i}.", "head.input_proj.{i}.", [("conv.", "0."), ("norm.", "1.")])
    names = [
        ("enc_score_head.", "head.proposals.class_embed."),
        ("enc_bbox_head.", "head.proposals.bbox_embed."),
        ("dec_score_head.", "head.class_embed."),
        ("dec_bbox_head.", "head.decoder.bbox_embed."),
        ("query_pos_head.", "head.decoder.query_pos_head."),
        ("denoising_class_embed.", "training_queries.denoising.label_embed."),
    ]
    yield from below("decoder.", "", names)


def _projections(first: str, second: str, linear: str, norm: str) -> Iterator[Rule]:
    """Yield the rules of the parts that the versions name differently."""
    yield from below("encoder.input_proj.{i}.", "neck.input_proj.{i}.", [(f"{first}.", "0."), (f"{second}.", "1.")])
    pairs = [(f"{linear}.", "enc_output."), (f"{norm}.", "enc_output_norm.")]
    yield from below("decoder.enc_output.", "head.proposals.", pairs)


def _write_anchors(state: State, model: nn.Module) -> State:
    """Add the logits of the anchors at the evaluated size, which the second version's model has as buffers."""
    anchors = []
    for level, info in enumerate(model.get_submodule("neck").feature_info.values()):
        side = _EVALUATED_SIZE // info.stride
        centers = (torch.arange(side) + 0.5) / side
        y, x = torch.meshgrid(centers, centers, indexing="ij")
        size = torch.full_like(x, 0.05 * 2**level)
        anchors.append(torch.stack([x, y, size, size], dim=-1).flatten(0, 1))
    boxes = torch.cat(anchors)[None]
    valid = ((boxes > 0.01) & (boxes < 0.99)).all(-1, keepdim=True)
    state["decoder.anchors"] = torch.logit(boxes).masked_fill(~valid, torch.inf)
    state["decoder.valid_mask"] = valid
    return state


_COMMON = [*_backbone("backbone."), *_encoder(), *_decoder()]
_ANCHORS = [Drop("^decoder.anchors$"), Drop("^decoder.valid_mask$")]
RT_DETR = KeyTable([*_ANCHORS, *_COMMON, *_projections("0", "1", "0", "1")])
RT_DETR_V2 = KeyTable(
    [
        *_ANCHORS,
        Custom(lambda state, _: state, _write_anchors),
        point_scales("decoder.decoder.layers.", "cross_attn.num_points_scale"),
        *_COMMON,
        *_projections("conv", "norm", "proj", "norm"),
    ]
)
RESNET_VD = KeyTable([*_backbone("")])
