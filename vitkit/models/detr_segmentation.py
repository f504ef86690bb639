"""DETR with masks: a mask head on a trained DETR (Carion et al. 2020, section 4.4, https://arxiv.org/abs/2005.12872)."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.heads.detr_masks import BoxAttention, MaskConvHead
from vitkit.models.detr import DETR
from vitkit.models.mask_postprocess import Panoptic, chunks, resize
from vitkit.ops.images import normalize_images, unpadded_sizes
from vitkit.registry import MODELS, Spec, nearest

TASKS = ("instance", "panoptic")
SMALLEST_AREA = 4
"""Panoptic segments of no more pixels are dropped."""


@MODELS.register
class DETRSegmentation(DETR):
    """
    Args:
        backbone, neck, head, num_queries, num_classes: as DETR's; the backbone returns four maps.
        freeze_detr: trains the mask head alone, as the original does from a trained DETR.
        tasks: what `postprocess` returns besides the boxes: "instance" masks, or a "panoptic" map.
        things: of each class whether it has instances; None: all have. A run sets its dataset's.
        object_threshold: queries of a panoptic map need a higher class probability.
    Raises:
        ConfigError: the backbone has fewer than four maps, or a task is unknown.
    """

    drops_features = False
    new_parts = ("bbox_attention.", "mask_head.")
    """Prefixes of what a checkpoint to start training from may lack: that of a DETR without masks does."""

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 100,
        num_classes: int = 250,
        freeze_detr: bool = True,
        tasks: Sequence[Literal["instance", "panoptic"]] = ("panoptic",),
        things: Sequence[bool] | None = None,
        object_threshold: float = 0.85,
    ):
        super().__init__(backbone, neck, head, num_queries=num_queries, num_classes=num_classes)
        for task in tasks:
            if task not in TASKS:
                raise ConfigError(f"model.tasks: unknown task {task!r}. {nearest(task, TASKS)}")
        infos = list(self.backbone.feature_info.values())
        if len(infos) < 4:
            raise ConfigError(
                f"DETRSegmentation: the mask head needs four maps, the backbone gives {len(infos)} "
                f"({', '.join(self.backbone.feature_info)}): set model.backbone.out_features."
            )
        d_model, num_heads = self.head.d_model, self.head.num_heads
        self.bbox_attention = BoxAttention(d_model, num_heads)
        finer = [info.channels for info in infos[-2:-5:-1]]
        self.mask_head = MaskConvHead(d_model + num_heads, d_model, finer)
        self.freeze_detr = freeze_detr
        if freeze_detr:
            for part in self._trained_parts():
                part.requires_grad_(False)
        self.tasks = tuple(tasks)
        self.things = list(things) if things is not None else [True] * num_classes
        self.object_threshold = object_threshold

    def _trained_parts(self) -> list[nn.Module]:
        return [self.backbone, self.neck, self.head] if self.freeze_detr else []

    def train(self, mode: bool = True) -> "DETRSegmentation":
        super().train(mode)
        for part in self._trained_parts():
            part.eval()
        return self

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """
        Args:
            images, padding_mask: as DETR's.
        Returns:
            what DETR returns, and of the last layer
            pred_masks: (B, Q, h, w) logits at the finest map's stride.
            input_size: (height, width) that the masks cover.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images = normalize_images(images, padding_mask)
        features = self.backbone(images)
        projected = self.neck(features)
        decoded = self.head.decode(projected, padding_mask)
        attention = self.bbox_attention(decoded.states[-1], decoded.memory, decoded.padding_mask)
        finer = list(features.values())[-2:-5:-1]
        masks = self.mask_head(projected[self.head.feature_name], attention, finer)
        outputs = self.head.predict(decoded.states)
        return dict(outputs, pred_masks=masks, input_size=tuple(images.shape[-2:]), image_sizes=image_sizes)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """
        Args:
            outputs: of `forward`.
            image_sizes: (height, width) of each original image, in pixels.
        Returns:
            one dict per image, of the original image: every query's scores, labels and boxes_xyxy as DETR's, and by
            task instance: masks (Q, H, W) bool; panoptic: panoptic (H, W) int32 segment ids from 1, and segments_info.
        """
        results = [dict(result) for result in super().postprocess(outputs, image_sizes)]
        for i, (result, original) in enumerate(zip(results, image_sizes)):
            inside = tuple(outputs["image_sizes"][i].tolist())
            if "instance" in self.tasks:
                result["masks"] = instance_masks(
                    outputs["pred_masks"][i].float(), outputs["input_size"], inside, original
                )
            if "panoptic" in self.tasks:
                probabilities = outputs["pred_logits"][i].float().softmax(-1)
                found = self._panoptic(probabilities, outputs["pred_masks"][i].float(), inside, original)
                result |= dict(panoptic=found.segment_ids, segments_info=found.segments)
        return results

    def _panoptic(
        self, probabilities: Tensor, masks: Tensor, processed: tuple[int, int], original: tuple[int, int]
    ) -> Panoptic:
        """Every pixel goes to the query whose mask is surest; small segments are dropped, pixels shared anew."""
        scores, labels = probabilities.max(-1)
        kept = (labels != probabilities.shape[-1] - 1) & (scores > self.object_threshold)
        scores, labels, masks = scores[kept], labels[kept].tolist(), masks[kept]
        # Stuff is merged in the first round alone.
        first_of = [labels.index(label) if not self.things[label] else i for i, label in enumerate(labels)]
        chosen, owner = list(range(len(labels))), torch.zeros(processed, dtype=torch.int64)
        first_round = True
        while chosen:
            # As the original, which does not crop the padding first.
            owner = surest(masks[chosen], processed).cpu()
            if first_round:
                owner = torch.tensor(first_of)[owner]
                first_round = False
            owner = resize_nearest(owner, original)
            areas = owner.flatten().bincount(minlength=len(chosen)).tolist()
            large = [query for query, area in zip(chosen, areas) if area > SMALLEST_AREA]
            if len(large) == len(chosen):
                break
            chosen = large
        segments = [
            dict(id=n, label=labels[q], score=float(scores[q]), is_thing=bool(self.things[labels[q]]))
            for n, q in enumerate(chosen, start=1)
        ]
        if not chosen:
            return Panoptic(torch.zeros(original, dtype=torch.int32), [])
        return Panoptic(owner.int() + 1, segments)


def instance_masks(masks: Tensor, padded: tuple[int, int], image: tuple[int, int], original: tuple[int, int]) -> Tensor:
    """(Q, h, w) logits -> (Q, H, W) bool of the original image, thresholded before the last, nearest, resizing."""
    original = tuple(original)
    inside = torch.zeros(len(masks), *original, dtype=torch.bool, device=masks.device)
    for chosen in chunks(len(masks), (padded, original)):
        some = resize(masks[chosen], padded)[:, : image[0], : image[1]].sigmoid() > 0.5
        inside[chosen] = F.interpolate(some[:, None].float(), size=original, mode="nearest")[:, 0].bool()
    return inside


def surest(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """(*size) int64: which of N > 0 masks, logits (N, h, w), is highest at each pixel; the first of equal ones."""
    best = masks.new_full(size, -torch.inf)
    owner = torch.zeros(size, dtype=torch.int64, device=masks.device)
    for chosen in chunks(len(masks), (size,)):
        value, index = resize(masks[chosen], size).max(0)
        owner = torch.where(value > best, index + chosen.start, owner)
        best = torch.maximum(best, value)
    return owner


def resize_nearest(labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Pillow's nearest resizing of a (h, w) map, as the original's."""
    resized = Image.fromarray(labels.int().numpy()).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return torch.from_numpy(np.array(resized)).long()
