"""MaskFormer and Mask2Former: backbone, pixel decoder, head; one model for semantic, instance and panoptic masks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.base import DensePredictionModel, check_tasks
from vitkit.models.mask_postprocess import Geometry, MaskSettings, instances, panoptic, semantic_map, semantic_scores
from vitkit.nn.query_groups import QuerySettings
from vitkit.ops.images import unpadded_sizes
from vitkit.ops.masks import boxes_around_masks, pad_masks
from vitkit.registry import MODELS, Spec
from vitkit.structures import DetectionTarget

TASKS = ("semantic", "instance", "panoptic")


@MODELS.register
class MaskClassification(DensePredictionModel):
    """A mask and its class per query (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

    Args:
        backbone: spec or module, as are `neck` (a pixel decoder) and `head`.
        queries: `num_queries` masks are predicted per image; further groups of queries help in training.
        num_classes: without the no-object class; a run sets its dataset's number.
        size_divisibility: images are padded at the right and bottom to a multiple of it, as the original does; 1: not.
        isolate_padding: see `DensePredictionModel`.
    Raises:
        ConfigError: there is no task or an unknown one, or `things` has another length than there are classes.
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
        tasks, things, resize_masks = settings.tasks, settings.things, settings.resize_masks
        if not tasks:
            raise ConfigError(f"model.tasks is empty; expected any of {', '.join(TASKS)}.")
        check_tasks(tasks, TASKS)
        if things is not None and len(things) != num_classes:
            raise ConfigError(f"model.things has {len(things)} entries, but there are {num_classes} classes.")
        self.tasks = tuple(tasks)
        self.things = list(things) if things is not None else [True] * num_classes
        self.settings = settings
        self.resize_masks = resize_masks if resize_masks is not None else set(tasks) != {"semantic"}

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        As in the originals padding is attended to, unless it is isolated; its pixels are 0 after the normalisation.

        Args:
            targets: in training alone, see `uses_targets`.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last for no object.
            pred_masks: (B, Q, h, w) logits.
            mask_embed, mask_features: factors of the masks, see the head.
            aux_outputs: the same of earlier layers, without pred_masks.
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
        return dict(outputs, input_size=input_size, image_sizes=image_sizes)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return what the tasks ask for, of the original images.

        Returns:
            one dict per image, by task
            instance: scores (N,), labels (N,), masks (N, H, W) bool, boxes_xyxy (N, 4) around the masks;
            semantic: semantic (H, W) int64, the class of every pixel;
            panoptic: panoptic (H, W) int32 segment ids, 0 being void, and segments_info, a list of id, label, score,
            is_thing.
        """
        results = []
        for i, original in enumerate(image_sizes):
            geometry = geometry_of(outputs, i, original)
            probabilities = outputs["pred_logits"][i].float().softmax(-1)
            masks = outputs["pred_masks"][i].float()
            result: dict[str, Any] = {}
            if "instance" in self.tasks:
                count = self.settings.num_instances
                best = instances(probabilities[:, :-1], masks, geometry, things=self.things, num_instances=count)
                result |= best._asdict() | {"boxes_xyxy": boxes_around_masks(best.masks)}
            if "semantic" in self.tasks:
                result["semantic"] = semantic_map(
                    probabilities[:, :-1], masks, geometry, resize_masks=self.resize_masks
                )
            if "panoptic" in self.tasks:
                segmented = panoptic(probabilities, masks, geometry, things=self.things, settings=self.settings)
                result |= dict(panoptic=segmented.segment_ids, segments_info=segmented.segments)
            results.append(result)
        return results

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield class scores of an image's pixels, some rows at a time.

        Args:
            outputs: of `forward`.
            index: of the image in the batch.
            original: (height, width) of the original image.
            within: the rows of it to score; None: all.
        Yields:
            the rows, and (C, rows, W) float32 scores.
        """
        return semantic_scores(
            outputs["pred_logits"][index].float().softmax(-1)[:, :-1],
            outputs["pred_masks"][index].float(),
            geometry_of(outputs, index, original),
            resize_masks=self.resize_masks,
            within=within,
        )


def geometry_of(outputs: Mapping[str, Any], index: int, original: Sequence[int]) -> Geometry:
    """Return the sizes of one image of a batch."""
    return Geometry(outputs["input_size"], tuple(outputs["image_sizes"][index].tolist()), tuple(original))
