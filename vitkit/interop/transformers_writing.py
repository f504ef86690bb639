"""Write folders of the transformers library from vitkit's models: the reverse of `transformers_configs`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.checkpoint.folders import CONFIG, WEIGHTS
from vitkit.checkpoint.hub import PREPROCESSOR
from vitkit.checkpoint.marian import FILES, TARGET_NUMBERS
from vitkit.checkpoint.writing import write_bytes, write_safetensors
from vitkit.config.schema import Slot, slots_in
from vitkit.data.transforms.classification import ClassificationEvalTransforms
from vitkit.data.transforms.clips import ClipEvalTransforms
from vitkit.data.transforms.pipelines import EvalResize
from vitkit.errors import CheckpointError
from vitkit.inference.predictor import Predictor
from vitkit.inference.translator import Translator
from vitkit.interop.transformers_configs import (
    ATTENTION_TYPES,
    BUILDERS,
    HGNET_SETTINGS,
    HGNETS,
    RESNETS,
    SAMPLING_METHODS,
)
from vitkit.interop.transformers_settings import INTERPOLATIONS, Section, Settings
from vitkit.model_zoo.converters import Written, written
from vitkit.models.classifier import Classifier
from vitkit.ops.images import pixel_statistics
from vitkit.registry import MODELS, REGISTRIES, TRAINING_QUERIES, Registry
from vitkit.seq2seq.vocabulary import Vocabulary
from vitkit.structures import BOS, EOS, PAD

TOKENIZER = "tokenizer_config.json"
_NOT_COMPARED = (
    *("pretrained", "frozen_stages", "frozen_stem", "freeze_detr", "drop_path", "dropout", "position_std"),
    *("norm", "out_features", "num_classes", "source_size", "target_size", "output_bias", "tasks", "things"),
    *("training_queries", "pixel_mean", "pixel_std", "size_divisibility", "isolate_padding", "decoding"),
)
"""Arguments that are not compared: those of training, those that follow from the weights, and those of pre- and
post-processing."""


def write_folder(folder: Path, loaded: Predictor | Translator, spec: str | Mapping[str, Any]) -> Written:
    """Write a model as a folder for the library's `from_pretrained`: settings, weights, and a text model's tokens.

    Args:
        spec: the model section of the config.
    Raises:
        CheckpointError: the library lacks the model or one of its parts, or the folder cannot be written.
    """
    result = written(loaded.model, "transformers")
    values = config_json(loaded, spec)
    files = {CONFIG: _as_json(values)}
    if isinstance(loaded, Translator):
        files |= token_files(loaded.vocabularies)
    else:
        files[PREPROCESSOR] = _as_json(_preprocessor(loaded, values["model_type"]))
    for name, data in files.items():
        write_bytes(folder / name, data)
    write_safetensors(folder / WEIGHTS[0], result.state)
    return result


def _as_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode()


def token_files(vocabularies: Mapping[str, Vocabulary]) -> dict[str, bytes]:
    """Return the files of the library's MarianTokenizer; none for words and characters, which it does not support."""
    source, target = vocabularies["source"], vocabularies["target"]
    if source.pieces_model is None or target.pieces_model is None:
        return {}
    numbers = {
        name: _as_json({token: number for number, token in enumerate(vocabulary.tokens)})
        for name, vocabulary in ((FILES[2], source), (TARGET_NUMBERS, target))
    }
    shared = source.tokens == target.tokens
    if shared:
        del numbers[TARGET_NUMBERS]
    settings = dict(tokenizer_class="MarianTokenizer", separate_vocabs=not shared)
    return {FILES[0]: source.pieces_model, FILES[1]: target.pieces_model, TOKENIZER: _as_json(settings), **numbers}


def config_json(loaded: Predictor | Translator, spec: Mapping[str, Any]) -> Section:
    """Return the library's config of a model.

    Raises:
        CheckpointError: the library does not support a setting.
    """
    model = _resolved(spec, MODELS)
    kind = _KINDS.get(model["backbone"]["type"] if model["type"] == "Classifier" else model["type"])
    if kind == "deformable_detr" and model["neck"].get("in_features") is None:
        model["neck"]["in_features"] = loaded.model.neck.in_features
    if getattr(loaded.model, "training_queries", None) is None:
        model["training_queries"] = []
    if kind in ("rt_detr_v2", "d_fine") and isinstance(model["head"]["num_points"], int):
        model["head"]["num_points"] = [model["head"]["num_points"]] * len(loaded.model.neck.feature_info)
    if kind is None:
        raise CheckpointError(f"{model['type']}: transformers names: there is no such model there.")
    theirs = _THEIRS[kind]
    architecture = "DetrForSegmentation" if model["type"] == "DETRSegmentation" else theirs.architecture
    values = {"model_type": kind, "architectures": [architecture], **theirs.settings(model), **_classes(loaded)}
    values["torch_dtype"] = "float32"
    if isinstance(loaded, Translator):
        model["num_layers"] = [values["encoder_layers"], values["decoder_layers"]]
        sizes = [len(vocabulary) for vocabulary in loaded.vocabularies.values()]
        values |= {"vocab_size": sizes[0], "decoder_vocab_size": sizes[-1]}
    if "tasks" in model:
        things = loaded.model.things
        values["vitkit"] = {"tasks": list(model["tasks"]), "things": None if things is None else list(things)}
    _, read = BUILDERS[kind](Settings(values, CONFIG), "")
    differing = _difference(model, _resolved(read, MODELS), "model")
    if differing:
        raise CheckpointError(f"{differing}: the transformers library's model has no such setting.")
    return values


def _resolved(spec: Any, registry: Registry) -> Section:
    """Return all arguments of a spec and its nested specs, defaults included."""
    constructor, _ = registry.resolve(spec, "model")
    slots = slots_in(Slot(Any, registry=registry), spec, "model")
    values = {name: slot.default for name, slot in slots.items() if name != "type"}
    for name in ("backbone", "neck", "head"):
        if name in values:
            values[name] = _resolved(values[name], REGISTRIES[name])
    return {"type": constructor.__name__, **values}


def _difference(ours: Any, theirs: Any, where: str) -> str | None:
    """Return the first setting in which two resolved specs differ, as key=value; None if they are the same model."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in (ours | theirs) if key not in _NOT_COMPARED]
        found = (_difference(ours.get(key), theirs.get(key), f"{where}.{key}") for key in keys)
        return next(filter(None, found), None)
    as_list = [list(value) if isinstance(value, tuple) else value for value in (ours, theirs)]
    return None if as_list[0] == as_list[1] else f"{where}={ours!r}"


def _classes(loaded: Predictor | Translator) -> Section:
    if isinstance(loaded, Translator) or not loaded.classes:
        return {}
    names = dict(enumerate(loaded.classes))
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}}


def _detector(model: Section) -> Section:
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


def _deformable_detr(model: Section) -> Section:
    head = model["head"]
    return _detector(model) | dict(
        num_feature_levels=model["neck"].get("num_levels"),
        encoder_n_points=head["num_points"],
        decoder_n_points=head["num_points"],
        with_box_refine=head["refine_boxes"],
        two_stage=head["two_stage"],
        two_stage_num_proposals=model["num_queries"],
    )


def _rt_detr(model: Section) -> Section:
    backbone, neck, head = model["backbone"], model["neck"], model["head"]
    channels = neck["out_channels"]
    resnet = _resnet(model) | dict(model_type="rt_detr_resnet", out_features=["stage2", "stage3", "stage4"])
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
    return settings | _denoising(model)


def _denoising(model: Section) -> Section:
    settings: Section = {"num_denoising": 0}
    for spec in model["training_queries"]:
        slots = slots_in(Slot(Any, registry=TRAINING_QUERIES), spec, "model.training_queries")
        if TRAINING_QUERIES.resolve(spec)[0].__name__ == "BoxDenoising":
            settings["num_denoising"] = slots["num_queries"].default
            settings["label_noise_ratio"] = slots["label_noise"].default
            settings["box_noise_scale"] = slots["box_noise"].default
    return settings


def _rt_detr_v2(model: Section) -> Section:
    head = model["head"]
    methods = {ours: theirs for theirs, ours in SAMPLING_METHODS.items()}
    return _rt_detr(model) | dict(
        decoder_n_points=head["num_points"][0],
        decoder_n_levels=3,
        decoder_offset_scale=head["offset_scale"],
        decoder_method=methods[head["sampling"]],
    )


def _d_fine(model: Section) -> Section:
    backbone, neck, head = model["backbone"], model["neck"], model["head"]
    size = str(backbone.get("name", "")).partition(".")[0].removeprefix("hgnetv2_")
    if size not in HGNETS:
        raise CheckpointError(f"model.backbone: the library's D-FINE has an HGNetv2 ({', '.join(HGNETS)}).")
    levels, channels = len(head["num_points"]), neck["out_channels"]
    hgnet = dict(zip(HGNET_SETTINGS, HGNETS[size], strict=True))
    hgnet |= dict(hidden_sizes=hgnet["stage_out_channels"], depths=hgnet["stage_num_blocks"])
    hgnet |= dict(
        model_type="hgnet_v2",
        out_features=["stage2", "stage3", "stage4"][-levels:],
        use_learnable_affine_block=size in ("b0", "b2"),
    )
    return dict(
        backbone_config=hgnet,
        freeze_backbone_batch_norms=backbone["norm"] == "frozen_bn",
        encoder_in_channels=HGNETS[size][3][-levels:],
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
    ) | _denoising(model)


def _resnet(model: Section) -> Section:
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


def _swin(model: Section) -> Section:
    backbone = model["backbone"]
    return dict(
        model_type="swin",
        patch_size=4,
        image_size=backbone.get("image_size") or 224,
        embed_dim=backbone["embed_dim"],
        depths=list(backbone["depths"]),
        num_heads=list(backbone["num_heads"]),
        window_size=backbone["window"],
        drop_path_rate=backbone["drop_path"],
        mlp_ratio=4.0,
        qkv_bias=True,
        hidden_act="gelu",
    )


def _mask_backbone(model: Section) -> Section:
    section = (_swin if model["backbone"]["type"] == "Swin" else _resnet)(model)
    return section | dict(out_features=["stage1", "stage2", "stage3", "stage4"])


def _maskformer(model: Section) -> Section:
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
        backbone_config=_mask_backbone(model),
        decoder_config=decoder,
    )


def _mask2former(model: Section) -> Section:
    head, neck = model["head"], model["neck"]
    return dict(
        backbone_config=_mask_backbone(model),
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


def _swinv2(model: Section) -> Section:
    windows = [window or 0 for window in model["backbone"].get("trained_windows") or [0] * 4]
    return _swin(model) | dict(model_type="swinv2", pretrained_window_sizes=windows)


def _patches(model: Section) -> Section:
    backbone = model["backbone"]
    return dict(
        hidden_size=backbone["d_model"],
        num_hidden_layers=backbone["depth"],
        num_attention_heads=backbone["num_heads"],
        intermediate_size=round(backbone["d_model"] * backbone["mlp_ratio"]),
        image_size=backbone["image_size"],
        patch_size=backbone["patch_size"],
        layer_norm_eps=1e-6,
        hidden_act="gelu",
        qkv_bias=True,
    )


def _timesformer(model: Section) -> Section:
    attention = model["backbone"]["attention"]
    scheme = next((theirs for theirs, ours in ATTENTION_TYPES.items() if ours == attention), attention)
    frames = model["backbone"]["num_frames"]
    return _patches(model) | dict(num_frames=frames, attention_type=scheme)


def _marian(model: Section) -> Section:
    layers = model["num_layers"]
    encoder_layers, decoder_layers = (layers,) * 2 if isinstance(layers, int) else layers
    return dict(
        d_model=model["d_model"],
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        encoder_attention_heads=model["num_heads"],
        decoder_attention_heads=model["num_heads"],
        encoder_ffn_dim=model["d_ffn"],
        decoder_ffn_dim=model["d_ffn"],
        dropout=model["dropout"],
        activation_function=model["activation"],
        max_position_embeddings=model["max_length"],
        share_encoder_decoder_embeddings=model["shared_embeddings"],
        scale_embedding=True,
        static_position_embeddings=True,
        tie_word_embeddings=model["tied_output"],
        pad_token_id=PAD,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=EOS,
    )


class _Theirs(NamedTuple):
    """How a kind of model is written for the library."""

    settings: Callable[[Section], Section]
    """Converts the resolved section of vitkit's model to the library's settings."""
    architecture: str
    processor: str = "BitImageProcessor"
    """The library's class that prepares the images."""


_THEIRS: Mapping[str, _Theirs] = {
    "detr": _Theirs(_detector, "DetrForObjectDetection", "DetrImageProcessor"),
    "deformable_detr": _Theirs(_deformable_detr, "DeformableDetrForObjectDetection", "DeformableDetrImageProcessor"),
    "rt_detr": _Theirs(_rt_detr, "RTDetrForObjectDetection", "RTDetrImageProcessor"),
    "rt_detr_v2": _Theirs(_rt_detr_v2, "RTDetrV2ForObjectDetection", "RTDetrImageProcessor"),
    "d_fine": _Theirs(_d_fine, "DFineForObjectDetection", "RTDetrImageProcessor"),
    "maskformer": _Theirs(_maskformer, "MaskFormerForInstanceSegmentation", "MaskFormerImageProcessor"),
    "mask2former": _Theirs(_mask2former, "Mask2FormerForUniversalSegmentation", "Mask2FormerImageProcessor"),
    "swin": _Theirs(_swin, "SwinForImageClassification"),
    "swinv2": _Theirs(_swinv2, "Swinv2ForImageClassification"),
    "vit": _Theirs(_patches, "ViTForImageClassification"),
    "resnet": _Theirs(_resnet, "ResNetForImageClassification"),
    "timesformer": _Theirs(_timesformer, "TimesformerForVideoClassification", "VideoMAEImageProcessor"),
    "marian": _Theirs(_marian, "MarianMTModel"),
}
"""`model_type` -> how the model is written."""
_KINDS = {
    "DETR": "detr",
    "DETRSegmentation": "detr",
    "DeformableDETR": "deformable_detr",
    "RTDETR": "rt_detr",
    "RTDETRv2": "rt_detr_v2",
    "DFINE": "d_fine",
    "MaskFormer": "maskformer",
    "Mask2Former": "mask2former",
    "Swin": "swin",
    "SwinV2": "swinv2",
    "ViT": "vit",
    "ResNet": "resnet",
    "TimeSformer": "timesformer",
    "Transformer": "marian",
}
"""The class of a model, or of a classifier's backbone -> `model_type`."""


def _preprocessor(loaded: Predictor, kind: str) -> Section:
    """Return the settings of the library's image processor that prepares images as `loaded` does."""
    model, transforms = loaded.model, loaded.transforms
    statistics = pixel_statistics(model if isinstance(model, Classifier) else model.backbone)
    values = dict(image_processor_type=_THEIRS[kind].processor, do_rescale=True)
    values["do_normalize"] = (*statistics["mean"], *statistics["std"]) != (0, 0, 0, 1, 1, 1)
    values |= dict(image_mean=list(statistics["mean"]), image_std=list(statistics["std"]))
    if isinstance(transforms, EvalResize) and transforms.size is not None:
        height, width = transforms.size
        return values | dict(do_resize=True, size=dict(height=height, width=width))
    if isinstance(transforms, EvalResize):
        longest = {} if transforms.max_size is None else {"longest_edge": transforms.max_size}
        return values | dict(do_resize=True, size=dict(shortest_edge=transforms.short_side, **longest))
    if not isinstance(transforms, ClassificationEvalTransforms | ClipEvalTransforms):
        return values | dict(do_resize=False)
    square = dict(height=transforms.size, width=transforms.size)
    if isinstance(transforms, ClassificationEvalTransforms):
        values["resample"] = _resample(transforms.interpolation)
        if transforms.short_side is None:
            return values | dict(image_processor_type="ViTImageProcessor", do_resize=True, size=square)
    size = dict(shortest_edge=transforms.short_side)
    return values | dict(do_resize=True, size=size, do_center_crop=True, crop_size=square)


def _resample(interpolation: str) -> int:
    """Return Pillow's number of an interpolation.

    Raises:
        CheckpointError: folders with this interpolation could not be read back.
    """
    for number, name in INTERPOLATIONS.items():
        if name == interpolation:
            return number
    raise CheckpointError(
        f"data.val.transforms.interpolation={interpolation!r}: expected {' or '.join(INTERPOLATIONS.values())}, with "
        "which a folder can be read back."
    )
