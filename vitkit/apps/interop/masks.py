"""Mask models of the transformers library: MaskFormer and Mask2Former."""

from vitkit.apps.interop.backbones import read_resnet, read_swin, write_resnet, write_swin
from vitkit.apps.interop.transformers_settings import Kind, Row, Section, Settings, read_rows, write_rows
from vitkit.errors import ConfigError
from vitkit.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CLASSES

_TASKS = ("semantic", "instance", "panoptic")


def _read_backbone(settings: Settings) -> Section:
    backbone = settings.sub("backbone_config")
    kind = backbone.get("model_type")
    if kind in ("swin", "maskformer-swin"):
        return read_swin(backbone)
    if kind == "resnet":
        return read_resnet(backbone) | dict(norm="frozen_bn")
    raise ConfigError(f"{settings.where}: backbone {kind!r}: vitkit's converter knows swin and resnet.")


def _write_backbone(model: Section) -> Section:
    section = (write_swin if model["backbone"]["type"] == "Swin" else write_resnet)(model)
    return section | dict(out_features=["stage1", "stage2", "stage3", "stage4"])


def _tasks(settings: Settings, name: str) -> list[str]:
    """Return a mask model's tasks: those that vitkit wrote, or guessed from name or classes; the library has none."""
    stated = settings.sub("vitkit").names("tasks") or [task for task in _TASKS if task in name.lower()][-1:]
    by_classes = {len(COCO_CLASSES): "instance", len(COCO_PANOPTIC_CLASSES): "panoptic"}
    return stated or [by_classes.get(len(settings.sub("id2label").values), "semantic")]


_PIXEL_DECODER = [Row("fpn_feature_size", "neck.out_channels"), Row("mask_feature_size", "neck.mask_channels")]
_MASKFORMER_DECODER = [
    Row("num_queries", "num_queries", default=100),
    Row("d_model", "head.d_model"),
    Row("decoder_attention_heads", "head.num_heads"),
    Row("decoder_ffn_dim", "head.d_ffn"),
    Row("dropout", "head.dropout", Settings.get, 0.1),
    Row("decoder_layers", "head.num_decoder_layers"),
]


def _read_maskformer(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of MaskFormer with an FPN as pixel decoder."""
    decoder = settings.sub("decoder_config")
    decoder.expect(model_type="detr", activation_function="relu")
    tasks = _tasks(settings, name)
    base = {"panoptic": "coco_panoptic"}.get(tasks[0], "ade20k")
    model = dict(
        type="MaskFormer",
        tasks=tasks,
        size_divisibility=32,
        backbone=_read_backbone(settings),
        neck=dict(type="FPNPixelDecoder"),
        head=dict(type="MaskFormerHead", num_encoder_layers=0),
    )
    read_rows(settings, _PIXEL_DECODER, model)
    return f"maskformer_r50_{base}", read_rows(decoder, _MASKFORMER_DECODER, model)


def _write_maskformer(model: Section) -> Section:
    decoder = dict(model_type="detr", **write_rows(model, _MASKFORMER_DECODER))
    settings = dict(backbone_config=_write_backbone(model), decoder_config=decoder)
    return settings | write_rows(model, _PIXEL_DECODER)


_MASK2FORMER = [
    Row("num_queries", "num_queries"),
    Row("feature_size", "neck.out_channels"),
    Row("mask_feature_size", "neck.mask_channels"),
    Row("encoder_layers", "neck.num_layers"),
    Row("encoder_feedforward_dim", "neck.d_ffn", default=1024),
    Row("num_attention_heads", "neck.num_heads"),
    Row("num_attention_heads", "head.num_heads"),
    Row("hidden_dim", "head.d_model"),
    Row("dim_feedforward", "head.d_ffn"),
]
_MASK2FORMER_FIXED = dict(
    activation_function="relu", pre_norm=False, enforce_input_projection=False, common_stride=4,
    feature_strides=[4, 8, 16, 32],
)  # fmt: skip


def _read_mask2former(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Mask2Former."""
    settings.expect(**_MASK2FORMER_FIXED)
    tasks = _tasks(settings, name)
    base = {"semantic": "ade20k_semantic"}.get(tasks[0], f"coco_{tasks[0]}")
    model = dict(
        type="Mask2Former",
        tasks=tasks,
        backbone=_read_backbone(settings),
        neck=dict(type="DeformablePixelDecoder"),
        head=dict(type="Mask2FormerHead", num_decoder_layers=settings.number("decoder_layers") - 1),
    )
    return f"mask2former_r50_{base}", read_rows(settings, _MASK2FORMER, model)


def _write_mask2former(model: Section) -> Section:
    head = model["head"]
    layers = dict(decoder_layers=head["num_decoder_layers"] + 1, dropout=head["dropout"])
    backbone = dict(backbone_config=_write_backbone(model))
    return backbone | write_rows(model, _MASK2FORMER) | _MASK2FORMER_FIXED | layers


KINDS = [
    Kind(
        "maskformer",
        {"MaskFormer": "MaskFormerForInstanceSegmentation"},
        _read_maskformer,
        _write_maskformer,
        processor="MaskFormerImageProcessor",
    ),
    Kind(
        "mask2former",
        {"Mask2Former": "Mask2FormerForUniversalSegmentation"},
        _read_mask2former,
        _write_mask2former,
        processor="Mask2FormerImageProcessor",
    ),
]
