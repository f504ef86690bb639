"""COCO's metrics of boxes and masks, computed by pycocotools (Lin et al. 2014, https://arxiv.org/abs/1405.0312)."""

import contextlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from vitkit.distributed import gather_objects, is_main
from vitkit.errors import ConfigError, DataError
from vitkit.registry import EVALUATORS
from vitkit.structures import Detections, DetectionTarget, Instances

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""In the order of COCOeval's statistics."""
IOU_TYPES = ("bbox", "segm")
_CHUNK = 16  # masks that are turned into run lengths at once


class CocoDataset(Protocol):
    """What the evaluator asks of a dataset."""

    classes: Sequence[str]
    category_ids: Sequence[int]
    image_ids: Iterable[int]

    def ground_truth(self) -> dict[str, Any]: ...


class _Rows(NamedTuple):
    """The predictions for one image."""

    category_ids: np.ndarray
    """(N,) int64, raw."""
    boxes_xywh: np.ndarray
    """(N, 4) float32, pixels."""
    scores: np.ndarray
    """(N,) float32."""
    masks: list[dict[str, Any]] | None
    """N masks as compressed run lengths."""


@EVALUATORS.register
class CocoEvaluator:
    """The twelve COCO numbers of detected boxes, of instance masks, or of both.

    Every image of the dataset counts: one without predictions counts as missed. Of masks only run lengths are kept.

    Args:
        dataset: the evaluated dataset; `ground_truth()` is in COCO's format, every annotation with area and iscrowd,
            and for masks with a segmentation.
        iou_types: what overlaps are taken of: "bbox", "segm" or both.
    Raises:
        ConfigError: an unknown IoU type.
    """

    def __init__(self, dataset: CocoDataset, *, iou_types: Sequence[Literal["bbox", "segm"]] = ("bbox",)):
        if not iou_types or not set(iou_types) <= set(IOU_TYPES):
            raise ConfigError(f"CocoEvaluator: got iou_types={list(iou_types)}; expected 'bbox', 'segm' or both.")
        self.dataset = dataset
        self.iou_types = tuple(iou_types)
        self._category_ids = np.asarray(dataset.category_ids, dtype=np.int64)
        self._rows: dict[int, _Rows] = {}
        """By raw image id."""
        self._evaluations: dict[str, COCOeval] = {}
        self._table = ""

    def update(self, predictions: Sequence[Detections | Instances], targets: Sequence[DetectionTarget]) -> None:
        """Takes one batch; an image that was seen before is left out (samplers repeat some to fill the last batch).

        Args:
            predictions: in pixels of the original images; with masks, if they are evaluated.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            DataError: a predicted label is not one of the dataset's classes.
            ConfigError: the model predicts no masks, and they are to be evaluated.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            image_id = int(target["image_id"])
            if image_id in self._rows:
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
            self._rows[image_id] = _Rows(self._category_ids[labels], boxes_xywh, scores, masks)

    def gather(self) -> None:
        """Moves the predictions of all ranks to the main process; an image that several ranks saw is kept once."""
        merged = {}
        for rows in gather_objects(self._rows):
            merged = rows | merged
        if is_main():
            self._rows = merged

    def compute(self) -> dict[str, float]:
        """The metrics "bbox/AP", "bbox/AP50", … "segm/ARl" on the main process, an empty dict elsewhere.

        They are in 0..1, and -1 where no object of that size exists, as pycocotools prints them.

        Raises:
            DataError: masks are evaluated and an annotation has none.
        """
        if not is_main():
            return {}
        truth = self.dataset.ground_truth()
        results = self.results()
        metrics, lines = {}, []
        for iou_type in self.iou_types:
            evaluation, summary = self._evaluate(iou_type, truth, results)
            self._evaluations[iou_type] = evaluation
            lines += [f"{_TITLES[iou_type]}:", summary] if len(self.iou_types) > 1 else [summary]
            numbers = zip(METRICS, evaluation.stats, strict=True)
            metrics |= {f"{iou_type}/{name}": float(value) for name, value in numbers}
        self._table = "\n".join(lines)
        return metrics

    def _evaluate(self, iou_type: str, truth: dict[str, Any], results: list[dict[str, Any]]) -> tuple[COCOeval, str]:
        if iou_type == "segm":
            without = [a for a in truth["annotations"] if not a.get("segmentation")]
            if without:
                raise DataError(
                    f"{len(without)} of {len(truth['annotations'])} annotations have no segmentation, such as "
                    f"{without[0]['id']} (image {without[0]['image_id']}). To evaluate masks, every object needs one."
                )
            results = [{**result, "area": int(coco_mask.area(result["segmentation"]))} for result in results]
        else:
            results = [{**result, "area": result["bbox"][2] * result["bbox"][3]} for result in results]
        results = [{**result, "iscrowd": 0} for result in results]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            evaluation = COCOeval(_indexed(truth, truth["annotations"]), _indexed(truth, results), iou_type)
            evaluation.params.imgIds = [int(image_id) for image_id in self.dataset.image_ids]
            evaluation.params.catIds = self._category_ids.tolist()
            evaluation.evaluate()
            evaluation.accumulate()
            printed.truncate(0)
            printed.seek(0)
            evaluation.summarize()
        return evaluation, printed.getvalue().rstrip("\n")

    def table(self) -> str:
        """The twelve lines that pycocotools prints of the last `compute()`, for each IoU type; empty on other
        processes."""
        return self._table

    def per_class(self) -> dict[str, float]:
        """Class name -> AP of the last `compute()`, of masks if they were evaluated, -1 for a class without objects;
        empty on other processes."""
        if not self._evaluations:
            return {}
        evaluation = self._evaluations.get("segm") or self._evaluations["bbox"]
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class), all sizes, 100 boxes
        # COCOeval sorts the classes by id; without objects a class has precision -1 throughout.
        by_id = dict(zip(evaluation.params.catIds, precision.mean(axis=(0, 1)).tolist(), strict=True))
        return {name: by_id[category_id] for name, category_id in zip(self.dataset.classes, self._category_ids)}

    def details(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Of the last `compute()`, of masks if they were evaluated: AP, AP50, AP75 and AR by class and by size.

        Returns:
            class name -> numbers, also APs, APm and APl; "small", "medium", "large" -> numbers; each with `objects`,
            their number. -1 where there is no object; empty on other processes.
        """
        if not self._evaluations:
            return {}, {}
        iou_type = "segm" if "segm" in self._evaluations else "bbox"
        evaluation = self._evaluations[iou_type]
        precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]  # (IoU, recall, class, size, 3)
        by_class = {}
        for name, category_id in zip(self.dataset.classes, self._category_ids.tolist()):
            k = evaluation.params.catIds.index(category_id)
            by_class[name] = _numbers(precision[:, :, k, 0, -1], recall[:, k, 0, -1])
            for size, title in enumerate(("APs", "APm", "APl"), start=1):
                by_class[name][title] = _mean_of_known(precision[:, :, k, size, -1])
            by_class[name]["objects"] = self._count_objects(evaluation, 0, category_id)
        by_size = {}
        for size, title in enumerate(("small", "medium", "large"), start=1):
            by_size[title] = _numbers(precision[:, :, :, size, -1], recall[:, :, size, -1])
            by_size[title]["objects"] = self._count_objects(evaluation, size)
        return by_class, by_size

    @staticmethod
    def _count_objects(evaluation: COCOeval, size: int, category_id: int | None = None) -> int:
        least, most = evaluation.params.areaRng[size]
        return sum(
            not annotation["iscrowd"] and least <= annotation["area"] <= most
            for annotation in evaluation.cocoGt.dataset["annotations"]
            if category_id is None or annotation["category_id"] == category_id
        )

    def results(self) -> list[dict[str, Any]]:
        """All predictions in COCO's result format (raw ids, boxes xywh in pixels, masks as run lengths), sorted by
        image."""
        results = []
        for image_id, rows in sorted(self._rows.items()):
            columns = (column.tolist() for column in rows[:3])
            for position, (category_id, box, score) in enumerate(zip(*columns)):
                result = {"image_id": image_id, "category_id": category_id, "bbox": box, "score": score}
                if rows.masks is not None:
                    result["segmentation"] = rows.masks[position]
                results.append(result)
        return results

    def write_results(self, path: str | Path) -> None:
        """Writes `results()` as JSON, which pycocotools' `loadRes` and COCO's server read."""
        Path(path).write_text(json.dumps(self.results()), encoding="utf-8")

    def load_results(self, path: str | Path) -> None:
        """Takes predictions that were written before, in place of `update`.

        Args:
            path: a JSON file in COCO's result format.
        Raises:
            DataError: the file is missing or wrong, or of other images or classes.
        """
        results = _read_results(Path(path), self.iou_types)
        known_images, known_classes = {int(i) for i in self.dataset.image_ids}, set(self._category_ids.tolist())
        for key, known, of in (("image_id", known_images, "images"), ("category_id", known_classes, "classes")):
            unknown = [result[key] for result in results if result[key] not in known]
            if unknown:
                raise DataError(
                    f"results '{path}': {len(unknown)} of {len(results)} predictions have a {key} that is not among "
                    f"the dataset's {len(known)} {of}, such as {unknown[0]!r}. Give results of the config's data.val."
                )
        by_image: dict[int, list[dict[str, Any]]] = {}
        for result in results:
            by_image.setdefault(result["image_id"], []).append(result)
        for image_id, found in by_image.items():
            masks = [result["segmentation"] for result in found] if "segm" in self.iou_types else None
            boxes = [r["bbox"] if "bbox" in r else coco_mask.toBbox(r["segmentation"]).tolist() for r in found]
            self._rows[image_id] = _Rows(
                np.array([result["category_id"] for result in found], np.int64),
                np.array(boxes, np.float64),
                np.array([result["score"] for result in found], np.float64),
                masks,
            )


def _numbers(precision: np.ndarray, recall: np.ndarray) -> dict[str, float]:
    """
    Args:
        precision: (IoU, ...), recall: (IoU, ...); -1 where there is nothing.
    """
    return {
        "AP": _mean_of_known(precision),
        "AP50": _mean_of_known(precision[0]),
        "AP75": _mean_of_known(precision[5]),
        "AR": _mean_of_known(recall),
    }


def _mean_of_known(values: np.ndarray) -> float:
    known = values[values > -1]
    return float(known.mean()) if known.size else -1.0


_TITLES = {"bbox": "boxes", "segm": "masks"}


def _read_results(path: Path, iou_types: Sequence[str]) -> list[dict[str, Any]]:
    try:
        results = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"results: cannot read '{path}' ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(f"results: '{path}' is not JSON: {error}.") from error
    needed = {"image_id", "category_id", "score"} | ({"segmentation"} if "segm" in iou_types else {"bbox"})
    if not isinstance(results, list) or not all(isinstance(r, dict) and needed <= r.keys() for r in results):
        raise DataError(
            f"results '{path}': expected a list of predictions in COCO's format, each with {', '.join(sorted(needed))}."
        )
    return results


def masks_to_rle(masks: Tensor) -> list[dict[str, Any]]:
    """
    Args:
        masks: (N, H, W) bool.
    Returns:
        N masks as COCO's compressed run lengths, with text, as JSON holds them.
    """
    encoded = []
    for some in masks.split(_CHUNK):
        # Run lengths go down the columns: (N, W, H) in memory is (H, W, N) in Fortran's order.
        columns = some.transpose(1, 2).contiguous().cpu().numpy().view(np.uint8)
        encoded += coco_mask.encode(columns.transpose(2, 1, 0))
    return [{"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")} for rle in encoded]


def _indexed(truth: dict[str, Any], annotations: list[dict[str, Any]]) -> COCO:
    """pycocotools' index of annotations; its own `loadRes` fails on an empty list."""
    coco = COCO()
    # Copies, since COCOeval writes into them, with ids from 1, since it takes id 0 for "not matched".
    numbered = [{**annotation, "id": number} for number, annotation in enumerate(annotations, start=1)]
    coco.dataset = {"images": truth["images"], "categories": truth["categories"], "annotations": numbered}
    coco.createIndex()
    return coco
