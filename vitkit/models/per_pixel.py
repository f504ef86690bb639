"""Per-pixel classification with a pixel decoder, as a baseline for mask classification."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.models.base import DensePredictionModel, Part
from vitkit.ops.images import unpadded_sizes
from vitkit.ops.mask_postprocess import geometry_of, upsample_in_bands
from vitkit.registry import MODELS
from vitkit.structures import AttentionLayers


@MODELS.register
class PerPixelClassification(DensePredictionModel):
    """A model that classifies every pixel (PerPixelBaseline and PerPixelBaseline+ of Cheng et al. 2021, section 4.2,
    https://arxiv.org/abs/2107.06278).

    Args:
        backbone, neck, head: spec or module; the neck is a pixel decoder, or an encoder for `DFINESegHead`.
        num_classes: number of classes; a run sets its dataset's.
        isolate_padding: see `DensePredictionModel`.
    """

    class_head = ("head.predictor.", "head.query_embed.", "head.aux_predictor.")
    learned_queries = ()
    tasks = returns = ("semantic",)

    def __init__(
        self, backbone: Part, neck: Part, head: Part, *, num_classes: int = 150, isolate_padding: bool = False
    ):
        super().__init__(backbone, neck, head, num_classes=num_classes, isolate_padding=isolate_padding)
        self.stride = next(iter(self.neck.feature_info.values())).stride

    @property
    def mask_multiple(self) -> int:
        """See `DensePredictionModel`; here also a multiple of the finest map's stride."""
        return math.lcm(self.padding_multiple, self.stride)

    def attention_layers(self) -> AttentionLayers:
        """Return the attention of the encoder: the queries, if the head has any, make no predictions themselves."""
        return super().attention_layers()._replace(decoder=())

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict class logits per pixel. Unless padding is isolated, it is only set to 0 after normalization.

        Returns:
            the head's outputs: pred_semantic (B, num_classes, h, w) logits, and aux_outputs if it has any.
            input_size: (height, width) that the logits cover, H and W rounded up to the finest map's stride.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images, padding_mask = self.prepare(images, padding_mask)
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        outputs = self.head(features, padding_mask if self.isolate_padding else None)
        finest = next(iter(features.values()))
        input_size = tuple(side * self.stride for side in finest.shape[-2:])
        return {**outputs, "input_size": input_size, "image_sizes": image_sizes}

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return one dict per image: semantic (H, W) int64, the class of every pixel of the original image."""
        return [
            dict(semantic=torch.cat([logits.argmax(0) for _, logits in self._logits(outputs, i, original)]))
            for i, original in enumerate(image_sizes)
        ]

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield class probabilities of an image's pixels; see `MaskResults.semantic_scores`."""
        for rows, logits in self._logits(outputs, index, original, within=within):
            yield rows, logits.softmax(0)

    def _logits(
        self, outputs: Mapping[str, Any], index: int, original: Sequence[int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        logits = outputs["pred_semantic"][index].float()
        return upsample_in_bands(logits, geometry_of(outputs, index, original), within=within)
