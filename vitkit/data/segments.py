"""Images cut into segments, for panoptic, instance or semantic segmentation: one mask and one class for each."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pycocotools import mask as coco_mask
from torch import Tensor

from vitkit.data.images import to_tensor
from vitkit.data.transforms import Transforms
from vitkit.errors import ConfigError
from vitkit.ops.boxes import xyxy_to_cxcywh
from vitkit.ops.label_maps import count_values, replace_values
from vitkit.ops.masks import boxes_around_masks
from vitkit.registry import TRANSFORMS, Spec
from vitkit.structures import IGNORED, PanopticMap, Sample

Task = Literal["panoptic", "instance", "semantic"]
TASKS = ("panoptic", "instance", "semantic")
MOST_CLASSES = IGNORED
"""Of semantic maps, which are bytes."""
_WHOLE = np.zeros(1, np.int64)


class SegmentationDataset:
    """Images whose pixels lie in one segment each, or in none. A subclass sets `image_ids` and answers `__len__`,
    `load_image`, `load_panoptic`, `image_size` and `aspect_ratios`.

    Args:
        categories: as in a COCO panoptic file: id, name, isthing.
        task: what the samples hold, and which classes there are:
            "panoptic": a mask for every segment, without crowds;
            "instance": likewise for things, and only their classes;
            "semantic": a mask for every class that is seen, crowds included.
        transforms: spec of the transforms (see vitkit.data.transforms); None returns the images as they are.
    Raises:
        ConfigError: an unknown task, or more classes than a semantic map can hold.
    """

    image_ids: Sequence[int]

    def __init__(
        self, categories: Sequence[Mapping[str, Any]], *, task: Task = "panoptic", transforms: Spec | Transforms | None
    ):
        if task not in TASKS:
            raise ConfigError(f"task: got {task!r}; expected {', '.join(map(repr, TASKS))}.")
        kept = [category for category in categories if task != "instance" or category["isthing"]]
        self.task = task
        self.classes: list[str] = [str(category["name"]) for category in kept]
        self.category_ids: list[int] = [category["id"] for category in kept]
        self.things: list[bool] = [bool(category["isthing"]) for category in kept]
        """Of each class whether its objects are counted."""
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        self.label_of = {raw: label for label, raw in enumerate(self.category_ids)}
        if task == "semantic":
            check_number_of_classes(self.classes)

    def __len__(self) -> int:
        return len(self.image_ids)

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, before any transform."""
        raise NotImplementedError

    def load_panoptic(self, index: int) -> PanopticMap:
        """The true segments of an image before any transform, those of `classes`; all else is void."""
        raise NotImplementedError

    def image_size(self, index: int) -> tuple[int, int]:
        """(height, width) of an image before any transform, without loading it."""
        raise NotImplementedError

    def load_semantic(self, index: int) -> np.ndarray:
        """The class of every pixel of an image before any transform.

        Returns:
            (H, W) uint8, 255 = ignored.
        """
        ids, segments = self.load_panoptic(index)
        labels = {segment["id"]: segment["label"] for segment in segments}
        return replace_values(ids, labels, dtype=np.uint8, default=IGNORED)

    def load_annotated(self, index: int) -> tuple[np.ndarray, PanopticMap]:
        """`load_image` and `load_panoptic` at once."""
        return self.load_image(index), self.load_panoptic(index)

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """One transformed image with its masks.

        Args:
            index: position in the dataset; or (position, seed), and the transforms are drawn from that seed alone.
        Raises:
            DataError: the image or its map is missing or wrong.
        """
        index, seed = index if isinstance(index, tuple) else (index, None)
        index = range(len(self))[index]
        image, (ids, segments) = self.load_annotated(index)
        if self.task == "semantic":
            labels = list(range(len(self.classes)))
            number_of = {segment["id"]: segment["label"] + 1 for segment in segments}
        else:
            segments = [segment for segment in segments if not segment["iscrowd"]]
            labels = [segment["label"] for segment in segments]
            number_of = {segment["id"]: number for number, segment in enumerate(segments, start=1)}
        numbers = replace_values(ids, number_of, dtype=np.uint8 if len(labels) < 256 else np.uint16)
        return segmentation_sample(
            image, numbers, labels, image_id=int(self.image_ids[index]), transforms=self.transforms, seed=seed
        )

    def ground_truth(self) -> dict[str, Any]:
        """All things as a COCO instances file holds them, masks as compressed run lengths. Every map is read."""
        images, annotations = [], []
        for index, image_id in enumerate(self.image_ids):
            height, width = self.image_size(index)
            images.append({"id": int(image_id), "height": height, "width": width})
            ids, segments = self.load_panoptic(index)
            for segment in segments:
                if not self.things[segment["label"]]:
                    continue
                rle = coco_mask.encode(np.asfortranarray(ids == segment["id"]).view(np.uint8))
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": int(image_id),
                        "category_id": self.category_ids[segment["label"]],
                        "segmentation": {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")},
                        "area": int(coco_mask.area(rle)),
                        "bbox": coco_mask.toBbox(rle).tolist(),
                        "iscrowd": int(segment["iscrowd"]),
                    }
                )
        categories = [{"id": raw, "name": name} for raw, name in zip(self.category_ids, self.classes)]
        return {"images": images, "annotations": annotations, "categories": categories}


def check_number_of_classes(classes: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: there are none, or more than a semantic map can hold.
    """
    if not 1 <= len(classes) <= MOST_CLASSES:
        raise ConfigError(f"classes: got {len(classes)}; expected 1 to {MOST_CLASSES} for semantic segmentation.")


def segmentation_sample(
    image: np.ndarray,
    numbers: np.ndarray,
    labels: Sequence[int],
    *,
    image_id: Any,
    transforms: Transforms | None,
    seed: int | None = None,
) -> Sample:
    """Transforms an image with its map of segments, and takes the masks out of it.

    A segment of which no pixel is left is not in the sample.

    Args:
        image: (H, W, 3) uint8 RGB.
        numbers: (H, W) uint8 or uint16; number k stands for the class `labels[k - 1]`, 0 for no segment.
        labels: contiguous class indices.
        image_id: for the target.
        transforms, seed: see vitkit.data.transforms.
    """
    original_size = image.shape[:2]
    if transforms is not None:
        whole = np.array([[0, 0, original_size[1], original_size[0]]], np.float32)
        image, _, _, moved = transforms(image, whole, _WHOLE, numbers[None], seed=seed)
        numbers = moved[0]
    height, width = image.shape[:2]
    seen, _ = count_values(numbers)
    seen = seen[seen > 0]
    masks = torch.from_numpy(numbers[None] == seen[:, None, None])
    boxes_xyxy = boxes_around_masks(masks)
    target = {
        "labels": torch.tensor([labels[number - 1] for number in seen.tolist()], dtype=torch.int64),
        "boxes_cxcywh": xyxy_to_cxcywh(boxes_xyxy) / torch.tensor([width, height, width, height]),
        "masks": masks,
        "image_id": image_id,
        "image_size": (height, width),
        "original_size": original_size,
    }
    return Sample(image=to_tensor(image), target=target)


def drop_empty_masks(target: dict[str, Any]) -> None:
    """Leaves out, in place, the objects of which a crop or a smaller size left no pixel."""
    kept: Tensor = target["masks"].flatten(1).any(1)
    if not kept.all():
        for name in ("labels", "boxes_cxcywh", "masks"):
            target[name] = target[name][kept]
