"""Key names of DETR and DETR with masks: facebookresearch/detr's and the transformers library's."""

from collections.abc import Iterator

from vitkit.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CLASSES
from vitkit.model_zoo.converters import mmdetection
from vitkit.model_zoo.converters.key_table import Alias, Drop, Format, KeyTable, Rename, Rule, aliases, below
from vitkit.model_zoo.converters.layers import DECODER_NORMS, ENCODER_NORMS, library_stack, torch_stack
from vitkit.model_zoo.converters.resnet import detectron2_resnet, library_resnet, with_counters


def official_backbone(prefix: str) -> list[Rule]:
    """Return the rules of the official detectors' backbone below a prefix; only ResNets have a "body"."""
    return [Rename(f"^{prefix}backbone.0.body.", "^backbone."), Alias(f"^{prefix}backbone.0.", "^backbone.")]


def library_backbone(prefix: str) -> list[Rule]:
    """Return the rules of a detector's ResNet, timm's or the library's."""
    timm = f"{prefix}backbone.conv_encoder.model."
    return [
        Alias(f"^{prefix}backbone.model.", f"^{timm}"),
        Alias(f"^{timm}_backbone.", f"^{timm}"),
        *aliases([*library_resnet(timm, timm)]),
        Rename(f"^{timm}", "^backbone."),
    ]


def _official(prefix: str) -> Iterator[Rule]:
    """Yield the rules of the official detector below a prefix."""
    yield from official_backbone(prefix)
    yield Rename(f"^{prefix}input_proj.", "^neck.projections.res5.")
    for stack in ("encoder.", "decoder."):
        yield from torch_stack(f"{prefix}transformer.{stack}", f"head.{stack}")
    yield from below(prefix, "head.", ["class_embed.", "bbox_embed.", "query_embed."])


def _library(prefix: str) -> Iterator[Rule]:
    """Yield the rules of the library's detector below a prefix."""
    model = f"{prefix}model."
    yield from library_backbone(model)
    yield from library_stack(f"{model}encoder.", "head.encoder.", ENCODER_NORMS, joined=["self_attn"])
    yield from library_stack(f"{model}decoder.", "head.decoder.", DECODER_NORMS, joined=["self_attn", "cross_attn"])
    yield Rename(f"^{model}decoder.layernorm.", "^head.decoder.norm.")
    yield Rename(f"^{model}input_projection.", "^neck.projections.res5.")
    yield Rename(f"^{model}query_position_embeddings.", "^head.query_embed.")
    yield Rename(f"^{prefix}class_labels_classifier.", "^head.class_embed.")
    yield Rename(f"^{prefix}bbox_predictor.", "^head.bbox_embed.")


def _mmdetection() -> Iterator[Rule]:
    """Yield the rules of mmdetection's detector."""
    yield with_counters("backbone.")
    yield from mmdetection.SWIN
    yield Rename("^neck.convs.0.conv.", "^neck.projections.res5.")
    for theirs, norms, attentions in (
        ("encoder.", mmdetection.ENCODER_NORMS, ["self_attn"]),
        ("decoder.", mmdetection.DECODER_NORMS, ["self_attn", "cross_attn"]),
    ):
        yield from mmdetection.stack(f"{theirs}layers.{{i}}.", f"head.{theirs}layers.{{i}}.", norms, attentions)
    yield Rename("^decoder.post_norm.", "^head.decoder.norm.")
    yield Rename("^query_embedding.", "^head.query_embed.")
    yield Rename("^bbox_head.fc_cls.", "^head.class_embed.")
    yield Rename("^bbox_head.reg_ffn.layers.0.0.", "^head.bbox_embed.layers.0.")
    yield Rename("^bbox_head.reg_ffn.layers.1.", "^head.bbox_embed.layers.1.")
    yield Rename("^bbox_head.fc_reg.", "^head.bbox_embed.layers.2.")


SELF_ATTENTION = ("attentions.0.attn.", "self_attn.")
"""detrex's name of an attention that wraps PyTorch's, and vitkit's."""


def detrex_backbone() -> list[Rule]:
    """Return the rules of the backbone of detrex's detectors, which is detectron2's, and of what a model lacks."""
    return [Drop("^criterion."), Drop(".relative_position_index$"), *detectron2_resnet("backbone.", "backbone.")]


def _detrex() -> Iterator[Rule]:
    """Yield the rules of detrex's detector."""
    encoder, decoder = "encoder.layers.{i}.", "decoder.layers.{i}."
    cross = ("attentions.1.attn.", "cross_attn.")
    yield from detrex_backbone()
    yield Rename("^input_proj.", "^neck.projections.res5.")
    yield from mmdetection.detrex_stack(
        f"transformer.{encoder}", f"head.{encoder}", mmdetection.ENCODER_NORMS, SELF_ATTENTION
    )
    yield from mmdetection.detrex_stack(
        f"transformer.{decoder}", f"head.{decoder}", mmdetection.DECODER_NORMS, SELF_ATTENTION, cross
    )
    yield Rename("^transformer.decoder.post_norm_layer.", "^head.decoder.norm.")
    yield from below("", "head.", ["class_embed.", "bbox_embed.", "query_embed."])


_LIBRARY_MASK_HEAD = (
    ("bbox_attention.q_proj.", "bbox_attention.q_linear."),
    ("bbox_attention.k_proj.", "bbox_attention.k_linear."),
    *((f"mask_head.conv{i}.conv.", f"mask_head.lay{i}.") for i in (1, 2)),
    *((f"mask_head.conv{i}.norm.", f"mask_head.gn{i}.") for i in (1, 2)),
    *((f"mask_head.fpn_stages.{i}.fpn_adapter.", f"mask_head.adapter{i + 1}.") for i in range(3)),
    *((f"mask_head.fpn_stages.{i}.refine.conv.", f"mask_head.lay{i + 3}.") for i in range(3)),
    *((f"mask_head.fpn_stages.{i}.refine.norm.", f"mask_head.gn{i + 3}.") for i in range(3)),
    ("mask_head.output_conv.", "mask_head.out_lay."),
)
"""Names of the mask head in newer versions of the library; older ones have the official names, as vitkit does."""

_OURS = ("neck.projections.res5.weight", "backbone.conv1.weight")

TRANSFORMERS = [
    Format(
        "transformers DETR, with masks",
        KeyTable([*(Alias(f"^{new}", f"^{old}") for new, old in _LIBRARY_MASK_HEAD), *_library("detr.")]),
        marks=("detr.class_labels_classifier.weight", "detr.model.query_position_embeddings.weight"),
        model="DETRSegmentation",
        ours=_OURS,
        classes=COCO_PANOPTIC_CLASSES,
    ),
    Format(
        "transformers DETR",
        KeyTable([*_library("")]),
        marks=(
            *("class_labels_classifier.weight", "model.query_position_embeddings.weight"),
            "model.input_projection.weight",
        ),
        model="DETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
]
OFFICIAL = [
    Format(
        "facebookresearch/detr, with masks",
        KeyTable([*_official("detr.")]),
        marks=("detr.transformer.decoder.norm.weight", "mask_head.lay1.weight"),
        model="DETRSegmentation",
        ours=_OURS,
        classes=COCO_PANOPTIC_CLASSES,
    ),
    Format(
        "facebookresearch/detr",
        KeyTable([*_official("")]),
        marks=("backbone.0.body.conv1.weight", "transformer.decoder.norm.weight", "input_proj.weight"),
        model="DETR",
        ours=_OURS,
        classes=COCO_CLASSES,
    ),
]
MMDETECTION = [
    Format(
        "open-mmlab/mmdetection DETR",
        KeyTable([*_mmdetection()]),
        marks=("bbox_head.fc_cls.weight", "decoder.layers.0.cross_attn.attn.in_proj_weight", "query_embedding.weight"),
        model="DETR",
        ours=("neck.projections.res5.weight", "head.query_embed.weight"),
        classes=COCO_CLASSES,
    )
]
DETREX = [
    Format(
        "IDEA-Research/detrex DETR",
        KeyTable([*_detrex()]),
        marks=(
            *("transformer.decoder.layers.0.attentions.1.attn.in_proj_weight", "query_embed.weight"),
            *("transformer.decoder.post_norm_layer.weight", "input_proj.weight"),
        ),
        model="DETR",
        ours=_OURS[:1],
        classes=COCO_CLASSES,
    )
]
