"""MaskFormer and Mask2Former: backbone, pixel decoder, head; one model for semantic, instance and panoptic masks."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.models.base import DensePredictionModel
from vitkit.models.mask_postprocess import MaskSettings
from vitkit.models.mask_results import MaskResults
from vitkit.nn.query_groups import QuerySettings
from vitkit.ops.images import unpadded_sizes
from vitkit.ops.masks import pad_masks
from vitkit.registry import MODELS, Spec
from vitkit.structures import DetectionTarget


@MODELS.register
class MaskClassification(MaskResults, DensePredictionModel):
    """A model that predicts a mask and its class per query (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

    Args:
        backbone: spec or module, as are `neck` (a pixel decoder) and `head`.
        queries: `num_queries` masks are predicted per image; additional groups of queries help in training.
        num_classes: number of classes without "no object"; a run sets its dataset's.
        size_divisibility: images are padded at the right and bottom to a multiple of this, as in the original; 1: no
            padding.
        isolate_padding: see `DensePredictionModel`.
    Raises:
        ConfigError: there is no task or an unknown one, or the length of `things` is not the number of classes.
    """

    class_head = ("head.class_embed.", "head.denoising.label_embed.")

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        queries: QuerySettings = QuerySettings(),
        num_classes: int = 80,
        size_divisibility: int = 32,
        settings: MaskSettings = MaskSettings(),
        isolate_padding: bool = False,
    ):
        super().__init__(
            backbone,
            neck,
            head,
            queries=queries,
            num_classes=num_classes,
            isolate_padding=isolate_padding,
            size_divisibility=size_divisibility,
        )
        self.set_tasks(settings, num_classes)

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        As in the originals, padding is attended to unless it is isolated; its pixels are 0 after normalisation.

        Args:
            targets: only in training, see `uses_targets`.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_masks: (B, Q, h, w) logits.
            mask_embed, mask_features: factors of the masks, see the head.
            aux_outputs: the same for earlier layers, without pred_masks.
            input_size: (height, width) that the masks cover: the images padded to `size_divisibility`.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images, padding_mask = self.prepare(images, padding_mask)
        features = self.features(images, padding_mask)
        input_size = tuple(images.shape[-2:])
        if targets is not None:
            targets = [{**target, "masks": pad_masks(target["masks"], input_size)} for target in targets]
        outputs = self.head_outputs(features, padding_mask if self.isolate_padding else None, targets)
        return {**outputs, "input_size": input_size, "image_sizes": image_sizes}
