"""LR-Net (Hu et al. 2019, https://arxiv.org/abs/1904.11491): a ResNet whose only spatial layers are local relations."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import BackboneBase, drop_path_rates, four_stages
from vitkit.errors import ConfigError
from vitkit.nn.fusion import fuse_pair
from vitkit.nn.local_relation import LocalRelation
from vitkit.ops.images import check_images
from vitkit.registry import BACKBONES

_DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}

LRNET_VARIANTS = {f"lrnet{depth}": dict(depth=depth) for depth in _DEPTHS}
"""The variants of the paper's table 1: 7 x 7 windows, m = 8."""
for _depth in (26, 50):
    for _size in (3, 5, 9):
        LRNET_VARIANTS[f"lrnet{_depth}_k{_size}"] = dict(depth=_depth, kernel_size=_size)
    for _channels in (1, 2, 4, 16):
        LRNET_VARIANTS[f"lrnet{_depth}_m{_channels}"] = dict(depth=_depth, channels_per_weight=_channels)

_STEM_CHANNELS = 64
_WIDTHS = {"res2": 100, "res3": 200, "res4": 400, "res5": 800}
"""Channels of the local relations in each stage."""
_STEM_STRIDE = 4


class RelationBlock(nn.Module):
    """ResNet's bottleneck with a local relation instead of its 3x3 convolution.

    Args:
        in_channels: number of input channels.
        width: channels of the local relation.
        out_channels: number of output channels.
        relation: arguments of the `LocalRelation`, except for its channels and stride.
        stride: stride of the output relative to the input.
        drop_path: probability of skipping the block in training.
    """

    activation_checkpointing = False

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        out_channels: int,
        relation: dict,
        stride: int = 1,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relation = LocalRelation(width, stride=stride, **relation)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = None
        if stride > 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, ceil(H / stride), ceil(W / stride))."""
        out = F.relu_(self.bn1(self.conv1(x)))
        out = F.relu_(self.bn2(self.relation(out)))
        out = self.drop_path(self.bn3(self.conv3(out)))
        out = out + (x if self.downsample is None else self.downsample(x))
        return F.relu_(out)

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`."""
        fuse_pair(self, "conv1", "bn1")
        fuse_pair(self, "conv3", "bn3")
        if self.downsample is not None:
            fuse_pair(self.downsample, "0", "1")
        return self


@BACKBONES.register
class LRNet(BackboneBase):
    """LR-Net: maps "res2" to "res5" at strides 4 to 32, or a classifier.

    It follows the paper's table 1, with the widths that give its number of parameters: 100, 200, 400 and 800.

    Args:
        depth: 26, 50 or 101.
        kernel_size: side of the windows; odd.
        channels_per_weight: m, the number of channels that share a weight.
        similarity: similarity of a query and a key; see `vitkit.kernels.local_relation.SIMILARITIES`.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`.
    Raises:
        ConfigError: an argument is invalid.
    """

    class_head = ("fc.",)
    stage_pattern = r"layers\.res\d\."
    input_weight = "stem.0.weight"

    def __init__(
        self,
        depth: int = 50,
        *,
        kernel_size: int = 7,
        channels_per_weight: int = 8,
        similarity: str = "product",
        drop_path: float = 0.0,
        **options: Any,
    ):
        if depth not in _DEPTHS:
            raise ConfigError(f"depth={depth}: expected one of {', '.join(map(str, _DEPTHS))}.")
        available = four_stages(256)
        super().__init__(available, **options)
        relation = dict(kernel_size=kernel_size, channels_per_weight=channels_per_weight, similarity=similarity)
        self.stem = nn.Sequential(
            nn.Conv2d(self.in_channels, _STEM_CHANNELS, 1, bias=False),
            nn.BatchNorm2d(_STEM_CHANNELS),
            nn.ReLU(inplace=True),
            LocalRelation(_STEM_CHANNELS, stride=2, **relation),
            nn.BatchNorm2d(_STEM_CHANNELS),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        rates = iter(drop_path_rates(drop_path, sum(_DEPTHS[depth])))
        self.layers = nn.ModuleDict()
        channels = _STEM_CHANNELS
        for name, num_blocks in zip(self.stages_to_build, _DEPTHS[depth]):
            self.layers[name] = nn.ModuleList()
            for i in range(num_blocks):
                block = RelationBlock(
                    channels,
                    _WIDTHS[name],
                    out_channels=available[name].channels,
                    relation=relation,
                    stride=2 if i == 0 and name != "res2" else 1,
                    drop_path=next(rates),
                )
                self.layers[name].append(block)
                channels = available[name].channels
        if self.is_classifier:
            self.fc = nn.Linear(channels, self.num_classes)
        self.apply(_init_weights)
        self.freeze()

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the features, or a classifier's logits, of images of at least 4 pixels."""
        check_images("LRNet", images, min_size=_STEM_STRIDE, in_channels=self.in_channels)
        x = self.stem(images)
        features = {}
        for name, layer in self.layers.items():
            for block in layer:
                x = block(x)
            if name in self.feature_info:
                features[name] = x
        return self.fc(x.mean((2, 3))) if self.is_classifier else features

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`; this is the stem."""
        fuse_pair(self.stem, "0", "1")
        return self


def _init_weights(module: nn.Module) -> None:
    """Initialize convolutions as He et al. do; those of queries and keys get small values, for a flat softmax."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, LocalRelation):
        module.query.reset_parameters()
        module.key.reset_parameters()


BACKBONES.register_variants(LRNet, LRNET_VARIANTS)
