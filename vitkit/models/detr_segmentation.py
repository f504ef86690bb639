"""DETR with masks: a mask head on a trained DETR (Carion et al. 2020, section 4.4, https://arxiv.org/abs/2005.12872)."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.heads.detr_masks import BoxAttention, MaskConvHead
from vitkit.models.base import Part, check_tasks
from vitkit.models.detr import DETR
from vitkit.ops.detr_masks import SMALLEST_AREA, instance_masks, panoptic_map
from vitkit.ops.images import resize_mask, unpadded_sizes
from vitkit.registry import MODELS

_FIELDS = {"instance": "masks", "panoptic": "panoptic"}
"""Task -> the field of its predictions."""


@MODELS.register
class DETRSegmentation(DETR):
    """A DETR with a mask for each query.

    Args:
        backbone, neck, head, num_queries, num_classes, isolate_padding: see DETR; the backbone must return four maps.
        freeze_detr: train only the mask head, as the original does from a trained DETR.
        tasks: what `postprocess` returns in addition to boxes: "instance" masks, or a "panoptic" map.
        things: for each class, whether it has instances; None: all have. A run sets its dataset's.
        object_threshold: class probability that queries in a panoptic map have to exceed.
    Raises:
        ConfigError: the backbone has fewer than four maps, or a task is unknown.
    """

    needs_all_features = True
    new_parts = ("bbox_attention.", "mask_head.")
    """Prefixes of parts that may be missing from a checkpoint to start from, such as that of a DETR without masks."""

    def __init__(
        self,
        backbone: Part,
        neck: Part,
        head: Part,
        *,
        num_queries: int = 100,
        num_classes: int = 250,
        freeze_detr: bool = True,
        tasks: Sequence[Literal["instance", "panoptic"]] = ("panoptic",),
        things: Sequence[bool] | None = None,
        object_threshold: float = 0.85,
        isolate_padding: bool = False,
    ):
        super().__init__(
            backbone, neck, head, num_queries=num_queries, num_classes=num_classes, isolate_padding=isolate_padding
        )
        check_tasks(tasks, ("instance", "panoptic"))
        infos = list(self.backbone.feature_info.values())
        if len(infos) < 4:
            raise ConfigError(
                f"DETRSegmentation: the mask head needs four maps, the backbone returns {len(infos)} "
                f"({', '.join(self.backbone.feature_info)}): set model.backbone.out_features, or take a backbone with "
                "several maps (a plain ViT has one)."
            )
        d_model, num_heads = self.head.d_model, self.head.num_heads
        self.bbox_attention = BoxAttention(d_model, num_heads)
        finer = [info.channels for info in infos[-2:-5:-1]]
        self.mask_head = MaskConvHead(d_model + num_heads, d_model, finer)
        self.freeze_detr = freeze_detr
        for part in self._frozen_parts():
            part.requires_grad_(False)
        self.tasks = tuple(tasks)
        self.returns = ("boxes_xyxy", *(name for task, name in _FIELDS.items() if task in tasks))
        self.things = list(things) if things is not None else [True] * num_classes
        self.object_threshold = object_threshold

    def _frozen_parts(self) -> list[nn.Module]:
        return [self.backbone, self.neck, self.head] if self.freeze_detr else []

    def train(self, mode: bool = True) -> "DETRSegmentation":
        """Set the training mode, except for a frozen DETR, which always stays in evaluation mode."""
        super().train(mode)
        for part in self._frozen_parts():
            part.eval()
        return self

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict a box, class logits and a mask per query.

        Returns:
            the outputs of DETR, and for the last layer
            pred_masks: (B, Q, h, w) logits at the finest map's stride.
            input_size: (height, width) that the masks cover.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images, padding_mask = self.prepare(images, padding_mask)
        maps = self.backbone_maps(images, padding_mask)
        features = self.neck(maps, padding_mask)
        outputs = self.head(features, padding_mask)
        image = features[self.head.feature_name]  # (B, d_model, h, w)
        memory = outputs["memory"].transpose(1, 2).unflatten(2, image.shape[-2:])
        padding = None if padding_mask is None else resize_mask(padding_mask, image.shape[-2:])
        attention = self.bbox_attention(outputs["queries"], memory, padding)
        finer = list(maps.values())[-2:-5:-1]
        masks = self.mask_head(image, attention, finer, padding_mask if self.isolate_padding else None)
        return {**outputs, "pred_masks": masks, "input_size": tuple(images.shape[-2:]), "image_sizes": image_sizes}

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return boxes, and masks or panoptic maps, of the original images.

        Returns:
            one dict per image: every query's scores, labels and boxes_xyxy as from DETR, and by task
            instance: masks (Q, H, W) bool;
            panoptic: panoptic (H, W) int32 segment ids from 1, and segments_info.
        """
        results = [dict(result) for result in super().postprocess(outputs, image_sizes)]
        for i, (result, original) in enumerate(zip(results, image_sizes)):
            masks, padded = outputs["pred_masks"][i].float(), outputs["input_size"]
            inside = tuple(outputs["image_sizes"][i].tolist())
            if "instance" in self.tasks:
                result["masks"] = instance_masks(masks, padded, inside, original)
            if "panoptic" in self.tasks:
                # The original includes the padding in the resizing.
                if self.isolate_padding:
                    height, width = (
                        math.ceil(n * m / side) for n, m, side in zip(inside, masks.shape[-2:], padded, strict=True)
                    )
                    masks = masks[:, :height, :width]
                probabilities = outputs["pred_logits"][i].float().softmax(-1)
                panoptic = panoptic_map(
                    probabilities, masks, inside, original, things=self.things, threshold=self.object_threshold
                )
                result |= dict(panoptic=panoptic.segment_ids, segments_info=panoptic.segments)
        return results

    def postprocess_settings(self) -> dict[str, Any]:
        """Return how masks are resized and merged, in addition; see `DensePredictionModel`."""
        rules = dict(masks="nearest", smallest_area=SMALLEST_AREA, object_threshold=self.object_threshold)
        return {**super().postprocess_settings(), **rules, "things": list(self.things)}
