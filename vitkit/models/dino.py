"""DINO: backbone, neck, head (Zhang et al. 2022, https://arxiv.org/abs/2203.03605)."""

from typing import Any

import torch
from torch import Tensor

from vitkit.models.base import Part, QueryDetector
from vitkit.models.variants import deformable_variant
from vitkit.registry import MODELS


@MODELS.register
class DINO(QueryDetector):
    """A detector whose queries start from boxes that the encoder selects; trained with contrastive denoising.

    The arguments are those of `QueryDetector`. The official checkpoints have 91 classes, for COCO's raw
    category ids.
    """

    def __init__(
        self, backbone: Part, neck: Part, head: Part, *, num_queries: int = 900, num_classes: int = 91, **rest: Any
    ):
        super().__init__(backbone, neck, head, num_queries=num_queries, num_classes=num_classes, **rest)

    variant_of = staticmethod(deformable_variant)

    def prepare(self, images: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Prepare images, with a mask if the head needs their sizes in pixels."""
        if padding_mask is None and not self.head.rounds_padding:
            padding_mask = torch.zeros_like(images[:, 0], dtype=torch.bool)
        return super().prepare(images, padding_mask)
