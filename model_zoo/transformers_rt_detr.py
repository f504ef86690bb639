"""Key names of the transformers library's RT-DETR and RT-DETRv2, both ways."""

import torch
from torch import nn

from vitkit.model_zoo.converter import State
from vitkit.model_zoo.key_table import Alias, Custom, Drop, KeyTable, Rename, below
from vitkit.model_zoo.transformers_detectors import DEFORMABLE_DECODER_LAYER, ENCODER_LAYER, layer_rules

_STEM = "model.backbone.model.embedder.embedder."
_CONVOLUTION = [("convolution.", "0."), ("normalization.", "1.")]
_FUSION = ("lateral_convs", "downsample_convs", "fpn_blocks", "pan_blocks")


def _backbone_rules():
    """Yield the rules of ResNet-vd, whose first shortcut does not average."""
    for i, (conv, norm) in enumerate((("conv1.0.", "conv1.1."), ("conv1.3.", "conv1.4."), ("conv1.6.", "bn1."))):
        yield from below(f"{_STEM}{i}.", "backbone.", [("convolution.", conv), ("normalization.", norm)])
    for stage in range(4):
        theirs, ours = f"model.backbone.model.encoder.stages.{stage}.layers.", f"backbone.layer{stage + 1}."
        yield Rename(f"^{theirs}", f"^{ours}")
        shortcut = "shortcut." if stage == 0 else "shortcut.1."
        pairs = [(f"{shortcut}convolution.", "downsample.1."), (f"{shortcut}normalization.", "downsample.2.")]
        pairs += [(f"layer.{k}.convolution.", f"conv{k + 1}.") for k in range(3)]
        pairs += [(f"layer.{k}.normalization.", f"bn{k + 1}.") for k in range(3)]
        yield from below(f"{ours}{{i}}.", f"{ours}{{i}}.", pairs)


def _neck_rules():
    """Yield the rules of the hybrid encoder."""
    yield Rename("^model.encoder_input_proj.", "^neck.input_proj.")
    # Newer versions of the library have this name in memory.
    yield Alias("^model.encoder.aifi.", "^model.encoder.encoder.")
    yield from layer_rules("model.encoder.encoder.0.", "neck.encoder.", ENCODER_LAYER, joined=["self_attn"])
    yield Rename("^neck.encoder.layers.0.", "^neck.encoder.")
    for name in _FUSION:
        ours = f"neck.{name}.{{i}}."
        yield Rename(f"^model.encoder.{name}.", f"^neck.{name}.")
        yield from below(ours, ours, [("conv.", "0."), ("norm.", "1.")])
        for inner in ("", "blocks.{j}."):
            theirs = inner.replace("blocks", "bottlenecks")
            for k in (1, 2, 3):
                pairs = [
                    (f"{theirs}conv{k}.conv.", f"{inner}conv{k}.0."),
                    (f"{theirs}conv{k}.norm.", f"{inner}conv{k}.1."),
                ]
                yield from (Rename(f"^{ours}{a}", f"^{ours}{b}") for a, b in pairs)


def _head_rules():
    """Yield the rules of the query selection, the decoder and the predictions."""
    yield from layer_rules("model.decoder.", "head.decoder.", DEFORMABLE_DECODER_LAYER, joined=["self_attn"])
    yield from below(
        "model.",
        "",
        [
            ("decoder_input_proj.", "head.input_proj."),
            ("enc_output.0.", "head.proposals.enc_output."),
            ("enc_output.1.", "head.proposals.enc_output_norm."),
            ("enc_score_head.", "head.proposals.class_embed."),
            ("enc_bbox_head.", "head.proposals.bbox_embed."),
            ("denoising_class_embed.", "training_queries.denoising.label_embed."),
            ("decoder.query_pos_head.", "head.decoder.query_pos_head."),
            ("decoder.class_embed.", "head.class_embed."),
            ("decoder.bbox_embed.", "head.decoder.bbox_embed."),
        ],
    )


def point_scales(prefix: str, name: str) -> Custom:
    """Return the rule of the entries that repeat, for each sampled point, 1 / the number of its level's points.

    Args:
        prefix: their decoder layers' names before the number.
        name: the entry's name below a layer.
    """

    def read(state: State, model: nn.Module) -> State:
        return {key: value for key, value in state.items() if not (key.startswith(prefix) and key.endswith(name))}

    def write(state: State, model: nn.Module) -> State:
        for i, layer in enumerate(model.get_submodule("head.decoder.layers")):
            points = layer.cross_attn.num_points
            state[f"{prefix}{i}.{name}"] = torch.tensor([1 / number for number in points for _ in range(number)])
        return state

    return Custom(read, write)


RT_DETR = KeyTable(
    [
        # Second names of the decoder's heads in older files; anchors that follow from the image's size.
        *(Drop(f"^{name}") for name in ("class_embed.", "bbox_embed.", "model.anchors", "model.valid_mask")),
        *_backbone_rules(),
        *_neck_rules(),
        *_head_rules(),
    ]
)
RT_DETR_V2 = KeyTable([point_scales("model.decoder.layers.", "encoder_attn.n_points_scale"), *RT_DETR.rules])
