"""A backbone with its own classifier, behind the interface of the other models."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, normalize_images
from vitkit.registry import BACKBONES, MODELS, Spec


@MODELS.register
class Classifier(nn.Module):
    """
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
        self.class_head = tuple(f"backbone.{prefix}" for prefix in getattr(self.backbone, "class_head", ()))
        """Prefixes of the parameters whose size follows `num_classes`."""
        mean, std, usual_mean, usual_std = map(torch.tensor, (pixel_mean, pixel_std, IMAGENET_MEAN, IMAGENET_STD))
        self.register_buffer("pixel_scale", (usual_std / std).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_shift", ((usual_mean - mean) / std).view(3, 1, 1), persistent=False)
        self.usual_pixels = (*pixel_mean, *pixel_std) == (*IMAGENET_MEAN, *IMAGENET_STD)

    def load_pretrained(self) -> str | None:
        """Loads the backbone's pretrained weights, if it has any, as a new run does; see `Backbone.load_pretrained`."""
        load = getattr(self.backbone, "load_pretrained", None)
        return load() if load else None

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Puts a state dict of the backbone alone below `backbone.`, for `load_weights`."""
        inside = f"{prefix}backbone."
        for key in [key for key in state if not key.startswith(inside)]:
            state[inside + key.removeprefix(prefix)] = state.pop(key)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """
        Args:
            images: (B, 3, H, W) uint8 RGB; or float, normalised by ImageNet's mean and deviation.
            padding_mask: comes with every batch of images; those of a classifier have one size and no padding.
        Returns:
            logits: (B, num_classes).
        """
        images = normalize_images(images)
        if not self.usual_pixels:
            images = images * self.pixel_scale + self.pixel_shift
        return {"logits": self.backbone(images)}

    def postprocess(
        self, outputs: dict[str, Tensor], image_sizes: Sequence[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """
        Args:
            outputs: of `forward`.
            image_sizes: of the original images, which do not matter here.
        Returns:
            class_scores of each image: (num_classes,) float32 that sum to 1.
        """
        return [{"class_scores": scores} for scores in outputs["logits"].float().softmax(dim=-1)]
