"""ResNet-vd (He et al. 2018, "Bag of Tricks", section 4.1, https://arxiv.org/abs/1812.01187): RT-DETR's backbone."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.resnet import ResNet, conv_norm_relu
from vitkit.errors import ConfigError
from vitkit.nn.fusion import RELU, fuse_pair
from vitkit.registry import BACKBONES

_WEIGHTS = "https://github.com/lyuwenyu/storage/releases/download/v0.1/ResNet{}_pretrained_from_paddle.pth"
_WEIGHT_NAMES = {18: "18_vd", 34: "34_vd", 50: "50_vd_ssld_v2", 101: "101_vd_ssld"}


class AveragePool(nn.Module):
    """The average over stride x stride locations, counting only those inside the map and the image."""

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """(B, C, H, W) -> (B, C, ceil(H / stride), ceil(W / stride)); `padding` is (B, 1, H, W) bool, where x is 0."""
        if self.stride == 1:
            return x
        pooled = F.avg_pool2d(x, self.stride, ceil_mode=True)
        if padding is None:
            return pooled
        inside = F.avg_pool2d((~padding).to(x.dtype), self.stride, ceil_mode=True)
        return pooled / inside.clamp(min=1 / self.stride**2)


@BACKBONES.register
class ResNetVD(ResNet):
    """ResNet with a stem of three 3x3 convolutions, and shortcuts that average before they project.

    Its networks of basic blocks also project the first shortcut, as RT-DETR's do. Loads the weights of timm's
    `resnet50d` and `resnet101d`.

    Args:
        depth: 18, 34, 50 or 101.
        frozen_stem: whether the stem is not trained even if no stage is frozen.
        options: the other arguments of `ResNet`; pretrained=True means the ImageNet weights that RT-DETR starts from.
    Raises:
        ConfigError: an argument is invalid.
    """

    input_weight = "conv1.0.weight"

    def __init__(self, depth: int = 50, *, frozen_stem: bool = False, **options: Any):
        super().__init__(depth, **options)
        norm_layer, width = type(self.bn1), self.base_channels
        if width < 2:
            raise ConfigError(f"base_channels={width}: expected at least 2, as its stem begins with half of them.")
        self.conv1 = nn.Sequential(
            nn.Conv2d(self.in_channels, width // 2, 3, stride=2, padding=1, bias=False),
            norm_layer(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False),
            norm_layer(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, padding=1, bias=False),
        )
        for layer in self.layers.values():
            first, out_channels = layer[0], layer[-1].conv1.in_channels
            projection = nn.Conv2d(first.conv1.in_channels, out_channels, 1, bias=False)
            first.downsample = nn.Sequential(AveragePool(first.stride), projection, norm_layer(out_channels))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.frozen_stem = frozen_stem
        self.freeze()

    def stem(self, images: Tensor, padding: Tensor | None) -> Tensor:
        """(B, C, H, W) -> (B, 64, H / 2, W / 2); `padding` is (B, 1, H / 2, W / 2) bool."""
        conv1, norm1, _, conv2, norm2, _, conv3 = self.conv1
        x = conv_norm_relu(images, conv1, norm1, padding)
        x = conv_norm_relu(x, conv2, norm2, padding)
        return conv_norm_relu(x, conv3, self.bn1, padding)

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`; this is the stem."""
        if type(self).stem is ResNetVD.stem:  # a subclass may have another
            for conv, norm in (("conv1.0", "conv1.1"), ("conv1.3", "conv1.4"), ("conv1.6", "bn1")):
                fuse_pair(self, conv, norm, RELU)
        return self

    def _published_url(self) -> str:
        return _WEIGHTS.format(_WEIGHT_NAMES[self.depth])
