"""DINO: backbone, neck, head (Zhang et al. 2022, https://arxiv.org/abs/2203.03605)."""

from typing import Any

from torch import nn

from vitkit.models.deformable_detr import DeformableDETR
from vitkit.registry import MODELS, Spec


@MODELS.register
class DINO(DeformableDETR):
    """A detector whose queries start from boxes that the encoder selects; trained with contrastive denoising.

    Its outputs and results are those of Deformable DETR; so are its further arguments.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 900,
        num_detections: int = 300,
        **options: Any,
    ):
        super().__init__(backbone, neck, head, num_queries=num_queries, num_detections=num_detections, **options)
