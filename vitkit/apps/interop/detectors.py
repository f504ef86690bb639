"""Detectors of the transformers library: DETR and RF-DETR, also with masks, Deformable DETR, RT-DETR and D-FINE."""

import re
from collections.abc import Sequence
from typing import Any

from vitkit.apps.interop.backbones import read_resnet, write_resnet
from vitkit.apps.interop.transformers_settings import Kind, Row, Section, Settings, read_rows, write_rows
from vitkit.config.schema import Slot, slots_in
from vitkit.errors import CheckpointError, ConfigError
from vitkit.registry import TRAINING_QUERIES, Spec, nearest

_HGNETS = {
    "b0": ([3, 16, 16], [16, 64, 256, 512], [16, 32, 64, 128], [64, 256, 512, 1024], [1, 1, 2, 1], [3, 3, 3, 3]),
    "b2": ([3, 24, 32], [32, 96, 384, 768], [32, 64, 128, 256], [96, 384, 768, 1536], [1, 1, 3, 1], [4, 4, 4, 4]),
    "b4": ([3, 32, 48], [48, 128, 512, 1024], [48, 96, 192, 384], [128, 512, 1024, 2048], [1, 1, 3, 1], [6, 6, 6, 6]),
    "b5": ([3, 32, 64], [64, 128, 512, 1024], [64, 128, 256, 512], [128, 512, 1024, 2048], [1, 2, 5, 2], [6, 6, 6, 6]),
}
"""Size of D-FINE's HGNetv2 -> its channels, blocks and layers, see `_HGNET_SETTINGS`."""
_HGNET_SETTINGS = (
    *("stem_channels", "stage_in_channels", "stage_mid_channels", "stage_out_channels"),
    *("stage_num_blocks", "stage_numb_of_layers"),
)
"""The library's names of these settings."""
_DFINES = {("b0", 2): "n", ("b0", 3): "s", ("b2", 3): "m", ("b4", 3): "l"}
"""Size of the backbone and number of levels -> the size of D-FINE; others are "x"."""
_RF_DETRS, _RF_DETRS_WITH_MASKS = {384: "n", 512: "s", 576: "m", 704: "l"}, {312: "n", 384: "s", 432: "m", 504: "l"}
"""Side of RF-DETR's images -> its size."""
_SAMPLING_METHODS = {"default": "bilinear", "discrete": "discrete"}


def _detector_backbone(settings: Settings) -> Section:
    """Return the ResNet of DETR or Deformable DETR."""
    backbone = settings.sub("backbone_config")
    if backbone.get("model_type") == "resnet":
        section = read_resnet(backbone)
    else:
        name = str(backbone.get("backbone") or settings.get("backbone", "resnet50"))
        match = re.fullmatch(r"resnet(18|34|50|101)(\..*)?", name)
        if not match:
            raise ConfigError(
                f"{settings.where}: backbone {name!r}: expected resnet18, resnet34, resnet50 or resnet101."
            )
        dilation = bool(settings.get("dilation", False)) or backbone.get("output_stride") == 16
        section = dict(type="ResNet", depth=int(match[1]), dilation=dilation)
    return section | dict(norm="frozen_bn", frozen_stages=1)


_DETR = [
    Row("num_queries", "num_queries"),
    Row("d_model", "neck.out_channels"),
    Row("d_model", "head.d_model"),
    Row("encoder_attention_heads", "head.num_heads"),
    Row("decoder_attention_heads", "head.num_heads"),
    Row("encoder_ffn_dim", "head.d_ffn"),
    Row("decoder_ffn_dim", "head.d_ffn"),
    Row("dropout", "head.dropout", Settings.get, 0.1),
    Row("encoder_layers", "head.num_encoder_layers"),
    Row("decoder_layers", "head.num_decoder_layers"),
]
_DETR_FIXED = dict(position_embedding_type="sine", activation_function="relu")


def _read_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of DETR, with masks if the architecture has them."""
    settings.expect(**_DETR_FIXED)
    model = dict(
        type="DETR",
        backbone=_detector_backbone(settings),
        neck=dict(type="ChannelProjection"),
        head=dict(type="DETRHead"),
    )
    read_rows(settings, _DETR, model)
    if "DetrForSegmentation" not in settings.names("architectures"):
        return "detr_r50", model
    tasks = ["panoptic", "instance"]
    return "detr_r50_panoptic", model | dict(type="DETRSegmentation", freeze_detr=True, tasks=tasks)


def _write_detr(model: Section) -> Section:
    backbone = model["backbone"]
    return (
        write_rows(model, _DETR)
        | _DETR_FIXED
        | dict(
            backbone=f"resnet{backbone.get('depth')}",
            use_timm_backbone=True,
            use_pretrained_backbone=False,
            dilation=bool(backbone.get("dilation")),
        )
    )


_DEFORMABLE_DETR = [
    *_DETR[1:],
    Row("num_feature_levels", "neck.num_levels"),
    Row("encoder_n_points", "head.num_points"),
    Row("decoder_n_points", "head.num_points"),
]


def _read_deformable_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Deformable DETR and its variants."""
    settings.expect(**_DETR_FIXED)
    two_stage, refine = bool(settings.get("two_stage")), bool(settings.get("with_box_refine"))
    variant = "_two_stage" if two_stage else "_refine" if refine else ""
    model = dict(
        type="DeformableDETR",
        num_queries=settings.number("two_stage_num_proposals" if two_stage else "num_queries"),
        backbone=_detector_backbone(settings),
        neck=dict(type="PyramidProjection"),
        head=dict(type="DeformableDETRHead", refine_boxes=refine, two_stage=two_stage),
    )
    read_rows(settings, _DEFORMABLE_DETR, model)
    model["neck"]["in_features"] = ["res5"] if model["neck"]["num_levels"] == 1 else ["res3", "res4", "res5"]
    return f"deformable_detr_r50{variant}", model


def _write_deformable_detr(model: Section) -> Section:
    head = model["head"]
    return (
        _write_detr(model)
        | write_rows(model, _DEFORMABLE_DETR)
        | dict(
            with_box_refine=head.get("refine_boxes"),
            two_stage=head.get("two_stage"),
            two_stage_num_proposals=model["num_queries"],
        )
    )


_HYBRID = [
    Row("num_queries", "num_queries"),
    Row("encoder_hidden_dim", "neck.out_channels"),
    Row("encoder_attention_heads", "neck.num_heads"),
    Row("encoder_ffn_dim", "neck.d_ffn"),
    Row("hidden_expansion", "neck.expansion", Settings.factor, 1.0),
    Row("dropout", "neck.dropout", Settings.get, 0.0),
    Row("dropout", "head.dropout", Settings.get, 0.0),
    Row("d_model", "head.d_model"),
    Row("decoder_attention_heads", "head.num_heads"),
    Row("decoder_ffn_dim", "head.d_ffn"),
    Row("decoder_layers", "head.num_decoder_layers"),
]
"""What RT-DETR and D-FINE share."""
_HYBRID_FIXED = dict(
    encoder_layers=1, positional_encoding_temperature=10000, encoder_activation_function="gelu",
    activation_function="silu", decoder_activation_function="relu", normalize_before=False, learn_initial_query=False,
    with_box_refine=True, layer_norm_eps=1e-5, batch_norm_eps=1e-5,
)  # fmt: skip


def _hybrid_levels(widths: Sequence[int], channels: int) -> Section:
    """Return the settings that follow from the widths of the backbone's maps and the channels of the encoder's."""
    levels = len(widths)
    return dict(
        encoder_in_channels=list(widths),
        decoder_in_channels=[channels] * levels,
        feat_strides=[8, 16, 32][-levels:],
        encode_proj_layers=[levels - 1],
        num_feature_levels=levels,
    )


def _read_rt_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of RT-DETR on a ResNet-vd."""
    backbone = settings.sub("backbone_config")
    if backbone.get("model_type") != "rt_detr_resnet":
        raise ConfigError(
            f"{settings.where}: backbone {backbone.get('model_type')!r}: vitkit's RT-DETR knows rt_detr_resnet."
        )
    backbone.expect(downsample_in_bottleneck=False)
    depth = read_resnet(backbone)["depth"]
    widths = [128, 256, 512] if depth < 50 else [512, 1024, 2048]
    settings.expect(**_hybrid_levels(widths, settings.number("encoder_hidden_dim")), **_HYBRID_FIXED)
    model = dict(
        type="RTDETR",
        backbone=dict(
            type="ResNetVD",
            depth=depth,
            norm="frozen_bn" if settings.get("freeze_backbone_batch_norms", True) else "bn",
            out_features=["res3", "res4", "res5"],
            pixel_mean=[0.0] * 3,
            pixel_std=[1.0] * 3,
        ),
        neck=dict(type="HybridEncoder"),
        head=dict(type="RTDETRHead", num_points=settings.number("decoder_n_points")),
    )
    return f"rtdetr_r{depth}", read_rows(settings, _HYBRID, model) | _read_denoising(settings)


def _write_rt_detr(model: Section) -> Section:
    resnet = write_resnet(model) | dict(model_type="rt_detr_resnet", out_features=["stage2", "stage3", "stage4"])
    settings = dict(
        backbone_config=resnet,
        freeze_backbone_batch_norms=model["backbone"]["norm"] == "frozen_bn",
        decoder_n_points=model["head"]["num_points"],
        **_hybrid_levels(resnet["hidden_sizes"][1:], model["neck"]["out_channels"]),
    )
    return write_rows(model, _HYBRID) | _HYBRID_FIXED | settings | _write_denoising(model)


def _read_denoising(settings: Settings, **rules: bool) -> Section:
    """Return the section of the denoising queries, of the originals' rules; empty if there are none."""
    if not settings.get("num_denoising", 100):
        return {}
    denoising = dict(
        type="BoxDenoising", num_queries=settings.number("num_denoising", 100),
        label_noise=settings.factor("label_noise_ratio", 0.5), box_noise=settings.factor("box_noise_scale", 1.0),
        eps=1e-5, padding=0.0, **rules,
    )  # fmt: skip
    return {"training_queries": [denoising]}


def _write_denoising(model: Section) -> Section:
    queries = [_defaults_of(spec) for spec in model["training_queries"] if _is(spec, "BoxDenoising")]
    if not queries:
        return {"num_denoising": 0}
    return dict(
        num_denoising=queries[0]["num_queries"],
        label_noise_ratio=queries[0]["label_noise"],
        box_noise_scale=queries[0]["box_noise"],
    )


def _is(spec: Spec, name: str) -> bool:
    return TRAINING_QUERIES.resolve(spec)[0].__name__ == name


def _defaults_of(spec: Spec) -> Section:
    """Return all arguments of a set of training queries, defaults included."""
    slots = slots_in(Slot(Any, registry=TRAINING_QUERIES), spec, "model.training_queries")
    return {name: slot.default for name, slot in slots.items()}


def _read_rt_detr_v2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of RT-DETRv2 on a ResNet-vd."""
    _, model = _read_rt_detr(settings, name)
    settings.expect(decoder_n_levels=3)
    method = str(settings.get("decoder_method", "default"))
    if method not in _SAMPLING_METHODS:
        raise ConfigError(f"{settings.where}: decoder_method={method!r}. {nearest(method, _SAMPLING_METHODS)}")
    model["type"] = "RTDETRv2"
    model["head"].update(
        type="RTDETRv2Head",
        num_points=[settings.number("decoder_n_points")] * 3,
        offset_scale=settings.factor("decoder_offset_scale", 0.5),
        sampling=_SAMPLING_METHODS[method],
    )
    return f"rtdetrv2_r{model['backbone']['depth']}", model


def _write_rt_detr_v2(model: Section) -> Section:
    head = model["head"]
    methods = {ours: theirs for theirs, ours in _SAMPLING_METHODS.items()}
    return _write_rt_detr(model) | dict(
        decoder_n_points=head["num_points"][0],
        decoder_n_levels=3,
        decoder_offset_scale=head["offset_scale"],
        decoder_method=methods[head["sampling"]],
    )


def _read_hgnet(settings: Settings) -> str:
    """Return the size of an HGNetv2."""
    if settings.get("model_type") != "hgnet_v2":
        raise ConfigError(f"{settings.where} {settings.get('model_type')!r}: vitkit's D-FINE knows hgnet_v2.")
    settings.expect(
        hidden_act="relu", stage_downsample=[False, True, True, True], stage_light_block=[False, False, True, True],
        stage_kernel_size=[3, 3, 5, 5],
    )  # fmt: skip
    sizes = tuple(settings.numbers(name) for name in _HGNET_SETTINGS)
    name = next((name for name, ours in _HGNETS.items() if ours == sizes), None)
    if name is None or bool(settings.get("use_learnable_affine_block")) != (name in ("b0", "b2")):
        raise ConfigError(f"{settings.where}: expected the settings of D-FINE's HGNetv2: {', '.join(_HGNETS)}.")
    return name


_D_FINE = [
    *_HYBRID,
    Row("max_num_bins", "head.reg_max", default=32),
    Row("reg_scale", "head.reg_scale", Settings.factor, 4.0),
    Row("up", "head.up", Settings.factor, 0.5),
]


def _read_d_fine(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of D-FINE on an HGNetv2."""
    hgnet = _read_hgnet(settings.sub("backbone_config"))
    levels, points = settings.number("num_feature_levels"), settings["decoder_n_points"]
    if levels not in (2, 3):
        raise ConfigError(f"{settings.where}: num_feature_levels={levels}: vitkit's model has 2 or 3.")
    settings.expect(**_hybrid_levels(_HGNETS[hgnet][3][-levels:], settings.number("encoder_hidden_dim")))
    settings.expect(
        **_HYBRID_FIXED, eval_idx=-1, layer_scale=1, top_prob_values=4, lqe_hidden_dim=64, lqe_layers=2,
        decoder_offset_scale=0.5, decoder_method="default",
    )  # fmt: skip
    frozen = dict(norm="frozen_bn", frozen_stem=True) if settings.get("freeze_backbone_batch_norms", True) else {}
    model = dict(
        type="DFINE",
        backbone=dict(
            type="TimmBackbone",
            name=f"hgnetv2_{hgnet}",
            out_features=["res3", "res4", "res5"][-levels:],
            pixel_mean=[0.0] * 3,
            pixel_std=[1.0] * 3,
            **frozen,
        ),
        neck=dict(type="DFINEEncoder", num_blocks=round(3 * settings.factor("depth_mult", 1.0))),
        head=dict(
            type="DFINEHead",
            num_points=settings.numbers("decoder_n_points") if isinstance(points, list) else [points] * levels,
        ),
    )
    read_rows(settings, _D_FINE, model)
    return f"dfine_{_DFINES.get((hgnet, levels), 'x')}_coco", model | _read_denoising(settings, mirror=True)


def _write_d_fine(model: Section) -> Section:
    backbone, neck, head = model["backbone"], model["neck"], model["head"]
    size = str(backbone.get("name", "")).partition(".")[0].removeprefix("hgnetv2_")
    if size not in _HGNETS:
        raise CheckpointError(f"model.backbone: the library's D-FINE has an HGNetv2 ({', '.join(_HGNETS)}).")
    levels = len(head["num_points"])
    hgnet = dict(zip(_HGNET_SETTINGS, _HGNETS[size], strict=True))
    hgnet |= dict(hidden_sizes=hgnet["stage_out_channels"], depths=hgnet["stage_num_blocks"])
    hgnet |= dict(
        model_type="hgnet_v2",
        out_features=["stage2", "stage3", "stage4"][-levels:],
        use_learnable_affine_block=size in ("b0", "b2"),
    )
    settings = dict(
        backbone_config=hgnet,
        freeze_backbone_batch_norms=backbone["norm"] == "frozen_bn",
        depth_mult=neck["num_blocks"] / 3,
        decoder_n_points=head["num_points"],
        **_hybrid_levels(_HGNETS[size][3][-levels:], neck["out_channels"]),
    )
    return write_rows(model, _D_FINE) | _HYBRID_FIXED | settings | _write_denoising(model)


_RF_DETR = [
    Row("num_queries", "num_queries", default=300),
    Row("d_model", "neck.out_channels", default=256),
    Row("c2f_num_blocks", "neck.num_blocks", default=3),
    Row("d_model", "head.d_model", default=256),
    Row("decoder_self_attention_heads", "head.num_heads", default=8),
    Row("decoder_cross_attention_heads", "head.num_cross_heads", default=16),
    Row("decoder_n_points", "head.num_points", default=4),
    Row("decoder_ffn_dim", "head.d_ffn", default=2048),
    Row("dropout", "head.dropout", Settings.get, 0.1),
    Row("decoder_layers", "head.num_decoder_layers", default=3),
]
_DINOV2 = [
    Row("patch_size", "patch_size", default=14),
    Row("hidden_size", "d_model", default=768),
    Row("num_hidden_layers", "depth", default=12),
    Row("num_attention_heads", "num_heads", default=12),
    Row("num_windows", "num_windows", default=4),
    Row("drop_path_rate", "drop_path", Settings.get, 0.0),
]


def _read_rf_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of RF-DETR, with masks if the architecture has them."""
    dinov2 = settings.sub("backbone_config")
    dinov2.expect(
        model_type="rf_detr_dinov2", mlp_ratio=4, hidden_act="gelu", num_channels=3, qkv_bias=True,
        use_swiglu_ffn=False, apply_layernorm=True,
    )  # fmt: skip
    settings.expect(
        hidden_expansion=0.5, activation_function="silu", decoder_activation_function="relu", attention_bias=True,
        num_feature_levels=1, mask_downsample_ratio=4, segmentation_head_activation_function="gelu",
    )  # fmt: skip
    if settings.get("layer_norm_eps") != 1e-5:  # the library's default, which is near enough to the original's
        settings.expect(layer_norm_eps=1e-6)
    image_size = dinov2.get("image_size", 224)
    if not isinstance(image_size, int):
        image_size = dinov2.numbers("image_size")
    stages = [re.fullmatch(r"stage(\d+)", stage) for stage in dinov2.names("out_features")]
    if not stages or None in stages:
        raise ConfigError(f"{dinov2.where}: out_features={dinov2.get('out_features')}: expected names of stages.")
    maps = [int(stage[1]) for stage in stages]
    features = [f"block{block}" for block in maps]
    backbone = read_rows(dinov2, _DINOV2, dict(type="WindowedViT", image_size=image_size, out_features=features))
    blocks = range(backbone["depth"])
    windowed = dinov2.numbers("window_block_indexes", [block for block in blocks if block not in maps])
    backbone["global_blocks"] = [block for block in blocks if block not in windowed]
    with_masks = "RfDetrForInstanceSegmentation" in settings.names("architectures")
    groups = settings.number("group_detr", 13)
    model = dict(
        type="RFDETRSeg" if with_masks else "RFDETR",
        num_detections=settings.number("num_queries", 300),
        backbone=backbone,
        neck=dict(type="C2fProjection", in_features=list(features)),
        head=dict(type="RFDETRHead", masks=with_masks),
        training_queries=[dict(type="QueryGroups", groups=groups)] if groups > 1 else [],
    )
    sizes = _RF_DETRS_WITH_MASKS if with_masks else _RF_DETRS
    size = sizes.get(image_size if isinstance(image_size, int) else None, "n")
    return f"rf_detr_{'seg_' if with_masks else ''}{size}_coco", read_rows(settings, _RF_DETR, model)


def _write_rf_detr(model: Section) -> Section:
    backbone, size = model["backbone"], model["backbone"]["image_size"]
    groups = [_defaults_of(spec) for spec in model["training_queries"] if _is(spec, "QueryGroups")]
    dinov2 = dict(
        model_type="rf_detr_dinov2",
        mlp_ratio=4,
        image_size=size if isinstance(size, int) else list(size),
        out_features=[name.replace("block", "stage") for name in backbone["out_features"]],
        **write_rows(backbone, _DINOV2),
    )
    return write_rows(model, _RF_DETR) | dict(
        backbone_config=dinov2,
        hidden_expansion=0.5,
        group_detr=groups[0]["groups"] if groups else 1,
        intermediate_size=4 * model["head"]["d_model"],
        layer_norm_eps=1e-6,
    )


KINDS = [
    Kind(
        "detr",
        {"DETR": "DetrForObjectDetection", "DETRSegmentation": "DetrForSegmentation"},
        _read_detr,
        _write_detr,
        processor="DetrImageProcessor",
    ),
    Kind(
        "deformable_detr",
        {"DeformableDETR": "DeformableDetrForObjectDetection"},
        _read_deformable_detr,
        _write_deformable_detr,
        processor="DeformableDetrImageProcessor",
    ),
    Kind(
        "rt_detr",
        {"RTDETR": "RTDetrForObjectDetection"},
        _read_rt_detr,
        _write_rt_detr,
        processor="RTDetrImageProcessor",
    ),
    Kind(
        "rt_detr_v2",
        {"RTDETRv2": "RTDetrV2ForObjectDetection"},
        _read_rt_detr_v2,
        _write_rt_detr_v2,
        processor="RTDetrImageProcessor",
    ),
    Kind("d_fine", {"DFINE": "DFineForObjectDetection"}, _read_d_fine, _write_d_fine, processor="RTDetrImageProcessor"),
    Kind(
        "rf_detr",
        {"RFDETR": "RfDetrForObjectDetection", "RFDETRSeg": "RfDetrForInstanceSegmentation"},
        _read_rf_detr,
        _write_rf_detr,
        processor="RfDetrImageProcessor",
    ),
]
