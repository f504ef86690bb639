"""Classifiers of the transformers library and their backbones (ResNet, Swin, Swin V2, ViT and TimeSformer), and MAE."""

from vitkit.apps.interop.transformers_settings import Kind, Row, Section, Settings, read_rows, write_rows
from vitkit.errors import ConfigError
from vitkit.registry import nearest

RESNETS = {
    ("basic", (2, 2, 2, 2)): 18,
    ("basic", (3, 4, 6, 3)): 34,
    ("bottleneck", (3, 4, 6, 3)): 50,
    ("bottleneck", (3, 4, 23, 3)): 101,
}
_ATTENTION_TYPES = {"divided_space_time": "divided", "joint_space_time": "joint", "space_only": "space"}


def read_resnet(settings: Settings) -> Section:
    """Return the section of a ResNet with the library's settings."""
    settings.expect(hidden_act="relu", downsample_in_first_stage=False, embedding_size=64)
    layer = str(settings.get("layer_type", "bottleneck"))
    depths = tuple(settings.numbers("depths", (3, 4, 6, 3)))
    widths = [64 * 2**i * (4 if layer == "bottleneck" else 1) for i in range(4)]
    settings.expect(hidden_sizes=widths)
    if (layer, depths) not in RESNETS:
        raise ConfigError(
            f"{settings.where}: vitkit has no ResNet of {layer} blocks {list(depths)}; expected one of "
            f"{', '.join(map(str, RESNETS.values()))} layers."
        )
    stride = dict(stride_in_1x1=True) if settings.get("downsample_in_bottleneck") else {}
    return dict(type="ResNet", depth=RESNETS[layer, depths], **stride)


def write_resnet(model: Section) -> Section:
    """Return the library's settings of a model's ResNet."""
    backbone = model["backbone"]
    layer, depths = next(key for key, depth in RESNETS.items() if depth == backbone["depth"])
    return dict(
        model_type="resnet",
        layer_type=layer,
        depths=list(depths),
        hidden_sizes=[64 * 2**i * (4 if layer == "bottleneck" else 1) for i in range(4)],
        embedding_size=64,
        hidden_act="relu",
        downsample_in_bottleneck=bool(backbone.get("stride_in_1x1")),
    )


_SWIN = [
    # Published files may leave out values that are the library's own.
    Row("embed_dim", "embed_dim", Settings.number, 96),
    Row("depths", "depths", Settings.numbers, [2, 2, 6, 2]),
    Row("num_heads", "num_heads", Settings.numbers, [3, 6, 12, 24]),
    Row("window_size", "window", Settings.number, 7),
    Row("drop_path_rate", "drop_path", Settings.get, 0.1),
]
_SWIN_FIXED = dict(patch_size=4, mlp_ratio=4.0, qkv_bias=True, hidden_act="gelu")


def read_swin(settings: Settings) -> Section:
    """Return the section of a Swin Transformer with the library's settings."""
    settings.expect(num_channels=3, use_absolute_embeddings=False, **_SWIN_FIXED)
    return read_rows(settings, _SWIN, dict(type="Swin"))


def write_swin(model: Section) -> Section:
    """Return the library's settings of a model's Swin Transformer."""
    backbone = model["backbone"]
    others = dict(model_type="swin", image_size=backbone.get("image_size") or 224)
    return write_rows(backbone, _SWIN) | _SWIN_FIXED | others


def _require_classifier(settings: Settings) -> None:
    architectures = settings.names("architectures")
    if architectures and not any("Classification" in architecture for architecture in architectures):
        raise ConfigError(
            f"{settings.where}: {', '.join(architectures)} has no classifier. Give its folder as the weights of a "
            "backbone: model.backbone.pretrained=FOLDER."
        )


def _read_swin(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of a Swin Transformer as a classifier."""
    _require_classifier(settings)
    return "swin_tiny_in1k", dict(type="Classifier", backbone=read_swin(settings))


def _read_swinv2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of a Swin Transformer V2 as a classifier."""
    _require_classifier(settings)
    windows = settings.numbers("pretrained_window_sizes", [0] * 4)
    backbone = read_swin(settings) | dict(type="SwinV2")
    if any(windows):
        backbone["trained_windows"] = [window or settings.number("window_size") for window in windows]
    return "swinv2_tiny_in1k", dict(type="Classifier", backbone=backbone)


def _write_swinv2(model: Section) -> Section:
    windows = [window or 0 for window in model["backbone"].get("trained_windows") or [0] * 4]
    return write_swin(model) | dict(model_type="swinv2", pretrained_window_sizes=windows)


_PATCHES = [Row("hidden_size", "d_model"), Row("num_hidden_layers", "depth"), Row("num_attention_heads", "num_heads")]


def _sizes(settings: Settings) -> Section:
    settings.expect(num_channels=3, qkv_bias=True, hidden_act="gelu")
    sizes = dict(
        patch_size=settings["patch_size"],
        image_size=settings["image_size"],
        mlp_ratio=settings.number("intermediate_size") / settings.number("hidden_size"),
    )
    return read_rows(settings, _PATCHES, sizes)


def _read_vit(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of a ViT as a classifier."""
    _require_classifier(settings)
    return "vit_b16_in1k", dict(type="Classifier", backbone=dict(type="ViT", **_sizes(settings)))


def _read_resnet(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of a ResNet as a classifier."""
    _require_classifier(settings)
    return "resnet50_in1k", dict(type="Classifier", backbone=read_resnet(settings) | dict(pretrained=False))


def _write_patches(model: Section) -> Section:
    backbone = model["backbone"]
    return write_rows(backbone, _PATCHES) | dict(
        intermediate_size=round(backbone["d_model"] * backbone["mlp_ratio"]),
        image_size=backbone["image_size"],
        patch_size=backbone["patch_size"],
        layer_norm_eps=1e-6,
        hidden_act="gelu",
        qkv_bias=True,
    )


def _read_timesformer(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of TimeSformer as a classifier of clips."""
    _require_classifier(settings)
    scheme = str(settings.get("attention_type", "divided_space_time"))
    if scheme not in _ATTENTION_TYPES:
        raise ConfigError(f"{settings.where}: attention_type {scheme!r}. {nearest(scheme, _ATTENTION_TYPES)}")
    backbone = dict(
        type="TimeSformer",
        attention=_ATTENTION_TYPES[scheme],
        num_frames=settings.number("num_frames"),
        **_sizes(settings),
    )
    return f"timesformer_{_ATTENTION_TYPES[scheme]}_k400", dict(type="Classifier", backbone=backbone)


def _write_timesformer(model: Section) -> Section:
    attention = model["backbone"]["attention"]
    scheme = next((theirs for theirs, ours in _ATTENTION_TYPES.items() if ours == attention), attention)
    frames = model["backbone"]["num_frames"]
    return _write_patches(model) | dict(num_frames=frames, attention_type=scheme)


_MAE_DECODER = [
    Row("decoder_hidden_size", "decoder_d_model", Settings.number, 512),
    Row("decoder_num_hidden_layers", "decoder_depth", Settings.number, 8),
    Row("decoder_num_attention_heads", "decoder_num_heads", Settings.number, 16),
    Row("mask_ratio", "mask_ratio", Settings.factor, 0.75),
    Row("norm_pix_loss", "norm_pix", Settings.get, False),
]


def _read_mae(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of MAE with its decoder."""
    model = read_rows(settings, _MAE_DECODER, dict(type="MAE"))
    settings.expect(decoder_intermediate_size=4 * model["decoder_d_model"])
    return "mae_vit_b16_in1k", model | dict(backbone=dict(type="ViT", positions="sincos", **_sizes(settings)))


def _write_mae(model: Section) -> Section:
    decoder = write_rows(model, _MAE_DECODER) | dict(decoder_intermediate_size=4 * model["decoder_d_model"])
    return _write_patches(model) | decoder


KINDS = [
    Kind("swin", {"Swin": "SwinForImageClassification"}, _read_swin, write_swin),
    Kind("swinv2", {"SwinV2": "Swinv2ForImageClassification"}, _read_swinv2, _write_swinv2),
    Kind("vit", {"ViT": "ViTForImageClassification"}, _read_vit, _write_patches),
    Kind("vit_mae", {"MAE": "ViTMAEForPreTraining"}, _read_mae, _write_mae),
    Kind("resnet", {"ResNet": "ResNetForImageClassification"}, _read_resnet, write_resnet),
    Kind(
        "timesformer",
        {"TimeSformer": "TimesformerForVideoClassification"},
        _read_timesformer,
        _write_timesformer,
        processor="VideoMAEImageProcessor",
    ),
]
