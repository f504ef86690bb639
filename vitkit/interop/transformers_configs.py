"""Convert the `config.json` of a folder of the transformers library to vitkit's config of the same model.

Data, losses and evaluation come from vitkit's config of the official model of the same kind.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from vitkit.checkpoint.folders import (
    CONFIG,
    INDEX_SUFFIX,
    files_in_index,
    is_transformers_folder,
    read_object,
    stated_classes,
    tokens_in,
    weights_in,
)
from vitkit.checkpoint.hub import GENERATION, PREPROCESSOR
from vitkit.config import load_config
from vitkit.data.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CLASSES
from vitkit.errors import ConfigError
from vitkit.interop.transformers_settings import Section, Settings, preprocess
from vitkit.models import build_model
from vitkit.registry import nearest

RESNETS = {
    ("basic", (2, 2, 2, 2)): 18,
    ("basic", (3, 4, 6, 3)): 34,
    ("bottleneck", (3, 4, 6, 3)): 50,
    ("bottleneck", (3, 4, 23, 3)): 101,
}
HGNETS = {
    "b0": ([3, 16, 16], [16, 64, 256, 512], [16, 32, 64, 128], [64, 256, 512, 1024], [1, 1, 2, 1], [3, 3, 3, 3]),
    "b2": ([3, 24, 32], [32, 96, 384, 768], [32, 64, 128, 256], [96, 384, 768, 1536], [1, 1, 3, 1], [4, 4, 4, 4]),
    "b4": ([3, 32, 48], [48, 128, 512, 1024], [48, 96, 192, 384], [128, 512, 1024, 2048], [1, 1, 3, 1], [6, 6, 6, 6]),
    "b5": ([3, 32, 64], [64, 128, 512, 1024], [64, 128, 256, 512], [128, 512, 1024, 2048], [1, 2, 5, 2], [6, 6, 6, 6]),
}
"""Size of D-FINE's HGNetv2 -> its channels, blocks and layers, see `HGNET_SETTINGS`."""
HGNET_SETTINGS = (
    *("stem_channels", "stage_in_channels", "stage_mid_channels", "stage_out_channels"),
    *("stage_num_blocks", "stage_numb_of_layers"),
)
"""The library's names of these settings."""
_DFINES = {("b0", 2): "n", ("b0", 3): "s", ("b2", 3): "m", ("b4", 3): "l"}
"""Size of the backbone and number of levels -> the size of D-FINE; others are "x"."""
SAMPLING_METHODS = {"default": "bilinear", "discrete": "discrete"}
ATTENTION_TYPES = {"divided_space_time": "divided", "joint_space_time": "joint", "space_only": "space"}
_PANOPTIC_DATA = ("ade20k", "cityscapes")
"""Data sets other than COCO whose panoptic configs state which classes have instances."""
_COMPUTED = 1 << 20
"""The most values that a model may compute rather than store, such as the relative positions in a window."""
_TASKS = ("semantic", "instance", "panoptic")


def check_architecture(path: Path) -> str:
    """Return the kind of model that a `config.json` describes.

    Raises:
        ConfigError: vitkit has no model of this kind.
        CheckpointError: the file is damaged.
    """
    values, where = read_object(path), str(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in BUILDERS:
        architectures = ", ".join(Settings(values, where).names("architectures")) or "not stated"
        raise ConfigError(
            f"{where}: model_type {kind!r} (architectures: {architectures}) is none that vitkit has. "
            f"{nearest(str(kind), BUILDERS)}"
        )
    return kind


def lacks_tokens(weights: Path) -> bool:
    """Whether weights are a folder of the library with a text model but without its tokenizer's files."""
    path = weights / CONFIG
    is_text = is_transformers_folder(weights) and path.is_file() and read_object(path).get("model_type") == "marian"
    return is_text and not tokens_in(weights)


def config_of(folder: Path, name: str | None = None) -> Section:
    """Build vitkit's config, unchecked, from a folder's `config.json`.

    Args:
        name: the repository's name, whose last part may contain the task; None: the folder's name.
    Raises:
        ConfigError: a file is damaged, or vitkit does not have the architecture or a setting.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"'{folder}' has weights, but no {CONFIG}, which says of what model. Give a config, too.")
    kind = check_architecture(path)
    settings = Settings(_with_generation(folder, read_object(path)), str(path))
    # The owner and the parent folders say nothing about the task.
    last_name = name.partition("@")[0].rpartition("/")[2] if name else folder.resolve().name
    base, model = BUILDERS[kind](settings, last_name)
    if tokens_in(folder):  # the sizes are those of the vocabularies
        del model["source_size"], model["target_size"]
    stated = stated_classes(path)
    things = settings.sub("vitkit").get("things")
    if things is not None and "tasks" in model:
        model["things"] = things
    elif "panoptic" in model.get("tasks", ()) and stated and stated["things"] is None:
        model |= _things_of(stated["classes"])
    config = json.loads(json.dumps(load_config(base, check=False)))
    config["model"] = model
    _check_size(model, folder, None if kind == "marian" else stated.get("classes"))
    path = folder / PREPROCESSOR
    if path.is_file():
        preprocess(config, Settings(read_object(path), str(path)))
    return config


def _check_size(model: Section, folder: Path, classes: Sequence[str] | None) -> None:
    """Check that a model is not far larger than the weights beside its config, before it takes memory.

    Raises:
        ConfigError: it is, or a size is none that a tensor can have.
    """
    path = weights_in(folder)
    if path is None:
        return
    files = [folder / name for name in files_in_index(path)] if path.name.endswith(INDEX_SUFFIX) else [path]
    available = sum(file.stat().st_size for file in files if file.is_file())
    vocabularies = {side: tokens.vocabulary for side, tokens in tokens_in(folder).items()}
    things = None if classes is None else [True] * len(classes)
    try:
        with torch.device("meta"):  # tensors with sizes but no values
            built = build_model(model, classes=classes, things=things, vocabularies=vocabularies)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # what torch raises depends on the size
        reason = str(error).splitlines()[0][:100]
        raise ConfigError(f"{folder / CONFIG}: its sizes are too large for a model ({reason}).") from error
    # A weight takes two or four bytes there.
    num_values = sum(value.numel() for value in (*built.parameters(), *built.buffers()))
    if num_values > available + _COMPUTED:
        raise ConfigError(
            f"{folder / CONFIG}: describes a model of {num_values} values, but the weights beside it have only "
            f"{available} bytes. Get both files again."
        )


def _with_generation(folder: Path, values: Section) -> Section:
    """Add the decoding settings, which newer folders have in a separate file."""
    path = folder / GENERATION
    return (read_object(path) if path.is_file() else {}) | values


def _things_of(classes: Sequence[str]) -> Section:
    """Return `things` of the data set that has these classes; empty if no data set does.

    Names are compared by first synonym, and over three quarters must agree, as repositories spell a few differently.
    """
    first_names = [name.partition(",")[0].strip() for name in classes]
    for data in _PANOPTIC_DATA:
        known = load_config(f"configs/mask2former_r50_{data}_semantic.py", check=False)["data"]["val"]["classes"]
        num_same = sum(a == b for a, b in zip(first_names, known))
        if len(known) == len(classes) and num_same > 0.75 * len(known):
            config = load_config(f"configs/mask2former_r50_{data}_panoptic.py", check=False)
            return dict(things=list(config["model"]["things"]))
    return {}


def _resnet(settings: Settings) -> Section:
    """Return the section of a ResNet with the library's settings."""
    settings.expect(hidden_act="relu", downsample_in_first_stage=False, embedding_size=64)
    layer = str(settings.get("layer_type", "bottleneck"))
    depths = tuple(settings.numbers("depths", (3, 4, 6, 3)))
    widths = [64 * 2**i * (4 if layer == "bottleneck" else 1) for i in range(4)]
    settings.expect(hidden_sizes=widths)
    if (layer, depths) not in RESNETS:
        raise ConfigError(
            f"{settings.where}: a ResNet of {layer} blocks {list(depths)} is none that vitkit has. It has ResNets of "
            f"{', '.join(map(str, RESNETS.values()))} layers."
        )
    stride = dict(stride_in_1x1=True) if settings.get("downsample_in_bottleneck") else {}
    return dict(type="ResNet", depth=RESNETS[layer, depths], **stride)


def _detector_backbone(settings: Settings) -> Section:
    """Return the ResNet of DETR or Deformable DETR."""
    backbone = settings.sub("backbone_config")
    if backbone.get("model_type") == "resnet":
        section = _resnet(backbone)
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


def detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of DETR, with masks if the architecture has them."""
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


def deformable_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of Deformable DETR and its variants."""
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


def rt_detr(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of RT-DETR on a ResNet-vd."""
    backbone = settings.sub("backbone_config")
    if backbone.get("model_type") != "rt_detr_resnet":
        raise ConfigError(
            f"{settings.where}: backbone {backbone.get('model_type')!r}: vitkit's RT-DETR knows rt_detr_resnet."
        )
    backbone.expect(downsample_in_bottleneck=False)
    depth = _resnet(backbone)["depth"]
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
    return f"configs/rtdetr_r{depth}.py", model | _denoising(settings)


def _denoising(settings: Settings) -> Section:
    """Return the section of the denoising queries; empty if there are none."""
    if not settings.get("num_denoising", 100):
        return {}
    noise = dict(
        label_noise=settings.factor("label_noise_ratio", 0.5), box_noise=settings.factor("box_noise_scale", 1.0)
    )
    denoising = dict(type="BoxDenoising", num_queries=settings.number("num_denoising", 100), **noise)
    return {"training_queries": [denoising]}


def rt_detr_v2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of RT-DETRv2 on a ResNet-vd."""
    _, model = rt_detr(settings, name)
    settings.expect(decoder_n_levels=3)
    method = str(settings.get("decoder_method", "default"))
    if method not in SAMPLING_METHODS:
        raise ConfigError(f"{settings.where}: decoder_method={method!r}. {nearest(method, SAMPLING_METHODS)}")
    model["type"] = "RTDETRv2"
    model["head"].update(
        type="RTDETRv2Head",
        num_points=[settings.number("decoder_n_points")] * 3,
        offset_scale=settings.factor("decoder_offset_scale", 0.5),
        sampling=SAMPLING_METHODS[method],
    )
    return f"configs/rtdetrv2_r{model['backbone']['depth']}.py", model


def _hgnet(settings: Settings) -> str:
    """Return the size of an HGNetv2."""
    if settings.get("model_type") != "hgnet_v2":
        raise ConfigError(f"{settings.where} {settings.get('model_type')!r}: vitkit's D-FINE knows hgnet_v2.")
    settings.expect(
        hidden_act="relu", stage_downsample=[False, True, True, True], stage_light_block=[False, False, True, True],
        stage_kernel_size=[3, 3, 5, 5],
    )  # fmt: skip
    sizes = tuple(settings.numbers(name) for name in HGNET_SETTINGS)
    name = next((name for name, ours in HGNETS.items() if ours == sizes), None)
    if name is None or bool(settings.get("use_learnable_affine_block")) != (name in ("b0", "b2")):
        raise ConfigError(f"{settings.where}: expected the settings of D-FINE's HGNetv2: {', '.join(HGNETS)}.")
    return name


def d_fine(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of D-FINE on an HGNetv2."""
    hgnet = _hgnet(settings.sub("backbone_config"))
    levels, channels = settings.number("num_feature_levels"), settings.number("encoder_hidden_dim")
    if levels not in (2, 3):
        raise ConfigError(f"{settings.where}: num_feature_levels={levels}: vitkit's model has 2 or 3.")
    settings.expect(
        encoder_in_channels=HGNETS[hgnet][3][-levels:], decoder_in_channels=[channels] * levels,
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
    return f"configs/dfine_{_DFINES.get((hgnet, levels), 'x')}_coco.py", model | _denoising(settings)


def _swin(settings: Settings) -> Section:
    settings.expect(
        patch_size=4, num_channels=3, mlp_ratio=4.0, qkv_bias=True, hidden_act="gelu", use_absolute_embeddings=False
    )
    return dict(
        type="Swin",
        embed_dim=settings.number("embed_dim"),
        depths=settings.numbers("depths"),
        num_heads=settings.numbers("num_heads"),
        window=settings.number("window_size"),
        drop_path=settings.get("drop_path_rate", 0.1),
    )


def _mask_backbone(settings: Settings) -> Section:
    backbone = settings.sub("backbone_config")
    kind = backbone.get("model_type")
    if kind in ("swin", "maskformer-swin"):
        return _swin(backbone)
    if kind == "resnet":
        return _resnet(backbone) | dict(norm="frozen_bn")
    raise ConfigError(f"{settings.where}: backbone {kind!r}: vitkit's converter knows swin and resnet.")


def _tasks(settings: Settings, name: str) -> list[str]:
    """Return a mask model's tasks: those that vitkit wrote, or guessed from name or classes; the library has none."""
    stated = settings.sub("vitkit").names("tasks") or [task for task in _TASKS if task in name.lower()][-1:]
    by_classes = {len(COCO_CLASSES): "instance", len(COCO_PANOPTIC_CLASSES): "panoptic"}
    return stated or [by_classes.get(len(settings.sub("id2label").values), "semantic")]


def maskformer(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of MaskFormer with an FPN as pixel decoder."""
    decoder = settings.sub("decoder_config")
    decoder.expect(model_type="detr", activation_function="relu")
    tasks = _tasks(settings, name)
    base = {"panoptic": "coco_panoptic"}.get(tasks[0], "ade20k")
    return f"configs/maskformer_r50_{base}.py", dict(
        type="MaskFormer",
        tasks=tasks,
        num_queries=decoder.number("num_queries", 100),
        size_divisibility=32,
        backbone=_mask_backbone(settings),
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


def mask2former(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of Mask2Former."""
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
        backbone=_mask_backbone(settings),
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


def _require_classifier(settings: Settings) -> None:
    architectures = settings.names("architectures")
    if architectures and not any("Classification" in architecture for architecture in architectures):
        raise ConfigError(
            f"{settings.where}: {', '.join(architectures)} has no classifier. Give its folder as the weights of a "
            "backbone: model.backbone.pretrained=FOLDER."
        )


def swin(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of a Swin Transformer as a classifier."""
    _require_classifier(settings)
    return "configs/swin_tiny_in1k.py", dict(type="Classifier", backbone=_swin(settings))


def swinv2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of a Swin Transformer V2 as a classifier."""
    _require_classifier(settings)
    windows = settings.numbers("pretrained_window_sizes", [0] * 4)
    backbone = _swin(settings) | dict(type="SwinV2")
    if any(windows):
        backbone["trained_windows"] = [window or settings.number("window_size") for window in windows]
    return "configs/swinv2_tiny_in1k.py", dict(type="Classifier", backbone=backbone)


def _sizes(settings: Settings) -> Section:
    settings.expect(num_channels=3, qkv_bias=True, hidden_act="gelu")
    return dict(
        patch_size=settings["patch_size"],
        image_size=settings["image_size"],
        d_model=settings.number("hidden_size"),
        depth=settings.number("num_hidden_layers"),
        num_heads=settings.number("num_attention_heads"),
        mlp_ratio=settings.number("intermediate_size") / settings.number("hidden_size"),
    )


def vit(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of a ViT as a classifier."""
    _require_classifier(settings)
    return "configs/vit_b16_in1k.py", dict(type="Classifier", backbone=dict(type="ViT", **_sizes(settings)))


def resnet(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of a ResNet as a classifier."""
    _require_classifier(settings)
    return "configs/resnet50_in1k.py", dict(type="Classifier", backbone=_resnet(settings) | dict(pretrained=False))


def timesformer(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of TimeSformer as a classifier of clips."""
    _require_classifier(settings)
    scheme = str(settings.get("attention_type", "divided_space_time"))
    if scheme not in ATTENTION_TYPES:
        raise ConfigError(f"{settings.where}: attention_type {scheme!r}. {nearest(scheme, ATTENTION_TYPES)}")
    backbone = dict(
        type="TimeSformer",
        attention=ATTENTION_TYPES[scheme],
        num_frames=settings.number("num_frames"),
        **_sizes(settings),
    )
    return f"configs/timesformer_{ATTENTION_TYPES[scheme]}_k400.py", dict(type="Classifier", backbone=backbone)


def marian(settings: Settings, name: str) -> tuple[str, Section]:
    """Return the config of Marian, whose tokens are those of the folder's SentencePiece models."""
    settings.expect(scale_embedding=True, static_position_embeddings=True, tie_word_embeddings=True)
    activation = {"swish": "silu"}.get(settings["activation_function"], settings["activation_function"])
    beams, length = settings.get("num_beams", 1), settings.number("max_position_embeddings")
    return "configs/transformer_base_wmt14.py", dict(
        type="Transformer",
        source_size=settings.number("vocab_size"),
        target_size=settings.number("decoder_vocab_size", settings.number("vocab_size")),
        num_layers=[settings.number("encoder_layers"), settings.number("decoder_layers")],
        d_model=settings.number("d_model"),
        num_heads=settings.same("encoder_attention_heads", "decoder_attention_heads"),
        d_ffn=settings.same("encoder_ffn_dim", "decoder_ffn_dim"),
        dropout=settings.get("dropout", 0.1),
        activation=activation,
        max_length=length,
        shared_embeddings=settings.get("share_encoder_decoder_embeddings", True),
        output_bias=True,
        decoding=dict(method="beam" if beams > 1 else "greedy", beams=beams, length_penalty=1.0, max_length=length),
    )


BUILDERS: Mapping[str, Callable[[Settings, str], tuple[str, Section]]] = {
    "detr": detr,
    "deformable_detr": deformable_detr,
    "rt_detr": rt_detr,
    "rt_detr_v2": rt_detr_v2,
    "d_fine": d_fine,
    "maskformer": maskformer,
    "mask2former": mask2former,
    "swin": swin,
    "swinv2": swinv2,
    "vit": vit,
    "resnet": resnet,
    "timesformer": timesformer,
    "marian": marian,
}
"""The library's `model_type` -> a function from its settings and the folder's name to the base config and the model
section."""
