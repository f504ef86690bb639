"""Functionality of dense prediction models: building, pretrained weights, and preparing images for the backbone."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.base import check_feature_info, pixel_statistics
from vitkit.errors import ConfigError, DataError
from vitkit.nn.query_groups import QuerySettings
from vitkit.ops.images import normalize_images, pad_to_multiple
from vitkit.protocols import HasPretrained, KeepsFeatures, Model, UsesTargets
from vitkit.registry import BACKBONES, HEADS, NECKS, Spec, nearest
from vitkit.structures import DetectionTarget


class ModelOnBackbone(Model):
    """Base of models with a backbone, whose pretrained weights are the backbone's."""

    backbone: nn.Module

    def load_pretrained(self) -> str | None:
        """Load the backbone's pretrained weights; return where they came from, or None if they stay random."""
        return self.backbone.load_pretrained() if isinstance(self.backbone, HasPretrained) else None


class DensePredictionModel(ModelOnBackbone):
    """A model of backbone, neck and head.

    Images are (B, 3, H, W), uint8 RGB, zero-padded at the right and bottom; or float, already normalised by ImageNet's
    mean and standard deviation, even if the backbone's differ. Their padding mask is (B, H, W) bool, True = padding;
    None if no image is padded. A DataError is raised for images that are not RGB, or smaller than one location of the
    coarsest map.

    Args:
        backbone: spec or module, as are `neck` and `head`.
        num_classes: number of classes, in the form that the head takes.
        queries: for heads with queries; settings of additional queries in training are passed on if they are set.
        isolate_padding: in the original models, padding leaks into an image through convolutions, norms and resizing,
            so that results depend on the other images in the batch; official metrics include this. True prevents it: an
            image's results are then the same, except for rounding, alone and in any batch.
        size_divisibility: images are padded with zeros to a multiple of this; the padding counts as part of the image.
    Raises:
        ConfigError: `isolate_padding` is set but the backbone takes no padding mask, or the backbone's `feature_info`
            does not match its outputs.
    """

    needs_all_features = False
    """Whether the model itself reads maps of the backbone that the neck does not read."""

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_classes: int,
        queries: QuerySettings | None = None,
        isolate_padding: bool = False,
        size_divisibility: int = 1,
    ):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        check_feature_info(self.backbone)
        self.neck = NECKS.build(neck, feature_info=self.backbone.feature_info)
        in_features = getattr(self.neck, "in_features", None)
        if isinstance(self.backbone, KeepsFeatures) and in_features is not None and not self.needs_all_features:
            self.backbone.keep_features(in_features)
        self.head = HEADS.build(
            head, feature_info=self.neck.feature_info, num_classes=num_classes, **_head_arguments(queries)
        )
        self.isolate_padding = isolate_padding
        self.size_divisibility = size_divisibility
        # If strides divide the size, an image's part of a map does not depend on the amount of padding.
        stride = max(info.stride for info in self.neck.feature_info.values()) if isolate_padding else 1
        self.padding_multiple = math.lcm(stride, size_divisibility)
        """Images are padded to multiples of this, in pixels."""
        if isolate_padding and "padding_mask" not in inspect.signature(self.backbone.forward).parameters:
            raise ConfigError(
                f"model.isolate_padding: backbone {type(self.backbone).__name__} takes no padding mask. "
                "Set model.isolate_padding=False or choose a ResNet."
            )

    def prepare(self, images: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalise images and pad them as the model requires; if padding is isolated, a mask is always returned."""
        images = normalize_images(images, padding_mask, **pixel_statistics(self.backbone))
        stride = max(info.stride for info in self.neck.feature_info.values())
        height, width = images.shape[-2:]
        # An image that covers one location in at least one direction is unusual, but can be processed.
        if height < stride and width < stride:
            raise DataError(
                f"{type(self).__name__}: images of {height}x{width} pixels are smaller than one "
                f"location of the coarsest map (stride {stride}). Resize them to more, or leave coarse maps out "
                "(model.backbone.out_features, model.neck)."
            )
        if not self.isolate_padding:
            divides = self.size_divisibility == 1
            return (images, padding_mask) if divides else pad_to_multiple(images, padding_mask, self.size_divisibility)
        if padding_mask is None:
            padding_mask = images.new_zeros(images.shape[0], *images.shape[-2:], dtype=torch.bool)
        images, padding_mask = pad_to_multiple(images, padding_mask, self.padding_multiple)
        return images, free_blocks(padding_mask, self.size_divisibility)

    def backbone_maps(self, images: Tensor, padding_mask: Tensor | None) -> Mapping[str, Tensor]:
        """Return the backbone's maps of prepared images."""
        return self.backbone(images, padding_mask) if self.isolate_padding else self.backbone(images)

    def neck_maps(self, maps: Mapping[str, Tensor], padding_mask: Tensor | None) -> Mapping[str, Tensor]:
        """Return the neck's maps from those of the backbone."""
        return self.neck(maps, padding_mask if self.isolate_padding else None)

    def features(self, images: Tensor, padding_mask: Tensor | None) -> Mapping[str, Tensor]:
        """Return the neck's maps of prepared images."""
        return self.neck_maps(self.backbone_maps(images, padding_mask), padding_mask)

    @property
    def uses_targets(self) -> bool:
        """Whether the head has additional queries in training; see `vitkit.protocols.UsesTargets`."""
        return isinstance(self.head, UsesTargets) and self.head.uses_targets

    def head_outputs(
        self, features: Mapping[str, Tensor], padding_mask: Tensor | None, targets: Sequence[DetectionTarget] | None
    ) -> dict[str, Any]:
        """Return the head's outputs, including those of its additional training queries if there are targets."""
        known = {} if targets is None else dict(targets=targets)
        return self.head(features, padding_mask, **known)


def _head_arguments(queries: QuerySettings | None) -> dict[str, int]:
    """Return the arguments for building a head: the number of queries, and settings that are not the default."""
    if queries is None:
        return {}
    usual = asdict(QuerySettings())
    further = {name: value for name, value in asdict(queries).items() if value != usual[name]}
    return {**further, "num_queries": queries.num_queries}


def free_blocks(padding_mask: Tensor, size: int) -> Tensor:
    """Mark whole blocks of size x size pixels as image if any of their pixels is; (B, H, W) bool, True = padding."""
    if size == 1:
        return padding_mask
    free = F.max_pool2d((~padding_mask).float(), size)
    return free.repeat_interleave(size, 1).repeat_interleave(size, 2) == 0


def check_tasks(tasks: Sequence[str], choices: Sequence[str]) -> None:
    """Raise ConfigError if a task is unknown."""
    for task in tasks:
        if task not in choices:
            raise ConfigError(f"model.tasks: unknown task {task!r}. {nearest(task, choices)}")
