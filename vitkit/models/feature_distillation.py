"""Feature distillation: a backbone learns the features of a frozen one from images without labels."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.base import check_feature_info
from vitkit.errors import ConfigError
from vitkit.models.pretraining import PretrainingModel, maps_and_features
from vitkit.models.teacher import TaughtModel
from vitkit.ops.images import in_channels, normalize_images, pixel_statistics
from vitkit.registry import BACKBONES, MODELS, Spec


@MODELS.register
class FeatureDistillation(TaughtModel, PretrainingModel):
    """A backbone that learns the coarsest map of a frozen one, the teacher, and one vector for each image; both may be
    CNNs or transformers, of any width and stride. The criterion is `FeatureDistillationLoss`.

    The student's maps are resized to the teacher's, and projected to its channels; its pooled features are projected
    to the teacher's (see `pooled_features`). Projections exist in training only. Both networks see the same images,
    each normalized by its own statistics; for the teacher they are resized to the nearest multiple of its stride,
    such as 14, so that its locations cover the image and no padding.

    Args:
        backbone: spec or module of the student.
        teacher: spec of a backbone with the weights that it names, or its default ones ("vit_small_patch16_dino"); a
            run's folder or a checkpoint of vitkit, of whose model it is the backbone; or a module. Its last map is
            learned, so `out_features` chooses a finer one.
        maps: the student's maps that learn: the one whose stride is "nearest" to the teacher's, or "all", by a
            projection each. The coarsest learns in any case, as its mean is the pooled features of a CNN.
    Raises:
        ConfigError: `maps` is unknown; also like `PretrainingModel`.
    """

    def __init__(
        self, backbone: Spec | nn.Module, teacher: Spec | nn.Module, *, maps: Literal["nearest", "all"] = "nearest"
    ):
        super().__init__(backbone)
        if maps not in ("nearest", "all"):
            raise ConfigError(f"maps={maps!r}: expected 'nearest' or 'all'.")
        self.maps = maps
        self.set_teacher(teacher)

    def build_teacher(self, backbone: Spec) -> nn.Module:
        """Return the backbone."""
        network: nn.Module = BACKBONES.build(backbone)
        return network

    def take_teacher(self, network: nn.Module) -> None:
        """Learn from this backbone from now on; it is frozen. Creates the projections to its channels.

        Raises:
            ConfigError: it takes images of other channels, or its `feature_info` does not match its outputs.
        """
        check_feature_info(network)
        if in_channels(network) != in_channels(self.backbone):
            raise ConfigError(
                f"the teacher's images have {in_channels(network)} channels, the student's "
                f"{in_channels(self.backbone)}. Choose a teacher for the same images."
            )
        super().take_teacher(network)
        self.teacher_feature, info = list(network.feature_info.items())[-1]
        self.teacher_stride = info.stride
        infos = self.backbone.feature_info
        # Of two equally near, the finer one.
        nearest = min(infos, key=lambda name: (abs(math.log(infos[name].stride / info.stride)), infos[name].stride))
        names = list(infos) if self.maps == "all" else [nearest]
        coarsest = list(infos)[-1]
        self.map_projections = nn.ModuleDict(
            {name: nn.Conv2d(infos[name].channels, info.channels, 1) for name in names}
        )
        self.image_projection = nn.Linear(infos[coarsest].channels, info.channels)
        for name in infos.keys() - {*names, coarsest}:
            # A norm that nothing learns from gets no gradient, which DDP does not allow.
            norm = self.backbone.norm_of(name) if hasattr(self.backbone, "norm_of") else None
            if norm is not None:
                self.backbone.get_submodule(norm).requires_grad_(False)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Compute the features of student and teacher in training, and those of `PretrainingModel` otherwise.

        Args:
            images, padding_mask: see `PretrainingModel`.
        Returns:
            pred_maps: student's map -> (B, C, h, w), projected to the teacher's channels and size,
            pred_features: (B, C), the student's pooled features, projected likewise,
            teacher_map: (B, C, h, w),
            teacher_features: (B, C).
        Raises:
            ConfigError: the model is trained without a teacher.
        """
        if not self.training:
            return super().forward(images, padding_mask)
        teacher_map, teacher_features = self.teach(images)
        maps, features = maps_and_features(self.backbone, self.prepare(images))
        size = teacher_map.shape[-2:]
        # Projections commute with resizing, and cost less after it; torch resizes in float32 only.
        pred_maps = {
            name: project(F.interpolate(maps[name].float(), size, mode="bilinear", antialias=True))
            for name, project in self.map_projections.items()
        }
        return {
            "pred_maps": pred_maps,
            "pred_features": self.image_projection(features),
            "teacher_map": teacher_map,
            "teacher_features": teacher_features,
        }

    @torch.no_grad()
    def teach(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's map (B, C, h, w) and pooled features (B, C) of images."""
        if self.frozen_teacher is None:
            raise ConfigError(
                "FeatureDistillation has no teacher, which its training needs: a run loads it (vitkit train), or give "
                "a module (teacher=)."
            )
        network, stride = self.frozen_teacher.network, self.teacher_stride
        pixels = normalize_images(images, **pixel_statistics(network))
        size = [max(1, round(side / stride)) * stride for side in images.shape[-2:]]
        if size != list(images.shape[-2:]):
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        maps, features = maps_and_features(network, pixels)
        return maps[self.teacher_feature], features

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Leave out the projections of a training if there is no teacher, in place."""
        if self.frozen_teacher is None:
            projections = tuple(f"{prefix}{name}_projection" for name in ("map", "image"))
            for key in [key for key in state if key.startswith(projections)]:
                del state[key]
