"""Detection and instance segmentation data in COCO's format (Lin et al. 2014, https://arxiv.org/abs/1405.0312).

Annotations in other formats (YOLO, Pascal VOC, LabelMe, CVAT, CSV, label images) are read as if they were COCO's.
"""

import logging
import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.base import DetectionDataset, ListedImages, new_labels, require_folders
from vitkit.data.datasets.coco_file import AnnotationSource, DetectionFile
from vitkit.data.formats.sizes import is_scaled
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.io.coco_schema import FileIssue
from vitkit.io.image_files import check_inside, is_rotated
from vitkit.io.json_files import gc_paused
from vitkit.io.packs import has_file
from vitkit.io.segmentations import decode_segmentation, object_area, visible_box
from vitkit.io.shared_memory import share, share_arrays
from vitkit.io.spooled_bytes import SpooledBytes, SpooledLists, read_lists
from vitkit.io.stored_arrays import MIN_BYTES, stored_arrays
from vitkit.registry import DATASETS, Spec
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

BOX_TOLERANCE = 0.01
"""Pixels by which a box may extend beyond its image before it is counted as outside: annotation tools round."""


@DATASETS.register
class CocoDetection(ListedImages, DetectionDataset):
    """Images with boxes, and optionally masks, from a folder and an annotation file.

    The classes are the file's categories in the order of their ids, whatever the ids are. Crowd regions are left out of
    the samples but included in `ground_truth()`. Boxes that extend beyond their image are counted and clipped, with a
    polygon to the box of its visible part.

    Args:
        images: folder of the images; None: the format's default location.
        annotations: COCO's JSON file, or the file or folder of another format; see vitkit.data.formats.
        transforms: see `BaseImageDataset`.
        masks: also load instance masks, in which case every annotation needs one; objects without a visible pixel are
            removed. Otherwise invalid masks are ignored, with a warning.
        bad_boxes: what to do with boxes that have no width or height or lie outside their image: "error", or "drop" to
            remove and count them. Negative sizes and numbers that are not finite are always errors.
        first: use only the first `first` images of the file, for instance to check that a model can overfit them.
        format: format of the annotations, such as "yolo"; None: detected from the files.
        split: "train", "val", "test" or "all", for formats that name splits.
        names: use only images whose file names match one of these patterns, such as "0001TP_*".
        allow_outside: also read files that lie outside the folder, by an absolute `file_name` or one with "..".
    Raises:
        DataError: a folder or file is missing, the annotations are invalid or there is no image.
    """

    file_kind = "objects"
    _id_of_raw: dict[int, int | None] | None = None
    """Category id in the file -> that of `category_ids`, None for what is left out; None: all are the same."""
    _truth: dict[str, np.ndarray] | None = None
    """What `ground_truth` is made of, once it was called."""

    def __init__(
        self,
        images: str | Path | None,
        annotations: str | Path,
        *,
        transforms: Spec | Transforms | None = None,
        masks: bool = False,
        bad_boxes: str = "error",
        first: int | None = None,
        format: str | None = None,
        split: str | None = None,
        names: Sequence[str] | None = None,
        allow_outside: bool = False,
    ):
        if bad_boxes not in ("error", "drop"):
            raise ConfigError(f"dataset CocoDetection: bad_boxes is {bad_boxes!r}; expected 'error' or 'drop'.")
        self.masks = masks
        super().__init__(transforms)
        self.annotation_file = Path(annotations)
        self.bad_boxes = bad_boxes
        if images is not None:
            require_folders(images=images)
            images = Path(images)
        self._source = AnnotationSource(self.annotation_file, images, format, split, names, first)
        # All workers share a few flat arrays; a list of objects would be copied into every worker, page by page, as
        # reference counts change.
        self._is_large = self._source.is_json() and self.annotation_file.stat().st_size >= MIN_BYTES
        index = self._stored("objects", lambda: self._index(allow_outside))
        for level, message in index.pop("messages"):
            logger.log(level, message)
        vars(self).update(index)
        self.folder = Path(self.folder)
        share_arrays(self)
        if not has_file(self.image_path(0)):
            raise DataError(
                f"images: '{self.annotation_file}' lists '{self.file_name(0)}', which is not in '{self.folder}'. "
                "Give the folder that belongs to these annotations."
            )

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[int] | None = None) -> None:
        """See `Dataset`; images of other classes stay, without objects."""
        labels = new_labels(self.classes, classes)
        if category_ids is None:
            id_of = dict(zip(labels.tolist(), self.category_ids))
            unused = count(max(self.category_ids) + 1)
            category_ids = [id_of[k] if k in id_of else next(unused) for k in range(len(classes))]
        self._id_of_raw = {
            raw: None if label < 0 else category_ids[label]
            for raw, label in zip(self._id_of_raw or self.category_ids, labels.tolist())
        }
        new = labels[self._labels]
        is_kept = new >= 0
        if not is_kept.all():
            if self.masks:
                self._segmentation_spans = self._segmentation_spans[is_kept]
            self._offsets = np.concatenate([[0], np.cumsum(is_kept)])[self._offsets]
            self._boxes_xyxy = self._boxes_xyxy[is_kept]
        self._labels, self.num_objects = new[is_kept], int(is_kept.sum())
        self.classes, self.category_ids = list(classes), list(category_ids)
        share_arrays(self)

    @staticmethod
    def _issues(content: dict[str, Any]) -> list[FileIssue]:
        """Return issues of the file's images and categories that others than this format's have."""
        return []

    def _read(self, *, log: bool = True) -> DetectionFile:
        return DetectionFile(
            self._source,
            masks=self.masks,
            drop_bad_boxes=self.bad_boxes == "drop",
            in_parts=self._is_large,
            log=log,
            check=self._issues,
        )

    def _stored(self, part: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `build` makes of the annotations; of a large file, what any process has made of it."""
        if not self._is_large:
            return build()
        source = {**asdict(self._source), "annotations": None, "images": str(self._source.images)}
        settings = [type(self).__qualname__, part, source, self.masks, self.bad_boxes]
        return stored_arrays(self.annotation_file, settings, build)

    def _index(self, allow_outside: bool) -> dict[str, Any]:
        """Return the attributes that hold the images and objects, and `messages`, each with its logging level."""
        others = {*vars(self)}
        with gc_paused():
            file = self._read()
            categories = sorted(file.content["categories"], key=lambda category: category["id"])
            self.category_ids: list[int] = [category["id"] for category in categories]
            self.classes: list[str] = [category["name"] for category in categories]
            images = file.content["images"]
            self.list_images(file.folder, images, file=self.annotation_file, allow_outside=True)
            num_clipped = self._index_objects(file)
            # Not before: issues of the annotations come first.
            names = (image["file_name"] for image in images)
            check_inside(file.folder, names, self.annotation_file.name, allow_outside=allow_outside)
        notes = file.notes() if self._is_large else ()  # otherwise reading has logged them
        messages = [(logging.WARNING, f"{self.annotation_file}: {note}") for note in notes]
        text = (
            f"{self.annotation_file.name}: {pluralize(len(self), 'images')}, {pluralize(self.num_objects, 'objects')} "
            f"of {pluralize(len(self.classes), 'classes')}; {pluralize(num_clipped, 'boxes')} clipped to the image, "
            f"{pluralize(file.num_dropped, 'bad boxes')} dropped, "
            f"{pluralize(self.num_crowds, 'crowd regions')} left out"
        )
        messages.append((logging.INFO, text))
        if wrong := file.wrong_segmentation:
            text = f"{self.annotation_file.name}: {wrong.count} invalid masks are ignored, such as: {wrong}"
            messages.append((logging.WARNING, text))
        self.folder = str(self.folder)
        return {name: value for name, value in vars(self).items() if name not in others} | {"messages": messages}

    def _index_objects(self, file: DetectionFile) -> int:
        """Set the arrays of objects; return the number of boxes that were clipped."""
        index_of_image = {image_id: index for index, image_id in enumerate(self.image_ids.tolist())}
        label_of_category = {category_id: label for label, category_id in enumerate(self.category_ids)}
        no_spans = np.zeros((0, 2), np.int64)
        columns = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32), no_spans)]
        segmentations = SpooledBytes(self.annotation_file.name)
        self.num_crowds = num_clipped = 0
        for annotations in file.annotations():
            objects = [annotation for annotation in annotations if not annotation.get("iscrowd")]
            self.num_crowds += len(annotations) - len(objects)
            image_indices = np.array([index_of_image[annotation["image_id"]] for annotation in objects], np.int64)
            labels = np.array([label_of_category[annotation["category_id"]] for annotation in objects], np.int64)
            boxes, beyond = _clip_boxes(objects, self._sizes[image_indices])
            num_clipped += beyond
            spans = no_spans
            if self.masks:
                # Marshalled lists, which only this machine's processes read, take 9 bytes per coordinate.
                blobs = [marshal.dumps(annotation["segmentation"]) for annotation in objects]
                stops = segmentations.size + np.cumsum([0, *map(len, blobs)], dtype=np.int64)
                spans = np.stack([stops[:-1], stops[1:]], axis=1)
                segmentations.write(b"".join(blobs))
            columns.append((image_indices, labels, boxes, spans))
        image_indices, labels, boxes, spans = map(np.concatenate, zip(*columns))
        order = np.argsort(image_indices, kind="stable")  # objects of one image together, in the file's order
        # Objects of image i are the rows offsets[i] to offsets[i + 1].
        self._offsets = np.searchsorted(image_indices[order], np.arange(len(self) + 1))
        self._labels, self._boxes_xyxy = labels[order], boxes[order]
        self.num_objects = len(order)
        if self.masks:
            self._segmentations, self._segmentation_spans = segmentations.array(), spans[order]
        return num_clipped

    def load_annotated(self, index: int) -> AnnotatedImage:
        image = self.load_image(index)
        rows = slice(self._offsets[index], self._offsets[index + 1])
        masks = self._load_masks(rows, *image.shape[:2]) if self.masks else None
        return AnnotatedImage(image, self._boxes_xyxy[rows], self._labels[rows], masks)

    def load_image(self, index: int) -> np.ndarray:
        """See `BaseImageDataset`.

        Raises:
            DataError: the file is missing or damaged, or its size differs from the annotated one.
        """
        image = super().load_image(index)
        size, annotated = image.shape[:2], self.image_size(index)
        if size != annotated:
            path = self.image_path(index)
            raise DataError(
                f"{self.annotation_file.name}: image '{path}' is {size[1]}x{size[0]} pixels (width x height, upright) "
                f"and annotated as {annotated[1]}x{annotated[0]}. {self._size_remedy(path, size, annotated)}"
            )
        return image

    def _size_remedy(self, path: Path, size: tuple[int, int], annotated: tuple[int, int]) -> str:
        """Explain why the (height, width) of an image file differs from the annotated one, and what to do about it."""
        command = (
            f"vitkit data convert {self.annotation_file} --images {self.folder} --out "
            f"{self.annotation_file.stem}_fixed.json"
        )
        if is_scaled(size[::-1], annotated[::-1]):
            return f"Scale the annotations to the files: {command}"
        if size != annotated[::-1]:
            return "Save the image in the size that was annotated."
        if is_rotated(path, max_pixels=self.max_image_pixels):
            return (
                "The image is rotated by its EXIF tag and the annotations were made before that rotation: Save the "
                "image in the size that was annotated."
            )
        return f"Width and height are swapped in the annotations: {command} --fix sizes"

    def _load_masks(self, rows: slice, height: int, width: int) -> np.ndarray:
        masks = np.zeros((rows.stop - rows.start, height, width), np.uint8)
        for mask, row in zip(masks, range(rows.start, rows.stop)):
            start, stop = self._segmentation_spans[row]
            mask[:] = decode_segmentation(marshal.loads(self._segmentations[start:stop]), height, width)
        return masks

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the (M,) int64 indices of images and labels of the classes that each image shows, each pair once."""
        image_indices = np.repeat(np.arange(len(self)), np.diff(self._offsets))
        pairs = np.unique(np.stack([image_indices, self._labels], axis=1), axis=0)
        return pairs[:, 0], pairs[:, 1]

    def _read_truth(self) -> dict[str, np.ndarray]:
        """Read the annotations again, and return what `ground_truth` is made of."""
        lists = SpooledLists(self.annotation_file.name)
        with gc_paused():
            file = self._read(log=False)
            lists.append([file.content])
            # pycocotools marks "not matched" by id 0, but files of other tools count from 0 or leave keys out.
            numbers = count(1)
            for annotations in file.annotations():
                lists.append(
                    [
                        {"iscrowd": 0, **a, "area": object_area(a), "id": number, "file_id": a.get("id")}
                        for a, number in zip(annotations, numbers)
                    ]
                )
        data, offsets = lists.arrays()
        return {"data": data, "offsets": offsets}

    def ground_truth(self) -> dict[str, Any]:
        """Return the annotations for evaluation by pycocotools: unclipped and with crowd regions.

        The first call reads them. Annotation ids count from 1; `file_id` is the id in the file.

        Raises:
            DataError: see the constructor.
        """
        if self._truth is None:
            self._truth = {name: share(array) for name, array in self._stored("ground truth", self._read_truth).items()}
        with gc_paused():
            (content,), *parts = read_lists(**self._truth)
            annotations = [*chain.from_iterable(parts)]
        if self._id_of_raw:
            entries = {self._id_of_raw.get(category["id"]): category for category in content["categories"]}
            names = zip(self.category_ids, self.classes)
            content["categories"] = [{**entries.get(raw, {}), "id": raw, "name": name} for raw, name in names]
            for annotation in annotations:
                annotation["category_id"] = self._id_of_raw.get(annotation["category_id"])
            annotations = [annotation for annotation in annotations if annotation["category_id"] is not None]
        return {**content, "annotations": annotations}


def _clip_boxes(objects: Sequence[Mapping[str, Any]], sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the boxes of objects clipped to their images, (N, 4) float32 xyxy, and the number that was beyond.

    Args:
        sizes: (N, 2) int64, (height, width) of the object's image.
    """
    coordinates = chain.from_iterable(annotation["bbox"] for annotation in objects)
    boxes = np.fromiter(coordinates, np.float64, 4 * len(objects)).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    height, width = sizes.T
    clipped = boxes.clip(0, np.stack([width, height, width, height], axis=1))
    (beyond,) = np.nonzero((np.abs(boxes - clipped) > BOX_TOLERANCE).any(axis=1))
    for row in beyond.tolist():
        x, y, box_width, box_height = visible_box(objects[row], int(height[row]), int(width[row]))
        clipped[row] = x, y, x + box_width, y + box_height
    return clipped.astype(np.float32), len(beyond)
