"""The synthetic world as detection, segmentation, classification and caption datasets, and as COCO records."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitkit.data.datasets.base import BaseImageDataset, DetectionDataset
from vitkit.data.datasets.captions import CaptionDataset
from vitkit.data.datasets.image_folder import ClassificationDataset
from vitkit.data.datasets.panoptic_segments import SegmentationDataset, Task, keep_segments
from vitkit.data.synthetic.world import (
    COLORS,
    GROUNDS,
    SHAPE_KEYPOINTS,
    THINGS,
    Scene,
    World,
    panoptic_categories,
    split_pair,
)
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError
from vitkit.io.keypoints import keypoint_fields, points_fields
from vitkit.io.segmentations import mask_annotation
from vitkit.registry import DATASETS, Spec, nearest
from vitkit.structures import PanopticMap, SegmentInfo


class _Shapes(BaseImageDataset):
    """Scenes 1 to `num_images` of a world, each drawn when it is loaded; none is stored.

    Args:
        num_images: number of images.
        The other arguments: see `World`.
    Raises:
        ConfigError: a number is out of range, or the split is unknown.
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
    ):
        self.world = World(image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split)
        if num_images < 1:
            raise ConfigError(f"num_images: got {num_images}, expected at least 1.")
        self.image_ids = range(1, num_images + 1)

    def scene(self, index: int) -> Scene:
        """Draw one scene.

        Raises:
            IndexError: there is no such image.
        """
        return self.world.scene(range(len(self))[index])

    def load_image(self, index: int) -> np.ndarray:
        return self.scene(index).image

    def image_size(self, index: int) -> tuple[int, int]:
        return self.world.size(index)


@DATASETS.register
class ShapesDetection(_Shapes, DetectionDataset):
    """The synthetic world as a detection dataset.

    Args:
        num_images: number of images.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        transforms: see `BaseImageDataset`.
        masks: whether targets have masks.
        keypoints: whether targets have keypoints: the `SHAPE_KEYPOINTS` of `vitkit.data.synthetic.world`. After a turn
            or a vertical flip, such as those of "D4", the one above is no longer above; mirror left and right.
        pairs: classes that are a color and a shape, such as "red star"; None: the six shapes, in any color.
        absent: those of the pairs that no image shows.
    Raises:
        ConfigError: a number is out of range, the split or a pair is unknown, or no pair is left to draw.
    """

    def __init__(
        self,
        num_images: int,
        *,
        transforms: Spec | Transforms | None = None,
        masks: bool = False,
        keypoints: bool = False,
        pairs: Sequence[str] | None = None,
        absent: Sequence[str] = (),
        **world: Any,
    ):
        self.masks = masks
        self.keypoints = SHAPE_KEYPOINTS if keypoints else None
        DetectionDataset.__init__(self, transforms)
        for name in absent:
            if name not in (pairs or ()):
                raise ConfigError(f"absent: {name!r} is not one of the pairs. {nearest(name, pairs or ())}")
        drawn = None if pairs is None else tuple(name for name in pairs if name not in absent)
        super().__init__(num_images, **world)
        self.world = replace(self.world, pairs=drawn)
        self.classes = list(THINGS if pairs is None else pairs)
        self.category_ids = list(range(1, len(self.classes) + 1))
        self._label_of_pair = None if pairs is None else {split_pair(name): k for k, name in enumerate(pairs)}

    def _labels(self, scene: Scene) -> np.ndarray:
        """Return the class of each of a scene's things, (N,) int64."""
        if self._label_of_pair is None:
            return scene.labels
        return np.array([self._label_of_pair[shape.color, shape.label] for shape in scene.shapes], np.int64)

    def load_annotated(self, index: int) -> AnnotatedImage:
        scene = self.scene(index)
        masks = scene.masks.view(np.uint8) if self.masks else None
        annotated = AnnotatedImage(scene.image, scene.boxes_xyxy, self._labels(scene), masks)
        if self.keypoints is None:
            return annotated
        areas = scene.masks.sum(axis=(1, 2)).astype(np.float32)
        return annotated._replace(keypoints=scene.keypoints, areas=areas, flip_order=self.keypoints.flip_order)

    def ground_truth(self) -> dict[str, Any]:
        """Return all annotations in the form of a COCO instances file, with masks as compressed run lengths."""
        images, annotations = [], []
        for index, image_id in enumerate(self.image_ids):
            scene = self.scene(index)
            images.append(make_image_record(image_id, scene))
            objects = make_instance_annotations(scene, image_id, len(annotations) + 1, self._labels(scene))
            annotations += objects if self.keypoints is None else with_keypoints(scene, objects)
        categories = [{"id": k, "name": name, "supercategory": "shape"} for k, name in enumerate(self.classes, 1)]
        if self.keypoints is not None:
            categories = [category | keypoint_fields(self.keypoints) for category in categories]
        return {"images": images, "annotations": annotations, "categories": categories}


@DATASETS.register
class ShapesSegmentation(_Shapes, SegmentationDataset):
    """The synthetic world as a segmentation dataset: six kinds of things on four kinds of ground.

    Args:
        num_images: number of images.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        task, transforms: see `SegmentationDataset`.
    Raises:
        ConfigError: a number is out of range, or the split or the task is unknown.
    """

    def __init__(
        self, num_images: int, *, task: Task = "panoptic", transforms: Spec | Transforms | None = None, **world: Any
    ):
        SegmentationDataset.__init__(self, panoptic_categories(), task=task, transforms=transforms)
        super().__init__(num_images, **world)

    def load_annotated(self, index: int) -> tuple[np.ndarray, PanopticMap]:
        """Draw the scene once, for the image and its map."""
        scene = self.scene(index)
        segments = [
            SegmentInfo(id=segment["id"], label=self.label_of[segment["category_id"]], iscrowd=False)
            for segment in scene.segments_info
            if segment["category_id"] in self.label_of
        ]
        return scene.image, PanopticMap(keep_segments(scene.panoptic, segments), segments)

    def load_panoptic(self, index: int) -> PanopticMap:
        return self.load_annotated(index)[1]


@DATASETS.register
class ShapesClassification(_Shapes, ClassificationDataset):
    """The synthetic world with one thing in each image; the image's class is the thing's.

    Args:
        num_images: number of images.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        transforms: see `ClassificationDataset`.
    Raises:
        ConfigError: a number is out of range or the split is unknown.
    """

    def __init__(
        self,
        num_images: int,
        *,
        image_size: int = 64,
        min_objects: int = 1,
        max_objects: int = 1,
        min_size: float = 0.3,
        max_size: float = 0.8,
        transforms: Spec | Transforms | None = None,
        **world: Any,
    ):
        if (min_objects, max_objects) != (1, 1):
            raise ConfigError(
                f"max_objects: got {min_objects} to {max_objects} objects, expected 1, whose class is the image's. "
                "Leave min_objects and max_objects out."
            )
        ClassificationDataset.__init__(self, THINGS, transforms)
        super().__init__(
            num_images, image_size=image_size, max_objects=1, min_size=min_size, max_size=max_size, **world
        )

    def load_labeled(self, index: int) -> tuple[np.ndarray, int]:
        scene = self.scene(index)
        return scene.image, int(scene.labels[0])


@DATASETS.register
class ShapesCaptions(_Shapes, CaptionDataset):
    """The synthetic world with a caption for each image: its things from left to right, and the ground.

    Mirrored images would contradict their captions: no transform may flip.

    Args:
        num_images: number of images.
        image_size, max_image_size, min_objects, max_objects, min_size, max_size, seed, split: see `World`.
        transforms, features: see `CaptionDataset`.
    Raises:
        ConfigError: a number is out of range or the split is unknown.
    """

    def __init__(
        self,
        num_images: int,
        *,
        image_size: int = 64,
        max_objects: int = 2,
        min_size: float = 0.25,
        max_size: float = 0.5,
        transforms: Spec | Transforms | None = None,
        features: str | None = None,
        **world: Any,
    ):
        sizes = dict(image_size=image_size, max_objects=max_objects, min_size=min_size, max_size=max_size)
        super().__init__(num_images, **sizes, **world)
        CaptionDataset.__init__(self, transforms, min_count=1, features=features)

    def references(self, index: int) -> list[str]:
        return [self.scene(index).caption]

    def vocabulary_texts(self) -> Iterable[str]:
        """Return every word that a caption can have, so that no scene needs to be drawn."""
        return ["a an left of above below on ground", *THINGS, *COLORS, *GROUNDS]

    def images_key(self) -> str:
        return f"{len(self)} images of {self.world}"


def make_image_record(image_id: int, scene: Scene, suffix: str = ".png") -> dict[str, Any]:
    """Return a scene's entry in `images` of a COCO file."""
    height, width = scene.image.shape[:2]
    return {"id": image_id, "file_name": f"{image_id:012d}{suffix}", "height": height, "width": width}


def make_instance_annotations(
    scene: Scene, image_id: int, begin_id: int, labels: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Return a scene's entries in `annotations` of a COCO instances file, with ids from `begin_id` on.

    Args:
        labels: (N,) the class of each thing; None: its shape.
    """
    labels = scene.labels if labels is None else labels
    return [
        {"id": id_, "image_id": image_id, "category_id": label + 1, "iscrowd": 0, **mask_annotation(mask)}
        for id_, (label, mask) in enumerate(zip(labels.tolist(), scene.masks), start=begin_id)
    ]


def with_keypoints(scene: Scene, annotations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a scene's annotations with the keypoints of its things."""
    return [annotation | points_fields(points) for annotation, points in zip(annotations, scene.keypoints)]
