"""ResNets with non-local blocks (Wang et al. 2018, https://arxiv.org/abs/1711.07971), of images and of clips."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import Backbone, check_images, choose_features, drop_path_rates
from vitkit.backbones.resnet import ResNet
from vitkit.errors import ConfigError, DataError
from vitkit.nn.layers import run_block
from vitkit.nn.non_local import NonLocalBlock
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

FIVE_BLOCKS = {"res3": (1, 3), "res4": (1, 3, 5)}
"""The paper's section 4: after every second block of res3 and res4 of a 50-layer network."""

NON_LOCAL_RESNET_VARIANTS = {
    "nonlocal_resnet50": dict(depth=50),
    "nonlocal_resnet101": dict(depth=101),
}
"""The paper's table 5, one block before the last of res4, has `positions={"res4": (4,)}`."""

CLIP_RESNET_VARIANTS = {
    "c2d_r50": dict(depth=50, inflation="c2d", positions={}),
    "c2d_nln_r50": dict(depth=50, inflation="c2d"),
    "i3d_r50": dict(depth=50, inflation="i3d", positions={}),
    "i3d_r101": dict(depth=101, inflation="i3d", positions={}),
    "i3d_nln_r50": dict(depth=50, inflation="i3d"),
    "i3d_nln_r101": dict(depth=101, inflation="i3d"),
    "slow_r50": dict(depth=50, inflation="slow", positions={}),
    "slow_nln_r50": dict(depth=50, inflation="slow", pairwise="dot_product"),
}
"""SlowFast's configs/Kinetics: C2D, I3D and SLOW, with and without _NLN_; the paper's tables 1 and 2."""

_STAGES = ("res2", "res3", "res4", "res5")
_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
# Frames that a kernel spans: the stem's, then of each stage those of its blocks in turn; whether frames are halved
# after res2.
_INFLATIONS = {
    "c2d": (1, ((1,), (1,), (1,), (1,)), True),
    "i3d": (5, ((3,), (3, 1), (3, 1), (1, 3)), True),
    "slow": (1, ((1,), (1,), (3,), (3,)), False),
}


@BACKBONES.register
class NonLocalResNet(ResNet):
    """`ResNet` with non-local blocks between its blocks; torchvision's weights fit, without those of the new blocks.

    Args:
        depth, norm, frozen_stages, dilation, out_features, num_classes, drop_path, pretrained: see `ResNet`.
        positions: stage -> the blocks, counted from 0, that a non-local block follows.
        pairwise, scaled: see `NonLocalBlock`.
        pool: side of the max pooling of keys and values; 1 for none.
    Raises:
        ConfigError: an argument is impossible, or there is no such block.
    """

    optional_weights = (
        "*num_batches_tracked", "*.pair", *(f"*.norm.{x}" for x in ("weight", "bias", "running_mean", "running_var")),
        *(f"*.conv_{name}.{x}" for name in ("theta", "phi", "g", "out") for x in ("weight", "bias")),
    )  # fmt: skip

    def __init__(
        self,
        depth: int = 50,
        *,
        positions: Mapping[str, Sequence[int]] = FIVE_BLOCKS,
        pairwise: str = "embedded_gaussian",
        scaled: bool = True,
        pool: int = 2,
        norm: str = "bn",
        frozen_stages: int = 0,
        dilation: bool = False,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        drop_path: float = 0.0,
        pretrained: bool | str = True,
    ):
        super().__init__(
            depth,
            norm=norm,
            dilation=dilation,
            out_features=out_features,
            num_classes=num_classes,
            drop_path=drop_path,
            pretrained=pretrained,
        )
        counts = {name: len(self._blocks(name)) for name in self.stage_names}
        for name, after in check_positions("NonLocalResNet", positions, counts).items():
            channels = 64 * 2 ** _STAGES.index(name) * self._blocks(name)[0].expansion
            # Named after the blocks that they follow, so that all others keep their names.
            blocks: dict[str, nn.Module] = {}
            for i, block in enumerate(self._blocks(name)):
                blocks[str(i)] = block
                if i in after:
                    blocks[f"non_local{i}"] = NonLocalBlock(
                        channels, pairwise=pairwise, scaled=scaled, pool=(pool, pool)
                    )
            setattr(self, f"layer{_STAGES.index(name) + 1}", nn.Sequential(OrderedDict(blocks)))
        self.frozen_stages = frozen_stages
        self.freeze()

    def _blocks(self, name: str) -> nn.Sequential:
        return getattr(self, f"layer{_STAGES.index(name) + 1}")


def check_positions(
    owner: str, positions: Mapping[str, Sequence[int]], counts: Mapping[str, int]
) -> dict[str, set[int]]:
    """Those of the stages in `counts`; others may lie beyond the deepest feature.

    Raises:
        ConfigError: there is no such stage or block.
    """
    for name, after in positions.items():
        if name not in _STAGES:
            raise ConfigError(f"{owner}: positions has unknown stage {name!r}. {nearest(name, _STAGES)}")
        wrong = [i for i in after if name in counts and not 0 <= i < counts[name]]
        if wrong:
            raise ConfigError(f"{owner}: positions: {name} has blocks 0 to {counts[name] - 1}, got {wrong}.")
    return {name: set(after) for name, after in positions.items() if name in counts and after}


class ClipBottleneck(nn.Module):
    """ResNet's bottleneck on clips: the first convolution may span frames, the second spans the image.

    Args:
        in_channels: of the input.
        width: of the inner convolutions; the output has four times as many channels.
        frames: that the first convolution spans.
        stride: of the output on the input, in space.
        drop_path: probability of skipping the block in training.
    """

    recompute = False

    def __init__(self, in_channels: int, width: int, *, frames: int, stride: int = 1, drop_path: float = 0.0):
        super().__init__()
        out_channels = 4 * width
        if stride > 1 or in_channels != out_channels:
            self.branch1 = nn.Conv3d(in_channels, out_channels, 1, stride=(1, stride, stride), bias=False)
            self.branch1_bn = nn.BatchNorm3d(out_channels)
        else:
            self.branch1 = None
        self.branch2 = nn.Module()
        self.branch2.a = nn.Conv3d(in_channels, width, (frames, 1, 1), padding=(frames // 2, 0, 0), bias=False)
        self.branch2.a_bn = nn.BatchNorm3d(width)
        self.branch2.b = nn.Conv3d(width, width, (1, 3, 3), stride=(1, stride, stride), padding=(0, 1, 1), bias=False)
        self.branch2.b_bn = nn.BatchNorm3d(width)
        self.branch2.c = nn.Conv3d(width, out_channels, 1, bias=False)
        self.branch2.c_bn = nn.BatchNorm3d(out_channels)
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(self, x: Tensor) -> Tensor:
        branch = self.branch2
        out = F.relu_(branch.a_bn(branch.a(x)))
        out = F.relu_(branch.b_bn(branch.b(out)))
        out = self.drop_path(branch.c_bn(branch.c(out)))
        out = out + (x if self.branch1 is None else self.branch1_bn(self.branch1(x)))
        return F.relu_(out)


@BACKBONES.register
class ClipResNet(Backbone):
    """ResNets of clips: C2D, I3D and SlowFast's slow pathway, with non-local blocks; SlowFast's state dicts fit.

    Maps "res2" to "res5" at strides 4 to 32 in space; frames are halved after res2, but for "slow".

    Args:
        depth: 50 or 101.
        inflation: which convolutions span frames: "c2d" (none), "i3d" or "slow".
        positions: stage -> the blocks, counted from 0, that a non-local block follows.
        pairwise, scaled: see `NonLocalBlock`.
        pool: frames, rows and columns of the max pooling of keys and values; (1, 1, 1) for none.
        out_features: the maps to return, and no deeper stage is made; all four if None.
        num_classes: makes it a classifier.
        dropout: share of a classifier's last features dropped in training.
        frozen_stages: how many stages are not trained; 1 is the stem and res2.
        drop_path: the last block's probability to be skipped in training; it grows from 0 over the blocks.
        pretrained: what `load_pretrained` loads: a path or an address; False, nothing.
    Raises:
        ConfigError: an argument is impossible, or there is no such block.
    """

    class_head = ("fc.",)
    optional_weights = ("*num_batches_tracked",)

    def __init__(
        self,
        depth: int = 50,
        *,
        inflation: str = "i3d",
        positions: Mapping[str, Sequence[int]] = FIVE_BLOCKS,
        pairwise: str = "embedded_gaussian",
        scaled: bool = True,
        pool: Sequence[int] = (1, 2, 2),
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        dropout: float = 0.5,
        frozen_stages: int = 0,
        drop_path: float = 0.0,
        pretrained: bool | str = False,
    ):
        super().__init__()
        if depth not in _DEPTHS:
            raise ConfigError(f"ClipResNet: depth {depth}: expected one of {', '.join(map(str, _DEPTHS))}.")
        if inflation not in _INFLATIONS:
            raise ConfigError(f"ClipResNet: unknown inflation {inflation!r}. {nearest(inflation, _INFLATIONS)}")
        available = {name: FeatureInfo(256 * 2**i, 4 * 2**i) for i, name in enumerate(_STAGES)}
        self.feature_info = choose_features("ClipResNet", available, out_features, num_classes=num_classes)
        self.is_classifier = num_classes is not None
        self.pretrained = pretrained

        stem_frames, stage_frames, self.halves_frames = _INFLATIONS[inflation]
        names = _STAGES[: _STAGES.index(list(self.feature_info)[-1]) + 1]
        counts = dict(zip(names, _DEPTHS[depth]))
        after = check_positions("ClipResNet", positions, counts)
        self.stem = nn.Module()
        size, margin = (stem_frames, 7, 7), (stem_frames // 2, 3, 3)
        self.stem.conv = nn.Conv3d(3, 64, size, stride=(1, 2, 2), padding=margin, bias=False)
        self.stem.bn = nn.BatchNorm3d(64)
        rates = iter(drop_path_rates("ClipResNet", drop_path, sum(_DEPTHS[depth])))
        non_local: dict[str, Any] = dict(pairwise=pairwise, scaled=scaled, pool=pool, axes=3)
        in_channels = 64
        self.layers = nn.ModuleDict()
        for stage, (name, count) in enumerate(counts.items()):
            blocks = nn.ModuleDict()
            for i in range(count):
                frames = stage_frames[stage][i % len(stage_frames[stage])]
                stride = 2 if stage > 0 and i == 0 else 1
                width = 64 * 2**stage
                blocks[f"res{i}"] = ClipBottleneck(
                    in_channels, width, frames=frames, stride=stride, drop_path=next(rates)
                )
                in_channels = 4 * width
                if i in after.get(name, ()):
                    blocks[f"nonlocal{i}"] = NonLocalBlock(in_channels, **non_local)
            self.layers[name] = blocks
        if self.is_classifier:
            self.dropout = nn.Dropout(dropout)
            self.fc = nn.Linear(in_channels, num_classes)
        self.apply(_init_weights)
        self.frozen_stages = frozen_stages
        self.freeze()

    def stages(self) -> list[list[nn.Module]]:
        return [[self.stem], *([layer] for layer in self.layers.values())]

    def drop_stages_after(self, feature: str) -> None:
        names = list(self.layers)
        for name in names[names.index(feature) + 1 :]:
            del self.layers[name]

    def forward(self, clips: Tensor) -> dict[str, Tensor] | Tensor:
        """
        Args:
            clips: (B, 3, T, H, W) float, normalised; any H and W from 4, and T from 2 where frames are halved.
        Returns:
            the maps named by `out_features`, each (B, channels, T or T // 2, ceil(H / stride), ceil(W / stride)), fine
            to coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the clips have not three channels, or are too small.
        """
        least = 2 if self.halves_frames else 1
        check_images("ClipResNet", clips, least=4, clips=True)
        if clips.shape[2] < least:
            raise DataError(f"ClipResNet: clips of {clips.shape[2]} frames: expected at least {least}.")
        x = F.relu_(self.stem.bn(self.stem.conv(clips)))
        x = F.max_pool3d(x, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        features = {}
        for name, layer in self.layers.items():
            for block in layer.values():
                x = run_block(block, x)
            if name in self.feature_info:
                features[name] = x
            if name == "res2" and self.halves_frames:
                x = F.max_pool3d(x, (2, 1, 1))
        return self.fc(self.dropout(x.mean((2, 3, 4)))) if self.is_classifier else features


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, ClipBottleneck):
        nn.init.zeros_(module.branch2.c_bn.weight)
    elif isinstance(module, nn.Conv3d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


BACKBONES.register_variants(NonLocalResNet, NON_LOCAL_RESNET_VARIANTS)
BACKBONES.register_variants(ClipResNet, CLIP_RESNET_VARIANTS)
