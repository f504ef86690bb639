"""Key names of DEIMv2: Intellindust-AI-Lab/DEIMv2's and the transformers library's."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters.dfine import hgnet, library_hgnet, pair_with_norm, refuse_deployed, settings
from vitkit.model_zoo.converters.key_table import (
    Alias,
    Custom,
    Drop,
    Format,
    Join,
    KeyTable,
    Rename,
    Rule,
    State,
    below,
)
from vitkit.model_zoo.converters.layers import DECODER_NORMS, ENCODER_NORMS, TORCH_FEED_FORWARD, library_stack
from vitkit.model_zoo.converters.rt_detr import LIBRARY_DECODER, OFFICIAL_DECODER, write_anchors
from vitkit.model_zoo.converters.vit import LIBRARY_DINO, join_projections
from vitkit.protocols.model import child

_CORNERS, _VIT = "head.decoder.corner_embed.", "backbone.vit."
_EVALUATED_SIZES = {64: 320, 96: 416}
"""Width of the decoder -> the size of images that the originals evaluate at, where it is not 640."""
_DETAIL = {"stem.": "stem.", "conv2.": "levels.res3.", "conv3.": "levels.res4.", "conv4.": "levels.res5."}


def _vit_of(model: nn.Module) -> nn.Module | None:
    """Return the transformer of a `SpatialAdapter`, None for another backbone."""
    return child(model.get_submodule("backbone"), "vit")


def _read_shared_heads(state: State, model: nn.Module) -> State:
    """Keep one of equal heads of distributions, if all layers of the model share it."""
    heads = sorted({int(match[1]) for key in state if (match := re.match(rf"{_CORNERS}(\d+)\.", key))})
    if len(model.get_submodule(_CORNERS[:-1])) > 1 or not heads:
        return state
    first, *others = heads
    result = {key: value for key, value in state.items() if not key.startswith(_CORNERS)}
    for name in [key.removeprefix(f"{_CORNERS}{first}.") for key in state if key.startswith(f"{_CORNERS}{first}.")]:
        value = state[f"{_CORNERS}{first}.{name}"]
        if any(not torch.equal(state.get(f"{_CORNERS}{i}.{name}", value), value) for i in others):
            raise CheckpointError(
                "the weights have another head of distributions in each decoder layer, but the model shares one: set "
                "model.head.shared_box_head=False."
            )
        result[f"{_CORNERS}0.{name}"] = value
    return result


def _write_shared_heads(state: State, model: nn.Module) -> State:
    """Repeat a shared head of distributions for each layer."""
    if len(model.get_submodule(_CORNERS[:-1])) == 1:
        shared = {key: value for key, value in state.items() if key.startswith(f"{_CORNERS}0.")}
        for i in range(1, len(model.get_submodule("head.decoder.layers"))):
            state |= {key.replace(f"{_CORNERS}0.", f"{_CORNERS}{i}."): value.clone() for key, value in shared.items()}
    return state


def _write_anchors(state: State, model: nn.Module) -> State:
    return write_anchors(state, model, _EVALUATED_SIZES.get(model.get_submodule("head").d_model, 640))


def _write_official_vit(state: State, model: nn.Module) -> State:
    """Write DINOv3's names of the transformer, and what the originals store besides."""
    if (vit := _vit_of(model)) is None:
        return state
    written, is_dinov3 = {}, vit.reg_token is not None
    theirs = "backbone.dinov3." if is_dinov3 else "backbone.dinov3._model."
    biases: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if not key.startswith(_VIT):
            written[key] = value
            continue
        name = key.removeprefix(_VIT)
        if match := re.match(r"(blocks\.\d+\.attn)\.([qv])_bias$", name):
            biases.setdefault(match[1], {})[match[2]] = value
        elif (match := re.match(r"(blocks\.\d+\.mlp)\.fc([12])\.(weight|bias)$", name)) and _is_gated(vit):
            names, parts = (("w1", "w2"), value.chunk(2)) if match[2] == "1" else (("w3",), (value,))
            written |= {f"{theirs}{match[1]}.{n}.{match[3]}": part.clone() for n, part in zip(names, parts)}
        else:
            written[theirs + name.replace("reg_token", "storage_tokens")] = value
    for attention, parts in biases.items():
        zeros, ones = torch.zeros_like(parts["q"]), torch.ones_like(parts["q"])
        written[f"{theirs}{attention}.qkv.bias"] = torch.cat((parts["q"], zeros, parts["v"]))
        written[f"{theirs}{attention}.qkv.bias_mask"] = torch.cat((ones, zeros, ones))
    weight = vit.patch_embed.proj.weight
    if f"{_VIT}patch_embed.proj.weight" in state:
        written[f"{theirs}rope_embed.periods"] = rotary_periods(vit)
        if is_dinov3:
            written[f"{theirs}mask_token"] = weight.new_zeros(1, len(weight))
    return written


def rotary_periods(vit: nn.Module) -> Tensor:
    """Return the periods of a transformer's rotations, which the originals store, (channels of a head / 4,)."""
    count = len(vit.patch_embed.proj.weight) // vit.blocks[0].attn.num_heads // 4
    return 100.0 ** (torch.arange(count) / count)


def _is_gated(vit: nn.Module) -> bool:
    return type(vit.blocks[0].mlp).__name__ == "SwiGLU"


def _neck(theirs: str, cv: tuple[str, str], csp: str, conv: str, downsample: str) -> Iterator[Rule]:
    """Yield the rules of an encoder's fusion.

    Args:
        theirs: prefix of the encoder.
        cv: names of a block's first and last convolution.
        csp, conv: templates of the names of a stage's cross-stage partial layer and of its last convolution, by the
            number {k} (2, 3) of the stage or {before} of the one before.
        downsample: template of the names of a downsampling's two convolutions, by the number {k}.
    """
    yield from below(f"{theirs}lateral_convs.{{i}}.", "neck.lateral_convs.{i}.", pair_with_norm("", ""))
    pairs = [pair for k in (1, 2) for pair in pair_with_norm(downsample.format(k=k), f"cv{k}.")]
    yield from below(f"{theirs}downsample_convs.{{i}}.", "neck.downsample_convs.{i}.", pairs)
    pairs = [pair for name, ours in zip(cv, ("cv1.", "cv4.")) for pair in pair_with_norm(name, ours)]
    for k in (2, 3):
        block, last = (text.format(k=k, before=k - 1) for text in (csp, conv))
        for part in ("conv1.", "conv2."):
            inside = f"{block}bottlenecks.{{j}}.{part}"
            pairs = [*pair_with_norm(inside, f"cv{k}.csp.blocks.{{j}}.{part}"), *pairs]
        pairs = [*pair_with_norm(f"{block}conv1.", f"cv{k}.csp.conv1."), *pair_with_norm(last, f"cv{k}.conv."), *pairs]
    for name in ("fpn_blocks.{i}.", "pan_blocks.{i}.", "fpn_block.", "pan_block."):
        yield from below(f"{theirs}{name}", f"neck.{name}", pairs)


def official_neck() -> Iterator[Rule]:
    """Yield the rules of the originals' hybrid encoder, which ECDet also has."""
    yield Rename("^encoder.encoder.0.layers.0.", "^neck.encoder.")
    yield from below("neck.encoder.", "neck.encoder.", TORCH_FEED_FORWARD)
    yield from below("encoder.input_proj.{i}.", "neck.input_proj.{i}.", pair_with_norm("", ""))
    yield from _neck("encoder.", ("cv1.", "cv4."), csp="cv{k}.0.", conv="cv{k}.1.", downsample="0.cv{k}.")


def official_head() -> Iterator[Rule]:
    """Yield the rules of the originals' head but for its layers' parts; ECDet also has them."""
    yield Rename("^decoder.decoder.layers.", "^head.decoder.layers.")
    yield from below("decoder.input_proj.{i}.", "head.input_proj.{i}.", pair_with_norm("", ""))
    yield from below(
        "decoder.",
        "",
        [
            *OFFICIAL_DECODER,
            ("pre_bbox_head.", "head.decoder.bbox_embed."),
            ("dec_bbox_head.", _CORNERS),
            ("decoder.lqe_layers.", "head.quality_embed."),
        ],
    )


def _official() -> Iterator[Rule]:
    yield Custom(refuse_deployed)
    yield from settings(("decoder.", "decoder.decoder."), "cross_attn")
    yield Custom(writing=_write_anchors)
    yield from hgnet("backbone.stem.", "backbone.stages.")
    yield from (Drop("rope_embed.periods$"), Drop("^backbone.dinov3.mask_token$"))
    yield Alias("^backbone.dinov3._model.", "^backbone.dinov3.")
    yield Custom(writing=_write_official_vit)
    yield Alias("^backbone.dinov3.", f"^{_VIT}")
    for name, ours in _DETAIL.items():
        # A GELU stands before the last two.
        conv, norm = ("1.", "2.") if name in ("conv3.", "conv4.") else ("0.", "1.")
        yield from below("backbone.sta.", "backbone.detail.", pair_with_norm(name, ours, conv, norm))
    for i in range(3):
        yield Rename(f"^backbone.convs.{i}.", f"^backbone.projections.res{3 + i}.0.")
        yield Rename(f"^backbone.norms.{i}.", f"^backbone.projections.res{3 + i}.1.")
    yield from official_neck()
    for name, ours in (("down_sample1.", "extra_level.conv."), ("down_sample2.", "downsample.conv.")):
        yield from below("encoder.", "neck.", pair_with_norm(name, ours, "1.", "2."))
    yield from below("encoder.", "neck.", pair_with_norm("bi_fusion.cv.", "global_conv."))
    yield from official_head()
    layer = "head.decoder.layers.{i}."
    yield from below(layer, layer, [("swish_ffn.w12.", "ffn.fc1."), ("swish_ffn.w3.", "ffn.fc2.")])
    yield from below(layer, layer, [(f"{n}.scale", f"{n}.weight") for n in ("norm1", "norm2", "norm3", "gateway.norm")])
    yield Custom(_read_shared_heads, _write_shared_heads)


def _read_encoder_output(state: State, model: nn.Module) -> State:
    """Drop the library's layers before the selection, which the originals do not have.

    Raises:
        CheckpointError: they are trained.
    """
    weight, bias = state.pop("model.enc_output.0.weight", None), state.pop("model.enc_output.0.bias", None)
    scale, shift = state.pop("model.enc_output.1.weight", None), state.pop("model.enc_output.1.bias", None)
    trained = weight is not None and (not torch.equal(weight, torch.eye(len(weight)).to(weight)) or bias.any())
    if trained or (scale is not None and ((scale != 1).any() or shift.any())):
        raise CheckpointError(
            "the weights are those of the transformers library's own DEIMv2, whose encoder ends with layers that were "
            "trained (model.enc_output); DEIMv2 has none. Expected weights that were converted from the originals."
        )
    return state


def _write_encoder_output(state: State, model: nn.Module) -> State:
    d_model = model.get_submodule("head").d_model
    state["model.enc_output.0.weight"] = torch.eye(d_model)
    state["model.enc_output.0.bias"] = torch.zeros(d_model)
    return state | {"model.enc_output.1.weight": torch.ones(d_model), "model.enc_output.1.bias": torch.zeros(d_model)}


def _read_library_vit(state: State, model: nn.Module) -> State:
    """Join the transformer's projections, and drop a norm that the model does not use."""
    state = join_projections(state, model)
    vit = _vit_of(model)
    unused = ("backbone.mask_token", *(() if vit is None or child(vit, "norm") else ("backbone.norm.",)))
    state = {key: value for key, value in state.items() if not key.startswith(unused)}
    if vit is not None and vit.reg_token is None:
        state.pop("backbone.register_tokens", None)  # of length 0
    names = ("blocks.", "patch_embed.", "cls_token", "register_tokens", "norm.")
    renamed = {f"backbone.{name}": f"{_VIT}{name}" for name in names}
    return {
        next((ours + key[len(theirs) :] for theirs, ours in renamed.items() if key.startswith(theirs)), key): value
        for key, value in state.items()
    }


def _write_library_vit(state: State, model: nn.Module) -> State:
    """Write the library's names of the transformer, with what it has besides: scales of 1, a norm, tokens."""
    if (vit := _vit_of(model)) is None:
        return state
    written: State = {}
    for key, value in state.items():
        if not key.startswith(_VIT):
            written[key] = value
            continue
        name = key.removeprefix(_VIT)
        if match := re.match(r"blocks\.(\d+)\.(.*)$", name):
            written |= {
                f"{_LIBRARY_VIT}layer.{match[1]}.{n}": v for n, v in _library_block(match[2], value, vit).items()
            }
        else:
            written[_LIBRARY_VIT + _LIBRARY_TOKENS.get(name, name.replace("patch_embed.proj", _PATCHES))] = value
    weight = vit.patch_embed.proj.weight
    if f"{_VIT}patch_embed.proj.weight" in state:
        width = len(weight)
        written[f"{_LIBRARY_VIT}embeddings.mask_token"] = weight.new_zeros(1, 1, width)
        written.setdefault(f"{_LIBRARY_VIT}embeddings.register_tokens", weight.new_zeros(1, 0, width))
        if child(vit, "norm") is None:
            written[f"{_LIBRARY_VIT}norm.weight"] = weight.new_ones(width)
            written[f"{_LIBRARY_VIT}norm.bias"] = weight.new_zeros(width)
        if isinstance(vit.blocks[0].ls1, nn.Identity):
            for i in range(len(vit.blocks)):
                scales = (f"{_LIBRARY_VIT}layer.{i}.layer_scale{k}.lambda1" for k in (1, 2))
                written |= {key: weight.new_ones(width) for key in scales}
    return written


_LIBRARY_VIT = "model.conv_encoder.backbone."
_LIBRARY_TOKENS = {"cls_token": "embeddings.cls_token", "reg_token": "embeddings.register_tokens"}
_PATCHES = "embeddings.patch_embeddings"
_LIBRARY_BLOCK = {
    "attn.q_bias": "attention.q_proj.bias",
    "attn.v_bias": "attention.v_proj.bias",
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "mlp.fc2": "mlp.down_proj",
}


def _library_block(name: str, value: Tensor, vit: nn.Module) -> State:
    """Return the library's entries for one of a block."""
    head, leaf = name.rpartition(".")[::2]
    if head == "attn.qkv":
        return {f"attention.{x}_proj.{leaf}": part.clone() for x, part in zip("qkv", value.chunk(3))}
    if head == "mlp.fc1":
        names = ("gate", "up") if _is_gated(vit) else ("up",)
        return {f"mlp.{n}_proj.{leaf}": part.clone() for n, part in zip(names, value.chunk(len(names)))}
    return {_LIBRARY_BLOCK.get(name) or f"{_LIBRARY_BLOCK.get(head, head)}.{leaf}": value}


def _write_input_projections(state: State, model: nn.Module) -> State:
    """Move the encoder's input projections into the library's backbone, where only the smallest encoder has none."""
    if child(model.get_submodule("neck"), "encoder") is None:
        return state
    return {
        key.replace("model.encoder.input_proj.", "model.conv_encoder.encoder_input_proj."): value
        for key, value in state.items()
    }


def _library() -> Iterator[Rule]:
    yield from settings(("model.decoder.",), "encoder_attn")
    yield Custom(_read_encoder_output, _write_encoder_output)
    yield from (Drop("^model.anchors$"), Drop("^model.valid_mask$"))
    # Second names of the decoder's heads.
    yield Alias("^class_embed.", "^model.decoder.class_embed.")
    yield Alias("^bbox_embed.", "^model.decoder.bbox_embed.")
    yield from library_hgnet("model.conv_encoder.model.")
    adapter = "model.conv_encoder.spatial_tuning_adapter."
    for name, ours in (("stem_conv.", "stem."), *list(_DETAIL.items())[1:]):
        yield from below(adapter, "backbone.detail.", pair_with_norm(name, ours))
    for i in range(3):
        yield from below(
            f"model.conv_encoder.fusion_proj.{i}.", f"backbone.projections.res{3 + i}.", pair_with_norm("", "")
        )
    yield Alias("^model.conv_encoder.backbone.", "^backbone.")
    yield Custom(writing=_write_library_vit)
    yield from (Custom(rule.read) for rule in LIBRARY_DINO)
    yield Custom(_read_library_vit)
    yield Custom(writing=_write_input_projections)
    for theirs in ("model.conv_encoder.encoder_input_proj.{i}.", "model.encoder.input_proj.{i}."):
        yield from below(theirs, "neck.input_proj.{i}.", pair_with_norm("", ""))
    # The names below are those in files of newer models, see `library_stack`.
    for stack in ("model.encoder.aifi.0.", "model.decoder."):
        layer = f"^{stack}layers.{{i}}."
        yield Rename(f"{layer}self_attn.o_proj.", f"{layer}self_attn.out_proj.")
        yield from (Rename(f"{layer}mlp.layers.{k}.", f"{layer}fc{k + 1}.") for k in (0, 1))
    yield from library_stack("model.encoder.aifi.0.", "neck.encoder.", ENCODER_NORMS, joined=["self_attn"])
    yield Rename("^neck.encoder.layers.0.", "^neck.encoder.")
    yield from _neck(
        "model.encoder.", ("conv1.", "conv2."), csp="csp_rep{before}.", conv="csp_rep{before}.conv2.",
        downsample="conv{k}.",
    )  # fmt: skip
    for name, ours in (
        ("down_conv1.", "extra_level.conv."),
        ("down_conv2.", "downsample.conv."),
        ("bi_fusion_conv.", "global_conv."),
    ):
        yield from below("model.encoder.", "neck.", pair_with_norm(name, ours))
    yield from library_stack("model.decoder.", "head.decoder.", DECODER_NORMS, joined=["self_attn"])
    layer = "^head.decoder.layers.{i}."
    yield Join([f"{layer}mlp.{name}_proj.{{leaf}}" for name in ("gate", "up")], f"{layer}ffn.fc1.{{leaf}}")
    yield Rename(f"{layer}mlp.down_proj.", f"{layer}ffn.fc2.")
    yield from below("model.decoder_input_proj.{i}.", "head.input_proj.{i}.", pair_with_norm("", ""))
    yield from below(
        "model.",
        "",
        [
            *LIBRARY_DECODER,
            ("decoder.pre_bbox_head.", "head.decoder.bbox_embed."),
            ("decoder.bbox_embed.", _CORNERS),
            ("decoder.lqe_layers.", "head.quality_embed."),
        ],
    )
    yield Custom(_read_shared_heads, _write_shared_heads)


_HEAD = "head.decoder.layers.0.ffn.fc1.weight"
_BACKBONES = ("backbone.detail.stem.0.weight", "backbone.net.stem.stem1.conv.weight")
_LIBRARY_MARKS = ("model.decoder.pre_bbox_head.layers.0.weight", "model.decoder.layers.0.mlp.gate_proj.weight")
_MARKS = ("decoder.pre_bbox_head.layers.0.weight", "decoder.decoder.layers.0.swish_ffn.w12.weight")

TRANSFORMERS = [
    Format(
        "transformers DEIMv2",
        KeyTable([*_library()]),
        marks=_LIBRARY_MARKS,
        model="DEIMv2",
        ours=(_HEAD, backbone),
        classes=COCO_CLASSES,
    )
    for backbone in _BACKBONES
]
OFFICIAL = [
    Format(
        "Intellindust-AI-Lab/DEIMv2",
        KeyTable([*_official()]),
        marks=_MARKS,
        model="DEIMv2",
        ours=(_HEAD, backbone),
        classes=COCO_CLASSES,
    )
    for backbone in _BACKBONES
]
