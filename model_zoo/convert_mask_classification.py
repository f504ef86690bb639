"""Key names of facebookresearch/MaskFormer and Mask2Former, with detectron2's ResNet or their own Swin.

This includes their per-pixel baselines.
"""

import re

from torch import nn

from vitkit.model_zoo.converter import Converter, State

RESNET = (
    (r"^backbone\.stem\.conv1\.norm\.", "backbone.bn1."),
    (r"^backbone\.stem\.conv1\.", "backbone.conv1."),
    (r"^backbone\.res(\d)\.(\d+)\.shortcut\.norm\.", lambda m: f"backbone.layer{int(m[1]) - 1}.{m[2]}.downsample.1."),
    (r"^backbone\.res(\d)\.(\d+)\.shortcut\.", lambda m: f"backbone.layer{int(m[1]) - 1}.{m[2]}.downsample.0."),
    (r"^backbone\.res(\d)\.(\d+)\.conv(\d)\.norm\.", lambda m: f"backbone.layer{int(m[1]) - 1}.{m[2]}.bn{m[3]}."),
    (r"^backbone\.res(\d)\.(\d+)\.", lambda m: f"backbone.layer{int(m[1]) - 1}.{m[2]}."),
)
"""Renames from detectron2's names of a ResNet to torchvision's."""

FIRST_NAMES = (
    (r"^sem_seg_head\.(?!pixel_decoder\.|predictor\.)", "sem_seg_head.pixel_decoder."),
    (r"^sem_seg_head\.predictor\.static_query\.", "sem_seg_head.predictor.query_feat."),
)
"""Renames from the names that the originals used at first to their later ones, which these patterns do not match."""

PIXEL_DECODER = r"^sem_seg_head\.pixel_decoder\."
PREDICTOR = r"^sem_seg_head\.predictor\."


def fit_pixel_decoder(state: State, model: nn.Module) -> State:
    """Name the FPN's convolutions by their feature maps, and drop the buffers of the losses."""
    lateral = re.compile(r"neck\.path\.lateral\.(\w+)\.0\.weight$")
    names = [match[1] for match in map(lateral.match, model.state_dict()) if match]
    fitted = {}
    for key, value in state.items():
        if key.startswith("criterion."):
            continue
        match = re.match(r"neck\.(adapter|layer)_(\d+)\.(?:(norm)\.)?(weight|bias)$", key)
        if match:
            kind, index, norm, leaf = match.groups()
            layer = "top"
            if int(index) <= len(names):
                layer = f"path.{'lateral' if kind == 'adapter' else 'output'}.{names[int(index) - 1]}"
            key = f"neck.{layer}.{1 if norm else 0}.{leaf}"
        fitted[key] = value
    return fitted


_MASK2FORMER = Converter(
    name="facebookresearch/Mask2Former",
    marks=("sem_seg_head.pixel_decoder.transformer.level_embed", "sem_seg_head.predictor.query_embed.weight"),
    renames=(
        *RESNET,
        *FIRST_NAMES,
        (PIXEL_DECODER + r"transformer\.", "neck."),
        (PIXEL_DECODER, "neck."),
        (r"^(neck\.encoder\.layers\.\d+)\.(linear[12])\.", r"\1.ffn.\2."),
        (PREDICTOR + r"transformer_cross_attention_layers\.(\d+)\.multihead_attn\.", r"head.layers.\1.cross_attn."),
        (PREDICTOR + r"transformer_cross_attention_layers\.(\d+)\.norm\.", r"head.layers.\1.norm1."),
        (PREDICTOR + r"transformer_self_attention_layers\.(\d+)\.self_attn\.", r"head.layers.\1.self_attn."),
        (PREDICTOR + r"transformer_self_attention_layers\.(\d+)\.norm\.", r"head.layers.\1.norm2."),
        (PREDICTOR + r"transformer_ffn_layers\.(\d+)\.norm\.", r"head.layers.\1.norm3."),
        (PREDICTOR + r"transformer_ffn_layers\.(\d+)\.", r"head.layers.\1.ffn."),
        (PREDICTOR, "head."),
    ),
    transform=fit_pixel_decoder,
)
_MASKFORMER = Converter(
    name="facebookresearch/MaskFormer",
    marks=("sem_seg_head.pixel_decoder.mask_features.weight", "sem_seg_head.predictor.query_embed.weight"),
    renames=(
        *RESNET,
        *FIRST_NAMES,
        (PIXEL_DECODER + r"transformer\.encoder\.", "neck.encoder."),
        (PIXEL_DECODER, "neck."),
        (r"^(neck\.encoder\.layers\.\d+)\.(linear[12])\.", r"\1.ffn.\2."),
        (PREDICTOR + r"transformer\.", "head."),
        (PREDICTOR, "head."),
        (r"^(head\.(?:en|de)coder\.layers\.\d+)\.multihead_attn\.", r"\1.cross_attn."),
        (r"^(head\.(?:en|de)coder\.layers\.\d+)\.(linear[12])\.", r"\1.ffn.\2."),
    ),
    transform=fit_pixel_decoder,
)
_PER_PIXEL = _MASKFORMER._replace(
    name="facebookresearch/MaskFormer, per-pixel baseline",
    marks=("sem_seg_head.pixel_decoder.mask_features.weight", "sem_seg_head.predictor.weight"),
    renames=((PREDICTOR + r"(weight|bias)$", r"head.predictor.\1"), *_MASKFORMER.renames),
)


def _named_at_first(converter: Converter) -> Converter:
    """Return the converter for files that were written before the pixel decoder had a separate name."""
    marks = tuple(mark.replace("sem_seg_head.pixel_decoder.", "sem_seg_head.") for mark in converter.marks)
    return converter._replace(marks=marks)


_CONVERTERS = (_MASK2FORMER, _MASKFORMER, _PER_PIXEL)
CONVERTERS = [*_CONVERTERS, *map(_named_at_first, _CONVERTERS)]
