"""The base of models that train a backbone on images without labels."""

from torch import Tensor, nn

from vitkit.backbones.base import check_feature_info
from vitkit.backbones.vit import ViT
from vitkit.errors import ConfigError
from vitkit.models.base import ModelOnBackbone
from vitkit.ops.images import normalize_images, pixel_statistics
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.registry import BACKBONES, Spec


class PretrainingModel(ModelOnBackbone):
    """Base of models that train a backbone, `trained_backbone`, on images without labels.

    A subclass overrides `forward` for training, and calls this one's in evaluation mode.

    Args:
        backbone: spec or module of a backbone that returns maps.
    Raises:
        ConfigError: the backbone is a classifier, or its `feature_info` does not match its outputs.
    """

    returns = ("features",)

    def __init__(self, backbone: Spec | nn.Module):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        if with_defaults(self.backbone, Backbone).is_classifier:
            raise ConfigError(
                f"backbone {type(self.backbone).__name__} is a classifier; expected one that returns maps. Leave "
                "backbone.num_classes out."
            )
        check_feature_info(self.backbone)

    @property
    def trained_backbone(self) -> nn.Module:
        """The backbone whose weights a run writes for detectors and other models."""
        return self.backbone

    def prepare(self, images: Tensor) -> Tensor:
        """Normalize images, (B, 3, H, W) uint8 RGB or float, by the statistics that the backbone expects."""
        return normalize_images(images, **pixel_statistics(self.trained_backbone))

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Compute a feature vector of each image, for evaluators.

        Args:
            images: (B, 3, H, W), uint8 RGB; or float, normalized by ImageNet's mean and standard deviation.
            padding_mask: ignored, as in `Classifier`: the images have one size and no padding.
        Returns:
            features: (B, D), see `pooled_features`.
        """
        return {"features": pooled_features(self.trained_backbone, self.prepare(images))}


def pooled_features(backbone: nn.Module, images: Tensor) -> Tensor:
    """Return one vector for each image: a plain ViT's class token after its norm, or the mean of the coarsest map.

    Args:
        images: (B, C, H, W) float, normalized.
    Returns:
        (B, D).
    """
    if _pools_class_token(backbone):
        return backbone.norm(backbone.run_blocks(backbone.tokens(images)).x[:, 0])
    return list(backbone(images).values())[-1].mean((-2, -1))


def maps_and_features(backbone: nn.Module, images: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a backbone's maps, and its `pooled_features`, from one pass."""
    if _pools_class_token(backbone):
        x, size, _ = backbone.run_blocks(backbone.tokens(images))
        x = backbone.norm(x)
        patches = x[:, backbone.num_tokens :].transpose(1, 2).unflatten(2, size)
        return dict.fromkeys(backbone.feature_info, patches), x[:, 0]
    maps = backbone(images)
    return maps, list(maps.values())[-1].mean((-2, -1))


def _pools_class_token(backbone: nn.Module) -> bool:
    """Whether a backbone is a plain ViT, of one map, with a class token."""
    is_plain = isinstance(backbone, ViT) and len(backbone.feature_info) == 1
    return is_plain and backbone.attends_globally and backbone.has_class_token
