"""Matches of predictions with objects, and COCO's precision and recall (Lin et al. 2014,
https://arxiv.org/abs/1405.0312).

Images are matched one by one, on any rank; precision and recall are accumulated from the matches of all images, which
are a few flat arrays. The numbers are those of pycocotools' COCOeval, to the last bit.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from vitkit.evaluation.keypoints import boxes_around_points, compute_oks
from vitkit.evaluation.matching import IOUS, IouType, match_in_order
from vitkit.io.segmentations import encode_segmentation

RECALLS = np.linspace(0.0, 1.0, 101)
"""The recalls at which COCO averages precision, computed as in pycocotools."""
AREAS = {"": (0, 1e10), "s": (0, 32**2), "m": (32**2, 96**2), "l": (96**2, 1e10)}
"""End of a metric's name -> the areas of its objects in pixels."""


class Predictions(NamedTuple):
    """The predictions for one image."""

    category_ids: np.ndarray
    """(N,) int64 raw category ids."""
    boxes_xywh: np.ndarray
    """(N, 4) float32, in pixels."""
    scores: np.ndarray
    """(N,) float32."""
    masks: list[dict[str, Any]] | None
    """N masks as compressed run lengths; None if masks are not evaluated."""
    keypoints: np.ndarray | None = None
    """(N, K, 3) float32 x, y in pixels and confidence; None if keypoints are not evaluated."""

    def take(self, indices: np.ndarray) -> "Predictions":
        """Return the predictions at (M,) int64 indices."""
        masks = None if self.masks is None else [self.masks[index] for index in indices.tolist()]
        keypoints = None if self.keypoints is None else self.keypoints[indices]
        return Predictions(self.category_ids[indices], self.boxes_xywh[indices], self.scores[indices], masks, keypoints)


class ImageMatches(NamedTuple):
    """The N predictions of an image that count, class by class, best first, and what they are matched with."""

    number: np.ndarray
    """(N,) int32 index of each among all of the image's predictions."""
    near: np.ndarray
    """(K,) int32 rows of the predictions that are close enough to an object of their class to be matched."""
    matched: np.ndarray
    """(K, A, T) int32 index of the object that each is matched with for the objects of each of `AREAS` and at each IoU,
    among the image's; -1 for none."""


class Objects(NamedTuple):
    """The M objects of an image, or of all."""

    category_ids: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    number: np.ndarray
    """Index of each among the annotations."""
    uncounted: np.ndarray
    """Whether each does not have to be detected: crowds, and among keypoints objects without a labeled one."""

    def find_ignored(self) -> np.ndarray:
        """Return (A, M) bool, whether each does not have to be detected among the objects of each of `AREAS`."""
        return self.uncounted | _outside(self.areas)


def group_objects(truth: Mapping[str, Any]) -> dict[Any, list[int]]:
    """Return the indices of each image's annotations."""
    of_image = defaultdict(list)
    for number, annotation in enumerate(truth["annotations"]):
        of_image[annotation["image_id"]].append(number)
    return of_image


def objects_at(truth: Mapping[str, Any], numbers: Sequence[int], iou_type: IouType) -> Objects:
    """Return the objects of annotations."""
    annotations = [truth["annotations"][number] for number in numbers]
    crowd = np.array([bool(annotation["iscrowd"]) for annotation in annotations], bool)
    uncounted = crowd
    if iou_type == "keypoints":
        uncounted = crowd | np.array([not any(annotation["keypoints"][2::3]) for annotation in annotations], bool)
    return Objects(
        np.array([annotation["category_id"] for annotation in annotations], np.int64),
        np.array([annotation["area"] for annotation in annotations], np.float64),
        crowd,
        np.array(numbers, np.int32),
        uncounted,
    )


def match_image(
    predictions: Predictions,
    objects: Objects,
    shapes: Sequence[Any],
    *,
    iou_type: IouType,
    max_dets: int,
    ious: Sequence[float] = IOUS,
    sigmas: Sequence[float] = (),
) -> ImageMatches:
    """Match the predictions of an image with the objects of their classes.

    Args:
        shapes: boxes, xywh in pixels, or masks in compressed run lengths, of the objects; for keypoints, annotations.
        max_dets: how many predictions of a class count, best first.
        ious: the minimum IoUs of a match.
        sigmas: those of keypoints, see `KeypointInfo`.
    """
    number = np.lexsort((-predictions.scores.astype(np.float64), predictions.category_ids))
    number = number[_ranks(predictions.category_ids[number]) < max_dets]
    category_ids = predictions.category_ids[number]
    near, matched = [np.zeros(0, np.int64)], [np.zeros((0, len(AREAS), len(ious)), np.int64)]
    for category_id in np.intersect1d(category_ids, objects.category_ids).tolist():
        rows = np.flatnonzero(category_ids == category_id)
        columns = np.flatnonzero(objects.category_ids == category_id)
        ours, theirs = _shapes(predictions, number[rows], iou_type), [shapes[column] for column in columns]
        if iou_type == "keypoints":
            overlaps = compute_oks(ours, theirs, sigmas)
        else:
            theirs = np.array(theirs, np.float64) if iou_type == "bbox" else theirs
            overlaps = np.asarray(coco_mask.iou(ours, theirs, objects.crowd[columns].astype(np.uint8)))
        close = (overlaps >= min(*ious, 1 - 1e-10)).any(axis=1)
        if close.any():
            crowd, ignored = objects.crowd[columns], objects.find_ignored()[:, columns]
            found = match_in_order(overlaps[close], crowd, ignored=ignored, ious=ious)
            near.append(rows[close])
            matched.append(np.where(found >= 0, columns[found], -1))
    near, matched = np.concatenate(near), np.concatenate(matched)
    return ImageMatches(*(values.astype(np.int32) for values in (number, near, matched)))


class ClassMatches(NamedTuple):
    """The D predictions of a class, in the order of the images, and which of them are correct for objects of a size."""

    scores: np.ndarray
    """(D,) float64."""
    image: np.ndarray
    """(D,) int64 indices of the predictions' images."""
    rank: np.ndarray
    """(D,) int64, 0 for the best of the class in its image."""
    correct: np.ndarray
    """(T, D) bool, whether each is matched at each IoU, with any object."""
    counted: np.ndarray
    """(T, D) bool, whether it counts: not if it is matched with an object that does not have to be detected, or with
    none and has another size."""
    num_objects: np.ndarray
    """(N,) float64 number of objects to detect in each image."""


class DetectionMatches:
    """The matches of all N images.

    Args:
        image_ids: the images in the order of the arrays.
        category_ids: raw category ids in the order of the classes.
        predictions_by_image: the predictions of each image; an image may have none.
        matches: the matches of the images that have predictions.
        truth: the annotations in COCO's format.
        ious: the IoUs that were matched at.
        incomplete: the classes of each image of which not every object is annotated, so that unmatched predictions of
            them do not count; an image may be absent.
    """

    def __init__(
        self,
        image_ids: Sequence[Any],
        category_ids: Sequence[int],
        predictions_by_image: Mapping[Any, Predictions],
        matches: Mapping[Any, ImageMatches],
        truth: Mapping[str, Any],
        *,
        iou_type: IouType,
        max_dets: Sequence[int],
        ious: Sequence[float] = IOUS,
        incomplete: Mapping[Any, Sequence[int]] | None = None,
    ):
        self.image_ids, self.iou_type, self.max_dets, self.ious = list(image_ids), iou_type, tuple(max_dets), ious
        self._num_images, self._num_classes = len(self.image_ids), len(category_ids)
        label_of = {raw: label for label, raw in enumerate(category_ids)}
        of_image = group_objects(truth)
        numbers = [of_image.get(image_id, []) for image_id in self.image_ids]
        numbers = [[k for k in part if truth["annotations"][k]["category_id"] in label_of] for part in numbers]
        self.objects = objects_at(truth, [number for part in numbers for number in part], iou_type)
        sizes = [len(part) for part in numbers]
        self.object_image = np.repeat(np.arange(self._num_images), sizes)
        self.object_labels = np.array([label_of[raw] for raw in self.objects.category_ids.tolist()], np.int64)
        self._ignored = self.objects.find_ignored()
        first_object = np.cumsum([0, *sizes[:-1]]) if sizes else np.zeros(0, int)

        incomplete = incomplete or {}
        parts = []
        near, matched = [np.zeros(0, np.int64)], [np.zeros((0, len(AREAS), len(ious)), np.int64)]
        num_rows, num_predictions = 0, 0
        for position, image_id in enumerate(self.image_ids):
            predictions = predictions_by_image.get(image_id)
            if predictions is None:
                continue
            found = matches[image_id]
            ids = predictions.category_ids[found.number]
            parts.append(
                (
                    np.array([label_of[raw] for raw in ids.tolist()], np.int64),
                    np.full(len(ids), position),
                    predictions.scores[found.number].astype(np.float64),
                    _areas(predictions, found.number, iou_type),
                    _ranks(ids),
                    found.number.astype(np.int64) + num_predictions,
                    np.isin(ids, list(incomplete.get(image_id, ()))),
                )
            )
            near.append(found.near.astype(np.int64) + num_rows)
            matched.append(np.where(found.matched >= 0, found.matched + first_object[position], -1))
            num_rows, num_predictions = num_rows + len(ids), num_predictions + len(predictions.scores)
        columns = [np.concatenate(column) for column in zip(*parts)] if parts else [np.zeros(0, np.int64)] * 7
        self.labels, self.image, self.scores, areas, self.rank, self.number, self._unsure = columns
        """(D,) of all predictions that count; `number` is the index of each among all predictions, image by image."""
        self._outside = _outside(areas)  # (A, D)
        self.near, self.matched = np.concatenate(near), np.concatenate(matched)
        """(K, A, T) index into `objects` of each prediction in `near`; -1 for none."""
        self._rows_of = _split_by(self.labels, self._num_classes)
        self._near_of = _split_by(self.labels[self.near], self._num_classes)
        self._objects_of = _split_by(self.object_labels, self._num_classes)

    def of_class(self, label: int, size: int = 0) -> ClassMatches:
        """Return the predictions of a class.

        Args:
            size: index into `AREAS`: 0 for objects of all sizes.
        """
        rows, near, objects = self._rows_of[label], self._near_of[label], self._objects_of[label]
        correct = np.zeros((len(self.ious), len(rows)), bool)
        uncounted = self._outside[size, rows] | self._unsure[rows].astype(bool)
        counted = np.repeat(~uncounted[None], len(self.ious), axis=0)
        matched = self.matched[near, size].T  # (T, K)
        has_object = matched >= 0
        columns = np.searchsorted(rows, self.near[near])
        correct[:, columns] = has_object
        if len(near) and len(self._ignored[size]):
            counted[:, columns] = np.where(has_object, ~self._ignored[size][matched], counted[:, columns])
        wanted = objects[~self._ignored[size, objects]]
        num_objects = np.bincount(self.object_image[wanted], minlength=self._num_images).astype(np.float64)
        return ClassMatches(self.scores[rows], self.image[rows], self.rank[rows], correct, counted, num_objects)

    def owners(self, iou: int) -> Iterator[tuple[int, int]]:
        """Yield the number of each prediction that counts, class by class, and of its annotation, -1 for none.

        Args:
            iou: index of the IoU at which they are matched.
        """
        for label, rows in enumerate(self._rows_of):
            owner = np.full(len(rows), -1)
            columns = np.searchsorted(rows, self.near[self._near_of[label]])
            matched = self.matched[self._near_of[label], 0, iou]
            owner[columns] = np.where(matched >= 0, np.r_[self.objects.number, -1][matched], -1)
            counted = self.of_class(label).counted[iou]
            yield from zip(self.number[rows[counted]].tolist(), owner[counted].tolist())

    def precision_and_recall(self) -> tuple[np.ndarray, np.ndarray]:
        """Return COCO's precision at `RECALLS`, (T, R, C, A), for the last limit, and recall, (T, C, A, limits).

        -1 where there is no object.
        """
        shape = (len(self.ious), self._num_classes, len(AREAS))
        precision = np.full((shape[0], len(RECALLS), *shape[1:]), -1.0)
        recall = np.full((*shape, len(self.max_dets)), -1.0)
        for label in range(self._num_classes):
            for size in range(len(AREAS)):
                found = self.of_class(label, size)
                total = int(found.num_objects.sum())
                if total:
                    right = found.correct & found.counted
                    for k, limit in enumerate(self.max_dets):
                        recall[:, label, size, k] = right[:, found.rank < limit].sum(axis=1) / total
                    wrong, order = ~found.correct & found.counted, np.argsort(-found.scores, kind="mergesort")
                    precision[:, :, label, size] = _precision_at_recalls(right[:, order], wrong[:, order], total)
        return precision, recall


def _precision_at_recalls(right: np.ndarray, wrong: np.ndarray, total: int) -> np.ndarray:
    """Return (T, R) precision from (T, D) bool, whether each prediction, best first, is right, or wrong."""
    num_right, num_wrong = right.cumsum(axis=1, dtype=np.float64), wrong.cumsum(axis=1, dtype=np.float64)
    recall, precision = num_right / total, num_right / (num_wrong + num_right + np.spacing(1))
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    # Each recall takes the precision at which it is first reached, 0 if it is not.
    envelope = np.concatenate([envelope, np.zeros((len(envelope), 1))], axis=1)
    reached = [np.searchsorted(row, RECALLS, side="left") for row in recall]
    return np.take_along_axis(envelope, np.array(reached).reshape(len(envelope), -1), axis=1)


def _shapes(predictions: Predictions, rows: np.ndarray, iou_type: IouType) -> Any:
    if iou_type == "bbox":
        return predictions.boxes_xywh[rows].astype(np.float64)
    if iou_type == "keypoints":
        return predictions.keypoints[rows]
    return [predictions.masks[row] for row in rows.tolist()]


def _areas(predictions: Predictions, rows: np.ndarray, iou_type: IouType) -> np.ndarray:
    shapes = _shapes(predictions, rows, iou_type)
    if iou_type == "keypoints":
        shapes = boxes_around_points(shapes)
    if iou_type != "segm":
        return shapes[:, 2] * shapes[:, 3]
    return np.array([int(coco_mask.area(mask)) for mask in shapes], np.float64)


def _outside(areas: np.ndarray) -> np.ndarray:
    """Return (A, D) bool, whether an area is not among each of `AREAS`."""
    low, high = np.array([*AREAS.values()], np.float64).T[..., None]
    return (areas < low) | (areas > high)


def _ranks(sorted_ids: np.ndarray) -> np.ndarray:
    """Return how many equal ids precede each of (N,) ids, of which equal ones are adjacent."""
    index = np.arange(len(sorted_ids))
    starts = np.r_[True, sorted_ids[1:] != sorted_ids[:-1]][: len(sorted_ids)]
    return index - np.maximum.accumulate(np.where(starts, index, 0))


def _split_by(labels: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the ascending indices of each label."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.searchsorted(labels[order], np.arange(1, count)))


def shapes_of(truth: Mapping[str, Any], numbers: Sequence[int], iou_type: IouType, size: Sequence[Any]) -> list[Any]:
    """Return the boxes, xywh in pixels, or masks of annotations of an image of this (height, width), or themselves."""
    annotations = [truth["annotations"][number] for number in numbers]
    if iou_type == "bbox":
        return [annotation["bbox"] for annotation in annotations]
    if iou_type == "keypoints":
        return annotations
    return [encode_segmentation(annotation["segmentation"], *size) for annotation in annotations]
