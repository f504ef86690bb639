"""The synthetic world as datasets of detection, segmentation and classification, and its scenes as COCO records."""

from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask

from vitkit.data.image_folder import ClassificationDataset
from vitkit.data.images import to_tensor
from vitkit.data.segments import SegmentationDataset, Task, drop_empty_masks
from vitkit.data.shapes_world import THINGS, Scene, World, panoptic_categories, thing_categories
from vitkit.data.transforms import Transforms
from vitkit.errors import ConfigError
from vitkit.ops.boxes import xyxy_to_cxcywh
from vitkit.ops.label_maps import replace_values
from vitkit.registry import DATASETS, TRANSFORMS, Spec
from vitkit.structures import PanopticMap, Sample, SegmentInfo


@DATASETS.register
class ShapesDetection:
    """The synthetic world as a detection dataset: nothing is stored, each image is drawn when it is asked for.

    Args:
        num_images: how many.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        transforms: a spec of TRANSFORMS or a built one; None leaves the images as drawn.
        masks: whether targets hold masks.
    Raises:
        ConfigError: a number is out of range or the split is unknown.
    """

    def __init__(
        self,
        num_images: int,
        *,
        image_size: int = 128,
        max_image_size: int | None = None,
        min_objects: int = 1,
        max_objects: int = 4,
        min_size: float = 0.15,
        max_size: float = 0.45,
        seed: int = 0,
        split: str = "train",
        transforms: Spec | Transforms | None = None,
        masks: bool = False,
    ):
        if num_images < 1:
            raise ConfigError(f"num_images: got {num_images}, expected at least 1.")
        self.world = World(
            image_size=image_size,
            max_image_size=max_image_size,
            min_objects=min_objects,
            max_objects=max_objects,
            min_size=min_size,
            max_size=max_size,
            seed=seed,
            split=split,
        )
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        self.masks = masks
        self.classes = list(THINGS)
        self.category_ids = [category["id"] for category in thing_categories()]
        self.image_ids = range(1, num_images + 1)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, item: int | tuple[int, int]) -> Sample:
        """One image; with (index, seed) its transforms draw their random numbers from the seed alone."""
        index, seed = item if isinstance(item, tuple) else (item, None)
        scene = self._scene(index)
        image, boxes_xyxy, labels = scene.image, scene.boxes_xyxy, scene.labels
        masks = scene.masks.view(np.uint8) if self.masks else None
        original_size = image.shape[:2]
        if self.transforms is not None:
            image, boxes_xyxy, labels, masks = self.transforms(image, boxes_xyxy, labels, masks, seed=seed)
        height, width = image.shape[:2]
        boxes_cxcywh = xyxy_to_cxcywh(torch.as_tensor(boxes_xyxy, dtype=torch.float32))
        target = {
            "labels": torch.as_tensor(labels, dtype=torch.int64),
            "boxes_cxcywh": boxes_cxcywh / torch.tensor([width, height, width, height]),
            "image_id": self.image_ids[index],
            "image_size": (height, width),
            "original_size": original_size,
        }
        if masks is not None:
            target["masks"] = torch.as_tensor(masks, dtype=torch.bool)
            drop_empty_masks(target)
        return Sample(image=to_tensor(image), target=target)

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, as drawn."""
        return self._scene(index).image

    def aspect_ratios(self) -> np.ndarray:
        """(len,) float64 width / height of each image."""
        sizes = np.array([self.world.size(index) for index in range(len(self))], np.float64)
        return sizes[:, 1] / sizes[:, 0]

    def ground_truth(self) -> dict[str, Any]:
        """All annotations as a COCO instances file holds them, masks as compressed RLE."""
        images, annotations = [], []
        for index, image_id in enumerate(self.image_ids):
            scene = self._scene(index)
            images.append(image_record(image_id, scene))
            annotations += instance_annotations(scene, image_id, len(annotations) + 1)
        return {"images": images, "annotations": annotations, "categories": thing_categories()}

    def _scene(self, index: int) -> Scene:
        # A world has no last index, and a loop over the dataset ends at this error.
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return self.world.scene(index % len(self))


@DATASETS.register
class ShapesSegmentation(SegmentationDataset):
    """The synthetic world as a segmentation dataset: six kinds of things on four kinds of ground.

    Args:
        num_images: how many.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        task, transforms: see `SegmentationDataset`.
    Raises:
        ConfigError: a number is out of range, or the split or the task is unknown.
    """

    def __init__(
        self,
        num_images: int,
        *,
        task: Task = "panoptic",
        image_size: int = 128,
        max_image_size: int | None = None,
        min_objects: int = 1,
        max_objects: int = 4,
        min_size: float = 0.15,
        max_size: float = 0.45,
        seed: int = 0,
        split: str = "train",
        transforms: Spec | Transforms | None = None,
    ):
        if num_images < 1:
            raise ConfigError(f"num_images: got {num_images}, expected at least 1.")
        super().__init__(panoptic_categories(), task=task, transforms=transforms)
        self.world = World(
            image_size=image_size,
            max_image_size=max_image_size,
            min_objects=min_objects,
            max_objects=max_objects,
            min_size=min_size,
            max_size=max_size,
            seed=seed,
            split=split,
        )
        self.image_ids = range(1, num_images + 1)

    def load_annotated(self, index: int) -> tuple[np.ndarray, PanopticMap]:
        scene = self.world.scene(range(len(self))[index])
        segments = [
            SegmentInfo(id=segment["id"], label=self.label_of[segment["category_id"]], iscrowd=False)
            for segment in scene.segments_info
            if segment["category_id"] in self.label_of
        ]
        kept = {segment["id"]: segment["id"] for segment in segments}
        return scene.image, PanopticMap(replace_values(scene.panoptic, kept, dtype=np.int32), segments)

    def load_image(self, index: int) -> np.ndarray:
        return self.load_annotated(index)[0]

    def load_panoptic(self, index: int) -> PanopticMap:
        return self.load_annotated(index)[1]

    def image_size(self, index: int) -> tuple[int, int]:
        return self.world.size(index)

    def aspect_ratios(self) -> np.ndarray:
        """(len,) float64 width / height of each image."""
        sizes = np.array([self.world.size(index) for index in range(len(self))], np.float64)
        return sizes[:, 1] / sizes[:, 0]


@DATASETS.register
class ShapesClassification(ClassificationDataset):
    """The synthetic world with one thing in each image, whose class is the image's.

    Args:
        num_images: how many.
        image_size, max_image_size, min_size, max_size, seed, split: see `World`.
        transforms: see `ClassificationDataset`.
    Raises:
        ConfigError: a number is out of range or the split is unknown.
    """

    def __init__(
        self,
        num_images: int,
        *,
        image_size: int = 64,
        max_image_size: int | None = None,
        min_size: float = 0.3,
        max_size: float = 0.8,
        seed: int = 0,
        split: str = "train",
        transforms: Spec | Transforms | None = None,
    ):
        if num_images < 1:
            raise ConfigError(f"num_images: got {num_images}, expected at least 1.")
        super().__init__(THINGS, transforms)
        self.world = World(
            image_size=image_size,
            max_image_size=max_image_size,
            min_objects=1,
            max_objects=1,
            min_size=min_size,
            max_size=max_size,
            seed=seed,
            split=split,
        )
        self.image_ids = range(1, num_images + 1)

    def __len__(self) -> int:
        return len(self.image_ids)

    def load_labelled(self, index: int) -> tuple[np.ndarray, int]:
        scene = self.world.scene(range(len(self))[index])
        return scene.image, int(scene.labels[0])


def image_record(image_id: int, scene: Scene, suffix: str = ".png") -> dict[str, Any]:
    """A scene's entry in `images` of a COCO file."""
    height, width = scene.image.shape[:2]
    return {"id": image_id, "file_name": f"{image_id:012d}{suffix}", "height": height, "width": width}


def instance_annotations(scene: Scene, image_id: int, first_id: int) -> list[dict[str, Any]]:
    """A scene's entries in `annotations` of a COCO instances file, with ids from `first_id` on."""
    annotations = []
    for k, (label, mask, box) in enumerate(zip(scene.labels.tolist(), scene.masks, scene.boxes_xyxy.tolist())):
        rle = coco_mask.encode(np.asfortranarray(mask.view(np.uint8)))
        x0, y0, x1, y1 = box
        annotations.append(
            {
                "id": first_id + k,
                "image_id": image_id,
                "category_id": label + 1,
                "segmentation": {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")},
                "area": int(np.count_nonzero(mask)),
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "iscrowd": 0,
            }
        )
    return annotations
