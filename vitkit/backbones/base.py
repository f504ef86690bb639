"""Base of all backbones: the choice of features, frozen stages, and the source of pretrained weights."""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from timm.models import adapt_input_conv
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, check_pixel_statistics, in_channels
from vitkit.protocols.backbone import Backbone
from vitkit.registry import nearest
from vitkit.structures import FeatureInfo

logger = logging.getLogger("vitkit")

STAGES = ("res2", "res3", "res4", "res5")
"""The maps of a backbone with four stages, at strides 4 to 32."""


def four_stages(channels: int) -> dict[str, FeatureInfo]:
    """Return the maps of four stages, each with twice the channels of the previous one, at strides 4 to 32."""
    return {name: FeatureInfo(channels * 2**i, 4 * 2**i) for i, name in enumerate(STAGES)}


def choose_features(
    available: Mapping[str, FeatureInfo], out_features: Sequence[str] | None, *, num_classes: int | None
) -> dict[str, FeatureInfo]:
    """Return the features that a backbone returns, fine to coarse.

    Args:
        available: all features that it could return, fine to coarse.
        out_features: the requested names; None for all.
        num_classes: number of classes of a classifier, which returns logits and no features.
    Raises:
        ConfigError: a name is unknown, the list is empty, or a classifier is asked for features or has no classes.
    """
    if num_classes is not None and num_classes < 1:
        raise ConfigError(f"num_classes={num_classes}: expected at least 1, or None for features.")
    if out_features is None:
        return dict(available)
    if num_classes is not None:
        raise ConfigError(
            f"out_features={list(out_features)}: a classifier (num_classes) returns no features. Leave it out."
        )
    if not out_features:
        raise ConfigError(f"out_features is empty. {nearest('', available)}")
    for name in out_features:
        if name not in available:
            raise ConfigError(f"out_features: unknown feature {name!r}. {nearest(name, available)}")
    return {name: info for name, info in available.items() if name in out_features}


def check_keys(argument: str, values: Mapping[str, Any], options: type) -> None:
    """Check the keys of an argument that is a dict against a `TypedDict`.

    Raises:
        ConfigError: a key is unknown.
    """
    for key in values:
        if key not in options.__annotations__:
            raise ConfigError(f"{argument}.{key}: unknown key. {nearest(key, options.__annotations__)}")


def check_at_least_1(**sizes: int) -> None:
    """Raise ConfigError if an argument is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: expected at least 1.")


def drop_path_rates(drop_path: float, num_blocks: int) -> list[float]:
    """Return each block's probability of being skipped in training (https://arxiv.org/abs/1603.09382): 0 to
    `drop_path`.

    Raises:
        ConfigError: `drop_path` is negative, or not below 1.
    """
    if not 0 <= drop_path < 1:
        raise ConfigError(f"drop_path={drop_path}: expected at least 0 and below 1.")
    return [drop_path * i / max(num_blocks - 1, 1) for i in range(num_blocks)]


def init_linear(module: nn.Module) -> None:
    """Initialize a linear layer as the transformers' official code does; for `nn.Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def check_feature_info(backbone: nn.Module) -> None:
    """Check the `feature_info` of a user's or timm's backbone against the maps that it returns for an image of zeros.

    It draws no random numbers. A backbone that rejects the image's size (DataError) is not checked, nor is one that
    raises another error, which is logged.

    Raises:
        ConfigError: names, order, channels or strides differ.
    """
    place = type(backbone).__module__
    if place.startswith("vitkit.backbones.") and place != "vitkit.backbones.timm_adapter":
        return  # tests hold it, and an image takes longer than building most of the model
    infos, name = backbone.feature_info, type(backbone).__name__
    if strange := [info for info in infos.values() if not isinstance(info, FeatureInfo)]:
        raise ConfigError(f"backbone {name}: feature_info has {strange[0]!r:.99}; expected a FeatureInfo of each map.")
    stride = max(info.stride for info in infos.values())
    height = math.ceil(64 / stride) * stride
    size = height, height + stride
    # This takes about as long as one training image of 64x96 pixels; the meta device would take two to six times that.
    device = next((weight.device for weight in backbone.parameters()), "cpu")
    training = [module for module in backbone.modules() if module.training]
    backbone.eval()
    try:
        with torch.no_grad():
            maps = backbone(torch.zeros(1, in_channels(backbone), *size, device=device))
    except DataError:  # it does not accept this size
        return
    except Exception as error:  # whatever a user's backbone raises
        reason = f"{type(error).__name__}: {error}"
        logger.warning("backbone %s: feature_info is not checked: %dx%d pixels fail with %s", name, *size, reason)
        return
    finally:
        for module in training:
            module.training = True
    if not isinstance(maps, Mapping):
        raise ConfigError(f"backbone {name}: forward returns a {type(maps).__name__}; expected a dict of feature maps.")
    strides = [info.stride for info in infos.values()]
    if strides != sorted(strides):
        raise ConfigError(
            f"backbone {name}: its features {', '.join(infos)} have strides {', '.join(map(str, strides))}. Expected "
            "an order from fine to coarse, in feature_info and in what forward returns."
        )
    expected = {
        feature: (1, info.channels, *(math.ceil(side / info.stride) for side in size))
        for feature, info in infos.items()
    }
    got = {feature: tuple(x.shape) for feature, x in maps.items()}
    if list(got.items()) != list(expected.items()):
        raise ConfigError(
            f"backbone {name}: for an image of {size[0]}x{size[1]} pixels, forward returns {got}; expected {expected} "
            "in this order, by its feature_info. Correct feature_info, or what forward returns."
        )


class BackboneBase(nn.Module, Backbone):
    """Base of vitkit's backbones: `backbone(images: (B, C, H, W)) -> dict[str, Tensor]`, or a classifier's logits.

    Images are float, normalized, of any height and width not below the first map's stride. The maps are those in
    `feature_info`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to coarse; a classifier returns
    (B, num_classes). Images of another shape, or too small ones, raise a DataError.

    A subclass calls `freeze` last in its constructor. Its stem and the following stages are `stem` and `layers`, an
    `nn.ModuleDict`; otherwise it overrides `stages` and `drop_stages_after`.

    Args:
        available: all maps that it could return, fine to coarse.
        out_features: names of the maps to return; deeper stages are not created. None: all maps.
        num_classes: number of classes of a classifier; None: return feature maps.
        frozen_stages: number of stages that are not trained: 1 is the stem and res2, as in DETR; for a plain
            transformer, the number of blocks, including everything before them. Norms of returned maps are always
            trained.
        pretrained: the weights that a training starts from, which `vitkit.weights.load_pretrained` loads: False, None:
            none; a file; "https://...#sha256=PREFIX", a URL with the first digits of its checksum; "timm/NAME", timm's
            weights of that name; True: the default of the backbone's family.
        pixel_mean, pixel_std: mean and standard deviation of the values of each channel, in 0..1, that the weights
            expect; models normalize images by them.
        in_channels: number of channels of the images, 3 for RGB. Weights for RGB are repeated over the channels and
            rescaled (or summed, for one channel) when they are loaded, as timm does.

    Attributes:
        stages_to_build: names of the stages down to the deepest one that is needed.
    Raises:
        ConfigError: see `choose_features` and `check_pixel_statistics`.
    """

    classifier_parts: tuple[str, ...] = ()
    """Prefixes of a classifier's other parts that feature maps do not need, such as its last norm."""
    stage_pattern: str | None = None
    """Regular expression for the prefix of a stage's state dict entries; None if stages are never left out."""
    input_weight: str | None = None
    """Name of the weight of the first convolution; None if it only takes RGB."""

    def __init__(
        self,
        available: Mapping[str, FeatureInfo],
        /,
        *,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        pretrained: bool | str | None = False,
        pixel_mean: Sequence[float] = IMAGENET_MEAN,
        pixel_std: Sequence[float] = IMAGENET_STD,
        in_channels: int = 3,
    ):
        nn.Module.__init__(self)  # not super(), which is torchvision's network in a ResNet
        self.feature_info = choose_features(available, out_features, num_classes=num_classes)
        self.stages_to_build = list(available)
        while self.stages_to_build and self.stages_to_build[-1] not in self.feature_info:
            self.stages_to_build.pop()
        self.num_classes = num_classes
        self.is_classifier = num_classes is not None
        self.pretrained = pretrained
        self.frozen_stages = frozen_stages
        self.in_channels = in_channels
        self.pixel_mean, self.pixel_std = check_pixel_statistics(pixel_mean, pixel_std, in_channels)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert the first convolution's weight for RGB to `in_channels`, in place."""
        key = f"{prefix}{self.input_weight}"
        if self.in_channels != 3 and key in state and state[key].ndim in (4, 5) and state[key].shape[1] == 3:
            weight = state[key]  # (C, 3, [T,] h, w), of which timm's function takes those of images
            adapted = adapt_input_conv(self.in_channels, weight.flatten(2, -2))
            state[key] = adapted.unflatten(2, weight.shape[2:-1])

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """Return the parts that may be frozen: the stem, then each stage."""
        return [[self.stem], *([layer] for layer in self.layers.values())]

    def keep_features(self, names: Iterable[str]) -> None:
        """Return only these features from now on, and remove the parts that only other features need; a model calls
        this with the features that its neck reads.
        """
        # Unused parts would never get a gradient, which DDP does not allow.
        names, deepest = set(names), list(self.feature_info)[-1]
        for name in self.feature_info.keys() - names:
            if self.norm_of(name):
                delattr(self, self.norm_of(name))
        self.feature_info = {name: info for name, info in self.feature_info.items() if name in names}
        if deepest not in names:
            self.drop_stages_after(list(self.feature_info)[-1])

    def drop_stages_after(self, feature: str) -> None:
        """Remove the stages deeper than this feature."""
        names = list(self.layers)
        for name in names[names.index(feature) + 1 :]:
            del self.layers[name]

    def entries_to_leave_out(self, names: Sequence[str]) -> list[str]:
        """Return the entries of a classifier that feature maps do not need: its head and deeper stages. A classifier
        needs all entries."""
        if self.is_classifier:
            return []
        kept = self.state_dict().keys()

        def is_deeper(name: str) -> bool:
            stage = self.stage_pattern and re.match(self.stage_pattern, name)
            return bool(stage) and not any(key.startswith(stage[0]) for key in kept)

        parts = (*self.class_head, *self.classifier_parts)
        return [name for name in names if name.startswith(parts) or is_deeper(name)]

    def freeze(self) -> None:
        """Exclude the first `frozen_stages` from training.

        Raises:
            ConfigError: there are fewer stages than that.
        """
        # The stem belongs to the first stage, as in DETR.
        num_stages = len(self.stages()) - 1
        if not 0 <= self.frozen_stages <= num_stages:
            raise ConfigError(f"frozen_stages={self.frozen_stages}: expected 0 to {num_stages}.")
        for part in self._frozen():
            part.requires_grad_(False)

    def _frozen(self) -> list[nn.Module | nn.Parameter]:
        number = self.frozen_stages + 1 if self.frozen_stages else int(self.frozen_stem)
        return [part for stage in self.stages()[:number] for part in stage] if number else []

    def train(self, mode: bool = True) -> "BackboneBase":
        """Set the training mode, except for frozen stages, which always stay in evaluation mode."""
        super().train(mode)
        for part in self._frozen() if mode else ():  # a fused network no longer has the names of its stages
            if isinstance(part, nn.Module):
                part.eval()  # running statistics do not change, and there is no dropout
        return self

    def pretrained_source(self) -> str | None:
        """Return the source of the weights that `pretrained` specifies, or None for random ones; see
        `vitkit.weights.load_pretrained`.

        Raises:
            ConfigError: `pretrained` is True, but there are no default weights.
        """
        return (self._url() if self.pretrained is True else self.pretrained) or None

    def _url(self) -> str:
        """Return the source of weights that `pretrained=True` stands for."""
        raise ConfigError(
            f"pretrained=True: there are no default weights for this {type(self).__name__}. Expected a file, a "
            "URL ('https://...#sha256=PREFIX') or the name of timm's weights ('timm/NAME')."
        )
