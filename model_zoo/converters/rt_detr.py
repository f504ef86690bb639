"""Key names of RT-DETR and RT-DETRv2: lyuwenyu/RT-DETR's and the transformers library's."""

from collections.abc import Iterator

import torch
from torch import nn

from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters.key_table import Alias, Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import (
    DEFORMABLE_DECODER_NORMS,
    ENCODER_NORMS,
    TORCH_FEED_FORWARD,
    library_stack,
)
from vitkit.model_zoo.converters.resnet import library_resnet, official_resnet_vd

EVALUATED_SIZE = 640
"""Height and width of the images for which the originals store anchors."""

LIBRARY_DECODER = (
    ("decoder_input_proj.", "head.input_proj."),
    ("enc_output.0.", "head.proposals.enc_output."),
    ("enc_output.1.", "head.proposals.enc_output_norm."),
    ("enc_score_head.", "head.proposals.class_embed."),
    ("enc_bbox_head.", "head.proposals.bbox_embed."),
    ("denoising_class_embed.", "training_queries.denoising.label_embed."),
    ("decoder.query_pos_head.", "head.decoder.query_pos_head."),
    ("decoder.class_embed.", "head.class_embed."),
)
OFFICIAL_DECODER = (
    ("enc_score_head.", "head.proposals.class_embed."),
    ("enc_bbox_head.", "head.proposals.bbox_embed."),
    ("dec_score_head.", "head.class_embed."),
    ("query_pos_head.", "head.decoder.query_pos_head."),
    ("denoising_class_embed.", "training_queries.denoising.label_embed."),
)
"""Names that D-FINE also has, below "model." in the library and "decoder." in the originals."""


def point_scales(prefix: str, name: str) -> Custom:
    """Return the rule of the entries that repeat, for each sampled point, 1 / the number of its level's points.

    Args:
        prefix: their decoder layers' names before the number.
        name: the entry's name below a layer.
    """

    def read(state: State, model: nn.Module) -> State:
        return {key: value for key, value in state.items() if not (key.startswith(prefix) and key.endswith(name))}

    def write(state: State, model: nn.Module) -> State:
        for i, layer in enumerate(model.get_submodule("head.decoder.layers")):
            points = layer.cross_attn.num_points
            state[f"{prefix}{i}.{name}"] = torch.tensor([1 / number for number in points for _ in range(number)])
        return state

    return Custom(read, write)


def write_anchors(state: State, model: nn.Module, size: int = EVALUATED_SIZE) -> State:
    """Add the logits of the anchors at the evaluated size, which the originals have as buffers."""
    levels = []
    for level, info in enumerate(model.get_submodule("neck").feature_info.values()):
        side = size // info.stride
        centers = (torch.arange(side) + 0.5) / side
        points = torch.cartesian_prod(centers, centers).flip(-1)  # row by row, as (x, y)
        levels.append(torch.cat([points, torch.full_like(points, 0.05 * 2**level)], dim=-1))
    boxes = torch.cat(levels)[None]
    valid = ((boxes > 0.01) & (boxes < 0.99)).all(-1, keepdim=True)
    return state | {"decoder.anchors": torch.logit(boxes).where(valid, torch.inf), "decoder.valid_mask": valid}


def library_neck_encoder() -> Iterator[Rule]:
    """Yield the rules of the hybrid encoder's attention in the library."""
    yield Alias("^model.encoder.aifi.", "^model.encoder.encoder.")  # newer versions have this name in memory
    yield from library_stack("model.encoder.encoder.0.", "neck.encoder.", ENCODER_NORMS, joined=["self_attn"])
    yield Rename("^neck.encoder.layers.0.", "^neck.encoder.")


def _fusion(theirs: str) -> Iterator[Rule]:
    """Yield the rules of the hybrid encoder's convolutions below a prefix."""
    inside = [("conv.", "0."), ("norm.", "1.")]
    for name in ("lateral_convs", "downsample_convs", "fpn_blocks", "pan_blocks"):
        yield from below(f"{theirs}{name}.{{i}}.", f"neck.{name}.{{i}}.", inside)
        for k in (1, 2, 3):
            for block, ours in ((f"conv{k}.", f"conv{k}."), (f"bottlenecks.{{j}}.conv{k}.", f"blocks.{{j}}.conv{k}.")):
                yield from below(f"{theirs}{name}.{{i}}.{block}", f"neck.{name}.{{i}}.{ours}", inside)


def _library() -> Iterator[Rule]:
    # Second names of the decoder's heads in older files; anchors that follow from the image's size.
    yield from (Drop(f"^{name}") for name in ("class_embed.", "bbox_embed.", "model.anchors", "model.valid_mask"))
    yield from library_resnet("model.backbone.model.", "backbone.", vd=True)
    yield Rename("^model.encoder_input_proj.", "^neck.input_proj.")
    yield from library_neck_encoder()
    yield from _fusion("model.encoder.")
    yield from library_stack("model.decoder.", "head.decoder.", DEFORMABLE_DECODER_NORMS, joined=["self_attn"])
    yield from below("model.", "", [*LIBRARY_DECODER, ("decoder.bbox_embed.", "head.decoder.bbox_embed.")])


def _official(input_proj: tuple[str, str], enc_output: tuple[str, str]) -> Iterator[Rule]:
    """Yield the original's rules; its versions name a projection and its norm differently at two places."""
    yield from (Drop("^decoder.anchors$"), Drop("^decoder.valid_mask$"))
    yield from official_resnet_vd("backbone.", "backbone.")
    encoder = ["self_attn.", "norm1.", "norm2.", *TORCH_FEED_FORWARD]
    yield from below("encoder.encoder.0.layers.0.", "neck.encoder.", encoder)
    yield from _fusion("encoder.")
    yield from below("encoder.input_proj.{i}.", "neck.input_proj.{i}.", list(zip(input_proj, ("0.", "1."))))
    # norm1 is that of the self-attention here, and of the cross-attention in vitkit.
    layer = [("norm1.", "norm2."), ("norm2.", "norm1."), *TORCH_FEED_FORWARD, "self_attn.", "cross_attn.", "norm3."]
    yield from below("decoder.decoder.layers.{i}.", "head.decoder.layers.{i}.", layer)
    yield from below("decoder.input_proj.{i}.", "head.input_proj.{i}.", [("conv.", "0."), ("norm.", "1.")])
    yield from below(
        "decoder.enc_output.", "head.proposals.", list(zip(enc_output, ("enc_output.", "enc_output_norm.")))
    )
    yield from below("decoder.", "", [*OFFICIAL_DECODER, ("dec_bbox_head.", "head.decoder.bbox_embed.")])


_LIBRARY_MARKS = (
    "model.backbone.model.embedder.embedder.2.convolution.weight",
    "model.encoder_input_proj.0.0.weight",
    "model.enc_score_head.weight",
)
_MARKS = ("backbone.conv1.conv1_1.conv.weight", "decoder.dec_score_head.0.weight")
_OURS = ("backbone.conv1.6.weight", "neck.pan_blocks.0.conv1.0.weight", "head.proposals.class_embed.weight")

TRANSFORMERS = [
    Format(
        "transformers RT-DETRv2",
        KeyTable([point_scales("model.decoder.layers.", "encoder_attn.n_points_scale"), *_library()]),
        marks=(*_LIBRARY_MARKS, "model.decoder.layers.0.encoder_attn.n_points_scale"),
        model="RTDETRv2",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
    Format(
        "transformers RT-DETR",
        KeyTable([*_library()]),
        marks=_LIBRARY_MARKS,
        model="RTDETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
]
OFFICIAL = [
    Format(
        "lyuwenyu/RT-DETR",
        KeyTable([*_official(("0.", "1."), ("0.", "1."))]),
        marks=(*_MARKS, "encoder.input_proj.0.0.weight"),
        model="RTDETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
    Format(
        "lyuwenyu/RT-DETR, v2",
        KeyTable(
            [
                Custom(writing=write_anchors),
                point_scales("decoder.decoder.layers.", "cross_attn.num_points_scale"),
                *_official(("conv.", "norm."), ("proj.", "norm.")),
            ]
        ),
        marks=(*_MARKS, "encoder.input_proj.0.conv.weight"),
        model="RTDETRv2",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
]
