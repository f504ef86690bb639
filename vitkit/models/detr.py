"""DETR: backbone, neck, head (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.ops.images import normalize_images, pad_to_multiple
from vitkit.registry import BACKBONES, HEADS, MODELS, NECKS, Spec
from vitkit.structures import Detections


@MODELS.register
class DETR(nn.Module):
    """
    Args:
        backbone: spec or module, as are `neck` and `head`.
        num_queries: boxes predicted per image.
        num_classes: without the no-object class; a run sets its dataset's number. The official checkpoints have
            91, COCO's raw category ids.
        isolate_padding: the original lets padding leak into an image's border through the backbone's convolutions,
            so that its results depend on what else is in the batch, which official numbers include. True stops
            that: an image's results are then the same, but for rounding, alone and in any batch.
    Raises:
        ConfigError: `isolate_padding` with a backbone that takes no padding mask.
    """

    class_head = ("head.class_embed.",)
    """Prefixes of the parameters whose size follows `num_classes`."""
    drops_features = True
    """The backbone returns only what the neck reads."""

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 100,
        num_classes: int = 91,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        self.neck = NECKS.build(neck, feature_info=self.backbone.feature_info)
        if self.drops_features and hasattr(self.backbone, "keep_features") and hasattr(self.neck, "in_features"):
            self.backbone.keep_features(self.neck.in_features)
        self.head = HEADS.build(
            head, feature_info=self.neck.feature_info, num_classes=num_classes, num_queries=num_queries
        )
        self.isolate_padding = isolate_padding
        if isolate_padding and "padding_mask" not in inspect.signature(self.backbone.forward).parameters:
            raise ConfigError(
                f"model.isolate_padding: backbone {type(self.backbone).__name__} takes no padding mask. "
                "Set model.isolate_padding=False or choose a ResNet."
            )

    def load_pretrained(self) -> str | None:
        """Loads the backbone's pretrained weights, if it has any, as a new run does; see `ResNet.load_pretrained`."""
        load = getattr(self.backbone, "load_pretrained", None)
        return load() if load else None

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """
        Args:
            images: (B, 3, H, W) uint8 RGB, zero-padded at the right and bottom; or float, already normalised.
            padding_mask: (B, H, W) bool, True = padding; None if no image is padded.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last for no object.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            aux_outputs: the same two of each decoder layer but the last, first layer first.
            The head may add to them; see there.
        Raises:
            DataError: the images are smaller than one place of the coarsest map.
        """
        images = normalize_images(images, padding_mask)
        stride = max(info.stride for info in self.neck.feature_info.values())
        # What fills a place in one direction at least is odd, but can be seen.
        if max(images.shape[-2:]) < stride:
            raise DataError(
                f"{type(self).__name__}: images of {images.shape[-2]}x{images.shape[-1]} pixels are smaller than one "
                f"place of the coarsest map (stride {stride}). Resize them to more, or leave coarse maps out "
                "(model.backbone.out_features, model.neck)."
            )
        if self.isolate_padding and padding_mask is not None:
            # Where strides divide the size, an image's share of a map does not depend on the padding's size.
            images, padding_mask = pad_to_multiple(images, padding_mask, stride)
            features = self.neck(self.backbone(images, padding_mask), padding_mask)
        else:
            features = self.neck(self.backbone(images))
        return self.head(features, padding_mask)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Every query's best class and box; nothing is thresholded or suppressed.

        Args:
            outputs: of `forward`.
            image_sizes: (height, width) of each original image, in pixels.
        Returns:
            one Detections per image, Q rows in the queries' order.
        """
        scores, labels = outputs["pred_logits"].float().softmax(dim=-1)[..., :-1].max(dim=-1)
        boxes_xyxy = scale_boxes(cxcywh_to_xyxy(outputs["pred_boxes"].float()), image_sizes)
        return [Detections(scores=s, labels=l, boxes_xyxy=b) for s, l, b in zip(scores, labels, boxes_xyxy)]
