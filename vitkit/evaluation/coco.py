"""COCO's detection metrics, computed by pycocotools (Lin et al. 2014, https://arxiv.org/abs/1405.0312)."""

import contextlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit.distributed import gather_objects, is_main
from vitkit.errors import ConfigError, DataError
from vitkit.registry import EVALUATORS
from vitkit.structures import Detections, DetectionTarget

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""In the order of COCOeval's statistics."""


class CocoDataset(Protocol):
    """What the evaluator asks of a dataset."""

    classes: Sequence[str]
    category_ids: Sequence[int]
    image_ids: Iterable[int]

    def ground_truth(self) -> dict[str, Any]: ...


@EVALUATORS.register
class CocoEvaluator:
    """The twelve COCO numbers of detected boxes.

    Every image of the dataset counts: one without predictions counts as missed.

    Args:
        dataset: the evaluated dataset; `ground_truth()` is in COCO's format, every annotation with area and iscrowd.
        iou_types: what overlaps are taken of; so far boxes only.
    Raises:
        ConfigError: an unknown IoU type.
    """

    def __init__(self, dataset: CocoDataset, *, iou_types: Sequence[Literal["bbox"]] = ("bbox",)):
        if list(iou_types) != ["bbox"]:
            raise ConfigError(f"CocoEvaluator: got iou_types={list(iou_types)}; expected ['bbox'].")
        self.dataset = dataset
        self._category_ids = np.asarray(dataset.category_ids, dtype=np.int64)
        self._rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        """Raw image id -> raw category ids (N,), boxes xywh in pixels (N, 4), scores (N,)."""
        self._evaluation: COCOeval | None = None
        self._table = ""

    def update(self, predictions: Sequence[Detections], targets: Sequence[DetectionTarget]) -> None:
        """Takes one batch; an image that was seen before is left out (samplers repeat some to fill the last batch).

        Args:
            predictions: in pixels of the original images.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            DataError: a predicted label is not one of the dataset's classes.
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
            self._rows[image_id] = (self._category_ids[labels], boxes_xywh, prediction["scores"].float().cpu().numpy())

    def gather(self) -> None:
        """Moves the predictions of all ranks to the main process; an image that several ranks saw is kept once."""
        merged = {}
        for rows in gather_objects(self._rows):
            merged = rows | merged
        if is_main():
            self._rows = merged

    def compute(self) -> dict[str, float]:
        """The metrics "bbox/AP", "bbox/AP50", … "bbox/ARl" on the main process, an empty dict elsewhere.

        They are in 0..1, and -1 where no object of that size exists, as pycocotools prints them.
        """
        if not is_main():
            return {}
        truth = self.dataset.ground_truth()
        results = self.results()
        for result in results:
            result |= {"area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            evaluation = COCOeval(_indexed(truth, truth["annotations"]), _indexed(truth, results), "bbox")
            evaluation.params.imgIds = [int(image_id) for image_id in self.dataset.image_ids]
            evaluation.params.catIds = self._category_ids.tolist()
            evaluation.evaluate()
            evaluation.accumulate()
            printed.truncate(0)
            printed.seek(0)
            evaluation.summarize()
        self._evaluation, self._table = evaluation, printed.getvalue().rstrip("\n")
        return {f"bbox/{name}": float(value) for name, value in zip(METRICS, evaluation.stats, strict=True)}

    def table(self) -> str:
        """The twelve lines that pycocotools prints of the last `compute()`; empty on other processes."""
        return self._table

    def per_class(self) -> dict[str, float]:
        """Class name -> AP of the last `compute()`, -1 for a class without objects; empty on other processes."""
        if self._evaluation is None:
            return {}
        precision = self._evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class), all sizes, 100 boxes
        # COCOeval sorts the classes by id; without objects a class has precision -1 throughout.
        by_id = dict(zip(self._evaluation.params.catIds, precision.mean(axis=(0, 1)).tolist(), strict=True))
        return {name: by_id[category_id] for name, category_id in zip(self.dataset.classes, self._category_ids)}

    def results(self) -> list[dict[str, Any]]:
        """All predictions in COCO's result format (raw ids, boxes xywh in pixels), sorted by image."""
        return [
            {"image_id": image_id, "category_id": category_id, "bbox": box, "score": score}
            for image_id, rows in sorted(self._rows.items())
            for category_id, box, score in zip(*(column.tolist() for column in rows))
        ]

    def write_results(self, path: str | Path) -> None:
        """Writes `results()` as JSON, which pycocotools' `loadRes` and COCO's server read."""
        Path(path).write_text(json.dumps(self.results()), encoding="utf-8")


def _indexed(truth: dict[str, Any], annotations: list[dict[str, Any]]) -> COCO:
    """pycocotools' index of annotations; its own `loadRes` fails on an empty list."""
    coco = COCO()
    # Copies, since COCOeval writes into them, with ids from 1, since it takes id 0 for "not matched".
    numbered = [{**annotation, "id": number} for number, annotation in enumerate(annotations, start=1)]
    coco.dataset = {"images": truth["images"], "categories": truth["categories"], "annotations": numbered}
    coco.createIndex()
    return coco
