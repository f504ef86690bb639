"""MaskFormer and Mask2Former: backbone, pixel decoder, head; one model for semantic, instance and panoptic masks."""

from typing import Any

from torch import Tensor, nn

from vitkit.ops.images import normalize_images, pad_to_multiple
from vitkit.registry import BACKBONES, HEADS, MODELS, NECKS, Spec


@MODELS.register
class MaskClassification(nn.Module):
    """Masks and a class for each (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

    Args:
        backbone: spec or module, as are `neck` (a pixel decoder) and `head`.
        num_queries: masks predicted per image.
        num_classes: without the no-object class; a run sets its dataset's number.
        size_divisibility: images are padded at the right and bottom to a multiple of it, as the original does; 1: not.
    """

    class_head = ("head.class_embed.",)

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 100,
        num_classes: int = 80,
        size_divisibility: int = 32,
    ):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        self.neck = NECKS.build(neck, feature_info=self.backbone.feature_info)
        self.head = HEADS.build(
            head, feature_info=self.neck.feature_info, num_classes=num_classes, num_queries=num_queries
        )
        self.size_divisibility = size_divisibility

    def load_pretrained(self) -> str | None:
        """Loads the backbone's pretrained weights, if it has any, as a new run does; see `Backbone.load_pretrained`."""
        load = getattr(self.backbone, "load_pretrained", None)
        return load() if load else None

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """
        Args:
            images: (B, 3, H, W) uint8 RGB, zero-padded at the right and bottom; or float, already normalised.
            padding_mask: (B, H, W) bool, True = padding; None if no image is padded. As in the originals padding is
                attended to: it only makes padded pixels 0 after the normalisation.
        Returns:
            what the head returns; pred_masks (B, Q, h, w) cover the images padded to `size_divisibility`.
            input_size: (height, width) after that.
        """
        images = normalize_images(images, padding_mask)
        if self.size_divisibility > 1:
            whole = images.new_zeros(len(images), *images.shape[-2:]).bool()
            images, _ = pad_to_multiple(images, whole, self.size_divisibility)
        outputs = self.head(self.neck(self.backbone(images)))
        return dict(outputs, input_size=tuple(images.shape[-2:]))
