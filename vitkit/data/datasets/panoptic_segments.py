"""Images divided into segments with a mask and a class each, for panoptic, instance or semantic segmentation."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from vitkit.data.datasets.base import BaseImageDataset, fill_ids, new_labels
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError
from vitkit.io.image_files import to_tensor
from vitkit.io.segmentations import mask_annotation
from vitkit.ops.boxes import xyxy_to_cxcywh
from vitkit.ops.label_maps import count_values, replace_values
from vitkit.ops.masks import boxes_around_masks
from vitkit.ops.packed_masks import PackedMasks
from vitkit.registry import Spec
from vitkit.structures import IGNORE_INDEX, PanopticMap, Sample

Task = Literal["panoptic", "instance", "semantic"]
MAX_CLASSES = IGNORE_INDEX
"""Maximum number of classes of a semantic map: it is stored as bytes, of which one value is ignored."""


class SegmentationDataset(BaseImageDataset):
    """Base of datasets whose pixels belong to at most one segment each. A subclass also implements `load_panoptic`.

    Args:
        categories: categories as in a COCO panoptic file, with id, name and isthing.
        task: what the samples contain, and which classes the dataset has:
            "panoptic": a mask for every segment, without crowds;
            "instance": the same for things, and only their classes;
            "semantic": a mask for every visible class, crowds included.
        transforms: see `BaseImageDataset`.
    Raises:
        ConfigError: an unknown task, or more classes than a semantic map can hold.
    """

    annotations = ("objects", "panoptic", "semantic")

    def __init__(
        self, categories: Sequence[Mapping[str, Any]], *, task: Task = "panoptic", transforms: Spec | Transforms | None
    ):
        if task not in get_args(Task):
            raise ConfigError(f"task: got {task!r}; expected {', '.join(map(repr, get_args(Task)))}.")
        super().__init__(transforms)
        categories = [category for category in categories if task != "instance" or category["isthing"]]
        self.task = task
        self.classes: list[str] = [category["name"] for category in categories]
        self.category_ids: list[int] = [category["id"] for category in categories]
        self.things: list[bool] = [bool(category["isthing"]) for category in categories]
        """For each class, whether it has countable objects."""
        self.label_of = {category_id: label for label, category_id in enumerate(self.category_ids)}
        if task == "semantic":
            check_number_of_classes(self.classes)

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[int] | None = None) -> None:
        """See `Dataset`; segments of other classes become void, and a class that it lacks is stuff."""
        labels = new_labels(self.classes, classes).tolist()
        things = dict(zip(labels, self.things))
        self.category_ids = fill_ids(labels, self.category_ids, len(classes)) if category_ids is None else category_ids
        self.label_of = {raw: labels[label] for raw, label in self.label_of.items() if labels[label] >= 0}
        self.classes, self.things = list(classes), [things.get(label, False) for label in range(len(classes))]

    def load_panoptic(self, index: int) -> PanopticMap:
        """Load the true segments of an image before any transform; pixels of unused classes are void."""
        raise NotImplementedError

    def load_semantic(self, index: int) -> np.ndarray:
        """Load the class of every pixel before any transform: (H, W) uint8, 255 = ignored."""
        ids, segments = self.load_panoptic(index)
        labels = {segment["id"]: segment["label"] for segment in segments}
        return replace_values(ids, labels, dtype=np.uint8, default=IGNORE_INDEX)

    def load_annotated(self, index: int) -> tuple[np.ndarray, PanopticMap]:
        """Load the image and its segments."""
        return self.load_image(index), self.load_panoptic(index)

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load an image with the masks of its segments; see `BaseImageDataset`."""
        image, (ids, segments) = self.load_annotated(index)
        if self.task == "semantic":
            labels = list(range(len(self.classes)))
            number_of = {segment["id"]: segment["label"] + 1 for segment in segments}
        else:
            segments = [segment for segment in segments if not segment["iscrowd"]]
            labels = [segment["label"] for segment in segments]
            number_of = {segment["id"]: number for number, segment in enumerate(segments, start=1)}
        segment_map = replace_values(ids, number_of, dtype=np.uint8 if len(labels) < 256 else np.uint16)
        annotated = self.transform(AnnotatedImage(image, segment_map=segment_map), seed)
        return make_segmentation_sample(
            annotated, labels, image_id=int(self.image_ids[index]), original_size=image.shape[:2]
        )

    def ground_truth(self) -> dict[str, Any]:
        """Return all things in the form of a COCO instances file, with run-length masks; this reads every map."""
        images, annotations = [], []
        for index, image_id in enumerate(self.image_ids):
            height, width = self.image_size(index)
            images.append({"id": int(image_id), "height": height, "width": width})
            ids, segments = self.load_panoptic(index)
            annotations += [
                {
                    "id": len(annotations) + number,
                    "image_id": int(image_id),
                    "category_id": self.category_ids[segment["label"]],
                    "iscrowd": int(segment["iscrowd"]),
                    **mask_annotation(ids == segment["id"]),
                }
                for number, segment in enumerate((s for s in segments if self.things[s["label"]]), start=1)
            ]
        categories = [{"id": raw, "name": name} for raw, name in zip(self.category_ids, self.classes)]
        return {"images": images, "annotations": annotations, "categories": categories}


def check_number_of_classes(classes: Sequence[str]) -> None:
    """Raise a ConfigError if there is no class, or more than a semantic map can hold."""
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise ConfigError(f"classes: got {len(classes)}; expected 1 to {MAX_CLASSES} for semantic segmentation.")


def keep_segments(ids: np.ndarray, segments: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Set the pixels of all segments that are not listed to 0: (H, W) integers to (H, W) int32 segment ids."""
    return replace_values(ids, {segment["id"]: segment["id"] for segment in segments}, dtype=np.int32)


def make_segmentation_sample(
    annotated: AnnotatedImage, labels: Sequence[int], *, image_id: Any, original_size: tuple[int, int]
) -> Sample:
    """Convert a transformed image with a segment map to a sample with the masks of all visible segments.

    Args:
        annotated: value k of its segment map has the class `labels[k - 1]`.
        labels: contiguous class indices.
    """
    height, width = annotated.image.shape[:2]
    numbers, _ = count_values(annotated.segment_map)
    numbers = numbers[numbers > 0]
    masks = torch.from_numpy(annotated.segment_map[None] == numbers[:, None, None])
    target = {
        "labels": torch.tensor([labels[number - 1] for number in numbers.tolist()], dtype=torch.int64),
        "boxes_cxcywh": xyxy_to_cxcywh(boxes_around_masks(masks)) / torch.tensor([width, height, width, height]),
        "masks": PackedMasks.pack(masks.numpy(), (height, width)),
        "image_id": image_id,
        "image_size": (height, width),
        "original_size": original_size,
    }
    return Sample(image=to_tensor(annotated.image), target=target)
