"""RT-DETR: backbone, hybrid encoder, head (Zhao et al. 2023, https://arxiv.org/abs/2304.08069)."""

from typing import Any

from torch import nn

from vitkit.models.deformable_detr import DeformableDETR
from vitkit.registry import MODELS, Spec


@MODELS.register
class RTDETR(DeformableDETR):
    """A real-time detector whose queries start from the encoder's best locations; trained with contrastive denoising.

    Its outputs and results are those of Deformable DETR; so are its further arguments.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_classes: int = 80,
        num_detections: int = 300,
        **options: Any,
    ):
        super().__init__(backbone, neck, head, num_classes=num_classes, num_detections=num_detections, **options)
