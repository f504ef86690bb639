"""Feature distillation: a backbone learns the features of a frozen one from images without labels."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.base import check_feature_info
from vitkit.distributed import accumulation_dtype, all_reduce_sum
from vitkit.errors import ConfigError, DataError
from vitkit.models.pretraining import PretrainingModel, maps_and_features
from vitkit.models.teacher import TaughtModel
from vitkit.ops.images import in_channels, normalize_images, pixel_statistics
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import BACKBONES, MODELS, Spec
from vitkit.structures import Batch


@MODELS.register
class FeatureDistillation(TaughtModel, PretrainingModel):
    """A backbone that learns the coarsest map of a frozen one, the teacher, and one vector for each image; both may be
    CNNs or transformers, of any width and stride. The criterion is `FeatureDistillationLoss`.

    The student's maps are resized to the teacher's, and projected to its channels; its pooled features are projected
    to the teacher's (see `pooled_features`). Projections exist in training only. Both networks see the same images,
    each normalized by its own statistics; for the teacher they are resized to the nearest multiple of its stride,
    such as 14, so that its locations cover the image and no padding.

    The teacher's channels are standardized by their mean and standard deviation over training images: otherwise a
    student first learns the mean, which alone may have a cosine of 0.7 with the map of any image.

    Args:
        backbone: spec or module of the student.
        teacher: spec of a backbone with the weights that it names, or its default ones ("vit_small_patch16_dino"); a
            run's folder or a checkpoint of vitkit, of whose model it is the backbone; or a module. Its last map is
            learned, so `out_features` chooses a finer one.
        maps: the student's maps that learn: the one whose stride is "nearest" to the teacher's, or "all", by a
            projection each. The coarsest learns in any case, as its mean is the pooled features of a CNN.
        standardize: whether the teacher's features are standardized.
    Raises:
        ConfigError: `maps` is unknown; also like `PretrainingModel`.
    """

    splits_with_features = ("train",)

    def __init__(
        self,
        backbone: Spec | nn.Module,
        teacher: Spec | nn.Module,
        *,
        maps: Literal["nearest", "all"] = "nearest",
        standardize: bool = True,
    ):
        super().__init__(backbone)
        if maps not in ("nearest", "all"):
            raise ConfigError(f"maps={maps!r}: expected 'nearest' or 'all'.")
        self.maps = maps
        self.standardize = standardize
        self.set_teacher(teacher)

    def build_teacher(self, backbone: Spec) -> nn.Module:
        """Return the backbone."""
        network: nn.Module = BACKBONES.build(backbone)
        return network

    def take_teacher(self, network: nn.Module) -> None:
        """Learn from this backbone from now on; it is frozen. Creates the projections to its channels.

        Raises:
            ConfigError: it is a classifier, takes images of other channels, or its `feature_info` does not match its
                outputs.
        """
        if with_defaults(network, Backbone).is_classifier:
            raise ConfigError("the teacher is a classifier; expected a backbone of maps. Leave its num_classes out.")
        check_feature_info(network)
        if in_channels(network) != in_channels(self.backbone):
            raise ConfigError(
                f"the teacher's images have {in_channels(network)} channels, the student's "
                f"{in_channels(self.backbone)}. Choose a teacher for the same images."
            )
        super().take_teacher(network)
        infos = self.backbone.feature_info
        self.teacher_feature, info = list(network.feature_info.items())[-1]
        self.teacher_stride = info.stride
        means, scales = torch.zeros(2, info.channels), torch.ones(2, info.channels)
        self.register_buffer("teacher_statistics", torch.stack([means, scales]))
        """Mean and inverse standard deviation of the channels, of the map and of the pooled features; see
        `measure_teacher`."""
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
            norm = with_defaults(self.backbone, Backbone).norm_of(name)
            if norm is not None:
                self.backbone.get_submodule(norm).requires_grad_(False)

    @property
    def has_fixed_features(self) -> bool:
        """See `Model`: whether there is a teacher, which never changes."""
        return self.frozen_teacher is not None

    def weights_key(self) -> int:
        """Return a fingerprint of the teacher, which is stored with its features."""
        key = self.teacher_key()
        assert key is not None
        return key

    def forward(
        self,
        images: Tensor,
        padding_mask: Tensor | None = None,
        *,
        features: Tensor | None = None,
        features_key: Tensor | None = None,
    ) -> dict[str, Any]:
        """Compute the features of student and teacher, or only those of `PretrainingModel` if there is no teacher.

        Args:
            images, padding_mask: see `PretrainingModel`.
            features: (B, C, 1 + h * w) of the teacher for these images, an earlier result of `teach`.
            features_key: int64, the `weights_key()` of the model that computed them.
        Returns:
            pred_maps: student's map -> (B, C, h, w), projected to the teacher's channels and size,
            pred_features: (B, C), the student's pooled features, projected likewise,
            teacher_map: (B, C, h, w),
            teacher_features: (B, C),
            features: (B, D), the student's pooled features, in evaluation mode.
        Raises:
            ConfigError: the model is trained without a teacher.
            DataError: the features are from another teacher.
        """
        if self.frozen_teacher is None and not self.training:
            return super().forward(images, padding_mask)
        if features is None:
            features = self.teach(images)
        elif features_key is None or int(features_key) != self.weights_key():
            raise DataError(
                "features: the stored ones are from another teacher than the model's. Leave `features` out of the "
                "dataset: data.cache_features=FOLDER computes them."
            )
        mean, scale = self.teacher_statistics
        teacher_map = (features[:, :, 1:] - mean[0, :, None]) * scale[0, :, None]
        teacher_map = teacher_map.unflatten(2, [side // self.teacher_stride for side in self.teacher_size(images)])
        maps, pooled = maps_and_features(self.backbone, self.prepare(images))
        size = teacher_map.shape[-2:]
        # Projections commute with resizing, and cost less after it; torch resizes in float32 only.
        pred_maps = {
            name: project(F.interpolate(maps[name].float(), size, mode="bilinear", antialias=True))
            for name, project in self.map_projections.items()
        }
        outputs = {
            "pred_maps": pred_maps,
            "pred_features": self.image_projection(pooled),
            "teacher_map": teacher_map,
            "teacher_features": (features[:, :, 0] - mean[1]) * scale[1],
        }
        return outputs if self.training else {**outputs, "features": pooled}

    def teacher_size(self, images: Tensor) -> list[int]:
        """Return the (height, width) at which the teacher sees images, multiples of its stride."""
        return [max(1, round(side / self.teacher_stride)) * self.teacher_stride for side in images.shape[-2:]]

    @torch.no_grad()
    def teach(self, images: Tensor) -> Tensor:
        """Return the teacher's pooled features of images, then its map row by row, (B, C, 1 + h * w) float32."""
        if self.frozen_teacher is None:
            raise ConfigError(
                "FeatureDistillation has no teacher, which its training needs: a run loads it (vitkit train), or give "
                "a module (teacher=)."
            )
        network, size = self.frozen_teacher.network, self.teacher_size(images)
        pixels = normalize_images(images, **pixel_statistics(network))
        if size != list(images.shape[-2:]):
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        maps, pooled = maps_and_features(network, pixels)
        return torch.cat([pooled[..., None], maps[self.teacher_feature].flatten(2)], dim=2).float()

    def feature_maps(self, batches: Iterable[Batch], device: torch.device | str) -> Iterator[Tensor]:
        """Yield the teacher's features of batches, see `teach`, to be stored."""
        for batch in batches:
            yield self.teach(batch.inputs["images"].to(device))

    def measure_teacher(self, batches: Iterable[Batch]) -> None:
        """Set the statistics by which the teacher's features are standardized, over the batches of all ranks."""
        if not self.standardize:
            return
        device, sums = self.teacher_statistics.device, torch.zeros(())
        for batch in batches:
            inputs = batch.to(device).inputs
            features = inputs["features"] if "features" in inputs else self.teach(inputs["images"])
            features = features.to(accumulation_dtype(device))
            parts = features[:, :, 1:].movedim(1, 0).flatten(1), features[:, :, 0].mT  # (C, N) each
            moments = [torch.stack([torch.ones_like(x), x, x.square()]).sum(2) for x in parts]
            sums = sums.to(device) + torch.stack(moments)
        count, total, squares = all_reduce_sum(sums).unbind(1)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        # A channel that is the same everywhere, such as that of a dead ReLU, teaches nothing.
        is_constant = deviation <= 1e-6 * deviation.mean(1, keepdim=True)
        scale = deviation.masked_fill(is_constant, 1).reciprocal().masked_fill(is_constant, 0)
        self.teacher_statistics.copy_(torch.stack([mean, scale]))

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Leave out what only training needs if there is no teacher, in place."""
        if self.frozen_teacher is None:
            for_training = tuple(f"{prefix}{name}" for name in ("map_proj", "image_proj", "teacher_stat"))
            for key in [key for key in state if key.startswith(for_training)]:
                del state[key]
