"""ResNets with non-local blocks (Wang et al. 2018, https://arxiv.org/abs/1711.07971), for images and for clips."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import STAGES, BackboneBase, drop_path_rates, four_stages
from vitkit.backbones.resnet import ResNet, resnet_url
from vitkit.errors import ConfigError, DataError
from vitkit.nn.non_local import NonLocalBlock
from vitkit.ops.images import check_images
from vitkit.registry import BACKBONES, nearest

FIVE_BLOCKS = {"res3": (1, 3), "res4": (1, 3, 5)}
"""The configuration of the paper's section 4: after every second block of res3 and res4 of a 50-layer network."""

NON_LOCAL_RESNET_VARIANTS = {"nonlocal_resnet50": dict(depth=50), "nonlocal_resnet101": dict(depth=101)}
"""The networks for images, with `FIVE_BLOCKS`. For the paper's table 5, which has a single non-local block before the
last block of res4, set `positions={"res4": (4,)}` with 50 layers."""

_PAPER_POSITIONS = {
    (50, 1): {"res4": (4,)},
    (50, 5): FIVE_BLOCKS,
    (50, 10): {"res3": (0, 1, 2, 3), "res4": (0, 1, 2, 3, 4, 5)},
    (101, 1): {"res4": (21,)},
    (101, 5): {"res3": (1, 3), "res4": (6, 13, 20)},
    # Not in the authors' code; distributed as evenly as their five.
    (101, 10): {"res3": (0, 1, 2, 3), "res4": (3, 6, 10, 13, 17, 20)},
}
"""Depth and number of blocks -> positions, according to section 5.1 of the paper and the authors' code."""

CLIP_RESNET_VARIANTS = {
    "c2d_r50": dict(depth=50, inflation="c2d", positions={}),
    "c2d_nln_r50": dict(depth=50, inflation="c2d"),
    "i3d_r50": dict(depth=50, inflation="i3d", positions={}),
    "i3d_r101": dict(depth=101, inflation="i3d", positions={}),
    "i3d_nln_r50": dict(depth=50, inflation="i3d"),
    "i3d_nln_r101": dict(depth=101, inflation="i3d"),
    "slow_r50": dict(depth=50, inflation="slow", positions={}),
    "slow_nln_r50": dict(depth=50, inflation="slow", pairwise="dot_product"),
    **{
        f"nonlocal_{kind}_r{depth}_{count}block": dict(
            depth=depth, inflation=kind, positions=positions, paper_pooling=True
        )
        for kind in ("c2d", "i3d")
        for (depth, count), positions in _PAPER_POSITIONS.items()
    },
}
"""The networks of SlowFast's configs/Kinetics: C2D, I3D and SLOW, with and without _NLN_; then those of the paper's
tables 1 and 2 (c, e), made for clips of 32 frames and more.
"""

_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
# Numbers of frames that kernels span: in the stem, then in the blocks of each stage in turn; and whether the number
# of frames is halved after res2.
_INFLATIONS = {
    "c2d": (1, ((1,), (1,), (1,), (1,)), True),
    "i3d": (5, ((3,), (3, 1), (3, 1), (1, 3)), True),
    "slow": (1, ((1,), (1,), (3,), (3,)), False),
}


@BACKBONES.register
class NonLocalResNet(ResNet):
    """`ResNet` with non-local blocks between its blocks; loads torchvision's weights, which lack the new blocks.

    Args:
        depth: see `ResNet`.
        positions: stage -> indices (from 0) of the blocks that are followed by a non-local block.
        pairwise, scaled: see `NonLocalBlock`.
        pool: side of the max pooling of keys and values; 1 for no pooling.
        options: the other arguments of `ResNet`.
    Raises:
        ConfigError: an argument is invalid, or a block does not exist.
    """

    optional_weights = (
        "*num_batches_tracked",
        "*.pair",
        *(f"*.norm.{x}" for x in ("weight", "bias", "running_mean", "running_var")),
        *(f"*.conv_{name}.{x}" for name in ("theta", "phi", "g", "out") for x in ("weight", "bias")),
    )

    def __init__(
        self,
        depth: int = 50,
        *,
        positions: Mapping[str, Sequence[int]] = FIVE_BLOCKS,
        pairwise: str = "embedded_gaussian",
        scaled: bool = True,
        pool: int = 2,
        **options: Any,
    ):
        super().__init__(depth, **options)
        layers = self.layers
        counts = {name: len(layer) for name, layer in layers.items()}
        for name, after in check_positions(positions, counts).items():
            stage = STAGES.index(name)
            channels = self.base_channels * 2**stage * layers[name][0].expansion
            # Non-local blocks are named after the blocks that they follow, so that all others keep their names.
            blocks: dict[str, nn.Module] = {}
            for i, block in enumerate(layers[name]):
                blocks[str(i)] = block
                if i in after:
                    blocks[f"non_local{i}"] = NonLocalBlock(
                        channels, pairwise=pairwise, scaled=scaled, pool=(pool, pool)
                    )
            setattr(self, f"layer{stage + 1}", nn.Sequential(OrderedDict(blocks)))
        self.freeze()


def check_positions(positions: Mapping[str, Sequence[int]], counts: Mapping[str, int]) -> dict[str, set[int]]:
    """Check the positions and return those of the stages in `counts`; others may be beyond the deepest feature.

    Raises:
        ConfigError: a stage or block does not exist.
    """
    for name, after in positions.items():
        if name not in STAGES:
            raise ConfigError(f"positions: unknown stage {name!r}. {nearest(name, STAGES)}")
        wrong = [i for i in after if name in counts and not 0 <= i < counts[name]]
        if wrong:
            raise ConfigError(f"positions: {name} has blocks 0 to {counts[name] - 1}, got {wrong}.")
    return {name: set(after) for name, after in positions.items() if name in counts and after}


class ClipBottleneck(nn.Module):
    """ResNet's bottleneck for clips: the first convolution may span frames, the second one spans rows and columns.

    Args:
        in_channels: number of input channels.
        width: channels of the inner convolutions; the output has four times as many.
        frames: number of frames that the first convolution spans.
        stride: stride of the output relative to the input, in space.
        drop_path: probability of skipping the block in training.
    """

    activation_checkpointing = False

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
        """(B, in_channels, T, H, W) -> (B, 4 * width, T, ceil(H / stride), ceil(W / stride))."""
        branch = self.branch2
        out = F.relu_(branch.a_bn(branch.a(x)))
        out = F.relu_(branch.b_bn(branch.b(out)))
        out = self.drop_path(branch.c_bn(branch.c(out)))
        out = out + (x if self.branch1 is None else self.branch1_bn(self.branch1(x)))
        return F.relu_(out)


@BACKBONES.register
class ClipResNet(BackboneBase):
    """ResNet for clips: C2D, I3D or SlowFast's slow pathway, with non-local blocks; loads SlowFast's state dicts.

    Maps "res2" to "res5" at strides 4 to 32 in space; except for "slow", the number of frames is halved after res2.
    torchvision's ImageNet weights of a ResNet are inflated (section 4 of the paper): each frame of a kernel has an
    equal fraction.

    Args:
        depth: 50 or 101.
        inflation: which convolutions span frames: "c2d" (none), "i3d" or "slow".
        positions: stage -> indices (from 0) of the blocks that are followed by a non-local block.
        pairwise, scaled: see `NonLocalBlock`.
        pool: frames, rows and columns of the max pooling of keys and values; (1, 1, 1) for no pooling.
        paper_pooling: halve the number of frames as in the paper's table 1, in the stem's convolution, its pooling and
            after res2, whereas SlowFast only does the last.
        dropout: fraction of a classifier's final features dropped in training.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`; pretrained=True means torchvision's ImageNet weights.
    Raises:
        ConfigError: an argument is invalid, or a block does not exist.
    """

    class_head = ("fc.",)
    input_weight = "stem.conv.weight"
    stage_pattern = r"layers\.res\d\."
    optional_weights = ("*num_batches_tracked", "*.nonlocal*")

    def __init__(
        self,
        depth: int = 50,
        *,
        inflation: str = "i3d",
        positions: Mapping[str, Sequence[int]] = FIVE_BLOCKS,
        pairwise: str = "embedded_gaussian",
        scaled: bool = True,
        pool: Sequence[int] = (1, 2, 2),
        paper_pooling: bool = False,
        dropout: float = 0.5,
        drop_path: float = 0.0,
        **options: Any,
    ):
        if depth not in _DEPTHS:
            raise ConfigError(f"depth={depth}: expected one of {', '.join(map(str, _DEPTHS))}.")
        if inflation not in _INFLATIONS:
            raise ConfigError(f"inflation={inflation!r}: unknown. {nearest(inflation, _INFLATIONS)}")
        super().__init__(four_stages(256), **options)
        self.depth = depth
        self.paper_pooling = paper_pooling
        stem_frames, stage_frames, self.halves_frames = _INFLATIONS[inflation]
        counts = dict(zip(self.stages_to_build, _DEPTHS[depth]))
        after = check_positions(positions, counts)
        self.stem = nn.Module()
        size, margin = (stem_frames, 7, 7), (stem_frames // 2, 3, 3)
        stride = (2 if paper_pooling else 1, 2, 2)
        self.stem.conv = nn.Conv3d(self.in_channels, 64, size, stride=stride, padding=margin, bias=False)
        self.stem.bn = nn.BatchNorm3d(64)
        rates = iter(drop_path_rates(drop_path, sum(_DEPTHS[depth])))
        non_local: dict[str, Any] = dict(pairwise=pairwise, scaled=scaled, pool=pool, axes=3)
        channels = 64
        self.layers = nn.ModuleDict()
        for stage, (name, count) in enumerate(counts.items()):
            blocks = nn.ModuleDict()
            for i in range(count):
                frames = stage_frames[stage][i % len(stage_frames[stage])]
                stride = 2 if stage > 0 and i == 0 else 1
                width = 64 * 2**stage
                blocks[f"res{i}"] = ClipBottleneck(channels, width, frames=frames, stride=stride, drop_path=next(rates))
                channels = 4 * width
                if i in after.get(name, ()):
                    blocks[f"nonlocal{i}"] = NonLocalBlock(channels, **non_local)
            self.layers[name] = blocks
        if self.is_classifier:
            self.dropout = nn.Dropout(dropout)
            self.fc = nn.Linear(channels, self.num_classes)
        self.apply(_init_weights)
        self.freeze()

    @property
    def num_frames(self) -> int:
        """See `Backbone`: the frames of the papers' clips."""
        return 32 if self.paper_pooling else 8

    def forward(self, clips: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the features, or a classifier's logits.

        Args:
            clips: (B, in_channels, T, H, W) float, normalized; any H and W from 4, and T from 2 if the number of frames
                is halved.
        Returns:
            the maps named by `out_features`, each (B, channels, frames, ceil(H / stride), ceil(W / stride)), fine to
            coarse: T frames in res2, T // 2 or (for "slow") T in the others, with `paper_pooling` ceil(T / 4) and
            ceil(T / 8); a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the clips do not have `in_channels` channels, or are too small.
        """
        min_frames = 2 if self.halves_frames and not self.paper_pooling else 1
        check_images("ClipResNet", clips, min_size=4, clips=True, in_channels=self.in_channels)
        if clips.shape[2] < min_frames:
            raise DataError(f"ClipResNet: clips of {clips.shape[2]} frames: expected at least {min_frames}.")
        x = F.relu_(self.stem.bn(self.stem.conv(clips)))
        if self.paper_pooling:
            x = F.max_pool3d(x, 3, stride=2, padding=1)
        else:
            x = F.max_pool3d(x, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        features = {}
        for name, layer in self.layers.items():
            for block in layer.values():
                x = block(x)
            if name in self.feature_info:
                features[name] = x
            if name == "res2" and self.paper_pooling:
                x = F.max_pool3d(x, (3, 1, 1), stride=(2, 1, 1), padding=(1, 0, 0))
            elif name == "res2" and self.halves_frames:
                x = F.max_pool3d(x, (2, 1, 1))
        return self.fc(self.dropout(x.mean((2, 3, 4)))) if self.is_classifier else features

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Rename the entries of torchvision's ResNet, and inflate kernels for images."""
        if f"{prefix}layer1.0.conv1.weight" in state:
            for key in [key for key in state if key.startswith(prefix)]:
                name = key.removeprefix(prefix)
                for pattern, replacement in _FROM_TORCHVISION:
                    name = re.sub(pattern, replacement, name)
                state[prefix + name] = state.pop(key)
        for name, parameter in self.named_parameters():
            kernel = state.get(prefix + name)
            if parameter.ndim == 5 and kernel is not None and kernel.ndim == 4:
                frames = parameter.shape[2]
                state[prefix + name] = kernel[:, :, None].expand(-1, -1, frames, -1, -1) / frames
        super().adapt_state(state, prefix)

    def _url(self) -> str:
        return resnet_url(self.depth)


_FROM_TORCHVISION = (
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.bn."),
    (r"^layer(\d)\.(\d+)\.", lambda m: f"layers.res{int(m[1]) + 1}.res{m[2]}."),
    (r"\.downsample\.0\.", ".branch1."),
    (r"\.downsample\.1\.", ".branch1_bn."),
    (r"\.conv([123])\.", lambda m: f".branch2.{'abc'[int(m[1]) - 1]}."),
    (r"\.bn([123])\.", lambda m: f".branch2.{'abc'[int(m[1]) - 1]}_bn."),
)


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
