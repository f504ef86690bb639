"""ECPose, EdgeCrafter's model of poses: ECDet's backbone and encoder, DETRPose's head
(https://arxiv.org/abs/2603.18739)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.models.base import Part, QueryDetector
from vitkit.ops.detections import BatchDetections
from vitkit.ops.keypoints import detections_with_keypoints, sigmas_of_keypoints
from vitkit.registry import MODELS
from vitkit.structures import KeypointDetections


@MODELS.register
class ECPose(QueryDetector):
    """Real-time keypoints of persons, or of other objects, on a small transformer: `ECViT`; `DEIMv2Encoder` with
    block="deim" and activation="silu"; `DETRPoseHead`.

    It predicts no boxes: those of its detections are around all keypoints, cut at the image's border. Arguments are
    those of `QueryDetector`, and

    Args:
        num_keypoints: number of keypoints of an object; a run sets its dataset's. To start from weights with another
            number, use `--init-partial`.
        keypoint_sigmas: how exactly each keypoint can be located, which the noise of denoising is in proportion to, see
            `sigmas_of_keypoints`; a run sets its dataset's.
    Raises:
        ConfigError: there is another number of sigmas than of keypoints; see `DETRPoseHead`.
    """

    def __init__(
        self,
        backbone: Part,
        neck: Part,
        head: Part,
        *,
        num_keypoints: int = 17,
        keypoint_sigmas: Sequence[float] | None = None,
        num_queries: int = 60,
        num_classes: int = 1,
        num_detections: int = 60,
        **rest: Any,
    ):
        sizes = dict(num_queries=num_queries, num_classes=num_classes, num_detections=num_detections)
        super().__init__(backbone, neck, head, num_keypoints=num_keypoints, **sizes, **rest)
        self.head.keypoint_sigmas.copy_(sigmas_of_keypoints(num_keypoints, keypoint_sigmas))
        self.returns = (*self.returns, "keypoints")

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        best = super().detections(outputs)
        return best._replace(boxes_xyxy=best.boxes_xyxy.clamp(0, 1))

    def keypoints(self, outputs: Mapping[str, Tensor], detections: BatchDetections) -> Tensor:
        """See `Model`; the confidence in each point is 1, as none is predicted."""
        predicted = outputs["pred_keypoints"].float()  # (B, Q, K, 2)
        index = detections.queries[..., None, None].expand(-1, -1, *predicted.shape[2:])
        points = predicted.gather(1, index)
        return torch.cat((points, torch.ones_like(points[..., :1])), dim=-1)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[KeypointDetections]:
        """Return the detections of each image, in pixels of the original image, with keypoints (N, K, 3)."""
        batch = self.detections(outputs)
        return detections_with_keypoints(batch, self.keypoints(outputs, batch), image_sizes)
