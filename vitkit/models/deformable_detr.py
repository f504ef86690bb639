"""Deformable DETR: backbone, neck, head (Zhu et al. 2021, https://arxiv.org/abs/2010.04159)."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.detr import DETR
from vitkit.ops.boxes import cxcywh_to_xyxy, duplicates
from vitkit.registry import MODELS, Spec
from vitkit.structures import Detections


@MODELS.register
class DeformableDETR(DETR):
    """A DETR with one sigmoid per class in place of a softmax with "no object", on as many maps as its neck and head
    have.

    Args:
        num_detections: number of detections per image. The other arguments are those of DETR.
        nms_iou: detections that overlap a better one of their class by more than this IoU get the score 0; None leaves
            them, as in the papers. It helps after short training, when queries still find objects twice; see
            configs/bccd/dino_r18.py.
    """

    class_head = ("head.class_embed.", "head.proposals.class_embed.", "training_queries.denoising.label_embed.")
    class_activation = "sigmoid"

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 300,
        num_detections: int = 100,
        nms_iou: float | None = None,
        **options: Any,
    ):
        super().__init__(backbone, neck, head, num_queries=num_queries, **options)
        if num_detections < 1:
            raise ConfigError(f"num_detections={num_detections}: expected at least 1.")
        if nms_iou is not None and not 0 < nms_iou < 1:
            raise ConfigError(f"nms_iou={nms_iou}: expected a number between 0 and 1, or None for no suppression.")
        self.num_detections, self.nms_iou = num_detections, nms_iou

    @staticmethod
    def variant_of(names: Iterable[str]) -> str:
        """Return the variant that the names of a state dict belong to, such as "of 4 levels with box refinement"."""
        names = set(names)
        if not any(name.startswith("neck.levels.") for name in names):
            return ""  # another head than the family's
        levels = sum(name.startswith("neck.levels.") and name.endswith(".0.weight") for name in names)
        box_positions = "head.decoder.ref_point_head.layers.0.weight" in names
        if "head.proposals.enc_output.weight" in names:
            stages = "in two stages" + (" with mixed query selection (DINO)" if box_positions else "")
        elif box_positions:
            stages = "with learned anchor boxes (DAB-DETR)"
        else:
            refines = "head.decoder.bbox_embed.1.layers.0.weight" in names
            stages = f"with{'' if refines else 'out'} box refinement"
        return f"of {levels} level{'s' if levels > 1 else ''} {stages}"

    def detections(self, outputs: Mapping[str, Tensor]) -> Detections:
        """Return the pairs of a query and a class with the highest scores; a query may be returned with several
        classes.

        Returns:
            the same as DETR's, with `num_detections` rows (or all pairs, if there are fewer), best first.
        """
        scores, queries, labels = self.best_pairs(outputs)
        return Detections(scores=scores, labels=labels, boxes_xyxy=self._boxes_of(queries, outputs))

    def detected_queries(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the query of each of the `detections`, (B, num_detections)."""
        return self.best_pairs(outputs)[1]

    def best_pairs(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, queries and labels of the detections, each (B, num_detections), best first."""
        probabilities = outputs["pred_logits"].float().sigmoid()
        num_classes = probabilities.shape[-1]
        pairs = probabilities.flatten(1)
        scores, best = pairs.topk(min(self.num_detections, pairs.shape[1]), dim=1)
        if self.nms_iou is not None:
            boxes_xyxy = self._boxes_of(best // num_classes, outputs)
            scores = scores.masked_fill(duplicates(boxes_xyxy, best % num_classes, iou=self.nms_iou), 0.0)
            scores, order = scores.topk(scores.shape[1], dim=1)
            best = best.gather(1, order)
        return scores, best // num_classes, best % num_classes

    @staticmethod
    def _boxes_of(queries: Tensor, outputs: Mapping[str, Tensor]) -> Tensor:
        boxes_xyxy = cxcywh_to_xyxy(outputs["pred_boxes"].float())
        return boxes_xyxy.gather(1, queries[..., None].expand(-1, -1, 4))
