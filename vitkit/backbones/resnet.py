"""ResNet (He et al. 2015, https://arxiv.org/abs/1512.03385): torchvision's, with named features."""

from pathlib import Path
from typing import Any

import torchvision
from torch import Tensor, nn
from torchvision.models import resnet as tv
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

from vitkit.backbones.base import STAGES, BackboneBase, check_at_least_1, drop_path_rates, four_stages
from vitkit.errors import ConfigError
from vitkit.kernels import convolution_layout
from vitkit.nn.layers import InferenceOnly, conv_norm
from vitkit.ops.images import check_images
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

RESNET_VARIANTS = {f"resnet{depth}": dict(depth=depth) for depth in (18, 34, 50, 101)}
"""The variants of the paper's table 1."""


def without_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Set padding, (B, 1, H, W) bool, to zero."""
    return x if padding is None else x.masked_fill(padding, 0.0)


def conv_norm_relu(
    x: Tensor,
    conv: nn.Conv2d,
    norm: nn.Module,
    padding: Tensor | None,
    *,
    residual: Tensor | None = None,
    drop_path: nn.Module | None = None,
) -> Tensor:
    """Apply a convolution, a norm and ReLU, and set padding to zero.

    Args:
        residual: added before ReLU.
        drop_path: for the rest of a block with a residual.
    """
    if isinstance(conv, InferenceOnly):  # a fused one, which has all of it
        return without_padding(conv(x, residual=residual), padding)
    x = conv_norm(x, conv, norm)
    if residual is not None:
        x = x if drop_path is None else drop_path(x)
        x += residual
    return without_padding(x, padding).relu_()


def subsample(padding: Tensor | None, stride: int) -> Tensor | None:
    """Return the padding of a map after a layer of `stride`: location i was i * stride before."""
    return None if padding is None else padding[..., ::stride, ::stride]


def shortcut(x: Tensor, downsample: nn.Sequential | None, padding: Tensor | None) -> Tensor:
    """Return the residual of a block: x, or its projection to the size of the block's output."""
    if downsample is None:
        return x
    *pooling, conv, norm = downsample
    for pool in pooling:
        x = pool(x, padding)
    return conv_norm(x, conv, norm)


def fuse_block(block: nn.Module, num_convolutions: int) -> nn.Module:
    """Fold the norms of a block, numbered from 1, and of its shortcut into the convolutions before them."""
    from vitkit.nn.fusion import RELU, fuse_pair  # read only when a model is fused

    for i in range(1, num_convolutions + 1):
        fuse_pair(block, f"conv{i}", f"bn{i}", RELU)
    if block.downsample is not None:
        last = len(block.downsample) - 1
        fuse_pair(block.downsample, f"{last - 1}", f"{last}")
    return block


class BasicBlock(tv.BasicBlock):
    """torchvision's block with `conv_norm`, padding and `drop_path`, which the network sets."""

    activation_checkpointing = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride); `padding` is (B, 1, H, W) bool."""
        input_padding, padding = padding, subsample(padding, self.stride)
        out = conv_norm_relu(x, self.conv1, self.bn1, padding)
        residual = shortcut(x, self.downsample, input_padding)
        return conv_norm_relu(out, self.conv2, self.bn2, padding, residual=residual, drop_path=self.drop_path)

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`."""
        return fuse_block(self, 2)


class Bottleneck(tv.Bottleneck):
    """torchvision's block with `conv_norm`, padding and `drop_path`, which the network sets."""

    activation_checkpointing = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride); `padding` is (B, 1, H, W) bool."""
        input_padding, padding = padding, subsample(padding, self.conv1.stride[0])
        out = conv_norm_relu(x, self.conv1, self.bn1, padding)
        padding = subsample(padding, self.conv2.stride[0])
        out = conv_norm_relu(out, self.conv2, self.bn2, padding)
        residual = shortcut(x, self.downsample, input_padding)
        return conv_norm_relu(out, self.conv3, self.bn3, padding, residual=residual, drop_path=self.drop_path)

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`."""
        return fuse_block(self, 3)


_BLOCKS = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (Bottleneck, [3, 4, 6, 3]),
    101: (Bottleneck, [3, 4, 23, 3]),
}
_NORMS = {"bn": nn.BatchNorm2d, "frozen_bn": FrozenBatchNorm2d}


@BACKBONES.register
class ResNet(BackboneBase, tv.ResNet):
    """ResNet: maps "res2" to "res5" at strides 4 to 32, or a classifier; loads torchvision's state dicts.

    Args:
        depth: 18, 34, 50 or 101.
        norm: "bn", or "frozen_bn": a fixed scale and shift, for training with few images per GPU.
        dilation: keep res4's stride of 16 in the last stage and dilate its kernels (DC5).
        base_channels: channels of the stem and of the 3x3 convolutions of the first stage; each stage doubles them. The
            paper has 64; fewer make a small network, for which there are no published weights.
        stride_in_1x1: put the stride of a stage in its first 1x1 convolution, as required by the paper's own weights,
            detectron2's "MSRA" and Keras's, rather than in the 3x3 convolution after it, as by torchvision's. The names
            and shapes of weights are the same, so a wrong value only shows in worse results.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`; pretrained=True means torchvision's ImageNet weights
            (IMAGENET1K_V1).
    Raises:
        ConfigError: an argument is invalid.
    """

    class_head = ("fc.",)
    stage_pattern = r"layer\d\."
    input_weight = "conv1.weight"
    optional_weights = ("*num_batches_tracked",)

    def __init__(
        self,
        depth: int = 50,
        *,
        norm: str = "bn",
        dilation: bool = False,
        base_channels: int = 64,
        stride_in_1x1: bool = False,
        drop_path: float = 0.0,
        pretrained: bool | str | None = True,
        **options: Any,
    ):
        if depth not in _BLOCKS:
            raise ConfigError(f"depth={depth}: expected one of {', '.join(map(str, _BLOCKS))}.")
        if norm not in _NORMS:
            raise ConfigError(f"norm={norm!r}: unknown. {nearest(norm, _NORMS)}")
        block, num_blocks = _BLOCKS[depth]
        if dilation and block is BasicBlock:
            raise ConfigError(f"dilation=True: a ResNet of depth {depth} has no dilated form. Expected 50 or 101.")
        if stride_in_1x1 and block is BasicBlock:
            raise ConfigError(
                f"stride_in_1x1=True: a ResNet of depth {depth} has no 1x1 convolutions in its blocks. Expected depth "
                "50 or 101."
            )
        check_at_least_1(base_channels=base_channels)
        available = four_stages(base_channels * block.expansion)
        if dilation:
            available["res5"] = FeatureInfo(available["res5"].channels, available["res4"].stride)
        BackboneBase.__init__(self, available, pretrained=pretrained, **options)
        self.base_channels = base_channels
        tv.ResNet.__init__(
            self,
            block,
            num_blocks,
            num_classes=self.num_classes or 1,
            norm_layer=_NORMS[norm],
            replace_stride_with_dilation=[False, False, dilation],
        )
        if self.in_channels != 3 or base_channels != 64:
            self.conv1 = nn.Conv2d(self.in_channels, base_channels, 7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if base_channels != 64:
            self.bn1 = _NORMS[norm](base_channels)
            self.fc = nn.Linear(8 * base_channels * block.expansion, self.fc.out_features)
        blocks = [module for module in self.modules() if isinstance(module, block)]
        for module, rate in zip(blocks, drop_path_rates(drop_path, len(blocks))):
            module.drop_path = StochasticDepth(rate, "row")
            if stride_in_1x1:
                module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        self.depth = depth
        self.hidden_settings = {"dilation": dilation}

        # Parts that are not used are removed: they would never get a gradient, which DDP does not allow.
        self.drop_stages_after(self.stages_to_build[-1])
        if not self.is_classifier:
            del self.avgpool, self.fc
        self.freeze()

    def _make_layer(
        self, block: type[nn.Module], planes: int, blocks: int, stride: int = 1, dilate: bool = False
    ) -> nn.Sequential:
        """Make torchvision's stage, base_channels / 64 times as wide."""
        if planes == 64:
            self.inplanes = self.base_channels  # of the stem, which torchvision makes 64 channels wide
        stage = super()._make_layer(block, planes * self.base_channels // 64, blocks, stride, dilate)
        if self.base_channels < 16:
            from vitkit.kernels.convolution.narrow import subsample_before_1x1  # few networks are so narrow

            subsample_before_1x1(stage)
        return stage

    @property
    def layers(self) -> dict[str, nn.Sequential]:
        """The stages by the names of their maps; torchvision names them layer1 to layer4."""
        numbered = {name: f"layer{i}" for i, name in enumerate(STAGES, start=1)}
        return {name: getattr(self, layer) for name, layer in numbered.items() if hasattr(self, layer)}

    def stem(self, images: Tensor, padding: Tensor | None) -> Tensor:
        """(B, C, H, W) -> (B, base_channels, H / 2, W / 2); `padding` is (B, 1, H / 2, W / 2) bool."""
        return conv_norm_relu(images, self.conv1, self.bn1, padding)

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`; this is the stem."""
        from vitkit.nn.fusion import RELU, fuse_pair  # read only when a model is fused

        if type(self).stem is ResNet.stem:  # a subclass may have another
            fuse_pair(self, "conv1", "bn1", RELU)
        return self

    def stages(self) -> list[list[nn.Module]]:
        """Return the stem, then each stage."""
        return [[self.conv1, self.bn1], *([layer] for layer in self.layers.values())]

    def drop_stages_after(self, feature: str) -> None:
        for i in range(STAGES.index(feature) + 1, len(self.layers)):
            delattr(self, f"layer{i + 1}")

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor] | Tensor:
        """Compute the feature maps, or a classifier's logits.

        Args:
            images: (B, in_channels, H, W) float, normalized; any H and W.
            padding_mask: (B, H, W) bool, True = padding, which is set to zero before every kernel reads it, so that an
                image's part of the maps is the same as without padding. None: padding is treated like the image.
        """
        check_images(type(self).__name__, images, in_channels=self.in_channels)
        padding = None if padding_mask is None else padding_mask[:, None]
        x = images.contiguous(memory_format=convolution_layout(images))
        # A kernel would carry what is in the padding into the image.
        x = without_padding(x, padding)
        padding = subsample(padding, 2)
        x = self.maxpool(self.stem(x, padding))
        padding = subsample(padding, 2)
        x = without_padding(x, padding)
        features = {}
        for name, layer in self.layers.items():
            for block in layer:
                x = block(x, padding)
                padding = subsample(padding, block.stride)
            if name in self.feature_info:
                features[name] = x
        return self.fc(self.avgpool(x).flatten(1)) if self.is_classifier else features

    def _url(self) -> str:
        if self.base_channels != 64:
            raise ConfigError(
                f"pretrained=True: there are no published weights with base_channels={self.base_channels}, only with "
                "64. Set pretrained=False, or give a file."
            )
        return self._published_url()

    def _published_url(self) -> str:
        return resnet_url(self.depth)


def resnet_url(depth: int) -> str:
    """Return the URL of torchvision's ImageNet weights, with their checksum."""
    url = torchvision.models.get_model_weights(f"resnet{depth}")["IMAGENET1K_V1"].url
    return f"{url}#sha256={Path(url).stem.split('-')[1]}"


BACKBONES.register_variants(ResNet, RESNET_VARIANTS)
