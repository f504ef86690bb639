"""Base classes of mask classification models: their construction, and the conversion of outputs to predictions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.models.base import DensePredictionModel, Part, check_tasks
from vitkit.ops.images import unpadded_sizes
from vitkit.ops.mask_postprocess import PanopticRules, geometry_of, instances, panoptic, semantic_map, semantic_scores
from vitkit.ops.masks import boxes_around_masks, pad_masks
from vitkit.structures import DetectionTarget, UncompiledTargets

TASKS = ("semantic", "instance", "panoptic")
_FIELDS = {"instance": ("boxes_xyxy", "masks"), "semantic": ("semantic",), "panoptic": ("panoptic",)}
"""Task -> the fields of its predictions."""


class MaskResults:
    """Base of models whose queries each predict a class and a mask."""

    classifies_masks = True
    tasks: tuple[str, ...]
    things: list[bool]
    num_instances: int
    panoptic_rules: PanopticRules
    cut_masks = True
    """See `PanopticRules`."""

    def set_results(
        self,
        num_classes: int,
        *,
        tasks: Sequence[str],
        things: Sequence[bool] | None,
        num_instances: int,
        object_threshold: float,
        overlap_threshold: float,
    ) -> None:
        """Store what `postprocess` returns.

        Args:
            tasks: "semantic", "instance", "panoptic": any of them.
            things: for each class, whether it has instances, for "instance" and "panoptic"; None: all have.
            num_instances: number of pairs of query and class chosen per image, for "instance".
            object_threshold, overlap_threshold: see `PanopticRules`.
        Raises:
            ConfigError: there is no task or an unknown one, or the length of `things` is not the number of classes.
        """
        if not tasks:
            raise ConfigError(f"tasks is empty; expected any of {', '.join(TASKS)}.")
        check_tasks(tasks, TASKS)
        if things is not None and len(things) != num_classes:
            raise ConfigError(f"things has {len(things)} entries, but there are {num_classes} classes.")
        self.tasks = tuple(tasks)
        self.returns = tuple(name for task, names in _FIELDS.items() if task in tasks for name in names)
        self.things = list(things) if things is not None else [True] * num_classes
        self.num_instances = num_instances
        self.panoptic_rules = PanopticRules(object_threshold, overlap_threshold, self.cut_masks)
        # Whether masks are resized to the original image before the classes are summed, rather than the sums, as in the
        # originals.
        self.resize_masks = set(tasks) != {"semantic"}

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the predictions for the configured tasks, at the size of the original images.

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
                best = instances(
                    probabilities[:, :-1], masks, geometry, things=self.things, num_instances=self.num_instances
                )
                result |= best._asdict() | {"boxes_xyxy": boxes_around_masks(best.masks)}
            if "semantic" in self.tasks:
                result["semantic"] = semantic_map(
                    probabilities[:, :-1], masks, geometry, resize_masks=self.resize_masks
                )
            if "panoptic" in self.tasks:
                segmented = panoptic(probabilities, masks, geometry, things=self.things, rules=self.panoptic_rules)
                result |= dict(panoptic=segmented.segment_ids, segments_info=segmented.segments)
            results.append(result)
        return results

    def postprocess_settings(self) -> dict[str, Any]:
        """Return the tasks and the rules by which masks become their results."""
        return {
            "tasks": list(self.tasks),
            "mask_multiple": self.mask_multiple,
            "masks": "bilinear",
            "num_instances": self.num_instances,
            **self.panoptic_rules._asdict(),
            "things": list(self.things),
        }

    def semantic_scores(
        self, outputs: Mapping[str, Any], index: int, original: tuple[int, int], *, within: range | None = None
    ) -> Iterator[tuple[range, Tensor]]:
        """Yield class scores of an image's pixels, a band of rows at a time.

        Args:
            outputs: outputs of `forward`.
            index: index of the image in the batch.
            original: (height, width) of the original image.
            within: the rows of the original image to score; None: all.
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


class MaskClassifier(MaskResults, DensePredictionModel):
    """Base of models of backbone, pixel decoder and a head that predicts a class and a mask per query.

    Args:
        backbone, neck, head: spec or module; the neck is a pixel decoder.
        num_queries: number of masks predicted per image.
        num_classes: number of classes without "no object"; a run sets its dataset's.
        tasks, things, num_instances, object_threshold, overlap_threshold: what `postprocess` returns, see
            `MaskResults.set_results`; a run sets its dataset's things.
        size_divisibility: images are padded at the right and bottom to a multiple of this, as in the original; 1: no
            padding.
        options: `training_queries` and `isolate_padding`, see `DensePredictionModel`.
    Raises:
        ConfigError: there is no task or an unknown one, or the length of `things` is not the number of classes.
    """

    class_head = ("head.class_embed.", "training_queries.denoising.label_embed.")

    def __init__(
        self,
        backbone: Part,
        neck: Part,
        head: Part,
        *,
        num_queries: int = 100,
        num_classes: int = 80,
        tasks: Sequence[Literal["semantic", "instance", "panoptic"]] = ("instance",),
        things: Sequence[bool] | None = None,
        num_instances: int = 100,
        object_threshold: float = 0.8,
        overlap_threshold: float = 0.8,
        size_divisibility: int = 32,
        **options: Any,
    ):
        super().__init__(backbone, neck, head, num_classes=num_classes, num_queries=num_queries, **options)
        self.size_divisibility = size_divisibility
        self.padding_multiple = math.lcm(self.padding_multiple, size_divisibility)
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
            targets = _pad_targets(targets, input_size)
        outputs = self.run_head(features, attended, targets)
        return {**outputs, "input_size": input_size, "image_sizes": image_sizes}


@torch.compiler.disable
def _pad_targets(targets: Sequence[DetectionTarget], size: tuple[int, int]) -> Sequence[DetectionTarget]:
    return UncompiledTargets([{**target, "masks": pad_masks(target["masks"], size)} for target in targets])
