"""Detection and instance segmentation data in COCO's format (Lin et al. 2014, https://arxiv.org/abs/1405.0312).

Annotations in other formats (YOLO, Pascal VOC, LabelMe, CVAT, CSV, label images) are read as if they were COCO's.
"""

import logging
import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from vitkit.data.datasets.annotation_table import AnnotationTable
from vitkit.data.datasets.base import ListedObjects, fill_ids, new_labels, require_folders
from vitkit.data.datasets.coco_file import AnnotationSource, DetectionFile
from vitkit.data.formats.sizes import is_scaled
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.io.coco_schema import FileIssue
from vitkit.io.image_files import ImageStore, check_inside, is_rotated
from vitkit.io.json_files import pause_gc
from vitkit.io.segmentations import decode_segmentation, object_area
from vitkit.io.shared_memory import share
from vitkit.io.spooled_bytes import SpooledLists, read_lists
from vitkit.io.stored_arrays import MIN_BYTES, load_or_build_arrays
from vitkit.registry import DATASETS, Spec
from vitkit.structures import KeypointInfo
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")


class KeypointOptions(TypedDict, total=False):
    """What is said of keypoints in place of the file, all by their names; see `KeypointInfo`."""

    flip_pairs: Sequence[Sequence[str]]
    sigmas: Mapping[str, float]
    skeleton: Sequence[Sequence[str]]


@DATASETS.register
class CocoDetection(ListedObjects):
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
        keypoints: also load keypoints, of the points that the file's categories name. What the file does not say, or
            says otherwise, may be given by these names: dict(flip_pairs=[["left_eye", "right_eye"]], sigmas={"tail":
            0.1}, skeleton=[["nose", "tail"]]).
        min_keypoints_per_image: with `keypoints`, use only images with at least so many labeled points, for instance 1
            to leave out the images that show nobody; also in `ground_truth()`.
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
        keypoints: bool | KeypointOptions = False,
        min_keypoints_per_image: int = 0,
        bad_boxes: str = "error",
        first: int | None = None,
        format: str | None = None,
        split: str | None = None,
        names: Sequence[str] | None = None,
        allow_outside: bool = False,
    ):
        if bad_boxes not in ("error", "drop"):
            raise ConfigError(f"dataset CocoDetection: bad_boxes is {bad_boxes!r}; expected 'error' or 'drop'.")
        if min_keypoints_per_image and (min_keypoints_per_image < 0 or not keypoints):
            raise ConfigError(
                f"dataset CocoDetection: min_keypoints_per_image is {min_keypoints_per_image}; expected 0 or more, and "
                "keypoints=True beside it."
            )
        self.masks, self._keypoints = masks, keypoints
        super().__init__(transforms)
        self.annotation_file = Path(annotations)
        self.bad_boxes = bad_boxes
        if images is not None:
            require_folders(images=images)
            images = Path(images)
        self._source = AnnotationSource(self.annotation_file, images, format, split, names, first)
        is_one_file = self._source.is_json() and self.annotation_file.is_file()
        self._is_large = is_one_file and self.annotation_file.stat().st_size >= MIN_BYTES
        self._allow_outside = allow_outside
        stored = {**self._load_or_build("objects", self._read_table)}
        for level, message in stored.pop("messages"):
            logger.log(level, message)
        self.store = ImageStore(stored.pop("folder"))
        if (info := stored.pop("keypoint_info", None)) is not None:
            self.keypoints = KeypointInfo.from_json(info)
        table = AnnotationTable(**stored)
        self._chooses_images = min_keypoints_per_image > 0
        if self._chooses_images:
            table = _with_keypoints(table, min_keypoints_per_image, self.annotation_file.name)
        self.table = table.share()
        self.check_first_image()

    def _load_or_build(self, part: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Build a part of the dataset from the annotations; of a large file, load what was built before."""
        if not self._is_large:
            return build()
        source = {**asdict(self._source), "annotations": None, "images": str(self._source.images)}
        settings = [type(self).__qualname__, part, source, self.masks, self.bad_boxes, self._allow_outside]
        settings += [self._keypoints] if self._keypoints else []
        return load_or_build_arrays(self.annotation_file, settings, build)

    def _read_table(self) -> dict[str, Any]:
        """Return the fields of the table, the folder of the images, and `messages`, each with its logging level."""
        name = self.annotation_file.name
        with pause_gc():
            file = self._read()
            table = file.read_table()
            # Not before: issues of the annotations come first.
            names = (image["file_name"] for image in file.content["images"])
            check_inside(file.folder, names, name, allow_outside=self._allow_outside)
        notes = file.notes() if self._is_large else ()  # otherwise reading has logged them
        messages = [(logging.WARNING, f"{self.annotation_file}: {note}") for note in notes]
        text = (
            f"{name}: {pluralize(len(table.image_ids), 'images')}, {pluralize(len(table.labels), 'objects')} "
            f"of {pluralize(len(table.classes), 'classes')}; {pluralize(file.num_clipped, 'boxes')} clipped to the "
            f"image, {pluralize(file.num_dropped, 'bad boxes')} dropped, "
            f"{pluralize(table.num_crowds, 'crowd regions')} left out"
        )
        messages.append((logging.INFO, text))
        if wrong := file.wrong_segmentation:
            messages.append((logging.WARNING, f"{name}: {wrong.count} invalid masks are ignored, such as: {wrong}"))
        if empty := file.empty_mask:
            text = f"{pluralize(empty.count, 'masks', 'have')} no pixel; their objects are in no sample: {empty}"
            messages.append((logging.WARNING, f"{name}: {text}"))
        read = {**table.to_dict(), "folder": str(file.folder), "messages": messages}
        if self._keypoints:
            from vitkit.io.keypoints import read_keypoint_info  # few datasets have keypoints

            options = None if self._keypoints is True else self._keypoints
            info, notes = read_keypoint_info(file.content["categories"], name, options)
            messages += [(logging.INFO, f"{name}: {note}") for note in notes]
            read["keypoint_info"] = info.to_json()
        return read

    def _read(self, *, log: bool = True) -> DetectionFile:
        return DetectionFile(
            self._source,
            masks=self.masks,
            keypoints=bool(self._keypoints),
            drop_bad_boxes=self.bad_boxes == "drop",
            in_parts=self._is_large,
            log=log,
            check=self._issues,
        )

    @staticmethod
    def _issues(content: dict[str, Any]) -> list[FileIssue]:
        """Return issues of what a format adds to COCO's images and categories; none by default."""
        return []

    def load_annotated(self, index: int) -> AnnotatedImage:
        image, table = self.load_image(index), self.table
        rows = slice(table.offsets[index], table.offsets[index + 1])
        masks = self._load_masks(rows, *image.shape[:2]) if self.masks else None
        annotated = AnnotatedImage(image, table.boxes_xyxy[rows], table.labels[rows], masks)
        if self.keypoints is None:
            return annotated
        points = {"keypoints": table.keypoints[rows], "areas": table.areas[rows]}
        return annotated._replace(**points, flip_order=self.keypoints.flip_order)

    def _load_masks(self, rows: slice, height: int, width: int) -> np.ndarray:
        masks = np.zeros((rows.stop - rows.start, height, width), np.uint8)
        for mask, row in zip(masks, range(rows.start, rows.stop)):
            start, stop = self.table.segmentation_spans[row]
            mask[:] = decode_segmentation(marshal.loads(self.table.segmentations[start:stop]), height, width)
        return masks

    def size_remedy(self, path: Path, size: tuple[int, int], annotated: tuple[int, int]) -> str:
        """Explain why the (height, width) of an image file differs from the annotated one, and what to do about it."""
        command = (
            f"vitkit data convert {self.annotation_file} --images {self.store.folder} --out "
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

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        return self.table.image_classes()

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[int] | None = None) -> None:
        """See `Dataset`; images of other classes stay, without objects."""
        labels = new_labels(self.classes, classes)
        if category_ids is None:
            category_ids = fill_ids(labels.tolist(), self.category_ids, len(classes))
        new = {old: category_ids[label] for old, label in zip(self.category_ids, labels.tolist()) if label >= 0}
        before = self._id_of_raw or {raw: raw for raw in self.category_ids}
        self._id_of_raw = {raw: new.get(old) for raw, old in before.items()}
        self.table = self.table.with_classes(classes, category_ids, labels).share()

    @property
    def file_ids(self) -> dict[int, int]:
        """See `Dataset`; without the classes that the file lacks."""
        return {number: raw for raw, number in (self._id_of_raw or {}).items() if number is not None}

    def use_keypoints(self, names: Sequence[str]) -> None:
        order = [self.keypoints.names.index(name) for name in names]
        self.keypoints = self.keypoints.take(names)
        self.table = replace(self.table, keypoints=self.table.keypoints[:, order]).share()

    def ground_truth(self) -> dict[str, Any]:
        """Return the annotations for evaluation by pycocotools: unclipped and with crowd regions.

        The first call reads them. Annotation ids count from 1; `file_id` is the id in the file.

        Raises:
            DataError: see the constructor.
        """
        if self._truth is None:
            arrays = self._load_or_build("ground truth", self._read_truth)
            self._truth = {name: share(array) for name, array in arrays.items()}
        with pause_gc():
            (content,), *parts = read_lists(**self._truth)
            annotations = [*chain.from_iterable(parts)]
        if self._chooses_images:
            ids = {*self.image_ids.tolist()}
            content["images"] = [image for image in content["images"] if image["id"] in ids]
            annotations = [annotation for annotation in annotations if annotation["image_id"] in ids]
        if self._id_of_raw:
            entries = {self._id_of_raw.get(category["id"]): category for category in content["categories"]}
            names = zip(self.category_ids, self.classes)
            content["categories"] = [{**entries.get(raw, {}), "id": raw, "name": name} for raw, name in names]
            for annotation in annotations:
                annotation["category_id"] = self._id_of_raw.get(annotation["category_id"])
            annotations = [annotation for annotation in annotations if annotation["category_id"] is not None]
        if self.keypoints is not None:
            from vitkit.io.keypoints import order_keypoints  # few datasets have keypoints

            order_keypoints(content["categories"], annotations, self.keypoints)
        return {**content, "annotations": annotations}

    def _read_truth(self) -> dict[str, np.ndarray]:
        """Read the annotations again, and return the arrays that `ground_truth` is built from."""
        lists = SpooledLists(self.annotation_file.name)
        with pause_gc():
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


def _with_keypoints(table: AnnotationTable, number: int, name: str) -> AnnotationTable:
    """Return the table of the images with at least a number of labeled keypoints; raise a DataError, which begins with
    the annotation file's name, if no image has so many."""
    labeled = (table.keypoints[..., 2] > 0).sum(axis=1)
    (indices,) = np.nonzero(np.bincount(table.image_indices(), labeled, len(table.image_ids)) >= number)
    lacking = f"fewer than {pluralize(number, 'labeled keypoints')}"
    if not len(indices):
        raise DataError(f"{name}: every image has {lacking}. Lower min_keypoints_per_image.")
    images = pluralize(len(table.image_ids) - len(indices), "images", "have", of=len(table.image_ids))
    logger.info("%s: %s %s: left out", name, images, lacking)
    return table.take_images(indices)
