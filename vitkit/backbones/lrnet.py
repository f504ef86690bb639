"""LR-Net (Hu et al. 2019, https://arxiv.org/abs/1904.11491): a ResNet whose only spatial layers are local relations."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import Backbone, check_images, choose_features, drop_path_rates
from vitkit.errors import ConfigError
from vitkit.nn.layers import run_block
from vitkit.nn.local_relation import LocalRelation
from vitkit.registry import BACKBONES
from vitkit.structures import FeatureInfo

_DEPTHS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}

LRNET_VARIANTS = {f"lrnet{depth}": dict(depth=depth) for depth in _DEPTHS}
"""The paper's table 1: 7 x 7 windows, m = 8."""
for _depth in (26, 50):
    for _size in (3, 5, 9):
        LRNET_VARIANTS[f"lrnet{_depth}_k{_size}"] = dict(depth=_depth, kernel_size=_size)
    for _channels in (1, 2, 4, 16):
        LRNET_VARIANTS[f"lrnet{_depth}_m{_channels}"] = dict(depth=_depth, channels_per_weight=_channels)

_STEM_CHANNELS = 64
_STAGES = {  # name: width of the local relations, output channels, stride on the image
    "res2": (100, 256, 4),
    "res3": (200, 512, 8),
    "res4": (400, 1024, 16),
    "res5": (800, 2048, 32),
}
_STEM_STRIDE = 4


class RelationBlock(nn.Module):
    """ResNet's bottleneck with a local relation in place of its 3x3 convolution.

    Args:
        in_channels: of the input.
        width: channels of the local relation.
        out_channels: of the output.
        relation: further arguments of the `LocalRelation`.
        stride: of the output on the input.
        drop_path: probability of skipping the block in training.
    """

    recompute = False

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
        out = F.relu_(self.bn1(self.conv1(x)))
        out = F.relu_(self.bn2(self.relation(out)))
        out = self.drop_path(self.bn3(self.conv3(out)))
        out = out + (x if self.downsample is None else self.downsample(x))
        return F.relu_(out)


@BACKBONES.register
class LRNet(Backbone):
    """Maps "res2" to "res5" at strides 4 to 32, or a classifier.

    The paper's table 1 with the widths that give its number of parameters: 100, 200, 400 and 800.

    Args:
        depth: 26, 50 or 101.
        kernel_size: side of the windows; odd.
        channels_per_weight: m, how many channels share a weight.
        similarity: of a query and a key; see `vitkit.nn.local_windows.SIMILARITIES`.
        out_features: the maps to return, and no deeper stage is made; all four if None.
        num_classes: makes it a classifier.
        frozen_stages: how many stages are not trained; 1 is the stem and res2.
        drop_path: the last block's probability to be skipped in training; it grows from 0 over the blocks.
        pretrained: what `load_pretrained` loads: a path or an address; False, nothing. There are no official weights.
    Raises:
        ConfigError: an argument is impossible.
    """

    class_head = ("fc.",)

    def __init__(
        self,
        depth: int = 50,
        *,
        kernel_size: int = 7,
        channels_per_weight: int = 8,
        similarity: str = "product",
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        drop_path: float = 0.0,
        pretrained: bool | str = False,
    ):
        super().__init__()
        if depth not in _DEPTHS:
            raise ConfigError(f"LRNet: depth {depth}: expected one of {', '.join(map(str, _DEPTHS))}.")
        available = {name: FeatureInfo(channels, stride) for name, (_, channels, stride) in _STAGES.items()}
        self.feature_info = choose_features("LRNet", available, out_features, num_classes=num_classes)
        self.is_classifier = num_classes is not None
        self.pretrained = pretrained

        relation = dict(kernel_size=kernel_size, channels_per_weight=channels_per_weight, similarity=similarity)
        self.stem = nn.Sequential(
            nn.Conv2d(3, _STEM_CHANNELS, 1, bias=False),
            nn.BatchNorm2d(_STEM_CHANNELS),
            nn.ReLU(inplace=True),
            LocalRelation(_STEM_CHANNELS, stride=2, **relation),
            nn.BatchNorm2d(_STEM_CHANNELS),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        rates = iter(drop_path_rates("LRNet", drop_path, sum(_DEPTHS[depth])))
        names = list(_STAGES)
        self.layers = nn.ModuleDict()
        in_channels = _STEM_CHANNELS
        for name, num_blocks in zip(names[: names.index(list(self.feature_info)[-1]) + 1], _DEPTHS[depth]):
            width, out_channels, stage_stride = _STAGES[name]
            blocks = []
            for i in range(num_blocks):
                stride = 2 if i == 0 and stage_stride > _STEM_STRIDE else 1
                blocks.append(
                    RelationBlock(
                        in_channels,
                        width,
                        out_channels=out_channels,
                        relation=relation,
                        stride=stride,
                        drop_path=next(rates),
                    )
                )
                in_channels = out_channels
            self.layers[name] = nn.ModuleList(blocks)
        if self.is_classifier:
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

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """
        Args:
            images: (B, 3, H, W) float, normalised; any H and W from 4.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to
            coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the images have not three channels, or are smaller than one place of res2.
        """
        check_images("LRNet", images, least=_STEM_STRIDE)
        x = self.stem(images)
        features = {}
        for name, layer in self.layers.items():
            for block in layer:
                x = run_block(block, x)
            if name in self.feature_info:
                features[name] = x
        return self.fc(x.mean((2, 3))) if self.is_classifier else features


def _init_weights(module: nn.Module) -> None:
    """He et al.'s, for convolutions that a norm follows. Those of queries and keys keep small values, so that the
    softmax starts out wide."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, LocalRelation):
        module.query.reset_parameters()
        module.key.reset_parameters()


BACKBONES.register_variants(LRNet, LRNET_VARIANTS)
