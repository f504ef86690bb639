"""Detectors of the transformers library: (Deformable) DETR, RT-DETR, D-FINE, DEIMv2 and RF-DETR, some with masks."""

import re
from collections.abc import Mapping, Sequence
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
_SMALL_HGNETS = {
    "atto": ([3, 16, 16], [16, 64, 256], [16, 32, 64], [64, 256, 256], [1, 1, 1], [3, 3, 3]),
    "femto": ([3, 16, 16], [16, 64, 256], [16, 32, 64], [64, 256, 512], [1, 1, 1], [3, 3, 3]),
    "pico": tuple(values[:3] for values in _HGNETS["b0"]),
}
"""The same for DEIMv2's, which end with the third stage."""
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
    """Return the section of the denoising queries, by the originals' rules; empty without any."""
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


def _hgnet_blocks(name: str) -> Section:
    """Return the settings of the stages of an HGNetv2, other than `_HGNET_SETTINGS`."""
    num_stages = 3 if name in _SMALL_HGNETS else 4
    return dict(
        stage_downsample=[False, True, True, True][:num_stages],
        stage_light_block=[False, False, True, True][:num_stages],
        stage_kernel_size=[3, 3, 3] if name == "atto" else [3, 3, 5, 5][:num_stages],
        use_learnable_affine_block=name not in ("b4", "b5"),
    )


def _read_hgnet(settings: Settings, owner: str, known: Mapping[str, tuple[list[int], ...]]) -> str:
    """Return the size of an HGNetv2; other sizes than the published ones are an error."""
    if settings.get("model_type") != "hgnet_v2":
        raise ConfigError(f"{settings.where} {settings.get('model_type')!r}: vitkit's {owner} knows hgnet_v2.")
    sizes = tuple(settings.numbers(name) for name in _HGNET_SETTINGS)
    name = next((name for name, ours in known.items() if ours == sizes), None)
    if name is None:
        raise ConfigError(f"{settings.where}: expected the settings of {owner}'s HGNetv2: {', '.join(known)}.")
    settings.expect(hidden_act="relu", **_hgnet_blocks(name))
    return name


def _hgnet_section(name: str, settings: Settings, out_features: Sequence[str]) -> Section:
    """Return the section of an HGNetv2; `settings` are the detector's."""
    small = name in ("atto", "femto")
    spec = dict(type="SmallHGNetV2", size=name) if small else dict(type="TimmBackbone", name=f"hgnetv2_{name}")
    if name == "pico":
        spec["name"] = "hgnetv2_b0"
    frozen = dict(norm="frozen_bn", frozen_stem=True) if settings.get("freeze_backbone_batch_norms", True) else {}
    return spec | dict(out_features=list(out_features), pixel_mean=[0.0] * 3, pixel_std=[1.0] * 3) | frozen


def _write_hgnet(name: str, num_maps: int) -> Section:
    """Return the library's settings of an HGNetv2 whose last maps are used."""
    hgnet = dict(zip(_HGNET_SETTINGS, (_HGNETS | _SMALL_HGNETS)[name], strict=True))
    stages = ["stage2", "stage3", "stage4"][: len(hgnet["stage_out_channels"]) - 1]
    return hgnet | dict(
        hidden_sizes=hgnet["stage_out_channels"],
        depths=hgnet["stage_num_blocks"],
        model_type="hgnet_v2",
        out_features=stages[-num_maps:],
        **_hgnet_blocks(name),
    )


_D_FINE = [
    *_HYBRID,
    Row("max_num_bins", "head.reg_max", default=32),
    Row("reg_scale", "head.reg_scale", Settings.factor, 4.0),
    Row("up", "head.up", Settings.factor, 0.5),
]


def _read_d_fine(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of D-FINE on an HGNetv2."""
    hgnet = _read_hgnet(settings.sub("backbone_config"), "D-FINE", _HGNETS)
    levels, points = settings.number("num_feature_levels"), settings["decoder_n_points"]
    if levels not in (2, 3):
        raise ConfigError(f"{settings.where}: num_feature_levels={levels}: vitkit's model has 2 or 3.")
    settings.expect(**_hybrid_levels(_HGNETS[hgnet][3][-levels:], settings.number("encoder_hidden_dim")))
    settings.expect(
        **_HYBRID_FIXED, eval_idx=-1, layer_scale=1, top_prob_values=4, lqe_hidden_dim=64, lqe_layers=2,
        decoder_offset_scale=0.5, decoder_method="default",
    )  # fmt: skip
    model = dict(
        type="DFINE",
        backbone=_hgnet_section(hgnet, settings, ["res3", "res4", "res5"][-levels:]),
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
    settings = dict(
        backbone_config=_write_hgnet(size, levels),
        freeze_backbone_batch_norms=backbone["norm"] == "frozen_bn",
        depth_mult=neck["num_blocks"] / 3,
        decoder_n_points=head["num_points"],
        **_hybrid_levels(_HGNETS[size][3][-levels:], neck["out_channels"]),
    )
    return write_rows(model, _D_FINE) | _HYBRID_FIXED | settings | _write_denoising(model)


_DEIMV2 = [
    Row("num_queries", "num_queries"),
    Row("encoder_hidden_dim", "neck.out_channels"),
    Row("hidden_expansion", "neck.expansion", Settings.factor, 1.0),
    Row("d_model", "head.d_model"),
    Row("decoder_attention_heads", "head.num_heads"),
    Row("decoder_ffn_dim", "head.d_ffn"),
    Row("decoder_layers", "head.num_decoder_layers"),
    Row("dropout", "head.dropout", Settings.get, 0.0),
    Row("use_gateway", "head.gate", Settings.get, True),
    Row("share_bbox_head", "head.shared_box_head", Settings.get, False),
    Row("decoder_activation_function", "head.activation", Settings.get, "relu"),
    *_D_FINE[-3:],
]
_DEIMV2_HYBRID = [
    Row("encoder_attention_heads", "neck.num_heads"),
    Row("encoder_ffn_dim", "neck.d_ffn"),
    Row("dropout", "neck.dropout", Settings.get, 0.0),
]
"""What DEIMv2's smallest encoder does not have."""
_DEIMV2_FIXED = {key: value for key, value in _HYBRID_FIXED.items() if key != "decoder_activation_function"} | dict(
    encoder_fuse_op="sum", eval_idx=-1, layer_scale=1, top_prob_values=4, lqe_hidden_dim=64, lqe_layers=2,
    decoder_offset_scale=0.5, decoder_method="default",
)  # fmt: skip
_DEIMV2_HGNETS = _HGNETS | _SMALL_HGNETS
_DEIMV2_VITS = {192: "s", 256: "m"}
"""Width of the transformer -> the size of DEIMv2; others are "l", or "x" with gated blocks."""
_VIT_BLOCKS = dict(qkv_bias="qkv", layer_scale=None, norm_eps=1e-6)
"""The blocks of a ViT by default."""
_ADAPTED = [
    Row("hidden_size", "d_model"),
    Row("num_hidden_layers", "depth"),
    Row("num_attention_heads", "num_heads"),
    Row("patch_size", "patch_size"),
    Row("image_size", "image_size", default=224),
    Row("pos_embed_rescale", "rotary_rescale", Settings.factor, 1.0),
]


def _read_deimv2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of DEIMv2.

    The library adds layers before the selection of queries and computes positions in each layer, which the paper's
    model does not: vitkit's is the paper's.
    """
    backbone, points = settings.sub("backbone_config"), settings["decoder_n_points"]
    levels, channels = settings.number("num_feature_levels"), settings.number("encoder_hidden_dim")
    is_lite = settings.get("encoder_type", "hybrid") == "lite"
    if levels not in (2, 3) or (is_lite and levels != 2):
        raise ConfigError(f"{settings.where}: num_feature_levels={levels}: vitkit's model has 2 or 3, with lite 2.")
    settings.expect(
        decoder_in_channels=[channels] * levels, feat_strides=[8, 16, 32][-levels:], **_DEIMV2_FIXED,
        **({} if is_lite else dict(encode_proj_layers=[levels - 1])),
    )  # fmt: skip
    if backbone.get("model_type") == "dinov3_vit":
        size, section = _read_adapted_vit(backbone, settings)
    else:
        hgnet = _read_hgnet(backbone, "DEIMv2", _DEIMV2_HGNETS)
        if is_lite != (hgnet in _SMALL_HGNETS):
            raise ConfigError(
                f"{settings.where}: encoder_type: vitkit's has 'lite' on {', '.join(_SMALL_HGNETS)} only."
            )
        size = hgnet if is_lite else "n"
        features = ["res4"] if is_lite else ["res3", "res4", "res5"][-levels:]
        section = _hgnet_section(hgnet, settings, features)
    model = dict(
        type="DEIMv2",
        backbone=section,
        neck=dict(
            type="LiteEncoder" if is_lite else "DEIMv2Encoder",
            block="dfine" if settings.get("encoder_has_trailing_conv", True) else "deim",
            num_blocks=round(3 * settings.factor("depth_mult", 1.0)),
        ),
        head=dict(
            type="DEIMv2Head",
            num_points=settings.numbers("decoder_n_points") if isinstance(points, list) else [points] * levels,
        ),
    )
    read_rows(settings, _DEIMV2 if is_lite else [*_DEIMV2, *_DEIMV2_HYBRID], model)
    return f"deimv2_{size}_coco", model | _read_denoising(settings, mirror=True)


def _read_adapted_vit(vit: Settings, settings: Settings) -> tuple[str, Section]:
    """Return DEIMv2's size, and the section of a transformer with an adapter; `settings` are the detector's."""
    gated, norm = bool(vit.get("use_gated_mlp")), bool(vit.get("apply_layernorm", True))
    channels = settings.number("encoder_hidden_dim")
    vit.expect(
        hidden_act="silu" if gated else "gelu", rope_theta=100, num_channels=3, query_bias=True, value_bias=True,
        proj_bias=True, mlp_bias=True,
    )  # fmt: skip
    stages = [re.fullmatch(r"stage(\d+)", stage) for stage in vit.names("out_features")]
    if len(stages) != 3 or None in stages:
        raise ConfigError(f"{vit.where}: out_features={vit.get('out_features')}: expected the names of three stages.")
    blocks = dict(
        qkv_bias="qkv" if vit.get("key_bias", False) else "qv",
        # The small transformers without a norm of all maps have no scales either, which are 1 in their files.
        layer_scale=vit.factor("layerscale_value", 1.0) if norm else None,
        norm_eps=vit.factor("layer_norm_eps", 1e-5),
    )
    transformer = read_rows(vit, _ADAPTED, dict(type="ViT", positions="rotary"))
    transformer |= dict(
        blocks=None if blocks == _VIT_BLOCKS else blocks,
        mlp="swiglu" if gated else "gelu",
        mlp_ratio=vit.number("intermediate_size") / transformer["d_model"],
        num_registers=vit.get("num_register_tokens", 0),
    )
    section = dict(
        type="SpatialAdapter",
        vit=transformer,
        blocks=[int(stage[1]) - 1 for stage in stages],
        channels=settings.number("spatial_tuning_adapter_inplanes", 16),
        out_channels=None if channels == transformer["d_model"] else channels,
        norm=norm,
        drop_path=vit.get("drop_path_rate", 0.0),
    )
    return _DEIMV2_VITS.get(transformer["d_model"], "x" if gated else "l"), section


def _write_deimv2(model: Section) -> Section:
    backbone, neck, head = model["backbone"], model["neck"], model["head"]
    is_lite, levels, channels = neck["type"] == "LiteEncoder", len(head["num_points"]), neck["out_channels"]
    if backbone["type"] == "SpatialAdapter":
        theirs, widths = _write_adapted_vit(backbone), [channels] * 3
    else:
        size = backbone.get("size") or str(backbone.get("name", "")).partition(".")[0].removeprefix("hgnetv2_")
        if size == "b0" and is_lite:
            size = "pico"
        if size not in _DEIMV2_HGNETS:
            raise CheckpointError(f"model.backbone: the library's DEIMv2 has an HGNetv2 ({', '.join(_DEIMV2_HGNETS)}).")
        theirs = _write_hgnet(size, 1 if is_lite else levels)
        widths = _DEIMV2_HGNETS[size][3][-1:] if is_lite else _DEIMV2_HGNETS[size][3][-levels:]
    settings = dict(
        backbone_config=theirs,
        freeze_backbone_batch_norms=backbone.get("norm") == "frozen_bn",
        encoder_type="lite" if is_lite else "hybrid",
        encoder_has_trailing_conv=neck["block"] == "dfine",
        depth_mult=neck["num_blocks"] / 3,
        decoder_n_points=head["num_points"],
        spatial_tuning_adapter_inplanes=backbone.get("channels", 16),
        **_hybrid_levels(widths, channels) | dict(decoder_in_channels=[channels] * levels),
    )
    if is_lite:
        settings |= dict(feat_strides=[16, 32], num_feature_levels=2)
    rows = write_rows(model, _DEIMV2 if is_lite else [*_DEIMV2, *_DEIMV2_HYBRID])
    return rows | _DEIMV2_FIXED | settings | _write_denoising(model)


def _write_adapted_vit(adapter: Section) -> Section:
    vit, norm = adapter["vit"], adapter["norm"]
    blocks = _VIT_BLOCKS | dict(vit["blocks"] or {})
    if vit["type"] != "ViT" or vit["positions"] != "rotary":
        raise CheckpointError("model.backbone.vit: the library's DEIMv2 has a ViT with positions='rotary'.")
    gated = vit["mlp"] == "swiglu"
    return write_rows(vit, _ADAPTED) | dict(
        model_type="dinov3_vit",
        intermediate_size=round(vit["mlp_ratio"] * vit["d_model"]),
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
        layer_norm_eps=blocks["norm_eps"],
        key_bias=blocks["qkv_bias"] == "qkv",
        layerscale_value=blocks["layer_scale"] or 1.0,
        num_register_tokens=vit["num_registers"],
        drop_path_rate=adapter["drop_path"],
        apply_layernorm=norm,
        out_features=[f"stage{block + 1}" for block in adapter["blocks"]],
    )


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
        "deimv2", {"DEIMv2": "Deimv2ForObjectDetection"}, _read_deimv2, _write_deimv2, processor="RTDetrImageProcessor"
    ),
    Kind(
        "rf_detr",
        {"RFDETR": "RfDetrForObjectDetection", "RFDETRSeg": "RfDetrForInstanceSegmentation"},
        _read_rf_detr,
        _write_rf_detr,
        processor="RfDetrImageProcessor",
    ),
]
