"""MaskFormer and Mask2Former: backbone, pixel decoder, head; one model for semantic, instance and panoptic masks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.models.mask_postprocess import Geometry, instances, panoptic, semantic_map, semantic_scores
from vitkit.ops.images import normalize_images, pad_to_multiple, unpadded_sizes
from vitkit.ops.masks import boxes_around_masks
from vitkit.registry import BACKBONES, HEADS, MODELS, NECKS, Spec, nearest

TASKS = ("semantic", "instance", "panoptic")


@MODELS.register
class MaskClassification(nn.Module):
    """Masks and a class for each (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

    Args:
        backbone: spec or module, as are `neck` (a pixel decoder) and `head`.
        num_queries: masks predicted per image.
        num_classes: without the no-object class; a run sets its dataset's number.
        size_divisibility: images are padded at the right and bottom to a multiple of it, as the original does; 1: not.
        tasks: what `postprocess` returns: any of "semantic", "instance", "panoptic".
        things: of each class whether it has instances, for "instance" and "panoptic"; None: all have. A run sets its
            dataset's.
        num_instances: returned per image.
        object_threshold, overlap_threshold, cut_masks: see `panoptic`; MaskFormer does not cut masks, Mask2Former does.
        resize_masks: of semantic maps, see `semantic_scores`; None: as the originals, if there is another task.
    Raises:
        ConfigError: there is no task or an unknown one, or `things` has another length than there are classes.
    """

    class_head = ("head.class_embed.",)

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 100,
        num_classes: int = 80,
        size_divisibility: int = 32,
        tasks: Sequence[Literal["semantic", "instance", "panoptic"]] = ("instance",),
        things: Sequence[bool] | None = None,
        num_instances: int = 100,
        object_threshold: float = 0.8,
        overlap_threshold: float = 0.8,
        cut_masks: bool = True,
        resize_masks: bool | None = None,
    ):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        self.neck = NECKS.build(neck, feature_info=self.backbone.feature_info)
        if hasattr(self.backbone, "keep_features") and hasattr(self.neck, "in_features"):
            self.backbone.keep_features(self.neck.in_features)
        self.head = HEADS.build(
            head, feature_info=self.neck.feature_info, num_classes=num_classes, num_queries=num_queries
        )
        self.size_divisibility = size_divisibility
        if not tasks:
            raise ConfigError(f"model.tasks is empty; expected any of {', '.join(TASKS)}.")
        for task in tasks:
            if task not in TASKS:
                raise ConfigError(f"model.tasks: unknown task {task!r}. {nearest(task, TASKS)}")
        if things is not None and len(things) != num_classes:
            raise ConfigError(f"model.things has {len(things)} entries, but there are {num_classes} classes.")
        self.tasks = tuple(tasks)
        self.things = list(things) if things is not None else [True] * num_classes
        self.num_instances = num_instances
        self.panoptic_options = dict(
            object_threshold=object_threshold, overlap_threshold=overlap_threshold, cut_masks=cut_masks
        )
        self.resize_masks = resize_masks if resize_masks is not None else set(tasks) != {"semantic"}

    def load_pretrained(self) -> str | None:
        """Loads the backbone's pretrained weights, if it has any, as a new run does; see `Backbone.load_pretrained`."""
        load = getattr(self.backbone, "load_pretrained", None)
        return load() if load else None

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """
        Args:
            images: (B, 3, H, W) uint8 RGB, zero-padded at the right and bottom; or float, already normalised.
            padding_mask: (B, H, W) bool, True = padding; None if no image is padded. As in the originals padding is
                attended to: it only makes padded pixels 0 after the normalisation.
        Returns:
            what the head returns; pred_masks (B, Q, h, w) cover the images padded to `size_divisibility`.
            input_size: (height, width) after that.
            image_sizes: (B, 2) int64, height and width of each image without padding.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images = normalize_images(images, padding_mask)
        if self.size_divisibility > 1:
            whole = images.new_zeros(len(images), *images.shape[-2:]).bool()
            images, _ = pad_to_multiple(images, whole, self.size_divisibility)
        outputs = self.head(self.neck(self.backbone(images)))
        return dict(outputs, input_size=tuple(images.shape[-2:]), image_sizes=image_sizes)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """
        Args:
            outputs: of `forward`.
            image_sizes: (height, width) of each original image, in pixels.
        Returns:
            one dict per image, all of the original image, by task
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
                found = instances(
                    probabilities[:, :-1], masks, geometry, things=self.things, num_instances=self.num_instances
                )
                result |= found._asdict() | {"boxes_xyxy": boxes_around_masks(found.masks)}
            if "semantic" in self.tasks:
                result["semantic"] = semantic_map(
                    probabilities[:, :-1], masks, geometry, resize_masks=self.resize_masks
                )
            if "panoptic" in self.tasks:
                found = panoptic(probabilities, masks, geometry, things=self.things, **self.panoptic_options)
                result |= dict(panoptic=found.segment_ids, segments_info=found.segments)
            results.append(result)
        return results

    def semantic_scores(
        self,
        outputs: Mapping[str, Any],
        index: int,
        original: tuple[int, int],
        *,
        within: range | None = None,
    ) -> Iterator[tuple[range, Tensor]]:
        """Class scores of an image's pixels, some rows at a time.

        Args:
            outputs: of `forward`.
            index: of the image in the batch.
            original: (height, width) of the original image.
            within: the rows of it that are wanted; None: all.
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
    """Of one image of a batch."""
    return Geometry(outputs["input_size"], tuple(outputs["image_sizes"][index].tolist()), tuple(original))
