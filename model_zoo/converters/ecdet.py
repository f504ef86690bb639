"""Key names of ECDet, ECSeg and their transformer: Intellindust-AI-Lab/EdgeCrafter's, of its release edgecrafterv1."""

from collections.abc import Iterator, Mapping

from torch import nn

from vitkit.io.coco_classes import COCO_CLASSES
from vitkit.model_zoo.converters.deimv2 import official_head, official_neck, rotary_periods
from vitkit.model_zoo.converters.dfine import pair_with_norm, refuse_deployed, settings
from vitkit.model_zoo.converters.key_table import Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import TORCH_FEED_FORWARD
from vitkit.model_zoo.converters.rf_detr import BLOCK_MASKS
from vitkit.model_zoo.converters.rt_detr import write_anchors

_VIT, _PROJECTOR, _PROJECTIONS = "backbone.backbone.", "backbone.projector.", "backbone.projections."


def _vit(theirs: str, ours: str) -> Iterator[Rule]:
    """Yield the rules of the transformer below two prefixes."""
    yield Drop(f"^{theirs}rope_embed.periods$")
    yield Rename(f"^{theirs}register_token$", f"^{ours}reg_token$")
    yield from below(
        f"{theirs}patch_embed.", f"{ours}patch_embed.", [*pair_with_norm("convs.{i}.", "convs.{i}."), "proj."]
    )
    yield Rename(f"^{theirs}blocks.", f"^{ours}blocks.")


def _renamed(state: State, names: Mapping[str, str]) -> State:
    """Return the state dict with other prefixes."""
    return {
        next((new + key[len(old) :] for old, new in names.items() if key.startswith(old)), key): value
        for key, value in state.items()
    }


def _numbers(model: nn.Module) -> dict[str, str]:
    """Return the original's prefix of each projection, by ours."""
    names = model.get_submodule("backbone.projections").keys()
    return {f"{_PROJECTIONS}{name}.": f"{_PROJECTOR}{i}." for i, name in enumerate(names)}


def _read_projections(state: State, model: nn.Module) -> State:
    return _renamed(state, {theirs: ours for ours, theirs in _numbers(model).items()})


def _write_projections(state: State, model: nn.Module) -> State:
    return _renamed(state, _numbers(model))


def _write_periods(state: State, model: nn.Module) -> State:
    if f"{_VIT}patch_embed.proj.weight" in state:
        state[f"{_VIT}rope_embed.periods"] = rotary_periods(model.get_submodule("backbone"))
    return state


def official_maps() -> Iterator[Rule]:
    """Yield the rules of backbone and encoder, which ECPose also has."""
    yield Custom(writing=_write_periods)
    yield from _vit(_VIT, "backbone.")
    for leaf in pair_with_norm("", ""):
        yield Rename(f"^{_PROJECTOR}{{i}}.{leaf[0]}", f"^{_PROJECTOR}{{i}}.{leaf[1]}")
    yield Custom(_read_projections, _write_projections)
    yield from official_neck()


def _official() -> Iterator[Rule]:
    yield Custom(refuse_deployed)
    yield from settings(("decoder.", "decoder.decoder."), "cross_attn")
    yield Custom(writing=write_anchors)
    yield from official_maps()
    yield from below("decoder.decoder.segmentation_head.", "head.mask_head.", BLOCK_MASKS)
    yield from official_head()
    layer = "head.decoder.layers.{i}."
    yield from below(layer, layer, [*TORCH_FEED_FORWARD, ("norm2.", "norm3.")])


TRANSFORMERS: list[Format] = []
OFFICIAL = [
    Format(
        "Intellindust-AI-Lab/EdgeCrafter",
        KeyTable([*_official()]),
        marks=("backbone.backbone.register_token", "decoder.pre_bbox_head.layers.0.weight"),
        model="ECDet",
        ours=("backbone.patch_embed.convs.0.0.weight", "head.decoder.layers.0.ffn.linear1.weight"),
        classes=COCO_CLASSES,
    ),
    Format(
        "Intellindust-AI-Lab/EdgeCrafter, transformer",
        KeyTable([*_vit("", "")]),
        marks=("register_token", "patch_embed.convs.0.conv.weight"),
    ),
]
"""All formats: the original's; the transformers library has none."""
