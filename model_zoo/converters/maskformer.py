"""Key names of MaskFormer and Mask2Former: facebookresearch's, mmdetection's and the transformers library's.

The official ones are on detectron2's ResNet or their own Swin, and include MaskFormer's per-pixel baseline.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from vitkit.model_zoo.converters import mmdetection
from vitkit.model_zoo.converters.key_table import (
    Alias,
    Custom,
    Drop,
    Format,
    KeyTable,
    Rename,
    Rule,
    State,
    aliases,
    below,
)
from vitkit.model_zoo.converters.layers import DECODER_NORMS, join_qkv, library_stack, torch_stack
from vitkit.model_zoo.converters.resnet import detectron2_resnet, library_resnet, with_counters
from vitkit.model_zoo.converters.swin import library_swin, without_last_norm, write_position_indices

_PIXEL_DECODER, _PREDICTOR = "sem_seg_head.pixel_decoder.", "sem_seg_head.predictor."
_LIBRARY_ENCODER = "model.pixel_level_module.encoder."
_LIBRARY_DECODER = "model.pixel_level_module.decoder."
_LIBRARY_TRANSFORMER = "model.transformer_module."
_COARSE_TO_FINE = ("res4", "res3", "res2")
"""The backbone maps that MaskFormer's FPN adds, in the order of its layers."""
_LAYER = "head.layers.{i}."


def _write_loss_weights(state: State, model: nn.Module) -> State:
    """Write the loss weights of the classes, which are a buffer in both projects."""
    rows = len(state["head.class_embed.bias"])
    return state | {"criterion.empty_weight": torch.tensor([1.0] * (rows - 1) + [0.1])}


_LOSS_WEIGHTS: list[Rule] = [Drop("^criterion."), Custom(writing=_write_loss_weights)]


def _pyramid() -> Custom:
    """Return the rule of the official FPN's convolutions, which vitkit names by their feature maps."""

    def names_of(model: nn.Module) -> list[str]:
        lateral = re.compile(r"neck\.path\.lateral\.(\w+)\.0\.weight")
        return [match[1] for match in map(lateral.fullmatch, model.state_dict()) if match]

    def read(state: State, model: nn.Module) -> State:
        names, renamed = names_of(model), {}
        for key, value in state.items():
            match = re.match(r"neck\.(adapter|layer)_(\d+)\.(?:(norm)\.)?(weight|bias)$", key)
            if match:
                kind, index, norm, leaf = match.groups()
                layer = "top"
                if int(index) <= len(names):
                    layer = f"path.{'lateral' if kind == 'adapter' else 'output'}.{names[int(index) - 1]}"
                key = f"neck.{layer}.{1 if norm else 0}.{leaf}"
            renamed[key] = value
        return renamed

    def write(state: State, model: nn.Module) -> State:
        names, renamed = names_of(model), {}
        for key, value in state.items():
            match = re.match(r"neck\.(?:path\.(lateral|output)\.(\w+)|top)\.([01])\.(weight|bias)$", key)
            if match:
                kind, name, part, leaf = match.groups()
                index = names.index(name) + 1 if name else len(names) + 1
                layer = f"{'adapter' if kind == 'lateral' else 'layer'}_{index}"
                key = f"{_PIXEL_DECODER}{layer}.{'norm.' if part == '1' else ''}{leaf}"
            renamed[key] = value
        return renamed

    return Custom(read, write)


def _official_pixel_decoder(*pairs: tuple[str, str] | str) -> Iterator[Rule]:
    """Yield the rules of an official pixel decoder: of its parts, its encoder, and its FPN."""
    # The originals had these parts at a place without a name at first.
    for part in ("adapter_", "layer_", "mask_features.", "input_proj.", "transformer."):
        yield Alias(f"^sem_seg_head.{part}", f"^{_PIXEL_DECODER}{part}")
    yield from below(_PIXEL_DECODER, "neck.", [*pairs, "mask_features.", "input_proj."])
    yield from torch_stack(f"{_PIXEL_DECODER}transformer.encoder.", "neck.encoder.")
    yield from (Alias(f"^{_PIXEL_DECODER}{part}", f"^neck.{part}") for part in ("adapter_", "layer_"))
    yield _pyramid()


def _official_maskformer() -> Iterator[Rule]:
    yield from _official_pixel_decoder()
    for stack in ("encoder.", "decoder."):
        yield from torch_stack(f"{_PREDICTOR}transformer.{stack}", f"head.{stack}")
    yield from below(_PREDICTOR, "head.", ["class_embed.", "mask_embed.", "query_embed.", "input_proj."])
    yield from _LOSS_WEIGHTS


def _official_mask2former() -> Iterator[Rule]:
    yield from _official_pixel_decoder(("transformer.level_embed", "level_embed"))
    yield Alias(f"^{_PREDICTOR}static_query.", f"^{_PREDICTOR}query_feat.")
    yield from below(
        _PREDICTOR,
        "head.",
        [
            ("transformer_cross_attention_layers.{i}.multihead_attn.", "layers.{i}.cross_attn."),
            ("transformer_cross_attention_layers.{i}.norm.", "layers.{i}.norm1."),
            ("transformer_self_attention_layers.{i}.self_attn.", "layers.{i}.self_attn."),
            ("transformer_self_attention_layers.{i}.norm.", "layers.{i}.norm2."),
            ("transformer_ffn_layers.{i}.norm.", "layers.{i}.norm3."),
            ("transformer_ffn_layers.{i}.", "layers.{i}.ffn."),
            *("query_feat.", "query_embed.", "level_embed.", "decoder_norm."),
            *("class_embed.", "mask_embed.", "input_proj."),
        ],
    )
    yield from _LOSS_WEIGHTS


def _library_maskformer() -> Iterator[Rule]:
    yield from below(
        _LIBRARY_DECODER,
        "neck.",
        [
            ("fpn.stem.", "top."),
            *((f"fpn.layers.{i}.proj.", f"path.lateral.{name}.") for i, name in enumerate(_COARSE_TO_FINE)),
            *((f"fpn.layers.{i}.block.", f"path.output.{name}.") for i, name in enumerate(_COARSE_TO_FINE)),
            ("mask_projection.", "mask_features."),
        ],
    )
    decoder = f"{_LIBRARY_TRANSFORMER}decoder."
    yield from library_stack(decoder, "head.decoder.", DECODER_NORMS, joined=["self_attn", "cross_attn"])
    yield Rename(f"^{decoder}layernorm.", "^head.decoder.norm.")
    yield Rename(f"^{_LIBRARY_TRANSFORMER}queries_embedder.", "^head.query_embed.")
    yield Rename(f"^{_LIBRARY_TRANSFORMER}input_projection.", "^head.input_proj.")
    yield Rename("^class_predictor.", "^head.class_embed.")
    yield Rename("^mask_embedder.{i}.0.", "^head.mask_embed.layers.{i}.")
    yield from _LOSS_WEIGHTS


def _library_mask2former() -> Iterator[Rule]:
    encoder = [("self_attn_layer_norm.", "norm1."), ("final_layer_norm.", "norm2.")]
    yield from library_stack(f"{_LIBRARY_DECODER}encoder.", "neck.encoder.", encoder)
    yield from below(
        _LIBRARY_DECODER,
        "neck.",
        [
            "level_embed",
            ("input_projections.", "input_proj."),
            ("adapter_1.", "path.lateral.res2."),
            ("layer_1.", "path.output.res2."),
            ("mask_projection.", "mask_features."),
        ],
    )
    yield Rename(f"^{_LIBRARY_TRANSFORMER}decoder.layers.{{i}}.", f"^{_LAYER}")
    yield Alias(f"^{_LAYER}self_attn.o_proj.", f"^{_LAYER}self_attn.out_proj.")
    yield from (Alias(f"^{_LAYER}mlp.fc{k}.", f"^{_LAYER}fc{k}.") for k in (1, 2))
    yield from below(
        _LAYER,
        _LAYER,
        [
            ("cross_attn_layer_norm.", "norm1."),
            ("self_attn_layer_norm.", "norm2."),
            ("final_layer_norm.", "norm3."),
            ("fc1.", "ffn.linear1."),
            ("fc2.", "ffn.linear2."),
        ],
    )
    yield join_qkv(f"{_LAYER}self_attn.", f"{_LAYER}self_attn.in_proj_")
    yield from below(
        _LIBRARY_TRANSFORMER,
        "head.",
        [
            ("decoder.layernorm.", "decoder_norm."),
            ("decoder.mask_predictor.mask_embedder.{i}.0.", "mask_embed.layers.{i}."),
            ("queries_embedder.", "query_embed."),
            ("queries_features.", "query_feat."),
            ("input_projections.", "input_proj."),
            "level_embed.",
        ],
    )
    yield Rename("^class_predictor.", "^head.class_embed.")
    yield from _LOSS_WEIGHTS


def _library_resnet() -> Iterator[Rule]:
    """Yield the rules of the library's ResNet and of timm's."""
    yield with_counters(_LIBRARY_ENCODER)
    yield Alias(f"^{_LIBRARY_ENCODER}_backbone.", f"^{_LIBRARY_ENCODER}")
    yield from library_resnet(_LIBRARY_ENCODER, "backbone.")
    yield from aliases([*below(_LIBRARY_ENCODER, "backbone.", ["conv1.", "bn1.", "layer{i}."])])


def _write_unused_norm(state: State, model: nn.Module) -> State:
    """Write the last norm of a Swin Transformer, which the library's MaskFormer has but does not use."""
    norm = state.get("backbone.norm3.weight")
    if norm is not None:
        name = f"{_LIBRARY_ENCODER}model.layernorm"
        state |= {f"{name}.weight": torch.ones_like(norm), f"{name}.bias": norm * 0}
    return state


_MASKFORMER_SWIN: list[Rule] = [
    Custom(writing=write_position_indices),
    *library_swin(f"{_LIBRARY_ENCODER}model.", "backbone.", stage=""),
    # The norms of the feature maps are outside of the Swin model that computes these maps.
    *below(_LIBRARY_ENCODER, "backbone.", [(f"hidden_states_norms.{i}.", f"norm{i}.") for i in range(4)]),
    without_last_norm("backbone."),
    Custom(writing=_write_unused_norm),
]
_MASK2FORMER_SWIN: list[Rule] = [
    Alias(f"^{_LIBRARY_ENCODER}swin.", f"^{_LIBRARY_ENCODER}"),
    *library_swin(_LIBRARY_ENCODER, "backbone."),
    without_last_norm("backbone."),
]

_MM_DECODER = "panoptic_head.pixel_decoder."
_MM_TRANSFORMER = "panoptic_head.transformer_decoder."


def _mm_convolution(theirs: str, ours: str) -> Iterator[Rule]:
    """Yield the rules of a convolution and its norm."""
    yield from below(f"{_MM_DECODER}{theirs}.", f"neck.{ours}.", [("conv.", "0."), ("gn.", "1.")])


def _mmdetection() -> Iterator[Rule]:
    """Yield the rules that both models share in mmdetection."""
    yield with_counters("backbone.")
    yield from mmdetection.SWIN
    for i, name in enumerate(reversed(_COARSE_TO_FINE)):
        yield from _mm_convolution(f"lateral_convs.{i}", f"path.lateral.{name}")
        yield from _mm_convolution(f"output_convs.{i}", f"path.output.{name}")
    yield Rename(f"^{_MM_DECODER}mask_feature.", "^neck.mask_features.")
    yield from (Rename(f"^panoptic_head.mask_embed.{2 * k}.", f"^head.mask_embed.layers.{k}.") for k in range(3))
    yield Rename("^panoptic_head.cls_embed.", "^head.class_embed.")
    yield Rename("^panoptic_head.query_embed.", "^head.query_embed.")


def _mm_mask2former() -> Iterator[Rule]:
    attentions, encoder = ["self_attn", "cross_attn"], "encoder.layers.{i}."
    yield from _mmdetection()
    yield from _mm_convolution("input_convs.{i}", "input_proj.{i}")
    yield from mmdetection.stack(
        f"{_MM_DECODER}{encoder}", f"neck.{encoder}", mmdetection.ENCODER_NORMS, sampling=["self_attn"]
    )
    yield Rename(f"^{_MM_DECODER}level_encoding.weight$", "^neck.level_embed$")
    yield from mmdetection.stack(f"{_MM_TRANSFORMER}layers.{{i}}.", _LAYER, mmdetection.DECODER_NORMS, attentions)
    yield Rename(f"^{_MM_TRANSFORMER}post_norm.", "^head.decoder_norm.")
    yield Rename("^panoptic_head.decoder_input_projs.", "^head.input_proj.")
    yield from below("panoptic_head.", "head.", ["query_feat.", "level_embed."])


def _mm_maskformer(*, with_encoder: bool) -> Iterator[Rule]:
    attentions, encoder, decoder = ["self_attn", "cross_attn"], "encoder.layers.{i}.", "head.decoder.layers.{i}."
    yield from _mmdetection()
    yield from _mm_convolution("encoder_out_proj" if with_encoder else "last_feat_conv", "top")
    yield Rename(f"^{_MM_DECODER}encoder_in_proj.", "^neck.input_proj.")
    yield from mmdetection.stack(f"{_MM_DECODER}{encoder}", f"neck.{encoder}", mmdetection.ENCODER_NORMS, ["self_attn"])
    yield from mmdetection.stack(f"{_MM_TRANSFORMER}layers.{{i}}.", decoder, mmdetection.DECODER_NORMS, attentions)
    yield Rename(f"^{_MM_TRANSFORMER}post_norm.", "^head.decoder.norm.")
    yield Rename("^panoptic_head.decoder_input_proj.", "^head.input_proj.")


_RESNET_KEY, _SWIN_KEY = "backbone.conv1.weight", "backbone.layers.0.blocks.0.attn.relative_position_bias_table"
_OURS = {
    "MaskFormer": ("head.query_embed.weight", "neck.top.0.weight", "head.decoder.norm.weight"),
    "Mask2Former": ("head.query_feat.weight", "neck.level_embed"),
}
_LIBRARY_MARKS = {
    "MaskFormer": (f"{_LIBRARY_TRANSFORMER}queries_embedder.weight", f"{_LIBRARY_DECODER}fpn.stem.0.weight"),
    "Mask2Former": (f"{_LIBRARY_TRANSFORMER}queries_features.weight", f"{_LIBRARY_DECODER}level_embed"),
}
_LIBRARY_SWIN_MARK = ".embeddings.patch_embeddings.projection.weight"
_QUERIES, _MASKS = f"{_PREDICTOR}query_embed.weight", f"{_PIXEL_DECODER}mask_features.weight"

TRANSFORMERS = [
    Format(
        f"transformers {model}{suffix}",
        KeyTable([*backbone, *rules]),
        marks=(*_LIBRARY_MARKS[model], *marks),
        model=model,
        ours=(*_OURS[model], key),
    )
    for model, rules, swin in (
        ("Mask2Former", [*_library_mask2former()], _MASK2FORMER_SWIN),
        ("MaskFormer", [*_library_maskformer()], _MASKFORMER_SWIN),
    )
    for suffix, backbone, marks, key in (
        (", Swin", swin, [_LIBRARY_SWIN_MARK], _SWIN_KEY),
        ("", [*_library_resnet()], [], _RESNET_KEY),
    )
]


def _official(name: str, rules: Iterator[Rule], marks: Sequence[str], model: str = "") -> Iterator[Format]:
    """Yield the formats of an official model: on each backbone, and with the marks as they were named at first."""
    table = KeyTable([*detectron2_resnet("backbone.", "backbone."), *rules])
    for key in (_RESNET_KEY, _SWIN_KEY):
        yield Format(name, table, marks=marks, model=model, ours=(*_OURS.get(model, ()), key))
    yield Format(name, table, marks=[mark.replace("pixel_decoder.", "") for mark in marks])


OFFICIAL = [
    *_official(
        "facebookresearch/Mask2Former",
        _official_mask2former(),
        marks=[f"{_PIXEL_DECODER}transformer.level_embed", _QUERIES],
        model="Mask2Former",
    ),
    *_official("facebookresearch/MaskFormer", _official_maskformer(), marks=[_MASKS, _QUERIES], model="MaskFormer"),
    *_official(
        "facebookresearch/MaskFormer, per-pixel baseline",
        chain(below(_PREDICTOR, "head.predictor.", ["weight", "bias"]), _official_maskformer()),
        marks=[_MASKS, f"{_PREDICTOR}weight"],
    ),
]
_MM_MASKFORMER = ("panoptic_head.query_embed.weight", f"{_MM_TRANSFORMER}post_norm.weight")
MMDETECTION = [
    Format(
        "open-mmlab/mmdetection Mask2Former",
        KeyTable([*_mm_mask2former()]),
        marks=(*_MM_MASKFORMER, "panoptic_head.query_feat.weight"),
        model="Mask2Former",
        ours=_OURS["Mask2Former"],
    ),
    *(
        Format(
            "open-mmlab/mmdetection MaskFormer",
            KeyTable([*_mm_maskformer(with_encoder=with_encoder)]),
            marks=(*_MM_MASKFORMER, f"{_MM_DECODER}{mark}"),
            model="MaskFormer",
            ours=(*_OURS["MaskFormer"], *key),
        )
        for with_encoder, mark, key in (
            (True, "encoder_out_proj.conv.weight", ["neck.encoder.layers.0.norm1.weight"]),
            (False, "last_feat_conv.conv.weight", []),
        )
    ),
]
