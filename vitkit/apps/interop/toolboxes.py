"""Configs of models of mmdetection and detrex: from the shapes of a checkpoint's weights and the config in it.

That of mmdetection is parsed and never executed: what it sets other than by plain values is unknown here.
"""

import ast
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from vitkit.apps.interop.transformers_settings import Section
from vitkit.config import Config, load_config, load_saved_config
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model_zoo.converters import describe_other
from vitkit.model_zoo.converters.formats import DETREX, MMDETECTION
from vitkit.model_zoo.converters.key_table import Format, State
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD
from vitkit.text_format import pluralize
from vitkit.weights.contents import state_dict_of
from vitkit.weights.locate import Located

logger = logging.getLogger("vitkit")

_DEPTHS = {(2, False): 18, (6, False): 34, (6, True): 50, (23, True): 101}
"""Blocks of a ResNet's third stage, and whether they are bottlenecks -> its depth."""
_ATTENTIONS = ("encoder.layer_cfg.self_attn_cfg", "decoder.layer_cfg.self_attn_cfg", "decoder.layer_cfg.cross_attn_cfg")
_HEADS = {
    "open-mmlab/mmdetection DINO": dict(box_eps=1e-5),
    "IDEA-Research/detrex DINO": dict(position_offset=-0.5, temperature=10000.0),
}
"""Format -> settings of the head that shapes do not show."""
_NEEDED = {
    "DETR": {"positional_encoding.offset": 0.0, "positional_encoding.temperature": 10000},
    "DeformableDETR": {"positional_encoding.offset": -0.5, "positional_encoding.temperature": 10000},
    "DINO": {"positional_encoding.offset": 0.0, "positional_encoding.temperature": 20},
}
"""The settings that vitkit's model has no choice of, and that shapes do not show."""


def read_toolbox_config(model: Located, overrides: Sequence[str] = (), *, trust: bool = False) -> Config | None:
    """Return vitkit's config of a checkpoint of mmdetection or detrex; None for one of no known model.

    Args:
        overrides, trust: see `load_saved_config`.
    Raises:
        CheckpointError: it is of a model, or was trained with a setting, that vitkit does not have.
    """
    where, stored = str(model), state_dict_of(model.metadata, str(model))
    if (form := find_toolbox_format(stored)) is None:
        if (other := describe_other(stored)) is not None:
            names = ", ".join(sorted(_READERS))
            raise CheckpointError(f"{where}: seems to be {other}, which vitkit does not have. It has {names}.")
        return None
    settings = read_text_config(model.metadata)
    _check_settings(where, form.model, settings)
    # No rule of these formats asks the model when reading.
    state = form.table.read(dict(stored), nn.Module())
    try:
        base, section = _READERS[form.model](state, settings)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {form.name}: {error}") from error
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"{where}: not all entries of {form.name}: {error}. Get the file again.") from error
    config = json.loads(json.dumps(load_config(base, check=False)))
    section["head"] |= _HEADS.get(form.name, {})
    config["model"] = section
    _set_pixels(where, section, settings)
    if (size := _test_size(settings)) is not None:
        config["data"]["val"]["transforms"] = dict(type="EvalResize", short_side=size[0], max_size=size[1])
    # The data that the base config names are not those of this checkpoint.
    config["data"]["val"].pop("classes", None)
    logger.info("%s: %s: %s", where, form.name, _describe(section, model.metadata))
    return load_saved_config(json.dumps(config), model.path, overrides, trust=trust)


def find_toolbox_format(state: Mapping[str, Any]) -> Format | None:
    """Return the format of a checkpoint's weights if it is one of a toolbox for a model here; else None."""
    return next((form for form in (*MMDETECTION, *DETREX) if form.model in _READERS and form.matches(state)), None)


def is_of_toolbox(model: Located) -> bool:
    """Whether a model is a checkpoint of mmdetection or detrex."""
    metadata = model.metadata
    return "config" not in metadata and find_toolbox_format(state_dict_of(metadata, str(model))) is not None


def read_text_config(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of the config that a checkpoint of mmdetection has as text, {} if it has none."""
    meta = checkpoint.get("meta")
    text = meta.get("cfg", meta.get("config")) if isinstance(meta, Mapping) else None
    try:
        statements = ast.parse(text).body if isinstance(text, str) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two for text that nests too deeply
        return {}
    values = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                values[statement.targets[0].id] = ast.literal_eval(_Literals().visit(statement.value))
            except (ValueError, TypeError, RecursionError, MemoryError):
                continue
    return values


class _Literals(ast.NodeTransformer):
    """Turns `dict(key=value)` into `{"key": value}`, which is plain data."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        names = [keyword.arg for keyword in node.keywords]
        if not isinstance(node.func, ast.Name) or node.func.id != "dict" or node.args or None in names:
            return node  # which no literal has, so the value is unknown
        return ast.Dict([ast.Constant(name) for name in names], [keyword.value for keyword in node.keywords])


def _setting(settings: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path below the config's `model`."""
    value: Any = settings.get("model")
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None else value


def _check_settings(where: str, kind: str, settings: Mapping[str, Any]) -> None:
    for path, needed in _NEEDED.get(kind, {}).items():
        if _setting(settings, path, needed) != needed:
            raise CheckpointError(
                f"{where}: was trained with model.{path}={_setting(settings, path)}; vitkit's {kind} has {needed}."
            )
    if kind == "DeformableDETR" and _setting(settings, "as_two_stage") and not _setting(settings, "with_box_refine"):
        raise CheckpointError(
            f"{where}: was trained in two stages without box refinement (as_two_stage, not with_box_refine), which "
            "vitkit's DeformableDETR does not have."
        )


def _set_pixels(where: str, section: Section, settings: Mapping[str, Any]) -> None:
    """Set the pixels' statistics that the model was trained with.

    Raises:
        CheckpointError: it was trained on images whose channels have another order.
    """
    about = _setting(settings, "data_preprocessor", settings.get("data_preprocessor"))
    if not isinstance(about, Mapping) or not about.get("mean"):
        return
    if not about.get("bgr_to_rgb"):
        raise CheckpointError(
            f"{where}: was trained on images with channels in the order BGR (data_preprocessor.bgr_to_rgb=False), as "
            "models on ResNets of caffe are; vitkit's images are RGB. Reverse the second axis of the backbone's first "
            "convolution, and mean and std, in the checkpoint."
        )
    mean, std = ([value / 255 for value in about[name]] for name in ("mean", "std"))
    if max(abs(a - b) for a, b in zip((*mean, *std), (*IMAGENET_MEAN, *IMAGENET_STD))) > 1e-3:
        section["backbone"].update(pixel_mean=mean, pixel_std=std)


def _test_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the short and the long side that test images are resized to; None if the config does not say."""
    for step in settings.get("test_pipeline") or ():
        scale = step.get("scale") if isinstance(step, Mapping) and step.get("keep_ratio") else None
        if isinstance(scale, tuple | list) and len(scale) == 2 and all(type(side) is int for side in scale):
            return min(scale), max(scale)
    return None


def _count(state: State, pattern: str) -> int:
    """Return the number of different numbers that a pattern finds in the names."""
    return len({match[1] for match in map(re.compile(pattern).match, state) if match})


def _read_backbone(state: State, settings: Mapping[str, Any]) -> tuple[Section, list[int]]:
    """Return the section of a ResNet or a Swin Transformer, and the channels of its four maps."""
    if (patches := state.get("backbone.patch_embed.proj.weight")) is not None:
        tables = [
            state[f"backbone.layers.{i}.blocks.0.attn.relative_position_bias_table"]
            for i in range(_count(state, r"backbone\.layers\.(\d+)\."))
        ]
        depths = [_count(state, rf"backbone\.layers\.{i}\.blocks\.(\d+)\.") for i in range(len(tables))]
        side, heads = math.isqrt(len(tables[0])), [table.shape[1] for table in tables]
        section = dict(type="Swin", embed_dim=len(patches), depths=depths, num_heads=heads, window=(side + 1) // 2)
        return section, [len(patches) << i for i in range(len(tables))]
    bottleneck = "backbone.layer1.0.conv3.weight" in state
    blocks = _count(state, r"backbone\.layer3\.(\d+)\.")
    if "backbone.layer1.0.conv2.weight" not in state or (blocks, bottleneck) not in _DEPTHS:
        raise ConfigError("its backbone is neither a ResNet of 18, 34, 50 or 101 layers nor a Swin Transformer.")
    section = dict(type="ResNet", depth=_DEPTHS[blocks, bottleneck], norm="frozen_bn")
    if bottleneck and _setting(settings, "backbone.style") == "caffe":
        section["stride_in_1x1"] = True
    last = "conv3" if bottleneck else "conv2"
    return section, [len(state[f"backbone.layer{i}.0.{last}.weight"]) for i in (1, 2, 3, 4)]


def _heads(settings: Mapping[str, Any], *paths: str) -> int:
    """Return the number of heads of attentions, 8 unless the config says otherwise.

    Raises:
        ConfigError: they differ.
    """
    numbers = {_setting(settings, f"{path}.num_heads", 8) for path in paths}
    if len(numbers) > 1:
        raise ConfigError(
            f"its attentions have {' and '.join(map(str, sorted(numbers)))} heads; vitkit's have one number."
        )
    return int(numbers.pop())


def _read_detr(state: State, settings: Mapping[str, Any]) -> tuple[str, Section]:
    backbone, channels = _read_backbone(state, settings)
    num_queries, d_model = state["head.query_embed.weight"].shape
    if state["neck.projections.res5.weight"].shape[1] != channels[-1]:
        raise ConfigError("its neck does not read the backbone's last map.")
    if backbone["type"] == "ResNet":
        backbone["frozen_stages"] = 1
        backbone["dilation"] = list(_setting(settings, "backbone.dilations", ()))[-1:] == [2]
    head = dict(
        type="DETRHead", d_model=d_model, num_heads=_heads(settings, *_ATTENTIONS),
        d_ffn=len(state["head.encoder.layers.0.ffn.linear1.weight"]), dropout=0.1, **_num_layers(state),
    )  # fmt: skip
    neck = dict(type="ChannelProjection", out_channels=d_model)
    num_classes = len(state["head.class_embed.weight"]) - 1
    model = dict(type="DETR", num_queries=num_queries, num_classes=num_classes, backbone=backbone, neck=neck, head=head)
    return "detr_r50", model


def _num_layers(state: State) -> Section:
    return {f"num_{part}_layers": _count(state, rf"head\.{part}\.layers\.(\d+)\.") for part in ("encoder", "decoder")}


def _read_deformable(state: State, settings: Mapping[str, Any]) -> Section:
    """Return the parts that Deformable DETR and DINO share."""
    backbone, channels = _read_backbone(state, settings)
    num_levels, d_model = state["head.level_embed"].shape
    kernels = [state[f"neck.levels.{i}.0.weight"] for i in range(num_levels)]
    inputs = [kernel.shape[1] for kernel in kernels if kernel.shape[-1] == 1]
    if inputs != channels[len(channels) - len(inputs) :]:
        raise ConfigError(f"its neck reads maps of {inputs} channels; the backbone's have {channels}.")
    features = [f"res{i}" for i in range(6 - len(inputs), 6)]
    if backbone["type"] == "ResNet":
        backbone["frozen_stages"] = 1
    num_heads = _heads(settings, *_ATTENTIONS)
    weights = len(state["head.encoder.layers.0.self_attn.attention_weights.weight"])
    head = dict(
        d_model=d_model, num_heads=num_heads, num_points=weights // (num_heads * num_levels),
        d_ffn=len(state["head.encoder.layers.0.ffn.linear1.weight"]), **_num_layers(state),
    )  # fmt: skip
    neck = dict(type="PyramidProjection", in_features=features, out_channels=d_model, num_levels=num_levels)
    num_classes = len(state["head.class_embed.0.weight"])
    return dict(
        num_classes=num_classes, num_detections=_num_detections(settings), backbone=backbone, neck=neck, head=head
    )


def _num_detections(settings: Mapping[str, Any]) -> int | None:
    return _setting(settings, "test_cfg.max_per_img")


def _read_deformable_detr(state: State, settings: Mapping[str, Any]) -> tuple[str, Section]:
    if any(key.startswith("dn_query_generator.") for key in state):
        raise ConfigError("has denoised queries, as a DDQ-DETR, which vitkit does not have.")
    model = _read_deformable(state, settings)
    two_stage = "head.proposals.enc_output.weight" in state
    refines = "head.decoder.bbox_embed.1.layers.0.weight" in state or bool(_setting(settings, "with_box_refine"))
    # The number of queries selected in two stages shows in no weight.
    queries = _setting(settings, "num_queries", 300) if two_stage else len(state["head.query_embed.weight"])
    model["head"] |= dict(type="DeformableDETRHead", dropout=0.1, refine_boxes=refines, two_stage=two_stage)
    model["num_detections"] = model["num_detections"] or 100
    base = f"deformable_detr_r50{'_two_stage' if two_stage else '_refine' if refines else ''}"
    return base, dict(type="DeformableDETR", num_queries=queries, **model)


def _read_dino(state: State, settings: Mapping[str, Any]) -> tuple[str, Section]:
    model = _read_deformable(state, settings)
    model["head"] |= dict(type="DINOHead", dropout=0.0, share_heads=False)
    model["num_detections"] = model["num_detections"] or 300
    queries = len(state["head.proposals.content.weight"])
    denoising = load_config("dino_r50_4scale", check=False)["model"]["training_queries"]
    return "dino_r50_4scale", dict(type="DINO", num_queries=queries, **model, training_queries=denoising)


def _mask_tasks(state: State, settings: Mapping[str, Any]) -> Section:
    """Return the tasks of a mask model, and what its classes are if the config says it."""
    num_classes = len(state["head.class_embed.weight"]) - 1
    numbers = [_setting(settings, f"panoptic_head.num_{kind}_classes") for kind in ("things", "stuff")]
    things, stuff = numbers if None not in numbers else {133: (80, 53)}.get(num_classes, (num_classes, 0))
    if things + stuff != num_classes:
        raise ConfigError(f"its config has {things} things and {stuff} others, its head {num_classes} classes.")
    if not stuff:
        return dict(tasks=["instance"], num_classes=num_classes)
    tasks = ["panoptic", "instance", "semantic"]
    return dict(tasks=tasks, num_classes=num_classes, things=[True] * things + [False] * stuff)


def _read_mask2former(state: State, settings: Mapping[str, Any]) -> tuple[str, Section]:
    tasks = _mask_tasks(state, settings)
    num_queries, d_model = state["head.query_feat.weight"].shape
    levels = len(state["neck.level_embed"])
    decoder = [f"panoptic_head.transformer_decoder.layer_cfg.{name}_attn_cfg" for name in ("self", "cross")]
    num_heads = _heads(settings, "panoptic_head.pixel_decoder.encoder.layer_cfg.self_attn_cfg")
    neck = dict(
        type="DeformablePixelDecoder", out_channels=state["neck.mask_features.weight"].shape[1], num_levels=levels,
        mask_channels=len(state["neck.mask_features.weight"]), num_heads=num_heads,
        num_layers=_count(state, r"neck\.encoder\.layers\.(\d+)\."),
        num_points=len(state["neck.encoder.layers.0.self_attn.attention_weights.weight"]) // (num_heads * levels),
        d_ffn=len(state["neck.encoder.layers.0.ffn.linear1.weight"]),
    )  # fmt: skip
    head = dict(
        type="Mask2FormerHead", d_model=d_model, num_heads=_heads(settings, *decoder),
        d_ffn=len(state["head.layers.0.ffn.linear1.weight"]),
        num_decoder_layers=_count(state, r"head\.layers\.(\d+)\."),
    )  # fmt: skip
    backbone = _read_backbone(state, settings)[0]
    model = dict(type="Mask2Former", num_queries=num_queries, **tasks, backbone=backbone, neck=neck, head=head)
    return f"mask2former_r50_coco_{tasks['tasks'][0]}", model


def _read_maskformer(state: State, settings: Mapping[str, Any]) -> tuple[str, Section]:
    tasks = _mask_tasks(state, settings)
    num_queries, d_model = state["head.query_embed.weight"].shape
    decoder = [f"panoptic_head.transformer_decoder.layer_cfg.{name}_attn_cfg" for name in ("self", "cross")]
    neck = dict(
        type="FPNPixelDecoder", out_channels=len(state["neck.top.0.weight"]),
        mask_channels=len(state["neck.mask_features.weight"]),
    )  # fmt: skip
    if (num_layers := _count(state, r"neck\.encoder\.layers\.(\d+)\.")) > 0:
        neck |= dict(
            type="TransformerPixelDecoder", num_layers=num_layers,
            num_heads=_heads(settings, "panoptic_head.pixel_decoder.encoder.layer_cfg.self_attn_cfg"),
            d_ffn=len(state["neck.encoder.layers.0.ffn.linear1.weight"]),
        )  # fmt: skip
    head = dict(
        type="MaskFormerHead", d_model=d_model, num_heads=_heads(settings, *decoder),
        d_ffn=len(state["head.decoder.layers.0.ffn.linear1.weight"]), dropout=0.1,
        num_decoder_layers=_count(state, r"head\.decoder\.layers\.(\d+)\."),
    )  # fmt: skip
    base = dict(size_divisibility=1, num_queries=num_queries, backbone=_read_backbone(state, settings)[0])
    return "maskformer_r50_coco_panoptic", dict(type="MaskFormer", **tasks, **base, neck=neck, head=head)


_READERS: Mapping[str, Callable[[State, Mapping[str, Any]], tuple[str, Section]]] = {
    "DETR": _read_detr,
    "DeformableDETR": _read_deformable_detr,
    "DINO": _read_dino,
    "Mask2Former": _read_mask2former,
    "MaskFormer": _read_maskformer,
}
"""vitkit's class of a model -> what makes a base config's name and the model's section of its weights and settings."""


def _describe(section: Section, checkpoint: Mapping[str, Any]) -> str:
    """Describe a model, and where the names of its classes are from."""
    backbone = section["backbone"]
    kind = f"ResNet-{backbone['depth']}" if backbone["type"] == "ResNet" else f"Swin of width {backbone['embed_dim']}"
    levels = section["neck"].get("num_levels")
    parts = [kind, *([f"{levels} levels"] if levels else []), pluralize(section["num_queries"], "queries")]
    names = "named in the file" if checkpoint.get("classes") else "not named in the file"
    return f"{', '.join(parts)}, {pluralize(section['num_classes'], 'classes')}, {names}"
