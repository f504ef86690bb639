"""What mmdetection's models share in their key names (version 3), and detrex's, which took some of them over."""

import re
from collections.abc import Sequence

import torch
from torch import nn

from vitkit.model_zoo.converters.key_table import Custom, Drop, Rename, Rule, State, below
from vitkit.model_zoo.converters.swin import write_position_indices

FFN = (("ffn.layers.0.0.", "ffn.linear1."), ("ffn.layers.1.", "ffn.linear2."))
_MLP = (("ffn.layers.0.0.", "mlp.fc1."), ("ffn.layers.1.", "mlp.fc2."))

ENCODER_NORMS = ("norm1", "norm2")
DECODER_NORMS = ("norm1", "norm2", "norm3")
DEFORMABLE_DECODER_NORMS = ("norm2", "norm1", "norm3")
"""vitkit's names of a layer's norms in their order; in the last one, norm1 is that of the cross-attention."""

LABELS = "training_queries.denoising.label_embed.weight"
"""DINO's label embedding, whose last row stands for no class and is used by no query."""

_UNFOLDED = (0, 2, 1, 3)
"""mmdetection's order of the four pixels of a patch merging; they vary faster than channels."""


def stack(
    theirs: str, ours: str, norms: Sequence[str], attentions: Sequence[str] = (), sampling: Sequence[str] = ()
) -> list[Rule]:
    """Return the rules of a stack of layers.

    Args:
        theirs, ours: beginnings of the names of a layer, with the number {i}.
        norms: vitkit's names of the norms.
        attentions: names of attentions, which wrap PyTorch's.
        sampling: names of deformable attentions, whose entries have the same names.
    """
    pairs: list[tuple[str, str] | str] = [(f"{name}.attn.", f"{name}.") for name in attentions]
    pairs += [f"{name}." for name in sampling]
    pairs += [*FFN, *((f"norms.{k}.", f"{name}.") for k, name in enumerate(norms))]
    return [*below(theirs, ours, pairs)]


def detrex_stack(theirs: str, ours: str, norms: Sequence[str], *attentions: tuple[str, str]) -> list[Rule]:
    """Return the rules of a stack of layers of detrex.

    Args:
        theirs, ours: beginnings of the names of a layer, with the number {i}.
        norms: vitkit's names of the norms.
        attentions: their names below the layer, and vitkit's.
    """
    ffn = [(f"ffns.0.{name.removeprefix('ffn.')}", own) for name, own in FFN]
    return [*below(theirs, ours, [*attentions, *ffn, *((f"norms.{k}.", f"{name}.") for k, name in enumerate(norms))])]


def merge_patches() -> Custom:
    """Return the rule of the order of a Swin Transformer's patch merging."""

    is_merging = re.compile(r"backbone\.(?:stages|layers)\.\d+\.downsample\.").match

    def read(state: State, model: nn.Module) -> State:
        return {
            key: value.unflatten(-1, (-1, 4)).mT[..., _UNFOLDED, :].flatten(-2) if is_merging(key) else value
            for key, value in state.items()
        }

    def write(state: State, model: nn.Module) -> State:
        return {
            key: value.unflatten(-1, (4, -1))[..., _UNFOLDED, :].mT.flatten(-2) if is_merging(key) else value
            for key, value in state.items()
        }

    return Custom(read, write)


SWIN: list[Rule] = [
    merge_patches(),
    Drop(".relative_position_index$"),
    Custom(writing=write_position_indices),
    Rename("^backbone.patch_embed.projection.", "^backbone.patch_embed.proj."),
    *below(
        "backbone.stages.{i}.blocks.{j}.",
        "backbone.layers.{i}.blocks.{j}.",
        [("attn.w_msa.", "attn."), *_MLP, "norm1.", "norm2."],
    ),
    Rename("^backbone.stages.{i}.downsample.", "^backbone.layers.{i}.downsample."),
]


def channel_mapper(norm: str = "gn", *, has_biases: bool = False) -> Custom:
    """Return the rule of the neck (`ChannelMapper`): `convs` project its inputs, `extra_convs` make the extra levels.

    Args:
        norm: their name of a convolution's norm.
        has_biases: whether convolutions have biases also where they are zero; otherwise those that are zero are neither
            expected nor written.
    """
    parts = ("conv", norm)

    def read(state: State, model: nn.Module) -> State:
        convs = len({key.split(".")[2] for key in state if key.startswith("neck.convs.")})
        result = {}
        for key, value in state.items():
            if match := re.fullmatch(rf"neck\.(convs|extra_convs)\.(\d+)\.(conv|{norm})\.(weight|bias)", key):
                kind, number, part, leaf = match.groups()
                index = int(number) + (convs if kind == "extra_convs" else 0)
                key = f"neck.levels.{index}.{parts.index(part)}.{leaf}"
                if part == "conv":
                    result.setdefault(key.replace("weight", "bias"), value.new_zeros(len(value)))
            result[key] = value
        return result

    def write(state: State, model: nn.Module) -> State:
        convs = len(model.neck.in_features)
        result = {}
        for key, value in state.items():
            if match := re.fullmatch(r"neck\.levels\.(\d+)\.([01])\.(weight|bias)", key):
                index, part, leaf = int(match[1]), int(match[2]), match[3]
                if (part, leaf) == (0, "bias") and not has_biases and not value.any():
                    continue
                kind, index = ("convs", index) if index < convs else ("extra_convs", index - convs)
                key = f"neck.{kind}.{index}.{parts[part]}.{leaf}"
            result[key] = value
        return result

    return Custom(read, write)


def last_label_row() -> Custom:
    """Return the rule of a label embedding without a row for no class."""

    def read(state: State, model: nn.Module) -> State:
        if LABELS in state:
            state[LABELS] = torch.cat((state[LABELS], torch.zeros_like(state[LABELS][:1])))
        return state

    def write(state: State, model: nn.Module) -> State:
        return state | {key: state[key][:-1] for key in [LABELS] if key in state}

    return Custom(read, write)


def layer_heads() -> Custom:
    """Return the rule of heads that each decoder layer and the first stage have, under the names of the original."""
    heads = {"class_embed": "head.class_embed", "bbox_embed": "head.decoder.bbox_embed"}

    def num_layers(state: State) -> int:
        return len({key.split(".")[3] for key in state if key.startswith("head.decoder.layers.")})

    def read(state: State, model: nn.Module) -> State:
        layers = num_layers(state)
        of_layer: dict[tuple[str, str], State] = {}
        for key in list(state):
            if match := re.fullmatch(r"(class_embed|bbox_embed)\.(\d+)\.(.*)", key):
                name, index, leaf = match.groups()
                if int(index) == layers:
                    state[f"head.proposals.{name}.{leaf}"] = state.pop(key)
                else:
                    of_layer.setdefault((name, leaf), {})[index] = state.pop(key)
        # Without box refinement all layers have one head, of which files have a copy for each.
        refines = "head.proposals.enc_output.weight" in state or any(
            not torch.equal(value, each["0"]) for each in of_layer.values() for value in each.values()
        )
        for (name, leaf), each in of_layer.items():
            for index, value in each.items() if refines else [("0", each["0"])]:
                state[f"{heads[name]}.{index}.{leaf}"] = value
        return state

    def write(state: State, model: nn.Module) -> State:
        layers = num_layers(state)
        shared = f"{heads['bbox_embed']}.1.layers.0.weight" not in state
        for name, ours in heads.items():
            for key in [key for key in state if key.startswith(f"{ours}.")]:
                index, _, leaf = key.removeprefix(f"{ours}.").partition(".")
                value = state.pop(key)
                state |= {f"{name}.{i}.{leaf}": value.clone() for i in (range(layers) if shared else [index])}
            first_stage = f"head.proposals.{name}."
            for key in [key for key in state if key.startswith(first_stage)]:
                state[f"{name}.{layers}.{key.removeprefix(first_stage)}"] = state.pop(key)
        return state

    return Custom(read, write)


BRANCHES: list[Rule] = [
    Rename("^bbox_head.cls_branches.{i}.", "^class_embed.{i}."),
    *(Rename(f"^bbox_head.reg_branches.{{i}}.{2 * k}.", f"^bbox_embed.{{i}}.layers.{k}.") for k in range(3)),
]
"""The rules of the heads of mmdetection's layers, which give them the names that the original has."""
