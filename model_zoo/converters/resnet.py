"""Key names of ResNets; vitkit's are torchvision's, and for ResNets of video and non-local blocks its own."""

from collections.abc import Iterator

import torch
from torch import nn

from vitkit.model_zoo.converters.key_table import Alias, Custom, Format, KeyTable, Rename, Rule, State, below

_STEM_VD = (("conv1.0.", "conv1.1."), ("conv1.3.", "conv1.4."), ("conv1.6.", "bn1."))
"""The convolutions and norms of a ResNet-vd's stem."""


def library_resnet(theirs: str, ours: str, *, vd: bool = False) -> Iterator[Rule]:
    """Yield the rules of the transformers library's ResNet, or ResNet-vd, below these prefixes."""
    for i, (conv, norm) in enumerate(_STEM_VD if vd else [("conv1.", "bn1.")]):
        stem = f"{theirs}embedder.embedder.{f'{i}.' if vd else ''}"
        yield from below(stem, ours, [("convolution.", conv), ("normalization.", norm)])
    for stage in range(4):
        shortcut = "shortcut.1." if vd and stage > 0 else "shortcut."  # the first one of ResNet-vd does not average
        pairs = [(f"{shortcut}convolution.", f"downsample.{int(vd)}.")]
        pairs += [(f"{shortcut}normalization.", f"downsample.{int(vd) + 1}.")]
        pairs += [(f"layer.{k}.convolution.", f"conv{k + 1}.") for k in range(3)]
        pairs += [(f"layer.{k}.normalization.", f"bn{k + 1}.") for k in range(3)]
        yield from below(f"{theirs}encoder.stages.{stage}.layers.{{i}}.", f"{ours}layer{stage + 1}.{{i}}.", pairs)


def detectron2_resnet(theirs: str, ours: str) -> Iterator[Rule]:
    """Yield the rules of detectron2's ResNet below these prefixes."""
    yield from below(f"{theirs}stem.", ours, [("conv1.norm.", "bn1."), ("conv1.", "conv1.")])
    for i in range(1, 5):
        pairs = [("shortcut.norm.", "downsample.1."), ("shortcut.", "downsample.0.")]
        pairs += [pair for k in (1, 2, 3) for pair in ((f"conv{k}.norm.", f"bn{k}."), f"conv{k}.")]
        yield from below(f"{theirs}res{i + 1}.{{i}}.", f"{ours}layer{i}.{{i}}.", pairs)


def official_resnet_vd(theirs: str, ours: str) -> Iterator[Rule]:
    """Yield the rules of lyuwenyu/RT-DETR's ResNet-vd, whose first shortcut does not average."""
    for i, (conv, norm) in enumerate(_STEM_VD, start=1):
        yield from below(f"{theirs}conv1.conv1_{i}.", ours, [("conv.", conv), ("norm.", norm)])
    for stage in range(4):
        shortcut = "short." if stage == 0 else "short.conv."
        pairs = [(f"{shortcut}conv.", "downsample.1."), (f"{shortcut}norm.", "downsample.2.")]
        pairs += [(f"branch2{x}.conv.", f"conv{k}.") for k, x in enumerate("abc", start=1)]
        pairs += [(f"branch2{x}.norm.", f"bn{k}.") for k, x in enumerate("abc", start=1)]
        yield from below(f"{theirs}res_layers.{stage}.blocks.{{i}}.", f"{ours}layer{stage + 1}.{{i}}.", pairs)


def with_counters(theirs: str) -> Custom:
    """Return the rule that writes batch counters for batch norms below the prefix, as frozen ones have none."""

    def write(state: State, model: nn.Module) -> State:
        norms = [key.removesuffix("running_mean") for key in state if key.endswith("running_mean")]
        counters = {f"{norm}num_batches_tracked": torch.tensor(0) for norm in norms if norm.startswith(theirs)}
        return counters | state

    return Custom(writing=write)


def without_prefix(prefix: str, *parts: str) -> list[Rule]:
    """Return rules for files that hold the library's model without its head, and so without `prefix`."""
    return [Alias(f"^{part}", f"^{prefix}{part}") for part in parts]


TRANSFORMERS = [
    Format(
        "transformers ResNet",
        KeyTable(
            [
                *without_prefix("resnet.", "embedder.", "encoder."),
                *library_resnet("resnet.", ""),
                Rename("^classifier.1.", "^fc."),
            ]
        ),
        marks=(".embedder.embedder.convolution.weight", ".encoder.stages.0.layers.0.layer.0.convolution.weight"),
        model="ResNet",
    )
]
OFFICIAL = [
    Format("torchvision ResNet", KeyTable(), model="ResNet"),
    Format(
        "lyuwenyu/RT-DETR, backbone",
        KeyTable([*official_resnet_vd("", "")]),
        marks=("conv1.conv1_1.conv.weight",),
        model="ResNetVD",
        ours=("conv1.6.weight",),
    ),
    Format(
        "facebookresearch/SlowFast ResNet",
        KeyTable(
            [
                Rename(".s1.pathway0_stem.", ".stem."),
                *(
                    Rename(f".s{i}.pathway0_{kind}{{j}}.", f".layers.res{i}.{kind}{{j}}.")
                    for i in range(2, 6)
                    for kind in ("res", "nonlocal")
                ),
                Rename(".nonlocal{j}.bn.", ".nonlocal{j}.norm."),
                Rename(".head.projection.", ".fc."),
            ]
        ),
        marks=(".s1.pathway0_stem.conv.weight", ".s2.pathway0_res0.branch2.a.weight"),
    ),
]
