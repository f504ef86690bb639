"""Reads and checks COCO detection files, and files of other formats as if they were COCO's."""

import logging
import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.data.datasets.annotation_table import AnnotationTable, image_columns
from vitkit.data.formats.exporters import (
    ExportersFields,
    explain_issues,
    find_listed_files,
    has_lists,
    has_text_id,
    read_exporters_fields,
)
from vitkit.data.formats.sizes import Scaling, fit_images
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.io.coco_schema import (
    AnnotationChecks,
    FileIssue,
    IssueCounts,
    image_and_category_issues,
    object_issues,
    raise_issues,
    structure_issues,
)
from vitkit.io.folders import matches_any
from vitkit.io.json_files import read_json
from vitkit.io.json_stream import read_json_parts
from vitkit.io.segmentations import object_area, visible_box
from vitkit.io.spooled_bytes import SpooledBytes, SpooledLists

logger = logging.getLogger("vitkit")

BOX_TOLERANCE = 0.01
"""Pixels by which a box may extend beyond its image before it is counted as outside: annotation tools round."""


@dataclass(frozen=True)
class AnnotationSource:
    """The location of annotations, and the selection of those that are used."""

    annotations: Path
    """A file in COCO's format; or a file or folder in another one, see vitkit.data.formats."""
    images: Path | None = None
    """Folder of the images; None: the format's default location."""
    format: str | None = None
    """A key of vitkit.data.formats.FORMATS; None: detected from the files."""
    split: str | None = None
    """One of the splits that the format names; None: all images, if the format names no splits."""
    names: Sequence[str] | None = None
    """Use only images whose file names match one of these patterns; None: all."""
    first: int | None = None
    """Use only this many images, from the start of the file; None: all."""

    def is_json(self) -> bool:
        """Whether the annotations are one JSON file, in COCO's format or LabelMe's."""
        is_json = self.annotations.suffix.lower() == ".json" and self.format in (None, "coco")
        return is_json and self.images is not None and self.split in (None, "all")

    def read_parts(self) -> "Unchecked":
        """Read the content of a large file like `read_unchecked`, without holding its annotations; log nothing.

        Raises:
            DataError: there is no such file, or it is not JSON.
        """
        entries = SpooledLists(self.annotations.name)
        text_ids: list[bool] = []

        def take(annotations: list[Any]) -> None:
            text_ids.append(any(map(has_text_id, annotations)))
            entries.append(annotations)

        content = read_json_parts(self.annotations, "annotations", take)
        if not has_lists(content) or "shapes" in content:  # wrong, or LabelMe's
            return self.read_unchecked(log=False)
        fields = ExportersFields(content, has_text_ids=any(text_ids))
        listed = find_listed_files(content, self.images)
        scaling = self._fit(content, lambda: chain.from_iterable(fields.read(entries)))

        def parts() -> Iterator[list[Any]]:
            for annotations in fields.read(entries):
                scaling.apply(annotations)
                yield annotations

        return Unchecked("coco", content, self.images, lambda: [*fields.notes(), *listed, *scaling.notes], parts)

    def _fit(self, content: dict[str, Any], annotations: Callable[[], Iterable[Any]]) -> Scaling:
        return fit_images(content["images"], self.images, annotations, measure_all=False, strict=False)

    def read_unchecked(self, *, log: bool = True) -> "Unchecked":
        """Read the content without checking COCO's fields; `choose_images` then selects what is used.

        Args:
            log: whether to log what was assumed and left out.
        Raises:
            DataError: there is no such file, or a file of another format is invalid.
        """
        if self.is_json():
            content = read_json(self.annotations)
            if not (isinstance(content, dict) and "shapes" in content):  # LabelMe's
                notes = [*read_exporters_fields(content), *find_listed_files(content, self.images)]
                if has_lists(content):
                    scaling = self._fit(content, lambda: content["annotations"])
                    scaling.apply(content["annotations"])
                    notes += scaling.notes
                for note in notes if log else ():
                    logger.warning("%s: %s", self.annotations, note)
                return Unchecked("coco", content, self.images, lambda: notes, lambda: iter([content["annotations"]]))
        from vitkit.data.formats import read_annotations  # of all tools, which a file in COCO's format does not need

        data = read_annotations(
            self.annotations,
            self.images,
            format=self.format,
            check_segmentations=False,
            check_sizes=False,
            measure_all=False,
            allow_outside=True,
        )
        notes = data.notes
        data.report(log=log)  # before the split, which does not keep what was left out
        if self.split is not None or self.names is None:
            data = data.split(self.split)
        return Unchecked(data.format, data.content, data.folder, lambda: notes, lambda: iter([data.annotations]))

    def choose_images(self, images: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the images that are used.

        Raises:
            ConfigError, DataError: there is no such image.
        """
        if self.names is not None:
            images = [image for image in images if matches_any(image["file_name"], self.names)]
            if not images:
                raise DataError(f"{self.annotations.name}: no image's name matches any of names={list(self.names)}.")
        return first_images(images, self.first)

    def chooses(self) -> bool:
        """Whether only some of the images are used."""
        return self.names is not None or self.first is not None


class Unchecked(NamedTuple):
    """The content of annotations before COCO's fields are checked."""

    format: str
    """The key of vitkit.data.formats.FORMATS."""
    content: Any
    """For COCO the JSON as it is, apart from what `notes` say; of other formats `images`, `annotations` and
    `categories`."""
    folder: Path
    """Folder of the images."""
    notes: Callable[[], list[str]]
    """Returns what was assumed, and read in another form than COCO's, once all annotations are read."""
    parts: Callable[[], Iterator[list[Any]]]
    """Returns the annotations, some at a time; those of a large file are not in the content."""


class DetectionFile:
    """A detection file, whose annotations are checked as they are read.

    Args:
        source: the file, and which of its images are used.
        masks: every annotation needs a valid segmentation; otherwise invalid ones are removed.
        keypoints: also check keypoints, and read them into the table.
        drop_bad_boxes: leave out annotations whose box is empty or outside its image, in place of an error.
        in_parts: read a COCO file without holding its annotations in memory; nothing is logged.
        log: see `AnnotationSource.read_unchecked`.
        check: returns further issues of images and categories.
    Raises:
        DataError: there is no such file, it is not JSON, or its content is invalid.
    """

    num_dropped = 0
    """Number of annotations left out because their boxes are empty or outside their images."""
    num_clipped = 0
    """Number of boxes that extended beyond their images by more than `BOX_TOLERANCE`, once `read_table` was called."""
    wrong_segmentation: FileIssue | None = None
    """The first of the invalid segmentations, which are removed from their annotations, with their number."""
    empty_mask: FileIssue | None = None
    """With `masks`, the first of the segmentations without a pixel, with their number, once `read_table` was called."""

    def __init__(
        self,
        source: AnnotationSource,
        *,
        masks: bool = True,
        keypoints: bool = False,
        drop_bad_boxes: bool = False,
        in_parts: bool = False,
        log: bool = True,
        check: Callable[[dict[str, Any]], list[FileIssue]] = lambda content: [],
    ):
        self._source, self._masks, self._keypoints = source, masks, keypoints
        self._drop_bad_boxes, self._check = drop_bad_boxes, check
        read = source.read_parts() if in_parts else source.read_unchecked(log=log)
        _, content, self.folder, self.notes, self._parts = read
        if not has_lists(content) or not isinstance(content.get("categories"), list):
            raise_issues(structure_issues(content), source.annotations.name)
        self.content: dict[str, Any] = {**content, "annotations": []}
        """The images that are used, the categories, and whatever else the file contains; the list of annotations is
        empty."""
        self._structure_issues = structure_issues(self.content)
        self._entry_issues = [] if self._structure_issues else image_and_category_issues(self.content)
        self._checks = None if self._structure_issues else AnnotationChecks(self.content)
        self._choice_error: VitkitError | None = None
        self._used_ids: set[int] | None = None
        if source.chooses() and not self._structure_issues and not self._entry_issues:
            try:
                self.content["images"] = source.choose_images(self.content["images"])
                self._used_ids = {image["id"] for image in self.content["images"]}
            except VitkitError as error:
                self._choice_error = error
        if self._structure_issues or self._entry_issues or self._choice_error:
            for _ in self.annotations():  # raises what is wrong, also of the annotations
                pass

    def annotations(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the usable annotations in the file's order, some at a time, as objects that may be changed.

        Raises:
            DataError: an annotation is invalid; at the end, as the message counts all of them.
        """
        kinds = ("annotations", "bbox", "segmentation", "keypoints")
        no_objects, bad_boxes, wrong_masks, wrong_points = (IssueCounts([name]) for name in kinds)
        wrong_fields = IssueCounts(self._checks.fields if self._checks else ())
        num_read = num_chosen = num_used = 0
        for entries in self._parts():
            no_objects.add(object_issues(entries, "annotations", num_read))
            if self._checks and not no_objects:
                wrong_fields.add(self._checks.field_issues(entries, num_read))
            num_read += len(entries)
            if not self._checks or no_objects or self._entry_issues or wrong_fields or self._choice_error:
                continue
            if self._used_ids is not None:
                entries = [annotation for annotation in entries if annotation["image_id"] in self._used_ids]
            issues = self._checks.bad_box_issues(entries, num_chosen)
            bad_boxes.add(issues)
            dropped = {issue.position - num_chosen for issue in issues}
            num_chosen += len(entries)
            used = [annotation for k, annotation in enumerate(entries) if k not in dropped] if dropped else entries
            issues = self._checks.segmentation_issues(used, num_used, required=self._masks)
            wrong_masks.add(issues)
            for issue in issues:
                used[issue.position - num_used].pop("segmentation", None)
            if self._keypoints:
                wrong_points.add(self._checks.keypoint_issues(used, num_used))
            num_used += len(used)
            if not (self._masks and wrong_masks) and not wrong_points:
                yield used
        lists = ("images", "annotations", "categories")
        issues = [*self._structure_issues, *no_objects.issues()]
        self._raise(sorted(issues, key=lambda issue: lists.index(issue.field)))
        self._raise([*self._entry_issues, *wrong_fields.issues()])
        if self._choice_error:
            raise self._choice_error
        if not self._drop_bad_boxes:
            self._raise(bad_boxes.issues())
        if self._masks:
            self._raise(wrong_masks.issues())
        self._raise(wrong_points.issues())
        self._raise(self._check(self.content))
        self.num_dropped = num_chosen - num_used
        self.wrong_segmentation = next(iter(wrong_masks.issues()), None)

    def read_table(self) -> AnnotationTable:
        """Read the images and objects as flat arrays, crowd regions left out, boxes clipped; raises like `annotations`.

        Segmentations are included if `masks` is set, keypoints and areas if `keypoints` is.
        """
        columns = image_columns(self.content["images"])
        index_of_image = {image_id: index for index, image_id in enumerate(columns["image_ids"].tolist())}
        categories = sorted(self.content["categories"], key=lambda category: category["id"])
        label_of_category = {category["id"]: label for label, category in enumerate(categories)}
        no_spans = np.zeros((0, 2), np.int64)
        count = max((len(category.get("keypoints") or ()) for category in categories), default=0)
        no_points = (np.zeros((0, count, 3), np.float32), np.zeros(0, np.float32))
        parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32), no_spans, *no_points)]
        segmentations = SpooledBytes(self._source.annotations.name)
        num_crowds = num_used = self.num_clipped = 0
        empty_masks = IssueCounts(["segmentation"])
        for annotations in self.annotations():
            objects = [annotation for annotation in annotations if not annotation.get("iscrowd")]
            num_crowds += len(annotations) - len(objects)
            image_indices = np.array([index_of_image[annotation["image_id"]] for annotation in objects], np.int64)
            labels = np.array([label_of_category[annotation["category_id"]] for annotation in objects], np.int64)
            sizes = columns["sizes"][image_indices]
            boxes, beyond = _clip_boxes(objects, sizes)
            self.num_clipped += beyond
            spans = no_spans
            if self._masks:
                empty_masks.add(self._checks.empty_mask_issues(annotations, num_used))
                # Marshalled lists, which only this machine's processes read, take 9 bytes per coordinate.
                blobs = [marshal.dumps(annotation["segmentation"]) for annotation in objects]
                stops = segmentations.size + np.cumsum([0, *map(len, blobs)], dtype=np.int64)
                spans = np.stack([stops[:-1], stops[1:]], axis=1)
                segmentations.write(b"".join(blobs))
            points = no_points
            if self._keypoints:
                points = _read_keypoints(objects, count, sizes), np.array(list(map(object_area, objects)), np.float32)
            num_used += len(annotations)
            parts.append((image_indices, labels, boxes, spans, *points))
        self.empty_mask = next(iter(empty_masks.issues()), None)
        image_indices, labels, boxes, spans, keypoints, areas = map(np.concatenate, zip(*parts))
        order = np.argsort(image_indices, kind="stable")  # objects of one image together, in the file's order
        return AnnotationTable(
            **columns,
            classes=[category["name"] for category in categories],
            category_ids=[category["id"] for category in categories],
            offsets=np.searchsorted(image_indices[order], np.arange(len(index_of_image) + 1)),
            labels=labels[order],
            boxes_xyxy=boxes[order],
            num_crowds=num_crowds,
            segmentations=segmentations.array() if self._masks else None,
            segmentation_spans=spans[order] if self._masks else None,
            keypoints=keypoints[order] if self._keypoints else None,
            areas=areas[order] if self._keypoints else None,
        )

    def _raise(self, issues: list[FileIssue]) -> None:
        name = self._source.annotations.name
        explain_issues(issues, name)
        raise_issues(issues, name)


def first_images(images: list[dict[str, Any]], count: int | None) -> list[dict[str, Any]]:
    """Return the first `count` images; None: all.

    Raises:
        ConfigError: count is below 1.
    """
    if count is not None and count < 1:
        raise ConfigError(f"first: got {count}; expected at least 1, or none for all images.")
    return images[:count]


def _clip_boxes(objects: Sequence[Mapping[str, Any]], sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the boxes of objects, (N, 4) float32 xyxy, clipped to their images' (height, width), (N, 2) int64, and the
    number that was beyond."""
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


def _read_keypoints(objects: Sequence[Mapping[str, Any]], count: int, sizes: np.ndarray) -> np.ndarray:
    """Return the keypoints of objects, (N, count, 3) float32, clipped to their images' (height, width), (N, 2) int64;
    zeros where they are not labeled or not annotated."""
    keypoints = np.array([a.get("keypoints") or [0] * (3 * count) for a in objects], np.float32)
    keypoints = keypoints.reshape(len(objects), count, 3)
    keypoints[..., :2] = keypoints[..., :2].clip(0, sizes[:, None, ::-1])
    return keypoints * (keypoints[..., 2:] > 0)
