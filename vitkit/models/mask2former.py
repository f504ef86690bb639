"""Mask2Former: backbone, pixel decoder, head (Cheng et al. 2022, https://arxiv.org/abs/2112.01527)."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.models.base import DensePredictionModel
from vitkit.models.mask_results import MaskResults
from vitkit.ops.images import unpadded_sizes
from vitkit.ops.masks import pad_masks
from vitkit.registry import MODELS, Spec
from vitkit.structures import DetectionTarget


@MODELS.register
class Mask2Former(MaskResults, DensePredictionModel):
    """A model that predicts a mask and its class per query, whose decoder attends within the masks of the layer before.

    Args:
        backbone, neck, head: spec or module; the neck is a pixel decoder.
        num_queries: number of masks predicted per image.
        num_classes: number of classes without "no object"; a run sets its dataset's.
        tasks, things, num_instances, object_threshold, overlap_threshold: what `postprocess` returns, see
            `MaskResults.set_results`; a run sets its dataset's things.
        size_divisibility: images are padded at the right and bottom to a multiple of this, as in the original; 1: no
            padding.
        training_queries, isolate_padding: see `DensePredictionModel`.
    Raises:
        ConfigError: there is no task or an unknown one, or the length of `things` is not the number of classes.
    """

    class_head = ("head.class_embed.", "training_queries.denoising.label_embed.")

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 100,
        num_classes: int = 80,
        tasks: Sequence[Literal["semantic", "instance", "panoptic"]] = ("instance",),
        things: Sequence[bool] | None = None,
        num_instances: int = 100,
        object_threshold: float = 0.8,
        overlap_threshold: float = 0.8,
        size_divisibility: int = 32,
        training_queries: Sequence[Spec] = (),
        isolate_padding: bool = False,
    ):
        super().__init__(
            backbone,
            neck,
            head,
            num_classes=num_classes,
            num_queries=num_queries,
            training_queries=training_queries,
            isolate_padding=isolate_padding,
            size_divisibility=size_divisibility,
        )
        self.set_results(
            num_classes,
            tasks=tasks,
            things=things,
            num_instances=num_instances,
            object_threshold=object_threshold,
            overlap_threshold=overlap_threshold,
        )

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        As in the original, padding is attended to unless it is isolated; its pixels are 0 after normalization.

        Args:
            targets: only in training, see `uses_targets`.
        Returns:
            the head's outputs:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_masks: (B, Q, h, w) logits.
            mask_embed, mask_features: factors of the masks, see the head.
            aux_outputs: the same for earlier layers, without pred_masks.
            training_outputs: only with training queries, a list of their outputs, see `QuerySet`.
            And
            input_size: (height, width) that the masks cover: the images padded to `size_divisibility`.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images, padding_mask = self.prepare(images, padding_mask)
        input_size = tuple(images.shape[-2:])
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        attended = padding_mask if self.isolate_padding else None
        if targets is not None:
            targets = [{**target, "masks": pad_masks(target["masks"], input_size)} for target in targets]
        outputs = self.run_head(features, attended, targets)
        return {**outputs, "input_size": input_size, "image_sizes": image_sizes}
