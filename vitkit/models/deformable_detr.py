"""Deformable DETR: backbone, neck, head (Zhu et al. 2021, https://arxiv.org/abs/2010.04159)."""

from collections.abc import Iterable, Sequence
from typing import Any

from vitkit.models.detr import DETR
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.registry import MODELS
from vitkit.structures import Detections

NUM_DETECTIONS = 100
"""Returned per image, as the original does."""


@MODELS.register
class DeformableDETR(DETR):
    """A DETR on several maps, whose classes have a sigmoid each; arguments as DETR's."""

    class_head = ("head.class_embed.", "head.proposals.class_embed.")

    @staticmethod
    def variant_of(names: Iterable[str]) -> str:
        """Return the variant that the names of a state dict belong to, such as "of 4 levels with box refinement"."""
        names = set(names)
        levels = sum(name.startswith("neck.levels.") and name.endswith(".0.weight") for name in names)
        if "head.proposals.enc_output.weight" in names:
            stages = "in two stages"
        else:
            refines = "head.decoder.bbox_embed.1.layers.0.weight" in names
            stages = f"with{'' if refines else 'out'} box refinement"
        return f"of {levels} level{'s' if levels > 1 else ''} {stages}"

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Return the best pairs of a query and a class: a query may answer for several classes.

        Returns:
            one Detections per image, of 100 rows (of all pairs, if they are fewer), best first.
        """
        probabilities = outputs["pred_logits"].float().sigmoid()
        num_classes = probabilities.shape[-1]
        pairs = probabilities.flatten(1)
        scores, best = pairs.topk(min(NUM_DETECTIONS, pairs.shape[1]), dim=1)
        boxes_xyxy = scale_boxes(cxcywh_to_xyxy(outputs["pred_boxes"].float()), image_sizes)
        boxes_xyxy = boxes_xyxy.gather(1, (best // num_classes)[..., None].expand(-1, -1, 4))
        labels = best % num_classes
        return [Detections(scores=s, labels=l, boxes_xyxy=b) for s, l, b in zip(scores, labels, boxes_xyxy)]
