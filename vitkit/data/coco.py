"""Detection and instance segmentation data in COCO's format (Lin et al. 2014, https://arxiv.org/abs/1405.0312)."""

import logging
import marshal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.coco_file import (
    box_fault,
    decode_segmentation,
    first_images,
    is_well_formed_box,
    read_coco_file,
    segmentation_fault,
)
from vitkit.data.images import read_image, to_tensor
from vitkit.data.segments import drop_empty_masks
from vitkit.data.shared import share
from vitkit.data.transforms import Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.ops.boxes import xyxy_to_cxcywh
from vitkit.registry import DATASETS, TRANSFORMS, Spec
from vitkit.structures import Sample

logger = logging.getLogger("vitkit")

# A box may stick out of its image by less than this (pixels) without being counted: annotation tools round.
_CLIP_TOLERANCE = 0.01


@DATASETS.register
class CocoDetection:
    """Images with boxes, and masks on request, from a folder and a COCO annotation file.

    The classes are the file's categories in the order of their ids, whatever the ids are. Crowd regions are left out of
    the samples and kept in `ground_truth()`. Boxes that stick out of their image are clipped and counted.

    What is kept of the annotations lies in a few flat arrays, which all workers share. (A list of objects would be
    copied into every worker, page by page, as reference counts change.)

    Args:
        images: folder with the pictures.
        annotations: the JSON file.
        transforms: spec of the transforms (see vitkit.data.transforms); None returns the images as they are.
        masks: also return instance masks; an object of which no pixel is left is left out then.
        bad_boxes: what to do with boxes of no width or height or outside their image: "error", or "drop" to leave them
            out and count them. Negative sizes and numbers that are not finite are always errors.
        first: only as many of the file's images, in its order, such as to see that a model can learn them by heart.
    Raises:
        DataError: a folder or file is missing, the annotations are wrong or there is no image.
    """

    def __init__(
        self,
        images: str,
        annotations: str,
        *,
        transforms: Spec | Transforms | None = None,
        masks: bool = False,
        bad_boxes: str = "error",
        first: int | None = None,
    ):
        if bad_boxes not in ("error", "drop"):
            raise ConfigError(f"dataset CocoDetection: bad_boxes is {bad_boxes!r}; expected 'error' or 'drop'.")
        self.folder = Path(images)
        self.annotation_file = Path(annotations)
        self.masks = masks
        self.bad_boxes = bad_boxes
        self.first = first
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        if not self.folder.is_dir():
            raise DataError(
                f"images: no folder '{images}'. Download the dataset (see README, \"Data\"), "
                "or correct data.root or the `images` of this dataset."
            )
        content = first_images(read_coco_file(self.annotation_file), first)
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.category_ids: list[int] = [category["id"] for category in categories]
        self.classes: list[str] = [str(category["name"]) for category in categories]
        self.image_ids = np.array([image["id"] for image in content["images"]], np.int64)
        self._file_names = np.array([str(image["file_name"]) for image in content["images"]])
        self._sizes = np.array([(image["height"], image["width"]) for image in content["images"]], np.int64)
        self._index_objects(content)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, share(value))
        first = self.folder / str(self._file_names[0])
        if not first.is_file():
            raise DataError(
                f"images: '{self.annotation_file}' lists '{self._file_names[0]}', which is not in '{images}'. "
                "Give the folder that belongs to these annotations."
            )

    def _index_objects(self, content: dict[str, Any]) -> None:
        usable = _usable_annotations(content, self.annotation_file.name, drop=self.bad_boxes == "drop")
        num_dropped = len(content["annotations"]) - len(usable)
        objects = [annotation for annotation in usable if not annotation.get("iscrowd")]
        position_of = {raw: position for position, raw in enumerate(self.image_ids.tolist())}
        label_of = {raw: label for label, raw in enumerate(self.category_ids)}
        owner = np.array([position_of[annotation["image_id"]] for annotation in objects], np.int64)
        # Columns are read in the file's order: a million objects in another order are three times as slow.
        labels = np.array([label_of[annotation["category_id"]] for annotation in objects], np.int64)
        numbers = chain.from_iterable(annotation["bbox"] for annotation in objects)
        boxes = np.fromiter(numbers, np.float64, 4 * len(objects)).reshape(-1, 4)

        order = np.argsort(owner, kind="stable")  # objects of one image together, in the file's order
        # Objects of image i are the rows offsets[i] to offsets[i + 1].
        self._offsets = np.searchsorted(owner[order], np.arange(len(self) + 1))
        self._labels, boxes = labels[order], boxes[order]
        boxes[:, 2:] += boxes[:, :2]
        height, width = self._sizes[owner[order]].T
        clipped = boxes.clip(0, np.stack([width, height, width, height], axis=1))
        num_clipped = int((np.abs(boxes - clipped) > _CLIP_TOLERANCE).any(axis=1).sum())
        self._boxes_xyxy = clipped.astype(np.float32)
        self.num_objects = len(objects)

        if self.masks:
            self._index_masks([objects[position] for position in order], content)
        logger.info(
            f"{self.annotation_file.name}: {len(self)} images, {len(objects)} objects of {len(self.classes)} classes; "
            f"{num_clipped} boxes clipped to their image, {num_dropped} bad boxes dropped, "
            f"{len(usable) - len(objects)} crowd regions left out"
        )

    def _index_masks(self, objects: list[dict], content: dict[str, Any]) -> None:
        images = {image["id"]: image for image in content["images"]}
        blobs = []
        for annotation in objects:
            segmentation, image = annotation.get("segmentation"), images[annotation["image_id"]]
            fault = segmentation_fault(segmentation, image)
            if fault:
                raise DataError(
                    f"{self.annotation_file.name}: annotation {annotation.get('id')} has a bad segmentation: {fault} "
                    f"(image '{image['file_name']}'). Correct it, or train without masks (masks=False)."
                )
            # Marshalled lists live in this process and its workers only; they take 9 bytes per coordinate.
            blobs.append(marshal.dumps(segmentation))
        self._segmentations = np.frombuffer(b"".join(blobs), np.uint8)
        self._segmentation_offsets = np.cumsum([0, *map(len, blobs)])

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """One transformed image with its objects.

        Args:
            index: position in the dataset; or (position, seed), and the transforms are drawn from that seed alone.
        Raises:
            DataError: the image is missing, damaged, or of another size than annotated.
        """
        index, seed = index if isinstance(index, tuple) else (index, None)
        index = range(len(self))[index]
        image = self.load_image(index)
        height, width = image.shape[:2]
        rows = slice(self._offsets[index], self._offsets[index + 1])
        boxes_xyxy, labels = self._boxes_xyxy[rows], self._labels[rows]
        masks = self._load_masks(rows, height, width) if self.masks else None
        if self.transforms is not None:
            image, boxes_xyxy, labels, masks = self.transforms(image, boxes_xyxy, labels, masks, seed=seed)
        new_height, new_width = image.shape[:2]
        boxes_cxcywh = xyxy_to_cxcywh(torch.from_numpy(boxes_xyxy)) / torch.tensor([new_width, new_height] * 2)
        target = {
            "labels": torch.from_numpy(labels.copy()),
            "boxes_cxcywh": boxes_cxcywh,
            "image_id": int(self.image_ids[index]),
            "image_size": (new_height, new_width),
            "original_size": (height, width),
        }
        if masks is not None:
            target["masks"] = torch.from_numpy(masks.astype(bool))
            drop_empty_masks(target)
        return Sample(image=to_tensor(image), target=target)

    def load_image(self, index: int) -> np.ndarray:
        """The picture before any transform.

        Returns:
            (H, W, 3) uint8 RGB, turned upright.
        Raises:
            DataError: the file is missing, damaged, or of another size than annotated.
        """
        path = self.folder / str(self._file_names[index])
        image = read_image(path)
        size, annotated = image.shape[:2], tuple(self._sizes[index].tolist())
        if size != annotated:
            turned = " The picture is rotated by its EXIF tag and the annotations were made before that rotation:"
            raise DataError(
                f"{self.annotation_file.name}: image '{path}' is {size[1]}x{size[0]} pixels (width x height, upright) "
                f"and annotated as {annotated[1]}x{annotated[0]}."
                f"{turned if size == annotated[::-1] else ''} Save the picture in the size that was annotated."
            )
        return image

    def _load_masks(self, rows: slice, height: int, width: int) -> np.ndarray:
        masks = np.zeros((rows.stop - rows.start, height, width), np.uint8)
        for mask, row in zip(masks, range(rows.start, rows.stop)):
            start, stop = self._segmentation_offsets[row : row + 2]
            mask[:] = decode_segmentation(marshal.loads(self._segmentations[start:stop]), height, width)
        return masks

    def aspect_ratios(self) -> np.ndarray:
        """Width / height of every image, float64 (len(self),)."""
        return self._sizes[:, 1] / self._sizes[:, 0]

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Which classes each image shows, as (M,) int64 indices of images and labels, each pair once."""
        owners = np.repeat(np.arange(len(self)), np.diff(self._offsets))
        pairs = np.unique(np.stack([owners, self._labels], axis=1), axis=0)
        return pairs[:, 0], pairs[:, 1]

    def ground_truth(self) -> dict[str, Any]:
        """The annotations as pycocotools evaluates against them: unclipped and with crowd regions, read anew.

        Raises:
            DataError: see the constructor.
        """
        content = first_images(read_coco_file(self.annotation_file), self.first)
        annotations = []
        usable = _usable_annotations(content, self.annotation_file.name, drop=self.bad_boxes == "drop")
        for position, annotation in enumerate(usable):
            _, _, width, height = annotation["bbox"]
            # pycocotools marks "not matched" by id 0, and files of other tools start there or leave keys out.
            annotations.append({"area": width * height, "iscrowd": 0, **annotation, "id": position + 1})
        return {**content, "annotations": annotations}


def _usable_annotations(content: dict[str, Any], file_name: str, *, drop: bool) -> list[dict]:
    """The annotations with a box that has an area in its image; one without is left out, or an error."""
    images = {image["id"]: image for image in content["images"]}
    usable = []
    for annotation in content["annotations"]:
        image = images[annotation["image_id"]]
        fault = box_fault(annotation["bbox"], image)
        if fault is None:
            usable.append(annotation)
        elif not (drop and is_well_formed_box(annotation["bbox"])):
            raise DataError(
                f"{file_name}: annotation {annotation.get('id')} has bbox {annotation['bbox']}: {fault} "
                f"(image '{image['file_name']}'). Correct it; boxes that are empty or outside their image may also be "
                "left out, by bad_boxes='drop'."
            )
    return usable
