"""LVIS's box and mask metrics (Gupta et al. 2019, https://arxiv.org/abs/1908.03195), and fixed AP (Dave et al. 2021,
https://arxiv.org/abs/2102.01066)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitkit.evaluation.base import SampleEvaluator
from vitkit.evaluation.coco import CocoEvaluator, mean_of_valid, to_results
from vitkit.evaluation.detection_matches import Predictions
from vitkit.evaluation.matching import IOUS, IouType
from vitkit.io.coco_schema import ANNOTATED_CLASSES
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS

PER_IMAGE = 300
"""LVIS's limit on the detections of an image, of all classes together."""
PER_CLASS = 10_000
"""Fixed AP's limit on the detections of a class in all images together."""
FREQUENCIES = ("r", "c", "f")
"""LVIS's groups of classes: rare, common, frequent."""


@EVALUATORS.register
class LvisEvaluator(CocoEvaluator):
    """COCO's metrics where each image is annotated only for some classes, and AP of rare, common and frequent classes.

    A detection counts only if its image has an object of its class or certainly none. If not every object of the class
    is annotated in the image, a detection without an object is not an error. All numbers are equal to those of the
    package `lvis`, which is by the authors of LVIS.

    Args:
        dataset: the evaluated dataset, such as `LvisDetection`.
        iou_types, iou: see `CocoEvaluator`.
        fixed_ap: count the best 10,000 detections of each class in all images, in place of the best 300 of each image,
            where classes compete for a place. The model has to return more than usual (model.num_detections).
    Raises:
        ConfigError: see `CocoEvaluator`.
    """

    truth_fields = CocoEvaluator.truth_fields | {"images": ("id", *ANNOTATED_CLASSES)}

    def __init__(
        self, dataset: Dataset, *, iou_types: Sequence[IouType] = ("bbox",), fixed_ap: bool = False, iou: float = 0.5
    ):
        super().__init__(dataset, iou_types=iou_types, max_dets=PER_CLASS if fixed_ap else PER_IMAGE, iou=iou)
        self.fixed_ap = fixed_ap
        self.extra_metrics = tuple(f"{kind}/AP{frequency}" for kind in self.iou_types for frequency in FREQUENCIES)

    def results(self) -> list[dict[str, Any]]:
        """Return the predictions within the limit, see `CocoEvaluator`."""
        return to_results(self._within_limit())

    def incomplete_classes(self, image: Mapping[str, Any]) -> Sequence[int]:
        return image[ANNOTATED_CLASSES[1]]

    def select_predictions(self, truth: Mapping[str, Any]) -> dict[int, Predictions]:
        """Return the predictions within the limit of classes that their images are annotated for."""
        annotated = {image["id"]: {*image[ANNOTATED_CLASSES[0]]} for image in truth["images"]}
        for annotation in truth["annotations"]:
            annotated[annotation["image_id"]].add(annotation["category_id"])
        # Among millions of predictions for more than a thousand classes, few are of these.
        return {
            image_id: predictions.take(np.flatnonzero(np.isin(predictions.category_ids, [*annotated[image_id]])))
            for image_id, predictions in self._within_limit().items()
        }

    def gather(self) -> None:
        """Move the predictions of all ranks to the main process; see `CocoEvaluator`."""
        if self.fixed_ap:  # which predictions count is known only when all are
            SampleEvaluator.gather(self)
        else:
            super().gather()

    def _within_limit(self) -> dict[int, Predictions]:
        """Return the best predictions of each image, or of each class."""
        if not self.fixed_ap:
            return {k: p.take(_best(p.scores, PER_IMAGE)) for k, p in self.stored_predictions.items()}
        image_ids = sorted(self.stored_predictions)
        category_ids, scores = (
            np.concatenate([np.zeros(0), *(getattr(self.stored_predictions[k], name) for k in image_ids)])
            for name in ("category_ids", "scores")
        )
        kept = np.zeros(len(scores), bool)
        by_class = np.argsort(category_ids, kind="stable")
        for rows in np.split(by_class, np.flatnonzero(np.diff(category_ids[by_class])) + 1):
            kept[rows[_best(scores[rows], PER_CLASS)]] = True
        ends = np.cumsum([len(self.stored_predictions[k].scores) for k in image_ids], dtype=np.int64)
        return {
            k: self.stored_predictions[k].take(np.flatnonzero(part))
            for k, part in zip(image_ids, np.split(kept, ends[:-1]))
        }

    def _compute(self) -> dict[str, float]:
        """Return the metrics of `CocoEvaluator`, and bbox/APr, bbox/APc, bbox/APf ..."""
        metrics = super()._compute()
        groups = {entry["id"]: entry.get("frequency") for entry in self.dataset.ground_truth()["categories"]}
        for iou_type in self.iou_types:
            precision, _ = self._curves[iou_type]
            for frequency in FREQUENCIES:
                labels = [label for label, raw in enumerate(self.dataset.category_ids) if groups.get(raw) == frequency]
                metrics[f"{iou_type}/AP{frequency}"] = mean_of_valid(precision[: len(IOUS), :, labels, 0])
        return metrics

    def limit_line(self) -> str:
        """Return the line that states how many detections count."""
        if self.fixed_ap:
            return f"fixed AP: at most {PER_CLASS} detections of a class in all images count (fixed_ap)"
        return f"at most {PER_IMAGE} detections in an image count"


def _best(scores: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of the highest scores, ascending; of equal ones, the first."""
    return np.sort(np.argsort(-scores, kind="stable")[:limit])
