"""Mask models of the transformers library: MaskFormer and Mask2Former."""

from vitkit.data.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CLASSES
from vitkit.errors import ConfigError
from vitkit.interop.backbones import read_resnet, read_swin, write_resnet, write_swin
from vitkit.interop.transformers_settings import Kind, Section, Settings

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


def _read_maskformer(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of MaskFormer with an FPN as pixel decoder."""
    decoder = settings.sub("decoder_config")
    decoder.expect(model_type="detr", activation_function="relu")
    tasks = _tasks(settings, name)
    base = {"panoptic": "coco_panoptic"}.get(tasks[0], "ade20k")
    return f"configs/maskformer_r50_{base}.py", dict(
        type="MaskFormer",
        tasks=tasks,
        num_queries=decoder.number("num_queries", 100),
        size_divisibility=32,
        backbone=_read_backbone(settings),
        neck=dict(
            type="FPNPixelDecoder",
            out_channels=settings.number("fpn_feature_size"),
            mask_channels=settings.number("mask_feature_size"),
        ),
        head=dict(
            type="MaskFormerHead",
            d_model=decoder.number("d_model"),
            num_heads=decoder.number("decoder_attention_heads"),
            d_ffn=decoder.number("decoder_ffn_dim"),
            dropout=decoder.get("dropout", 0.1),
            num_encoder_layers=0,
            num_decoder_layers=decoder.number("decoder_layers"),
        ),
    )


def _write_maskformer(model: Section) -> Section:
    head = model["head"]
    decoder = dict(
        model_type="detr",
        d_model=head["d_model"],
        decoder_layers=head["num_decoder_layers"],
        decoder_attention_heads=head["num_heads"],
        decoder_ffn_dim=head["d_ffn"],
        dropout=head["dropout"],
        num_queries=model["num_queries"],
    )
    return dict(
        fpn_feature_size=model["neck"]["out_channels"],
        mask_feature_size=model["neck"]["mask_channels"],
        backbone_config=_write_backbone(model),
        decoder_config=decoder,
    )


def _read_mask2former(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Mask2Former."""
    settings.expect(
        activation_function="relu",
        pre_norm=False,
        enforce_input_projection=False,
        common_stride=4,
        feature_strides=[4, 8, 16, 32],
    )
    tasks = _tasks(settings, name)
    base = {"semantic": "ade20k_semantic"}.get(tasks[0], f"coco_{tasks[0]}")
    heads = settings.number("num_attention_heads")
    return f"configs/mask2former_r50_{base}.py", dict(
        type="Mask2Former",
        tasks=tasks,
        num_queries=settings.number("num_queries"),
        backbone=_read_backbone(settings),
        neck=dict(
            type="DeformablePixelDecoder",
            out_channels=settings.number("feature_size"),
            mask_channels=settings.number("mask_feature_size"),
            num_layers=settings.number("encoder_layers"),
            num_heads=heads,
            d_ffn=settings.number("encoder_feedforward_dim", 1024),
        ),
        head=dict(
            type="Mask2FormerHead",
            d_model=settings.number("hidden_dim"),
            num_heads=heads,
            d_ffn=settings.number("dim_feedforward"),
            num_decoder_layers=settings.number("decoder_layers") - 1,
        ),
    )


def _write_mask2former(model: Section) -> Section:
    head, neck = model["head"], model["neck"]
    return dict(
        backbone_config=_write_backbone(model),
        feature_size=neck["out_channels"],
        mask_feature_size=neck["mask_channels"],
        encoder_layers=neck.get("num_layers"),
        encoder_feedforward_dim=neck.get("d_ffn"),
        hidden_dim=head["d_model"],
        num_attention_heads=head["num_heads"],
        dim_feedforward=head["d_ffn"],
        decoder_layers=head["num_decoder_layers"] + 1,
        dropout=head["dropout"],
        num_queries=model["num_queries"],
        activation_function="relu",
        pre_norm=False,
        enforce_input_projection=False,
        common_stride=4,
        feature_strides=[4, 8, 16, 32],
    )


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
