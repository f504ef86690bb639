"""Key names of D-FINE and DEIM: Peterande/D-FINE's and the transformers library's; and of D-FINE-seg: its own."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters.key_table import Alias, Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import TORCH_FEED_FORWARD, library_stack
from vitkit.model_zoo.converters.rt_detr import (
    LIBRARY_DECODER,
    OFFICIAL_DECODER,
    library_neck_encoder,
    point_scales,
    write_anchors,
)


def settings(prefixes: Sequence[str], attention: str | None) -> list[Rule]:
    """Return the rules of the entries that follow from the settings: scales of distances and points, and anchors.

    Args:
        prefixes: the scales of distances are read below the first, and written below each.
        attention: name of a decoder layer's cross-attention; None: it stores no scales of points.
    """

    def read(state: State, model: nn.Module) -> State:
        stated = state.get(f"{prefixes[0]}reg_scale")
        ours = [part.reg_scale for part in model.modules() if hasattr(part, "reg_scale")]
        if stated is not None and any(scale != stated.item() for scale in ours):
            raise CheckpointError(
                f"the weights are for head.reg_scale={stated.item():g}, but the model has {ours[0]:g}: use the config "
                "of their size, or set model.head.reg_scale."
            )
        return state

    def write(state: State, model: nn.Module) -> State:
        head = model.get_submodule("head")
        for prefix in prefixes:
            state[f"{prefix}up"] = torch.tensor([head.up])
            state[f"{prefix}reg_scale"] = torch.tensor([head.decoder.reg_scale])
        return state

    scales = [] if attention is None else [point_scales(f"{prefixes[-1]}layers.", f"{attention}.num_points_scale")]
    return [
        Custom(read, write),
        *map(Drop, ("reg_scale$", ".up$", "decoder.project$", "anchors$", "valid_mask$")),
        *scales,
    ]


def refuse_deployed(state: State, model: nn.Module) -> State:
    """Raise CheckpointError for weights that the original converted for inference, which drops entries."""
    if any(key.endswith("conv_bn_fused.weight") for key in state):
        raise CheckpointError(
            "the weights are the original's after convert_to_deploy(), with batch norms folded into convolutions and "
            "without the class heads of all decoder layers but the last: use the file that they were converted from."
        )
    return state


def pair_with_norm(theirs: str, ours: str, conv: str = "conv.", norm: str = "norm.") -> list[tuple[str, str]]:
    """Return the names of a convolution and its batch norm."""
    return [(f"{theirs}{conv}", f"{ours}0."), (f"{theirs}{norm}", f"{ours}1.")]


def hgnet(stem: str, stages: str) -> Iterator[Rule]:
    """Yield the rules of the parts of HGNetv2 that timm names in another way in a model of features."""
    yield Rename(f"^{stem}", "^backbone.net.stem.")
    yield Rename(f"^{stages}{{i}}.", "^backbone.net.stages_{i}.")


def library_hgnet(prefix: str) -> Iterator[Rule]:
    """Yield the rules of the library's HGNetV2, whose names begin with a prefix."""
    yield from hgnet(f"{prefix}embedder.", f"{prefix}encoder.stages.")
    block = "stages_{i}.blocks.{j}."
    modules = [f"stem.{name}." for name in ("stem1", "stem2a", "stem2b", "stem3", "stem4")]
    modules += ["stages_{i}.downsample.", f"{block}aggregation.{{k}}.", f"{block}layers.{{k}}."]
    modules += [f"{block}layers.{{k}}.conv{m}." for m in (1, 2)]
    for module in (f"backbone.net.{module}" for module in modules):
        yield from below(module, module, [("convolution.", "conv."), ("normalization.", "bn.")])


def _neck(theirs: str, downsample: str, cv: str, conv: str, csp: str) -> Iterator[Rule]:
    """Yield the rules of the hybrid encoder's convolutions.

    Args:
        theirs: prefix of the encoder.
        downsample: what stands before a downsampling's two convolutions.
        cv, conv, csp: templates of their names by the number {k} of a convolution, and by the number {k} of the branch
            that ends with a convolution after a CSP block.
    """
    yield from below(f"{theirs}lateral_convs.{{i}}.", "neck.lateral_convs.{i}.", pair_with_norm("", ""))
    pairs = [pair for k in (1, 2) for pair in pair_with_norm(f"{downsample}{cv.format(k=k)}", f"cv{k}.")]
    yield from below(f"{theirs}downsample_convs.{{i}}.", "neck.downsample_convs.{i}.", pairs)
    for name in ("fpn_blocks", "pan_blocks"):
        pairs = [pair for k in (1, 4) for pair in pair_with_norm(cv.format(k=k), f"cv{k}.")]
        for k in (2, 3):
            pairs += pair_with_norm(conv.format(k=k), f"cv{k}.conv.")
            block = csp.format(k=k, before=k - 1)
            for part in ("conv1.", "conv2."):
                pairs += pair_with_norm(f"{block}{part}", f"cv{k}.csp.{part}")
                pairs += pair_with_norm(f"{block}bottlenecks.{{j}}.{part}", f"cv{k}.csp.blocks.{{j}}.{part}")
        yield from below(f"{theirs}{name}.{{i}}.", f"neck.{name}.{{i}}.", pairs)


def _official_maps() -> Iterator[Rule]:
    """Yield the rules of backbone and encoder."""
    yield from hgnet("backbone.stem.", "backbone.stages.")
    yield Rename("^encoder.encoder.0.layers.0.", "^neck.encoder.")
    yield from below("neck.encoder.", "neck.encoder.", TORCH_FEED_FORWARD)
    yield from below("encoder.input_proj.{i}.", "neck.input_proj.{i}.", pair_with_norm("", ""))
    yield from _neck("encoder.", downsample="0.", cv="cv{k}.", conv="cv{k}.1.", csp="cv{k}.0.")


def _official() -> Iterator[Rule]:
    yield Custom(refuse_deployed)
    yield from settings(("decoder.", "decoder.decoder."), "cross_attn")
    yield Custom(writing=write_anchors)
    yield from _official_maps()
    yield Rename("^decoder.decoder.layers.", "^head.decoder.layers.")
    yield from below("head.decoder.layers.{i}.", "head.decoder.layers.{i}.", TORCH_FEED_FORWARD)
    yield from below("decoder.input_proj.{i}.", "head.input_proj.{i}.", pair_with_norm("", ""))
    yield from below(
        "decoder.",
        "",
        [
            ("enc_output.proj.", "head.proposals.enc_output."),
            ("enc_output.norm.", "head.proposals.enc_output_norm."),
            *OFFICIAL_DECODER,
            ("pre_bbox_head.", "head.decoder.bbox_embed."),
            ("dec_bbox_head.", "head.decoder.corner_embed."),
            ("decoder.lqe_layers.", "head.quality_embed."),
        ],
    )
    yield from below("decoder.", "head.mask_head.", [*_MASKS, ("mask_head.", "embed.")])


_MASKS = [
    ("mask_decoder.lateral.{i}.", "pyramid.lateral.{i}.0."),
    ("mask_decoder.bn.{i}.", "pyramid.lateral.{i}.1."),
    ("mask_decoder.fusion_conv.", "pyramid.fusion.0."),
    ("mask_decoder.fusion_norm.", "pyramid.fusion.1."),
    ("mask_decoder.up_conv.", "pyramid.output.0."),
    ("mask_decoder.bn1.", "pyramid.output.1."),
]
"""Names of the parts that D-FINE-seg makes its mask features with."""


def _official_semantic() -> Iterator[Rule]:
    yield Custom(refuse_deployed)
    yield from _official_maps()
    yield from below("decoder.", "head.mask_head.", _MASKS)
    yield from below(
        "decoder.",
        "head.",
        [
            ("neck.{i}.", "convs.{i}."),
            ("classifier.", "predictor."),
            ("aux_head.0.", "aux_conv."),
            ("aux_head.2.", "aux_predictor."),
        ],
    )


def _library() -> Iterator[Rule]:
    yield from settings(("model.decoder.",), "encoder_attn")
    # Second names of the decoder's heads.
    yield Alias("^class_embed.", "^model.decoder.class_embed.")
    yield Alias("^bbox_embed.", "^model.decoder.bbox_embed.")
    yield from library_hgnet("model.backbone.model.")
    yield from library_neck_encoder()
    yield Rename("^model.encoder_input_proj.", "^neck.input_proj.")
    yield from _neck("model.encoder.", downsample="", cv="conv{k}.", conv="conv{k}.", csp="csp_rep{before}.")
    norms = [("self_attn_layer_norm.", "norm1."), ("final_layer_norm.", "norm3.")]
    yield from library_stack("model.decoder.", "head.decoder.", norms, joined=["self_attn"])
    yield from below(
        "model.",
        "",
        [
            *LIBRARY_DECODER,
            ("decoder.pre_bbox_head.", "head.decoder.bbox_embed."),
            ("decoder.bbox_embed.", "head.decoder.corner_embed."),
            ("decoder.lqe_layers.", "head.quality_embed."),
        ],
    )


_OURS = ("backbone.net.stem.stem1.conv.weight", "head.quality_embed.0.reg_conf.layers.0.weight")

TRANSFORMERS = [
    Format(
        "transformers D-FINE",
        KeyTable([*_library()]),
        marks=("model.decoder.pre_bbox_head.layers.0.weight", "model.decoder.lqe_layers.0.reg_conf.layers.0.weight"),
        model="DFINE",
        ours=_OURS,
        classes=COCO_CLASSES,
    )
]
OFFICIAL = [
    Format(
        "Peterande/D-FINE",
        KeyTable([*_official()]),
        marks=("decoder.pre_bbox_head.layers.0.weight", ".reg_conf.layers.0.weight"),
        model="DFINE",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
    Format(
        "ArgoHA/D-FINE-seg, semantic",
        KeyTable([*_official_semantic()]),
        marks=("decoder.classifier.weight", "decoder.mask_decoder.fusion_conv.weight"),
        model="PerPixelClassification",
        ours=(_OURS[0], "head.mask_head.pyramid.fusion.0.weight"),
    ),
]
