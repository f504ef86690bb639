"""A backbone for images or clips with its own classifier, with the interface of the other models."""

from collections.abc import Sequence

from torch import Tensor, nn

from vitkit.models.base import ModelOnBackbone
from vitkit.ops.images import check_pixel_statistics, normalize_images, pixel_statistics
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import BACKBONES, MODELS, Spec


@MODELS.register
class Classifier(ModelOnBackbone):
    """A backbone that returns logits.

    Args:
        backbone: spec, or a module that returns logits.
        num_classes: number of classes; a run sets its dataset's.
        pixel_mean, pixel_std: statistics of the channels' values in 0..1 that the backbone was trained with; None: the
            backbone's own. They are ImageNet's except for weights such as those of "How to train your ViT?"
            (https://arxiv.org/abs/2106.10270), for which all are 0.5.
    """

    returns = ("class_scores",)

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        num_classes: int = 1000,
        pixel_mean: Sequence[float] | None = None,
        pixel_std: Sequence[float] | None = None,
    ):
        super().__init__()
        is_module = isinstance(backbone, nn.Module)
        self.backbone = backbone if is_module else BACKBONES.build(backbone, num_classes=num_classes)
        self.class_head = tuple(f"backbone.{prefix}" for prefix in with_defaults(self.backbone, Backbone).class_head)
        """Prefixes of the parameters whose size depends on `num_classes`."""
        statistics = pixel_statistics(self.backbone)
        self.pixel_mean, self.pixel_std = check_pixel_statistics(
            statistics["mean"] if pixel_mean is None else pixel_mean,
            statistics["std"] if pixel_std is None else pixel_std,
            len(statistics["mean"]),
        )

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Prefix the entries of a backbone's own state dict with `backbone.`, for `load_weights`."""
        inside = f"{prefix}backbone."
        for key in [key for key in state if not key.startswith(inside)]:
            state[inside + key.removeprefix(prefix)] = state.pop(key)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Predict class logits.

        Args:
            images: (B, 3, H, W), or (B, 3, T, H, W) for clips, uint8 RGB; or float, normalized by ImageNet's mean and
                standard deviation. Views of the same video are clips of the batch, whose scores the caller averages.
            padding_mask: ignored; every batch of images has it, but a classifier's images have one size and no padding.
        Returns:
            logits: (B, num_classes).
        """
        return {"logits": self.backbone(normalize_images(images, mean=self.pixel_mean, std=self.pixel_std))}

    def postprocess(
        self, outputs: dict[str, Tensor], image_sizes: Sequence[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Return each image's class_scores: (num_classes,) float32 that sum to 1.

        Args:
            outputs: outputs of `forward`.
            image_sizes: sizes of the original images, which are not used here.
        """
        return [{"class_scores": scores} for scores in outputs["logits"].float().softmax(dim=-1)]
