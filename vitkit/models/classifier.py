"""A backbone of images or clips with its own classifier, behind the interface of the other models."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitkit.backbones.base import ModelOnBackbone
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, normalize_images, per_channel
from vitkit.protocols import HasClassHead
from vitkit.registry import BACKBONES, MODELS, Spec


@MODELS.register
class Classifier(ModelOnBackbone):
    """A backbone that returns logits.

    Args:
        backbone: spec, or a module that returns logits.
        num_classes: a run sets its dataset's number.
        pixel_mean, pixel_std: of RGB values in 0..1, with which the backbone was trained. ImageNet's, but for weights
            such as those of "How to train your ViT?" (https://arxiv.org/abs/2106.10270), which have 0.5 throughout.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        num_classes: int = 1000,
        pixel_mean: Sequence[float] = IMAGENET_MEAN,
        pixel_std: Sequence[float] = IMAGENET_STD,
    ):
        super().__init__()
        is_module = isinstance(backbone, nn.Module)
        self.backbone = backbone if is_module else BACKBONES.build(backbone, num_classes=num_classes)
        prefixes = self.backbone.class_head if isinstance(self.backbone, HasClassHead) else ()
        self.class_head = tuple(f"backbone.{prefix}" for prefix in prefixes)
        """Prefixes of the parameters whose size follows `num_classes`."""
        mean, std, usual_mean, usual_std = map(torch.tensor, (pixel_mean, pixel_std, IMAGENET_MEAN, IMAGENET_STD))
        self.register_buffer("pixel_scale", usual_std / std, persistent=False)
        self.register_buffer("pixel_shift", (usual_mean - mean) / std, persistent=False)
        self.usual_pixels = (*pixel_mean, *pixel_std) == (*IMAGENET_MEAN, *IMAGENET_STD)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Put a state dict of the backbone alone below `backbone.`, for `load_weights`."""
        inside = f"{prefix}backbone."
        for key in [key for key in state if not key.startswith(inside)]:
            state[inside + key.removeprefix(prefix)] = state.pop(key)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Predict class logits.

        Args:
            images: (B, 3, H, W), of clips (B, 3, T, H, W), uint8 RGB; or float, normalised by ImageNet's mean and
                deviation. Several views of a video are clips of the batch, whose scores the caller averages.
            padding_mask: comes with every batch of images; those of a classifier have one size and no padding.
        Returns:
            logits: (B, num_classes).
        """
        images = normalize_images(images)
        if not self.usual_pixels:
            images = images * per_channel(self.pixel_scale, images) + per_channel(self.pixel_shift, images)
        return {"logits": self.backbone(images)}

    def postprocess(
        self, outputs: dict[str, Tensor], image_sizes: Sequence[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Return each image's class_scores: (num_classes,) float32 that sum to 1.

        Args:
            outputs: of `forward`.
            image_sizes: of the original images, which do not matter here.
        """
        return [{"class_scores": scores} for scores in outputs["logits"].float().softmax(dim=-1)]
