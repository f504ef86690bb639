"""Detectors of the transformers library: DETR and RF-DETR, also with masks, Deformable DETR, RT-DETR and D-FINE."""

import re
from typing import Any

from vitkit.config.schema import Slot, slots_in
from vitkit.errors import CheckpointError, ConfigError
from vitkit.interop.backbones import read_resnet, write_resnet
from vitkit.interop.transformers_settings import Kind, Section, Settings
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


def _read_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of DETR, with masks if the architecture has them."""
    settings.expect(position_embedding_type="sine", activation_function="relu")
    with_masks = "DetrForSegmentation" in settings.names("architectures")
    model = dict(
        type="DETRSegmentation" if with_masks else "DETR",
        num_queries=settings.number("num_queries"),
        backbone=_detector_backbone(settings),
        neck=dict(type="ChannelProjection", out_channels=settings.number("d_model")),
        head=dict(
            type="DETRHead",
            d_model=settings.number("d_model"),
            num_heads=settings.same("encoder_attention_heads", "decoder_attention_heads"),
            d_ffn=settings.same("encoder_ffn_dim", "decoder_ffn_dim"),
            dropout=settings.get("dropout", 0.1),
            num_encoder_layers=settings.number("encoder_layers"),
            num_decoder_layers=settings.number("decoder_layers"),
        ),
    )
    if not with_masks:
        return "configs/detr_r50.py", model
    return "configs/detr_r50_panoptic.py", model | dict(freeze_detr=True, tasks=["panoptic", "instance"])


def _write_detr(model: Section) -> Section:
    head, backbone = model["head"], model["backbone"]
    return dict(
        d_model=head["d_model"],
        encoder_layers=head["num_encoder_layers"],
        decoder_layers=head["num_decoder_layers"],
        encoder_attention_heads=head["num_heads"],
        decoder_attention_heads=head["num_heads"],
        encoder_ffn_dim=head["d_ffn"],
        decoder_ffn_dim=head["d_ffn"],
        dropout=head["dropout"],
        num_queries=model["num_queries"],
        activation_function="relu",
        position_embedding_type="sine",
        backbone=f"resnet{backbone.get('depth')}",
        use_timm_backbone=True,
        use_pretrained_backbone=False,
        dilation=bool(backbone.get("dilation")),
    )


def _read_deformable_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Deformable DETR and its variants."""
    settings.expect(position_embedding_type="sine", activation_function="relu")
    levels = settings.number("num_feature_levels")
    two_stage, refine = bool(settings.get("two_stage")), bool(settings.get("with_box_refine"))
    variant = "_two_stage" if two_stage else "_refine" if refine else ""
    num_queries = settings.number("two_stage_num_proposals") if two_stage else settings.number("num_queries")
    points = settings.same("encoder_n_points", "decoder_n_points")
    return f"configs/deformable_detr_r50{variant}.py", dict(
        type="DeformableDETR",
        num_queries=num_queries,
        backbone=_detector_backbone(settings),
        neck=dict(
            type="PyramidProjection",
            in_features=["res5"] if levels == 1 else ["res3", "res4", "res5"],
            out_channels=settings.number("d_model"),
            num_levels=levels,
        ),
        head=dict(
            type="DeformableDETRHead",
            d_model=settings.number("d_model"),
            num_heads=settings.same("encoder_attention_heads", "decoder_attention_heads"),
            num_points=points,
            d_ffn=settings.same("encoder_ffn_dim", "decoder_ffn_dim"),
            dropout=settings.get("dropout", 0.1),
            num_encoder_layers=settings.number("encoder_layers"),
            num_decoder_layers=settings.number("decoder_layers"),
            refine_boxes=refine,
            two_stage=two_stage,
        ),
    )


def _write_deformable_detr(model: Section) -> Section:
    head = model["head"]
    return _write_detr(model) | dict(
        num_feature_levels=model["neck"].get("num_levels"),
        encoder_n_points=head["num_points"],
        decoder_n_points=head["num_points"],
        with_box_refine=head["refine_boxes"],
        two_stage=head["two_stage"],
        two_stage_num_proposals=model["num_queries"],
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
    channels = settings.number("encoder_hidden_dim")
    widths = [128, 256, 512] if depth < 50 else [512, 1024, 2048]
    settings.expect(
        encoder_in_channels=widths, decoder_in_channels=[channels] * 3, feat_strides=[8, 16, 32], num_feature_levels=3
    )
    settings.expect(encoder_layers=1, encode_proj_layers=[2], positional_encoding_temperature=10000)
    settings.expect(
        encoder_activation_function="gelu", activation_function="silu", decoder_activation_function="relu",
        normalize_before=False, learn_initial_query=False, with_box_refine=True, layer_norm_eps=1e-5,
        batch_norm_eps=1e-5,
    )  # fmt: skip
    dropout = settings.get("dropout", 0.0)
    model = dict(
        type="RTDETR",
        num_queries=settings.number("num_queries"),
        backbone=dict(
            type="ResNetVD",
            depth=depth,
            norm="frozen_bn" if settings.get("freeze_backbone_batch_norms", True) else "bn",
            out_features=["res3", "res4", "res5"],
            pixel_mean=[0.0] * 3,
            pixel_std=[1.0] * 3,
        ),
        neck=dict(
            type="HybridEncoder",
            out_channels=channels,
            num_heads=settings.number("encoder_attention_heads"),
            d_ffn=settings.number("encoder_ffn_dim"),
            dropout=dropout,
            expansion=settings.factor("hidden_expansion", 1.0),
        ),
        head=dict(
            type="RTDETRHead",
            d_model=settings.number("d_model"),
            num_heads=settings.number("decoder_attention_heads"),
            num_points=settings.number("decoder_n_points"),
            d_ffn=settings.number("decoder_ffn_dim"),
            dropout=dropout,
            num_decoder_layers=settings.number("decoder_layers"),
        ),
    )
    return f"configs/rtdetr_r{depth}.py", model | _read_denoising(settings)


def _write_rt_detr(model: Section) -> Section:
    backbone, neck, head = model["backbone"], model["neck"], model["head"]
    channels = neck["out_channels"]
    resnet = write_resnet(model) | dict(model_type="rt_detr_resnet", out_features=["stage2", "stage3", "stage4"])
    settings = dict(
        backbone_config=resnet,
        freeze_backbone_batch_norms=backbone["norm"] == "frozen_bn",
        encoder_in_channels=resnet["hidden_sizes"][1:],
        encoder_hidden_dim=channels,
        encoder_attention_heads=neck["num_heads"],
        encoder_ffn_dim=neck["d_ffn"],
        hidden_expansion=neck["expansion"],
        decoder_in_channels=[channels] * 3,
        d_model=head["d_model"],
        decoder_attention_heads=head["num_heads"],
        decoder_n_points=head["num_points"],
        decoder_ffn_dim=head["d_ffn"],
        decoder_layers=head["num_decoder_layers"],
        dropout=head["dropout"],
        num_queries=model["num_queries"],
        encoder_layers=1,
        encode_proj_layers=[2],
        feat_strides=[8, 16, 32],
        num_feature_levels=3,
    )
    return settings | _write_denoising(model)


def _read_denoising(settings: Settings) -> Section:
    """Return the section of the denoising queries; empty if there are none."""
    if not settings.get("num_denoising", 100):
        return {}
    noise = dict(
        label_noise=settings.factor("label_noise_ratio", 0.5), box_noise=settings.factor("box_noise_scale", 1.0)
    )
    denoising = dict(type="BoxDenoising", num_queries=settings.number("num_denoising", 100), **noise)
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
    return f"configs/rtdetrv2_r{model['backbone']['depth']}.py", model


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


def _read_d_fine(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of D-FINE on an HGNetv2."""
    hgnet = _read_hgnet(settings.sub("backbone_config"))
    levels, channels = settings.number("num_feature_levels"), settings.number("encoder_hidden_dim")
    if levels not in (2, 3):
        raise ConfigError(f"{settings.where}: num_feature_levels={levels}: vitkit's model has 2 or 3.")
    settings.expect(
        encoder_in_channels=_HGNETS[hgnet][3][-levels:], decoder_in_channels=[channels] * levels,
        feat_strides=[8, 16, 32][-levels:], encode_proj_layers=[levels - 1],
    )  # fmt: skip
    settings.expect(
        encoder_layers=1, positional_encoding_temperature=10000, encoder_activation_function="gelu",
        activation_function="silu", decoder_activation_function="relu", normalize_before=False,
        learn_initial_query=False, with_box_refine=True, layer_norm_eps=1e-5, batch_norm_eps=1e-5, eval_idx=-1,
        layer_scale=1, top_prob_values=4, lqe_hidden_dim=64, lqe_layers=2, decoder_offset_scale=0.5,
        decoder_method="default",
    )  # fmt: skip
    frozen = dict(norm="frozen_bn", frozen_stem=True) if settings.get("freeze_backbone_batch_norms", True) else {}
    points, dropout = settings["decoder_n_points"], settings.get("dropout", 0.0)
    model = dict(
        type="DFINE",
        num_queries=settings.number("num_queries"),
        backbone=dict(
            type="TimmBackbone",
            name=f"hgnetv2_{hgnet}",
            out_features=["res3", "res4", "res5"][-levels:],
            pixel_mean=[0.0] * 3,
            pixel_std=[1.0] * 3,
            **frozen,
        ),
        neck=dict(
            type="DFINEEncoder",
            out_channels=channels,
            num_heads=settings.number("encoder_attention_heads"),
            d_ffn=settings.number("encoder_ffn_dim"),
            dropout=dropout,
            num_blocks=round(3 * settings.factor("depth_mult", 1.0)),
            expansion=settings.factor("hidden_expansion", 1.0),
        ),
        head=dict(
            type="DFINEHead",
            d_model=settings.number("d_model"),
            num_heads=settings.number("decoder_attention_heads"),
            num_points=settings.numbers("decoder_n_points") if isinstance(points, list) else [points] * levels,
            d_ffn=settings.number("decoder_ffn_dim"),
            dropout=dropout,
            num_decoder_layers=settings.number("decoder_layers"),
            reg_max=settings.number("max_num_bins", 32),
            reg_scale=settings.factor("reg_scale", 4.0),
            up=settings.factor("up", 0.5),
        ),
    )
    return f"configs/dfine_{_DFINES.get((hgnet, levels), 'x')}_coco.py", model | _read_denoising(settings)


def _write_d_fine(model: Section) -> Section:
    backbone, neck, head = model["backbone"], model["neck"], model["head"]
    size = str(backbone.get("name", "")).partition(".")[0].removeprefix("hgnetv2_")
    if size not in _HGNETS:
        raise CheckpointError(f"model.backbone: the library's D-FINE has an HGNetv2 ({', '.join(_HGNETS)}).")
    levels, channels = len(head["num_points"]), neck["out_channels"]
    hgnet = dict(zip(_HGNET_SETTINGS, _HGNETS[size], strict=True))
    hgnet |= dict(hidden_sizes=hgnet["stage_out_channels"], depths=hgnet["stage_num_blocks"])
    hgnet |= dict(
        model_type="hgnet_v2",
        out_features=["stage2", "stage3", "stage4"][-levels:],
        use_learnable_affine_block=size in ("b0", "b2"),
    )
    return dict(
        backbone_config=hgnet,
        freeze_backbone_batch_norms=backbone["norm"] == "frozen_bn",
        encoder_in_channels=_HGNETS[size][3][-levels:],
        encoder_hidden_dim=channels,
        encoder_attention_heads=neck["num_heads"],
        encoder_ffn_dim=neck["d_ffn"],
        hidden_expansion=neck["expansion"],
        depth_mult=neck["num_blocks"] / 3,
        decoder_in_channels=[channels] * levels,
        d_model=head["d_model"],
        decoder_attention_heads=head["num_heads"],
        decoder_n_points=head["num_points"],
        decoder_ffn_dim=head["d_ffn"],
        decoder_layers=head["num_decoder_layers"],
        decoder_activation_function=head["activation"],
        dropout=head["dropout"],
        max_num_bins=head["reg_max"],
        reg_scale=head["reg_scale"],
        up=head["up"],
        num_queries=model["num_queries"],
        encoder_layers=1,
        encode_proj_layers=[levels - 1],
        feat_strides=[8, 16, 32][-levels:],
        num_feature_levels=levels,
    ) | _write_denoising(model)


def _read_rf_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of RF-DETR, with masks if the architecture has them."""
    backbone = settings.sub("backbone_config")
    backbone.expect(
        model_type="rf_detr_dinov2", mlp_ratio=4, hidden_act="gelu", num_channels=3, qkv_bias=True,
        use_swiglu_ffn=False, apply_layernorm=True,
    )  # fmt: skip
    settings.expect(
        hidden_expansion=0.5, activation_function="silu", decoder_activation_function="relu", attention_bias=True,
        num_feature_levels=1, mask_downsample_ratio=4, segmentation_head_activation_function="gelu",
    )  # fmt: skip
    if settings.get("layer_norm_eps") != 1e-5:  # the library's default, which is near enough to the original's
        settings.expect(layer_norm_eps=1e-6)
    depth, image_size = backbone.number("num_hidden_layers", 12), backbone.get("image_size", 224)
    if not isinstance(image_size, int):
        image_size = backbone.numbers("image_size")
    stages = [re.fullmatch(r"stage(\d+)", stage) for stage in backbone.names("out_features")]
    if not stages or None in stages:
        raise ConfigError(f"{backbone.where}: out_features={backbone.get('out_features')}: expected names of stages.")
    maps = [int(stage[1]) for stage in stages]
    windowed = backbone.numbers("window_block_indexes", [block for block in range(depth) if block not in maps])
    with_masks = "RfDetrForInstanceSegmentation" in settings.names("architectures")
    num_queries, groups = settings.number("num_queries", 300), settings.number("group_detr", 13)
    model = dict(
        type="RFDETRSeg" if with_masks else "RFDETR",
        num_queries=num_queries,
        num_detections=num_queries,
        backbone=dict(
            type="WindowedViT",
            patch_size=backbone.number("patch_size", 14),
            d_model=backbone.number("hidden_size", 768),
            depth=depth,
            num_heads=backbone.number("num_attention_heads", 12),
            image_size=image_size,
            num_windows=backbone.number("num_windows", 4),
            global_blocks=[block for block in range(depth) if block not in windowed],
            out_features=[f"block{block}" for block in maps],
            drop_path=backbone.get("drop_path_rate", 0.0),
        ),
        neck=dict(
            type="C2fProjection",
            in_features=[f"block{block}" for block in maps],
            out_channels=settings.number("d_model", 256),
            num_blocks=settings.number("c2f_num_blocks", 3),
        ),
        head=dict(
            type="RFDETRHead",
            d_model=settings.number("d_model", 256),
            num_heads=settings.number("decoder_self_attention_heads", 8),
            num_cross_heads=settings.number("decoder_cross_attention_heads", 16),
            num_points=settings.number("decoder_n_points", 4),
            d_ffn=settings.number("decoder_ffn_dim", 2048),
            dropout=settings.get("dropout", 0.1),
            num_decoder_layers=settings.number("decoder_layers", 3),
            masks=with_masks,
        ),
        training_queries=[dict(type="QueryGroups", groups=groups)] if groups > 1 else [],
    )
    sizes = _RF_DETRS_WITH_MASKS if with_masks else _RF_DETRS
    size = sizes.get(image_size if isinstance(image_size, int) else None, "n")
    return f"configs/rf_detr_{'seg_' if with_masks else ''}{size}_coco.py", model


def _write_rf_detr(model: Section) -> Section:
    backbone, head = model["backbone"], model["head"]
    groups = [_defaults_of(spec) for spec in model["training_queries"] if _is(spec, "QueryGroups")]
    size = backbone["image_size"]
    dinov2 = dict(
        model_type="rf_detr_dinov2",
        hidden_size=backbone["d_model"],
        num_hidden_layers=backbone["depth"],
        num_attention_heads=backbone["num_heads"],
        mlp_ratio=4,
        image_size=size if isinstance(size, int) else list(size),
        patch_size=backbone["patch_size"],
        num_windows=backbone["num_windows"],
        out_features=[name.replace("block", "stage") for name in backbone["out_features"]],
        drop_path_rate=backbone["drop_path"],
    )
    return dict(
        backbone_config=dinov2,
        hidden_expansion=0.5,
        c2f_num_blocks=model["neck"]["num_blocks"],
        dropout=head["dropout"],
        d_model=head["d_model"],
        decoder_self_attention_heads=head["num_heads"],
        decoder_cross_attention_heads=head["num_cross_heads"],
        decoder_n_points=head["num_points"],
        decoder_ffn_dim=head["d_ffn"],
        decoder_layers=head["num_decoder_layers"],
        num_queries=model["num_queries"],
        group_detr=groups[0]["groups"] if groups else 1,
        intermediate_size=4 * head["d_model"],
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
