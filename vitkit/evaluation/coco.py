"""COCO's box and mask metrics (Lin et al. 2014, https://arxiv.org/abs/1405.0312)."""

import json
import logging
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask
from torch import Tensor

from vitkit.distributed import gather_dicts, world_size
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import keypoints
from vitkit.evaluation.base import SampleEvaluator, check_image_ids, read_results, require_annotations
from vitkit.evaluation.detection_matches import (
    AREAS,
    DetectionMatches,
    ImageMatches,
    Predictions,
    group_objects,
    match_image,
    objects_at,
    shapes_of,
)
from vitkit.evaluation.detection_statistics import SIZES, DetectionStatistics
from vitkit.evaluation.matching import IOUS, IouType, check_iou
from vitkit.evaluation.score_thresholds import robust_threshold
from vitkit.io.coco_schema import raise_issues, result_issues
from vitkit.io.output import write_text
from vitkit.io.segmentations import encode_segmentation
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS, nearest
from vitkit.structures import Detections, DetectionTarget, InstanceDetections, ScoreThresholds

logger = logging.getLogger("vitkit")
MAX_DETS = (1, 10, 100)
"""COCO's limits on the detections of a class in an image; all metrics but the first two recalls have the last one."""
IOU_TYPES = ("bbox", "segm", "keypoints")
TITLES = {"bbox": "boxes", "segm": "masks", "keypoints": "keypoints"}
"""IoU type -> what the IoU is of."""
_SEE_TRUTH = "See Dataset.ground_truth in vitkit/protocols/dataset.py."
_CHUNK = 16  # number of masks that are run-length encoded at once


def metric_names(max_dets: Sequence[int] = MAX_DETS) -> tuple[str, ...]:
    """Return the names of the twelve COCO metrics, in the order of COCOeval's statistics."""
    return ("AP", "AP50", "AP75", "APs", "APm", "APl", *(f"AR{limit}" for limit in max_dets), "ARs", "ARm", "ARl")


@EVALUATORS.register
class CocoEvaluator(SampleEvaluator):
    """The twelve COCO metrics of detected boxes and of instance masks, and the ten of keypoints.

    For keypoints OKS takes the place of IoU, with the dataset's sigmas, and 20 detections of a class count in an image.
    "keypoints/PCK" is the fraction of the labeled points of all objects, crowds left out, that lie within 0.2 times the
    longer side of the object's box of the same point of the prediction that is matched with the object at `iou`; of
    objects without one, all points are missed.

    The numbers are those of pycocotools' COCOeval. Every image of the dataset counts; all objects of an image without
    predictions are missed. Masks are stored as run lengths. Each rank matches its own images.

    Args:
        dataset: the evaluated dataset; `ground_truth()` is in COCO's format, every annotation with area and iscrowd
            and, if masks are evaluated, a segmentation.
        iou_types: what IoU is computed for: "bbox", "segm", "keypoints", or several.
        max_dets: how many detections of a class count in an image, best first: the three limits of pycocotools'
            `maxDets`, ascending, or only the last one. Recall is reported at each, everything else at the last, which
            images with more objects of a class need to be higher.
        iou: the IoU with an object of its class from which a prediction is correct, above 0.1, in all that is computed
            at a score threshold: `score_thresholds`, and the report's precision, recall, F1, confusions,
            kinds of errors and calibration. COCO's metrics have their own.
        groups: name -> classes whose mean AP is a metric of its own, such as bbox/AP_unseen for "unseen".
    Raises:
        ConfigError: an IoU type, the IoU or a class of a group is unknown, the limits are not three ascending numbers,
            or the dataset has no boxes or masks of objects.
    """

    needs_dataset = ("image_ids", "classes", "category_ids", "ground_truth")
    truth_fields: Mapping[str, Sequence[str]] = {
        "images": ("id",),
        "categories": ("id", "name"),
        "annotations": ("id", "image_id", "category_id", "bbox", "area", "iscrowd"),
    }
    """The parts of `ground_truth()`, and the fields of their entries that are read."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        iou_types: Sequence[IouType] = ("bbox",),
        max_dets: int | Sequence[int] = MAX_DETS,
        iou: float = 0.5,
        groups: Mapping[str, Sequence[str]] | None = None,
    ):
        if not iou_types or not set(iou_types) <= set(IOU_TYPES):
            raise ConfigError(
                f"CocoEvaluator: got iou_types={list(iou_types)}; expected 'bbox', 'segm', 'keypoints' or several."
            )
        limits = (*MAX_DETS[:2], max_dets) if isinstance(max_dets, int) else tuple(max_dets)
        if len(limits) != 3 or not 0 < limits[0] < limits[1] < limits[2]:
            raise ConfigError(
                f"CocoEvaluator: got max_dets={max_dets if isinstance(max_dets, int) else list(max_dets)}; expected "
                f"one number above {MAX_DETS[1]}, such as 500, or three ascending ones, such as [1, 10, 500]."
            )
        check_iou("CocoEvaluator", iou)
        require_annotations(dataset, "objects", "CocoEvaluator")
        if "keypoints" in iou_types and dataset.keypoints is None:
            raise ConfigError(
                f"CocoEvaluator: iou_types has 'keypoints', and this {type(dataset).__name__} does not load any. Set "
                "its keypoints=True, or leave them out."
            )
        super().__init__(dataset)
        self.iou_types = tuple(iou_types)
        self.max_dets = limits
        self.iou = iou
        self.metric_names = metric_names(limits)
        for name, classes in (groups or {}).items():
            unknown = [each for each in classes if each not in dataset.classes]
            if unknown or not classes:
                what = f"the data have no class {unknown[0]!r}" if unknown else "has no classes"
                hint = nearest(str(unknown[0]), dataset.classes) if unknown else "Name at least one."
                raise ConfigError(f"CocoEvaluator: groups.{name}: {what}. {hint}".rstrip())
        self.groups = {name: list(classes) for name, classes in (groups or {}).items()}
        of_groups = (f"{iou_type}/AP_{name}" for iou_type in self.iou_types for name in self.groups)
        self.extra_metrics = [*self.extra_metrics, *of_groups, *["keypoints/PCK"] * ("keypoints" in iou_types)]
        self._category_ids = np.asarray(dataset.category_ids, dtype=np.int64)
        self._ious = IOUS if iou in IOUS else (*IOUS, iou)
        self._image_matches: dict[str, dict[int, ImageMatches]] = {}
        """Of the images that the ranks have matched, by IoU type."""
        self._matches: dict[str, DetectionMatches] = {}
        self._curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Precision and recall of the last `compute()`, by IoU type."""

    def check_dataset(self) -> None:
        """Check the content of `ground_truth()`; raise a DataError that names what is wrong with it."""
        name, truth = f"dataset {type(self.dataset).__name__}: ground_truth()", self.dataset.ground_truth()
        for part, fields in self.truth_fields.items():
            entries = truth.get(part) if isinstance(truth, dict) else None
            if not isinstance(entries, list):
                raise DataError(f"{name} has no list of {part!r}. {_SEE_TRUTH}")
            if part == "annotations" and "keypoints" in self.iou_types:
                fields = [*fields, "keypoints"]
            for entry in entries:
                missing = [field for field in fields if field not in entry]
                if missing:
                    raise DataError(f"{name}: {reprlib.repr(entry)} of {part!r} has no {missing[0]!r}. {_SEE_TRUTH}")
        for field, ids, listed in (
            ("image_id", {image["id"] for image in truth["images"]}, self.dataset.image_ids),
            ("category_id", {category["id"] for category in truth["categories"]}, self.dataset.category_ids),
        ):
            unknown = {*np.asarray(listed).tolist(), *(entry[field] for entry in truth["annotations"])} - ids
            if unknown:
                raise DataError(f"{name} does not list {field} {next(iter(unknown))!r} of the dataset. {_SEE_TRUTH}")
        names = {category["id"]: category["name"] for category in truth["categories"]}
        for category_id, class_name in zip(self.dataset.category_ids, self.dataset.classes):
            named = names[int(category_id)]
            if named != class_name and named in self.dataset.classes:
                what = f"calls category {category_id} {named!r}, its classes call it {class_name!r}"
                raise DataError(f"{name} {what}. {_SEE_TRUTH}")

    def names_of(self, iou_type: str) -> tuple[str, ...]:
        """Return the names of COCO's metrics of boxes, masks or keypoints."""
        return keypoints.METRICS if iou_type == "keypoints" else self.metric_names

    def _limits(self, iou_type: str) -> tuple[int, ...]:
        return (keypoints.MAX_DETS,) if iou_type == "keypoints" else self.max_dets

    def measures(self, metric: str) -> bool:
        """Return whether there is an object, for metrics of a size one of that size; crowds do not count.

        Raises:
            ConfigError: what is predicted has no such metric.
        """
        iou_type, _, name = metric.partition("/")
        if iou_type not in IOU_TYPES or metric in self.extra_metrics:
            return True
        names = [f"{each}/{known}" for each in self.iou_types for known in self.names_of(each)]
        if metric not in names:
            what = f"{type(self).__name__} with iou_types={list(self.iou_types)}"
            known = nearest(metric, [*names, *self.extra_metrics])
            raise ConfigError(f"train.best_metric={metric}: is no metric of {what}. {known}")
        low, high = AREAS.get(name[2:], AREAS[""])
        objects = (a for a in self.dataset.ground_truth()["annotations"] if not a["iscrowd"])
        if iou_type == "keypoints":
            objects = (a for a in objects if any(a["keypoints"][2::3]))
        return any(low <= annotation["area"] <= high for annotation in objects)

    def update(
        self, predictions: Sequence[Detections | InstanceDetections], targets: Sequence[DetectionTarget]
    ) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: in pixels of the original images; with masks if masks are evaluated.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            DataError: a predicted label is not one of the dataset's classes.
            ConfigError: masks are to be evaluated, but the model predicts none.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            image_id = int(target["image_id"])
            if image_id in self.stored_predictions:
                continue
            labels = prediction["labels"].cpu().numpy()
            if len(labels) and not 0 <= labels.min() <= labels.max() < len(self._category_ids):
                raise DataError(
                    f"image {image_id}: predicted labels {labels.min()} to {labels.max()}, but the dataset has "
                    f"{len(self._category_ids)} classes. Was the model built or trained for other classes?"
                )
            boxes = prediction["boxes_xyxy"].float().cpu().numpy()
            boxes_xywh = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
            scores = prediction["scores"].float().cpu().numpy()
            masks = None
            if "segm" in self.iou_types:
                if "masks" not in prediction:
                    raise ConfigError(
                        f"evaluator.iou_types is {list(self.iou_types)}, but the model predicts no masks: it returns "
                        f"{', '.join(prediction)}. Choose ['bbox'], or a model and task with masks."
                    )
                masks = masks_to_rle(prediction["masks"])
            ids, points = self._category_ids[labels], self._points_of(prediction)
            self.stored_predictions[image_id] = Predictions(ids, boxes_xywh, scores, masks, points)

    def _points_of(self, prediction: Mapping[str, Any]) -> np.ndarray | None:
        """Return the predicted keypoints, if they are evaluated."""
        if "keypoints" not in self.iou_types:
            return None
        if "keypoints" not in prediction:
            raise ConfigError(
                f"evaluator.iou_types is {list(self.iou_types)}, but the model predicts no keypoints: it returns "
                f"{', '.join(prediction)}. Choose ['bbox'], or a model with keypoints."
            )
        points, names = prediction["keypoints"].float().cpu().numpy(), self.dataset.keypoints.names
        if points.shape[1:] != (len(names), 3):
            raise DataError(
                f"predicted keypoints have the shape {points.shape}; expected (objects, {len(names)}, 3) for the "
                f"dataset's {', '.join(names)[:100]}. Was the model built or trained for other keypoints?"
            )
        return points

    def gather(self) -> None:
        """Match the images of each rank, and move predictions and matches to the main process."""
        if world_size() > 1:
            truth = self.dataset.ground_truth()
            predictions_by_image = self.select_predictions(truth)
            for iou_type in self.iou_types:
                self._image_matches[iou_type] = gather_dicts(self._match(iou_type, truth, predictions_by_image))
        super().gather()

    def _compute(self) -> dict[str, float]:
        """Return bbox/AP, bbox/AP50, … segm/ARl in 0..1; -1, as in pycocotools, where there is no object of that size.
        Raise a DataError if masks are evaluated, but an annotation has none."""
        truth = self.dataset.ground_truth()
        predictions_by_image = self.select_predictions(truth)
        metrics = {}
        for iou_type in self.iou_types:
            matches = self._match(iou_type, truth, predictions_by_image, known=self._image_matches.get(iou_type, {}))
            self._matches[iou_type] = DetectionMatches(
                sorted(int(image_id) for image_id in self.dataset.image_ids),
                self._category_ids.tolist(),
                predictions_by_image,
                matches,
                truth,
                iou_type=iou_type,
                max_dets=self._limits(iou_type),
                ious=self._ious,
                incomplete={image["id"]: self.incomplete_classes(image) for image in truth["images"]},
            )
            precision, recall = self._curves[iou_type] = self._matches[iou_type].precision_and_recall()
            by_id = np.argsort(self._category_ids)  # the order in which pycocotools averages
            numbers = _summarize(precision[: len(IOUS), :, by_id], recall[: len(IOUS), by_id], iou_type)
            names = self.names_of(iou_type)
            metrics |= {f"{iou_type}/{name}": value for name, value in zip(names, numbers, strict=True)}
            for name, classes in self.groups.items():
                columns = [self.dataset.classes.index(each) for each in classes]
                metrics[f"{iou_type}/AP_{name}"] = mean_of_valid(precision[: len(IOUS), :, columns, 0])
        if "keypoints" in self.iou_types:
            self._correct_points = self._count_points(truth, predictions_by_image)
            correct, labeled = self._correct_points.sum(axis=(0, 2))
            metrics["keypoints/PCK"] = float(correct / labeled) if labeled else -1.0
        return metrics

    def match_at(self, iou: float) -> None:
        """See `Evaluator`; where no predictions were matched at this IoU, all are matched again."""
        super().match_at(iou)
        if iou not in self._ious:
            self._ious = (*IOUS, iou)
            self._image_matches.clear()
            self._compute()

    def _count_points(self, truth: Mapping[str, Any], predictions_by_image: Mapping[int, Predictions]) -> np.ndarray:
        """Return the numbers of correct and of labeled points, see PCK, (images, 2, K) int64."""
        matches = self._matches["keypoints"]
        arrays = [predictions_by_image[i].keypoints for i in matches.image_ids if i in predictions_by_image]
        points = np.concatenate(arrays) if arrays else np.zeros((0, 0, 3))
        owners = matches.owners(int(abs(np.asarray(self._ious) - self.iou).argmin()))
        predicted = {owner: points[number] for number, owner in owners if owner >= 0}
        row_of = {image_id: row for row, image_id in enumerate(matches.image_ids)}
        counts = np.zeros((len(row_of), 2, len(self.dataset.keypoints.names)), np.int64)
        for number, annotation in enumerate(truth["annotations"]):
            if not annotation["iscrowd"] and annotation["image_id"] in row_of:
                counted = keypoints.count_correct_points(predicted.get(number), annotation)
                counts[row_of[annotation["image_id"]]] += np.stack(counted)
        return counts

    def correct_points(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of correct and of labeled points of each keypoint, see PCK, of the last `compute()`."""
        totals = self._correct_points.sum(axis=0).T.tolist()
        return {name: (correct, labeled) for name, (correct, labeled) in zip(self.dataset.keypoints.names, totals)}

    def incomplete_classes(self, image: Mapping[str, Any]) -> Sequence[int]:
        """Return the category ids whose objects are not all annotated in an image."""
        return ()

    def select_predictions(self, truth: Mapping[str, Any]) -> dict[int, Predictions]:
        """Return the predictions that the metrics are computed from."""
        return self.stored_predictions

    def select_results(self) -> list[dict[str, Any]]:
        """Return the predictions that the metrics are computed from, in COCO's result format, sorted by image."""
        return to_results(self.select_predictions(self.dataset.ground_truth()))

    def _match(
        self,
        iou_type: IouType,
        truth: Mapping[str, Any],
        predictions_by_image: Mapping[int, Predictions],
        *,
        known: Mapping[int, ImageMatches] | None = None,
    ) -> dict[int, ImageMatches]:
        """Return the matches of each image that has predictions; those that are `known` are not computed again."""
        if iou_type == "segm" and (unmasked := [a for a in truth["annotations"] if not a.get("segmentation")]):
            raise DataError(
                f"{len(unmasked)} of {len(truth['annotations'])} annotations have no segmentation, such as "
                f"{unmasked[0]['id']} (image {unmasked[0]['image_id']}). To evaluate masks, every object needs one."
            )
        matches, of_image = dict(known or {}), group_objects(truth)
        none = (None, None)  # boxes need no sizes
        sizes = {x["id"]: image_sides(x)[::-1] if iou_type == "segm" else none for x in truth["images"]}
        for image_id, predictions in predictions_by_image.items():
            if image_id in matches:
                continue
            if iou_type == "segm":
                _check_mask_sizes(predictions, image_id, sizes[image_id])
            objects = of_image.get(image_id, [])
            matches[image_id] = match_image(
                predictions,
                objects_at(truth, objects, iou_type),
                shapes_of(truth, objects, iou_type, sizes.get(image_id, none)),
                iou_type=iou_type,
                max_dets=self._limits(iou_type)[-1],
                ious=self._ious,
                sigmas=self.dataset.keypoints.sigmas if iou_type == "keypoints" else (),
            )
        return matches

    def _table_lines(self) -> list[str]:
        """Return a line for each IoU type, below the limit on detections and the names of the metrics."""
        lines, header = [self.limit_line()], ()
        for iou_type in sorted(self.iou_types, key=IOU_TYPES.index):
            names = (*self.names_of(iou_type), *["PCK"] * (iou_type == "keypoints"))
            width = max(7, len(TITLES[iou_type]) + 1)
            if names != header:
                lines.append(" " * width + "".join(f"{name:>7}" for name in names))
                header = names
            values = (self.metrics[f"{iou_type}/{name}"] for name in names)
            lines.append(f"{TITLES[iou_type]:<{width}}" + "".join(f"{'–' if v < 0 else f'{v:.3f}':>7}" for v in values))
        return lines

    def limit_line(self) -> str:
        """Return the line that states how many detections count, and whether the model returns fewer."""
        line = f"at most {self.max_dets[-1]} detections of a class in an image count (max_dets)"
        most = max((len(predictions.scores) for predictions in self.stored_predictions.values()), default=0)
        if 0 < most < self.max_dets[-1]:
            line += f"; the model returns at most {most}, of all classes (model.num_detections or num_queries)"
        return line

    def per_class(self) -> dict[str, float]:
        """Return class name -> AP of the last `compute()`, for masks if they were evaluated.

        It is -1 for a class without objects; the dict is empty on other processes.
        """
        return {name: metrics["AP"] for name, metrics in self.details()[0].items()}

    def details(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return AP, AP50, AP75 and AR of the last `compute()` by class and by size, for masks if they were evaluated.

        Returns:
            class name -> metrics, including APs, APm and APl; "small", "medium", "large" -> metrics; each with
            `objects`, the number of objects. -1 where there is no object; empty on other processes.
        """
        if not self._curves:
            return {}, {}
        iou_type = self._main_iou_type()
        precision, recall = (values[: len(IOUS)] for values in self._curves[iou_type])  # (IoU, recall, class, size)
        matches = self._matches[iou_type]
        counted, sizes = ~matches.objects.crowd, list(AREAS)[1:]
        num_objects = np.bincount(matches.object_labels[counted], minlength=len(self._category_ids)).tolist()
        by_class = {}
        for label, name in enumerate(self.dataset.classes):
            by_class[name] = _numbers(precision[:, :, label, 0], recall[:, label, 0, -1])
            for k, size in enumerate(sizes, start=1):
                by_class[name][f"AP{size}"] = mean_of_valid(precision[:, :, label, k])
            by_class[name]["objects"] = num_objects[label]
        by_size = {}
        for k, (size, title) in enumerate(zip(sizes, SIZES), start=1):
            low, high = AREAS[size]
            by_size[title] = _numbers(precision[:, :, :, k], recall[:, :, k, -1])
            within = (low <= matches.objects.areas) & (matches.objects.areas <= high)
            by_size[title]["objects"] = int((within & counted).sum())
        return by_class, by_size

    def statistics(self, iou_type: str | None = None) -> DetectionStatistics:
        """Return each image's contribution to the metrics of the last `compute()`.

        Args:
            iou_type: None: masks if they were evaluated, else boxes.
        """
        iou_type = iou_type or self._main_iou_type()
        sigmas = self.dataset.keypoints.sigmas if iou_type == "keypoints" else ()
        return DetectionStatistics(self._matches[iou_type], self.dataset.classes, iou=self.iou, sigmas=sigmas)

    def _main_iou_type(self) -> str:
        return max(self.iou_types)

    def named_statistics(self) -> dict[str, DetectionStatistics]:
        """Return the statistics of boxes, keypoints and, last, masks, if they were evaluated, by IoU type."""
        return {iou_type: self.statistics(iou_type) for iou_type in sorted(self.iou_types)}

    def score_thresholds(self) -> ScoreThresholds | None:
        """Return the thresholds with the highest F1 in the last `compute()`, over all classes and for each class.

        A prediction is correct if its IoU (of masks if they were evaluated) with an object of its class is at least
        `iou`. A threshold lies halfway to the next lower score, so that it is robust to rounding. Classes without a
        correct prediction get no threshold of their own. Returns None if no prediction is correct, and on other
        processes.
        """
        if not self._matches:
            return None
        rankings = self.statistics().rankings()
        overall = robust_threshold(rankings)
        if overall is None:
            return None
        by_class = tuple(robust_threshold([ranking]) for ranking in rankings)
        return ScoreThresholds(overall, by_class, origin="highest F1")

    def results(self) -> list[dict[str, Any]]:
        """Return all predictions in COCO's result format, sorted by image.

        Category ids are the dataset's raw ones, boxes are xywh in pixels, and masks are run lengths.
        """
        return to_results(self.stored_predictions)

    def write_results(self, path: str | Path) -> None:
        """Write `results()` as JSON, which pycocotools' `loadRes` and COCO's server read, with the ids of the file."""
        results, ids = self.results(), self.dataset.file_ids
        if ids:  # it numbers classes in another way than the model, or lacks some
            results = [result | {"category_id": ids[c]} for result in results if (c := result["category_id"]) in ids]
        write_text(Path(path), json.dumps(results))

    def load_results(self, path: str | Path) -> None:
        """Read predictions that were written earlier, in place of `update`.

        Args:
            path: a JSON file in COCO's result format.
        Raises:
            DataError: the file is missing or invalid, or is for other images or classes.
        """
        has_masks = "segm" in self.iou_types
        image_ids = {int(image_id) for image_id in self.dataset.image_ids}
        results = read_results(path)
        own = {raw: number for number, raw in self.dataset.file_ids.items()}
        if isinstance(results, list):
            ids = (entry.get("image_id") for entry in results if isinstance(entry, dict))
            check_image_ids(ids, image_ids, Path(path).name)
        raise_issues(
            result_issues(
                results,
                image_ids,
                set(own or self._category_ids.tolist()),
                masks=has_masks,
                num_keypoints=len(self.dataset.keypoints.names) if "keypoints" in self.iou_types else None,
            ),
            f"results '{path}'",
        )
        self._image_matches.clear()
        by_image: dict[int, list[dict[str, Any]]] = {}
        for result in results:
            by_image.setdefault(result["image_id"], []).append(result)
        if num_empty := len(image_ids - by_image.keys()):
            images = f"{num_empty} of {len(image_ids)} images"
            logger.warning(f"results '{path}': no prediction for {images}, whose objects count as missed")
        for image_id, image_results in by_image.items():
            masks = points = shown = None
            if has_masks:
                encoded = (result["segmentation"] for result in image_results)
                masks = [encode_segmentation(mask, *mask["size"]) for mask in encoded]
                shown = coco_mask.toBbox(masks)
            if "keypoints" in self.iou_types:
                points = np.array([result["keypoints"] for result in image_results], np.float64)
                points = points.reshape(len(image_results), -1, 3)
                shown = keypoints.boxes_around_points(points)
            boxes = [
                result["bbox"] if "bbox" in result else shown[k].tolist() for k, result in enumerate(image_results)
            ]
            self.stored_predictions[image_id] = Predictions(
                np.array([own.get(r["category_id"], r["category_id"]) for r in image_results], np.int64),
                np.array(boxes, np.float64),
                np.array([result["score"] for result in image_results], np.float64),
                masks,
                points,
            )


def to_results(predictions_by_image: Mapping[int, Predictions]) -> list[dict[str, Any]]:
    """Return predictions by image id in COCO's result format, sorted by image."""
    results = []
    for image_id, predictions in sorted(predictions_by_image.items()):
        columns = (column.tolist() for column in predictions[:3])
        for position, (category_id, box, score) in enumerate(zip(*columns)):
            result = {"image_id": image_id, "category_id": category_id, "bbox": box, "score": score}
            if predictions.masks is not None:
                result["segmentation"] = predictions.masks[position]
            if predictions.keypoints is not None:
                result["keypoints"] = predictions.keypoints[position].ravel().tolist()
            results.append(result)
    return results


def _numbers(precision: np.ndarray, recall: np.ndarray) -> dict[str, float]:
    """Average (IoU, ...) precisions and recalls, ignoring entries of -1, which have no objects."""
    return {
        "AP": mean_of_valid(precision),
        "AP50": mean_of_valid(precision[0]),
        "AP75": mean_of_valid(precision[5]),
        "AR": mean_of_valid(recall),
    }


def mean_of_valid(values: np.ndarray) -> float:
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else -1.0


def _summarize(precision: np.ndarray, recall: np.ndarray, iou_type: str) -> list[float]:
    """Return COCO's twelve numbers, or ten of keypoints, from (IoU, recall, class, size) precision and (IoU, class,
    size, limit) recall."""
    if iou_type == "keypoints":
        sizes, recalls = range(2, len(AREAS)), [recall[:, :, 0], recall[0, :, 0], recall[5, :, 0]]
    else:
        sizes, recalls = range(1, len(AREAS)), [recall[:, :, 0, limit] for limit in range(3)]
    precisions = [precision[..., 0], precision[0, ..., 0], precision[5, ..., 0], *(precision[..., k] for k in sizes)]
    recalls += [recall[:, :, k, -1] for k in sizes]
    return [mean_of_valid(values) for values in (*precisions, *recalls)]


def _check_mask_sizes(predictions: Predictions, image_id: int, size: Sequence[Any]) -> None:
    """Check that predicted masks have the size of their image: otherwise pycocotools would never return."""
    for mask in predictions.masks or ():
        if list(mask["size"]) != list(size):
            raise DataError(
                f"image {image_id}: a predicted mask has the size {list(mask['size'])}, [height, width]; expected "
                f"{list(size)}, that of the image. Predict in the sizes of the original images."
            )


def image_sides(image: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (width, height) of an image of `ground_truth()`, which masks and pages need.

    Raises:
        DataError: it has none.
    """
    if "width" not in image or "height" not in image:
        raise DataError(
            f"ground_truth(): image {image['id']!r} has no width and height, in pixels, which masks and reports need. "
            f"{_SEE_TRUTH}"
        )
    return image["width"], image["height"]


def masks_to_rle(masks: Tensor) -> list[dict[str, Any]]:
    """Return (N, H, W) bool masks as COCO's compressed run lengths, in text form as in JSON."""
    encoded = []
    for chunk in masks.split(_CHUNK):
        # Run lengths go down the columns: (N, W, H) in memory is (H, W, N) in Fortran order.
        columns = chunk.transpose(1, 2).contiguous().cpu().numpy().view(np.uint8)
        encoded += coco_mask.encode(columns.transpose(2, 1, 0))
    return [{"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")} for rle in encoded]
