"""ResNet (He et al. 2015, https://arxiv.org/abs/1512.03385): torchvision's, with named features."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import resnet as tv
from torchvision.ops import FrozenBatchNorm2d

from vitkit.checkpoint import read_checkpoint
from vitkit.download import cached_file
from vitkit.errors import CheckpointError, ConfigError
from vitkit.nn.layers import run_block
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

logger = logging.getLogger("vitkit")

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
    """torchvision's, with `conv_norm` and padding."""

    recompute = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        padding = every(padding, self.stride)
        out = relu(conv_norm(x, self.conv1, self.bn1), padding)
        out = conv_norm(out, self.conv2, self.bn2)
        out += x if self.downsample is None else conv_norm(x, *self.downsample)
        return relu(out, padding)


class Bottleneck(tv.Bottleneck):
    """torchvision's, with `conv_norm` and padding."""

    recompute = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out = relu(conv_norm(x, self.conv1, self.bn1), padding)
        padding = every(padding, self.stride)
        out = relu(conv_norm(out, self.conv2, self.bn2), padding)
        out = conv_norm(out, self.conv3, self.bn3)
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
class ResNet(tv.ResNet):
    """Maps "res2" to "res5" at strides 4 to 32; torchvision's state dicts fit.

    Args:
        depth: 18, 34, 50 or 101.
        norm: "bn", or "frozen_bn": a fixed scale and shift, for training with few images per GPU.
        frozen_stages: how many stages are not trained; 1 is the stem and res2, as in DETR.
        dilation: the last stage keeps res4's stride of 16 and dilates its kernels (DC5).
        out_features: the maps to return, and no deeper stage is made; all four if None.
        num_classes: makes it a classifier.
        pretrained: what `load_pretrained` loads: True, torchvision's ImageNet weights (IMAGENET1K_V1); a path;
            or False, nothing.
    Raises:
        ConfigError: an argument is none of these.
    """

    def __init__(
        self,
        depth: int = 50,
        *,
        norm: str = "bn",
        frozen_stages: int = 0,
        dilation: bool = False,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        pretrained: bool | str = True,
    ):
        if depth not in _BLOCKS:
            raise ConfigError(f"ResNet: depth {depth}: expected one of {', '.join(map(str, _BLOCKS))}.")
        if norm not in _NORMS:
            raise ConfigError(f"ResNet: unknown norm {norm!r}. {nearest(norm, _NORMS)}")
        if not 0 <= frozen_stages <= 4:
            raise ConfigError(f"ResNet: frozen_stages {frozen_stages}: expected 0 to 4.")
        block, num_blocks = _BLOCKS[depth]
        if dilation and block is BasicBlock:
            raise ConfigError(f"ResNet: depth {depth} has no dilated form: expected 50 or 101, or dilation=False.")
        if num_classes is not None and out_features is not None:
            raise ConfigError("ResNet: a classifier (num_classes) returns no features: leave out_features out.")
        if out_features is not None and not out_features:
            raise ConfigError(f"ResNet: out_features is empty. {nearest('', _STAGES)}")
        for name in out_features or ():
            if name not in _STAGES:
                raise ConfigError(f"ResNet: unknown feature {name!r} in out_features. {nearest(name, _STAGES)}")
        super().__init__(
            block,
            num_blocks,
            num_classes=num_classes or 1,
            norm_layer=_NORMS[norm],
            replace_stride_with_dilation=[False, False, dilation],
        )
        self.depth = depth
        self.pretrained = pretrained
        self.is_classifier = num_classes is not None

        # What is not needed is not kept: it would never get a gradient, which DDP does not forgive.
        self.out_features = [name for name in _STAGES if out_features is None or name in out_features]
        self.stages = list(_STAGES)[: list(_STAGES).index(self.out_features[-1]) + 1]
        for name in _STAGES.keys() - set(self.stages):
            delattr(self, _STAGES[name])
        if not self.is_classifier:
            del self.avgpool, self.fc

        strides = {"res2": 4, "res3": 8, "res4": 16, "res5": 16 if dilation else 32}
        widths = {name: 64 * 2**i * block.expansion for i, name in enumerate(_STAGES)}
        self.feature_info = {name: FeatureInfo(widths[name], strides[name]) for name in self.out_features}

        self.frozen_stages = frozen_stages
        for module in self._frozen_modules():
            module.requires_grad_(False)

    def _frozen_modules(self) -> list[nn.Module]:
        stem = [self.conv1, self.bn1] if self.frozen_stages else []
        return stem + [getattr(self, _STAGES[name]) for name in self.stages[: self.frozen_stages]]

    def train(self, mode: bool = True) -> "ResNet":
        super().train(mode)
        for module in self._frozen_modules():
            module.eval()  # running statistics are frozen, too
        return self

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor] | Tensor:
        """
        Args:
            images: (B, 3, H, W) float, normalised; any H and W.
            padding_mask: (B, H, W) bool, True = padding, zeroed before every kernel reads it, so that an image's
                part of the maps is what it would be alone. None: no padding, or padding like any other place.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to
            coarse; a classifier returns (B, num_classes) logits.
        """
        padding = None if padding_mask is None else padding_mask[:, None]
        # DETR is 5 to 10 % faster with it on a CPU, and tensor cores want it.
        x = images.contiguous(memory_format=torch.channels_last)
        x = zero(x, padding)
        padding = every(padding, 2)
        x = self.maxpool(relu(conv_norm(x, self.conv1, self.bn1), padding))
        padding = every(padding, 2)
        x = zero(x, padding)
        features = {}
        for name in self.stages:
            for block in getattr(self, _STAGES[name]):
                x = run_block(block, x, padding)
                padding = every(padding, block.stride)
            if name in self.feature_info:
                features[name] = x
        return self.fc(self.avgpool(x).flatten(1)) if self.is_classifier else features

    def load_pretrained(self) -> str | None:
        """Loads what `pretrained` names. A run calls this at its start, unless a checkpoint follows anyway.

        Returns:
            where the weights came from, or None if `pretrained` is False.
        Raises:
            CheckpointError: the weights cannot be had, or are of another network.
        """
        if not self.pretrained:
            if self.frozen_stages:
                logger.warning(
                    "backbone: its first %d stages are random and frozen, so they never learn. To train without "
                    "pretrained weights or a checkpoint set model.backbone.frozen_stages=0.",
                    self.frozen_stages,
                )
            return None
        path, source = self._find_pretrained()
        state = read_checkpoint(path)
        own = self.state_dict()
        # A backbone has no use for the classifier, nor a classifier for one of other classes.
        fits = {name: value for name, value in state.items() if name in own}
        fits = {k: v for k, v in fits.items() if not (k.startswith("fc.") and v.shape != own[k].shape)}
        optional = {name for name in own if name.startswith("fc.") or name.endswith("num_batches_tracked")}
        missing = sorted(own.keys() - fits.keys() - optional)
        wrong = [f"{k} {tuple(v.shape)}" for k, v in fits.items() if v.shape != own[k].shape]
        if missing or wrong:
            raise CheckpointError(
                f"{source} does not fit ResNet-{self.depth}: missing {missing[:3]} ({len(missing)} in all), "
                f"other shapes {wrong[:3]} ({len(wrong)} in all). Expected torchvision's resnet{self.depth} names."
            )
        self.load_state_dict(fits, strict=False)
        return source

    def _find_pretrained(self) -> tuple[Path, str]:
        """The weights' file, and what it is called in messages."""
        if isinstance(self.pretrained, str):
            if not Path(self.pretrained).is_file():
                raise CheckpointError(
                    f"model.backbone.pretrained: no file {self.pretrained!r}. Give the path of torchvision's "
                    f"resnet{self.depth} weights, or set model.backbone.pretrained=False to start from random weights."
                )
            return Path(self.pretrained), self.pretrained
        url = torchvision.models.get_model_weights(f"resnet{self.depth}")["IMAGENET1K_V1"].url
        try:
            return cached_file(url, sha256_prefix=Path(url).stem.split("-")[1]), url
        except CheckpointError as error:
            raise CheckpointError(
                f"model.backbone.pretrained: torchvision's resnet{self.depth} weights are missing: {error} Or name a "
                "file (model.backbone.pretrained=FILE), or start from random weights (model.backbone.pretrained=False)."
            ) from error


BACKBONES.register_variants(ResNet, RESNET_VARIANTS)
