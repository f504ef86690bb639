"""RF-DETR: backbone, neck, head (Robinson et al. 2025, https://arxiv.org/abs/2511.09554)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.models.base import Part, QueryDetector, attention_in
from vitkit.ops.detections import BatchDetections, with_scores
from vitkit.ops.keypoints import detections_with_keypoints, log_mean_variance
from vitkit.registry import MODELS
from vitkit.structures import AttentionLayers, KeypointDetections


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


@MODELS.register
class RFDETRKeypoints(RFDETR):
    """RF-DETR with keypoints of each query, the preview of the package rfdetr. Arguments are those of RFDETR, and

    Args:
        num_keypoints: number of keypoints of an object; a run sets its dataset's. To start from weights with another
            number, use `--init-partial`: the vectors of the points are then newly initialized.
        score_uncertainty: how much a detection's score falls with the uncertainty of its keypoints: the score s becomes
            t / (1 + t), where t is s divided by the power `score_uncertainty` of their mean variance, and s for labels
            without keypoints; 0: it stays s.
    Raises:
        ConfigError: `score_uncertainty` is negative; see `QueryKeypoints`.
    """

    def __init__(
        self,
        backbone: Part,
        neck: Part,
        head: Part,
        *,
        num_keypoints: int = 17,
        num_queries: int = 100,
        num_detections: int = 100,
        score_uncertainty: float = 0.2,
        **rest: Any,
    ):
        sizes = dict(num_keypoints=num_keypoints, num_queries=num_queries, num_detections=num_detections)
        super().__init__(backbone, neck, head, **sizes, **rest)
        if score_uncertainty < 0:
            raise ConfigError(f"score_uncertainty={score_uncertainty}: expected a number from 0.")
        self.score_uncertainty = score_uncertainty
        self.returns = (*self.returns, "keypoints")
        # Which labels have keypoints changes with the classes.
        self.class_head = (*self.class_head, "head.keypoint_head.label_groups")
        names = [name for name, _ in self.named_parameters()]
        stages = {f"{name.partition('.keypoint_embed.')[0]}.keypoint_embed." for name in names if "_embed." in name}
        self.new_parts = ("head.keypoint_head.", "neck.keypoints.", *sorted(stages))

    def attention_layers(self) -> AttentionLayers:
        """Also return the cross-attention of the keypoints."""
        return super().attention_layers()._replace(keypoints=attention_in(self.head.keypoint_head, "cross_attn"))

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        best = super().detections(outputs)
        if not self.score_uncertainty:
            return best
        predicted, has_points = self._points(outputs, best)
        uncertainty = log_mean_variance(predicted).where(has_points, 0)
        return with_scores(best, torch.sigmoid(best.scores.log() - self.score_uncertainty * uncertainty))

    def keypoints(self, outputs: Mapping[str, Tensor], detections: BatchDetections) -> Tensor:
        """See `Model`; zeros for labels without keypoints."""
        predicted, has_points = self._points(outputs, detections)
        points = torch.cat((predicted[..., :2], predicted[..., 2:3].sigmoid()), dim=-1)
        return points.where(has_points[..., None, None], 0)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[KeypointDetections]:
        """Return the detections of each image, in pixels of the original image, with keypoints (N, K, 3)."""
        batch = self.detections(outputs)
        return detections_with_keypoints(batch, self.keypoints(outputs, batch), image_sizes)

    def _points(self, outputs: Mapping[str, Tensor], detections: BatchDetections) -> tuple[Tensor, Tensor]:
        """Return what is predicted for the points of each detection, (B, N, K, 7), and whether its label has points,
        (B, N) bool."""
        predicted = outputs["pred_keypoints"].float()  # (B, Q, G, K, 7)
        group = outputs["keypoint_groups"].long()[detections.labels]  # of an exported file: float
        rows = detections.queries * predicted.shape[2] + group.clamp(min=0)
        flat = predicted.flatten(1, 2)
        index = rows[..., None, None].expand(-1, -1, *flat.shape[2:])
        return flat.gather(1, index), group >= 0


def is_group_head(name: str) -> bool:
    """Whether a parameter is that of a training group's class head."""
    return name.startswith("training_queries.groups.proposals.") and ".class_embed." in name
