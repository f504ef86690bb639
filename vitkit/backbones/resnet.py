"""ResNet (He et al. 2015, https://arxiv.org/abs/1512.03385): torchvision's, with named features."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import resnet as tv
from torchvision.ops import FrozenBatchNorm2d, StochasticDepth

from vitkit.backbones.base import Backbone, check_images, choose_features, drop_path_rates
from vitkit.errors import ConfigError
from vitkit.nn.layers import run_block
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

RESNET_VARIANTS = {f"resnet{depth}": dict(depth=depth) for depth in (18, 34, 50, 101)}
"""The paper's table 1."""


def conv_norm(x: Tensor, conv: nn.Conv2d, norm: nn.Module) -> Tensor:
    """`norm(conv(x))`; a norm that is a fixed scale and shift costs next to nothing."""
    if not isinstance(norm, FrozenBatchNorm2d):
        return norm(conv(x))
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    shift = norm.bias - norm.running_mean * scale
    if torch.is_grad_enabled() and conv.weight.requires_grad:
        # Scaled weights would be kept for the backward pass, as many as the network has; so scale in place.
        return conv(x).mul_(scale.view(1, -1, 1, 1)).add_(shift.view(1, -1, 1, 1))
    weight = conv.weight * scale.view(-1, 1, 1, 1)
    return F.conv2d(x, weight, shift, conv.stride, conv.padding, conv.dilation)


def zero(x: Tensor, padding: Tensor | None) -> Tensor:
    """Zeroes the padded places, (B, 1, H, W) bool, so that no kernel carries them into the image."""
    return x if padding is None else x.masked_fill(padding, 0.0)


def relu(x: Tensor, padding: Tensor | None) -> Tensor:
    """In place, zero at padded places."""
    return zero(x, padding).relu_()


def every(padding: Tensor | None, stride: int) -> Tensor | None:
    """The padding of a map after a step of `stride`: its place i covers the place i * stride before."""
    return None if padding is None else padding[..., ::stride, ::stride]


class BasicBlock(tv.BasicBlock):
    """torchvision's, with `conv_norm`, padding and, set by the network, `drop_path`."""

    recompute = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        padding = every(padding, self.stride)
        out = relu(conv_norm(x, self.conv1, self.bn1), padding)
        out = self.drop_path(conv_norm(out, self.conv2, self.bn2))
        out += x if self.downsample is None else conv_norm(x, *self.downsample)
        return relu(out, padding)


class Bottleneck(tv.Bottleneck):
    """torchvision's, with `conv_norm`, padding and, set by the network, `drop_path`."""

    recompute = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out = relu(conv_norm(x, self.conv1, self.bn1), padding)
        padding = every(padding, self.stride)
        out = relu(conv_norm(out, self.conv2, self.bn2), padding)
        out = self.drop_path(conv_norm(out, self.conv3, self.bn3))
        out += x if self.downsample is None else conv_norm(x, *self.downsample)
        return relu(out, padding)


_BLOCKS = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (Bottleneck, [3, 4, 6, 3]),
    101: (Bottleneck, [3, 4, 23, 3]),
}
_NORMS = {"bn": nn.BatchNorm2d, "frozen_bn": FrozenBatchNorm2d}
_STAGES = {"res2": "layer1", "res3": "layer2", "res4": "layer3", "res5": "layer4"}


@BACKBONES.register
class ResNet(Backbone, tv.ResNet):
    """Maps "res2" to "res5" at strides 4 to 32; torchvision's state dicts fit.

    Args:
        depth: 18, 34, 50 or 101.
        norm: "bn", or "frozen_bn": a fixed scale and shift, for training with few images per GPU.
        frozen_stages: how many stages are not trained; 1 is the stem and res2, as in DETR.
        dilation: the last stage keeps res4's stride of 16 and dilates its kernels (DC5).
        out_features: the maps to return, and no deeper stage is made; all four if None.
        num_classes: makes it a classifier.
        drop_path: the last block's probability to be skipped in training; it grows from 0 over the blocks.
        pretrained: what `load_pretrained` loads: True, torchvision's ImageNet weights (IMAGENET1K_V1); a path;
            or False, nothing.
    Raises:
        ConfigError: an argument is none of these.
    """

    class_head = ("fc.",)
    optional_weights = ("*num_batches_tracked",)

    def __init__(
        self,
        depth: int = 50,
        *,
        norm: str = "bn",
        frozen_stages: int = 0,
        dilation: bool = False,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        drop_path: float = 0.0,
        pretrained: bool | str = True,
    ):
        if depth not in _BLOCKS:
            raise ConfigError(f"ResNet: depth {depth}: expected one of {', '.join(map(str, _BLOCKS))}.")
        if norm not in _NORMS:
            raise ConfigError(f"ResNet: unknown norm {norm!r}. {nearest(norm, _NORMS)}")
        block, num_blocks = _BLOCKS[depth]
        if dilation and block is BasicBlock:
            raise ConfigError(f"ResNet: depth {depth} has no dilated form: expected 50 or 101, or dilation=False.")
        strides = {"res2": 4, "res3": 8, "res4": 16, "res5": 16 if dilation else 32}
        available = {name: FeatureInfo(64 * 2**i * block.expansion, strides[name]) for i, name in enumerate(_STAGES)}
        feature_info = choose_features("ResNet", available, out_features, num_classes=num_classes)
        super().__init__(
            block,
            num_blocks,
            num_classes=num_classes or 1,
            norm_layer=_NORMS[norm],
            replace_stride_with_dilation=[False, False, dilation],
        )
        blocks = [module for module in self.modules() if isinstance(module, block)]
        for module, rate in zip(blocks, drop_path_rates("ResNet", drop_path, len(blocks))):
            module.drop_path = StochasticDepth(rate, "row")
        self.depth = depth
        self.pretrained = pretrained
        self.is_classifier = num_classes is not None

        # What is not needed is not kept: it would never get a gradient, which DDP does not forgive.
        self.feature_info = feature_info
        self.stage_names = list(_STAGES)[: list(_STAGES).index(list(feature_info)[-1]) + 1]
        for name in _STAGES.keys() - set(self.stage_names):
            delattr(self, _STAGES[name])
        if not self.is_classifier:
            del self.avgpool, self.fc
        self.frozen_stages = frozen_stages
        self.freeze()

    def stages(self) -> list[list[nn.Module]]:
        return [[self.conv1, self.bn1], *([getattr(self, _STAGES[name])] for name in self.stage_names)]

    def drop_stages_after(self, feature: str) -> None:
        deepest = self.stage_names.index(feature) + 1
        for name in self.stage_names[deepest:]:
            delattr(self, _STAGES[name])
        self.stage_names = self.stage_names[:deepest]

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor] | Tensor:
        """
        Args:
            images: (B, 3, H, W) float, normalised; any H and W.
            padding_mask: (B, H, W) bool, True = padding, zeroed before every kernel reads it, so that an image's
                part of the maps is what it would be alone. None: no padding, or padding like any other place.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to
            coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the images have not three channels.
        """
        check_images(type(self).__name__, images)
        padding = None if padding_mask is None else padding_mask[:, None]
        # DETR is 5 to 10 % faster with it on a CPU, and tensor cores want it.
        x = images.contiguous(memory_format=torch.channels_last)
        x = zero(x, padding)
        padding = every(padding, 2)
        x = self.maxpool(relu(conv_norm(x, self.conv1, self.bn1), padding))
        padding = every(padding, 2)
        x = zero(x, padding)
        features = {}
        for name in self.stage_names:
            for block in getattr(self, _STAGES[name]):
                x = run_block(block, x, padding)
                padding = every(padding, block.stride)
            if name in self.feature_info:
                features[name] = x
        return self.fc(self.avgpool(x).flatten(1)) if self.is_classifier else features

    def _address(self) -> str:
        url = torchvision.models.get_model_weights(f"resnet{self.depth}")["IMAGENET1K_V1"].url
        return f"{url}#sha256={Path(url).stem.split('-')[1]}"


BACKBONES.register_variants(ResNet, RESNET_VARIANTS)
