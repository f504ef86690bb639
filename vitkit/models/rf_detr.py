"""RF-DETR: backbone, neck, head (Robinson et al. 2025, https://arxiv.org/abs/2511.09554)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.models.base import Part, QueryDetector
from vitkit.ops.detections import BatchDetections
from vitkit.registry import MODELS


@MODELS.register
class RFDETR(QueryDetector):
    """A real-time detector on a plain transformer in windows; trained with groups of queries (`QueryGroups`).

    The arguments are those of `QueryDetector`. The official checkpoints have 91 classes, for COCO's raw category ids.
    """

    def __init__(self, backbone: Part, neck: Part, head: Part, *, num_classes: int = 91, **rest: Any):
        super().__init__(backbone, neck, head, num_classes=num_classes, **rest)
        groups = {f"{name.rpartition('.')[0]}." for name, _ in self.named_parameters() if is_group_head(name)}
        self.class_head = (*self.class_head, *sorted(groups))

        # Patches beyond the image's border are padding, so that boxes are relative to the image itself.
        strides = [info.stride for info in self.neck.feature_info.values()]
        self.padding_multiple = math.lcm(self.padding_multiple, *strides)

    @staticmethod
    def variant_of(names: Iterable[str]) -> str:
        """Return the variant that the names of a state dict belong to, such as "of 3 decoder layers with masks"."""
        names = set(names)
        if "head.query_embed.weight" not in names or "head.decoder.ref_point_head.layers.0.weight" not in names:
            return ""  # another head than the family's
        layers = sum(n.startswith("head.decoder.layers.") and n.endswith(".norm1.weight") for n in names)
        return f"of {layers} decoder layers with{'' if 'head.mask_head.bias' in names else 'out'} masks"

    def prepare(self, images: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalize images, and pad them to complete patches."""
        if padding_mask is None and any(side % self.padding_multiple for side in images.shape[-2:]):
            padding_mask = images.new_zeros(images.shape[0], *images.shape[-2:], dtype=torch.bool)
        return super().prepare(images, padding_mask)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        best = super().detections(outputs)
        return best._replace(boxes_xyxy=best.boxes_xyxy.clamp(0, 1))  # boxes end at the image's border

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """If the weights have more queries, keep the first of each group, in place; see `DensePredictionModel`.

        Queries are assigned to locations by the rank of their scores, so the last ones matter least.
        """
        own, others = f"{prefix}head.query_embed.weight", f"{prefix}training_queries.groups.embed.weight"
        theirs, ours = len(state.get(own, ())), len(self.head.query_embed.weight)
        if theirs > ours:
            state[own] = state[own][:ours]
            if others in state:
                state[others] = state[others].unflatten(0, (-1, theirs))[:, :ours].flatten(0, 1)
        super().adapt_state(state, prefix)


@MODELS.register
class RFDETRSeg(RFDETR):
    """RF-DETR with a mask for each query; its head is an `RFDETRHead` with `masks=True`. Arguments are those of RFDETR.

    Raises:
        ConfigError: the head predicts no masks.
    """

    def __init__(
        self, backbone: Part, neck: Part, head: Part, *, num_queries: int = 100, num_detections: int = 100, **rest: Any
    ):
        super().__init__(backbone, neck, head, num_queries=num_queries, num_detections=num_detections, **rest)
        if self.mask_head is None:
            raise ConfigError("RFDETRSeg: the head predicts no masks. Set model.head.masks=True, or model.type=RFDETR.")


def is_group_head(name: str) -> bool:
    """Whether a parameter is that of a training group's class head."""
    return name.startswith("training_queries.groups.proposals.") and ".class_embed." in name
