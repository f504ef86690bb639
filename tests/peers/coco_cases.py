"""Random detections and annotations in COCO's format, as every evaluation of COCO reads them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from helpers.plain_dataset import PlainDataset
from pycocotools import mask as coco_mask

from vitkit.evaluation.coco import CocoEvaluator, masks_to_rle

SIZE = (150, 200)
CASES = {
    "plain": {},
    "crowds": dict(crowds=0.4),
    "many crowds": dict(crowds=0.9, objects=10),
    "empty images": dict(empty_images=0.5),
    "no objects": dict(objects=0),
    "no predictions": dict(empty_images=1.0),
    "ties": dict(ties=True, objects=15, false_alarms=15),
    "boxes without area": dict(without_area=0.3),
    "annotated areas": dict(other_areas=True),
    "more than 100 boxes": dict(num_images=3, num_classes=1, objects=60, false_alarms=120),
    "everything": dict(crowds=0.2, empty_images=0.2, ties=True, without_area=0.1, other_areas=True, num_images=20),
}
"""Name -> arguments of `random_case`."""


class Case(NamedTuple):
    """Annotations and predictions of the same images."""

    truth: dict[str, Any]
    predictions: dict[int, dict[str, torch.Tensor]]
    """Image id -> boxes_xyxy, scores, labels and masks."""

    @property
    def category_ids(self) -> list[int]:
        return [category["id"] for category in self.truth["categories"]]

    @property
    def dataset(self) -> PlainDataset:
        return PlainDataset(
            annotations=["objects"],
            classes=[category["name"] for category in self.truth["categories"]],
            category_ids=self.category_ids,
            image_ids=[image["id"] for image in self.truth["images"]],
            ground_truth=lambda: self.truth,
        )

    def of_images(self, image_ids: set[int]) -> "Case":
        """Return the case without the other images."""
        truth = {**self.truth, "images": [image for image in self.truth["images"] if image["id"] in image_ids]}
        truth["annotations"] = [a for a in truth["annotations"] if a["image_id"] in image_ids]
        return Case(truth, {k: prediction for k, prediction in self.predictions.items() if k in image_ids})

    def results(self, iou_type: str) -> list[dict[str, Any]]:
        """Return the predictions as COCO's result files have them, made without vitkit's evaluator.

        Those with masks have no boxes: `loadRes` would take the area of the box for that of the mask, and thus sort
        masks into COCO's three sizes by the areas of their boxes (detectron2 also leaves out the boxes).
        """
        results = []
        for image_id, prediction in self.predictions.items():
            for box, score, label, rle in zip(
                prediction["boxes_xyxy"].tolist(),
                prediction["scores"].tolist(),
                prediction["labels"].tolist(),
                masks_to_rle(prediction["masks"]),
            ):
                result = dict(image_id=image_id, category_id=self.category_ids[label], score=score)
                if iou_type == "bbox":
                    result["bbox"] = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
                else:
                    result["segmentation"] = rle
                results.append(result)
        return results


def random_case(
    seed: int,
    *,
    num_images: int = 8,
    num_classes: int = 3,
    objects: int = 6,
    false_alarms: int = 5,
    crowds: float = 0.0,
    empty_images: float = 0.0,
    ties: bool = False,
    without_area: float = 0.0,
    other_areas: bool = False,
) -> Case:
    """Return noisy copies of random objects, and random false alarms.

    Args:
        objects, false_alarms: mean numbers per image.
        crowds: share of the objects that are crowds.
        empty_images: share of images without an object, and of images without a prediction.
        ties: whether many predictions have the same score.
        without_area: share of predicted boxes of width 0.
        other_areas: whether the annotations' areas are not those of their boxes or masks.
    """
    rng = np.random.default_rng(seed)
    category_ids = rng.permutation(90)[:num_classes] + 1
    image_ids = rng.permutation(1000)[:num_images] + 1
    annotations, predictions = [], {}
    for image_id in image_ids.tolist():
        true_boxes = _boxes(rng, rng.poisson(objects) * (rng.random() >= empty_images))
        labels = rng.integers(num_classes, size=len(true_boxes))
        for box, label in zip(true_boxes, labels):
            rle = masks_to_rle(_masks(rng, box[None]))[0]
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=image_id,
                    category_id=int(category_ids[label]),
                    bbox=[*box[:2].tolist(), *(box[2:] - box[:2]).tolist()],
                    area=float(rng.uniform(100, 20000)) if other_areas else float(coco_mask.area(rle)),
                    iscrowd=int(rng.random() < crowds),
                    segmentation=rle,
                )
            )
        is_found = rng.random(len(true_boxes)) < 0.8
        near = true_boxes[is_found] + rng.normal(0, 5, (is_found.sum(), 4))
        boxes = np.concatenate([near, _boxes(rng, rng.poisson(false_alarms))])
        boxes = np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1)
        boxes[rng.random(len(boxes)) < without_area, 2] = boxes[:, :1].max(initial=0)
        boxes = boxes[: len(boxes) * (rng.random() >= empty_images)]
        found = np.concatenate([labels[is_found], rng.integers(num_classes, size=len(boxes))])[: len(boxes)]
        scores = rng.random(len(boxes))
        predictions[image_id] = dict(
            boxes_xyxy=torch.from_numpy(boxes).float(),
            scores=torch.from_numpy(np.round(scores, 1) if ties else scores).float(),
            labels=torch.from_numpy(found),
            masks=_masks(rng, boxes),
        )
    height, width = SIZE
    truth = dict(
        images=[dict(id=i, file_name=f"{i}.jpg", height=height, width=width) for i in image_ids.tolist()],
        categories=[dict(id=i, name=f"class {i}") for i in category_ids.tolist()],
        annotations=annotations,
    )
    return Case(truth, predictions)


def _boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return boxes of all of COCO's three ranges of sizes, (N, 4) xyxy."""
    sizes = np.exp(rng.uniform(np.log(6), np.log(140), (count, 2)))
    corners = rng.uniform(0, 1, (count, 2)) * np.maximum(np.array(SIZE)[::-1] - sizes, 0)
    return np.concatenate([corners, np.minimum(corners + sizes, np.array(SIZE)[::-1])], axis=1)


def _masks(rng: np.random.Generator, boxes: np.ndarray) -> torch.Tensor:
    """Return ellipses in the boxes, (N, *SIZE) bool; some are empty, where a box has no area."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]] + 0.5
    masks = np.zeros((len(boxes), *SIZE), bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes):
        radii = np.maximum([x1 - x0, y1 - y0], 1e-6) / 2
        mask[:] = ((x - (x0 + x1) / 2) / radii[0]) ** 2 + ((y - (y0 + y1) / 2) / radii[1]) ** 2 <= rng.uniform(0.7, 1)
    return torch.from_numpy(masks)


def metrics_of(case: Case, **options) -> dict[str, float]:
    """Return vitkit's metrics of boxes and masks."""
    evaluator = CocoEvaluator(case.dataset, iou_types=["bbox", "segm"], **options)
    for image_id, prediction in case.predictions.items():
        evaluator.update([prediction], [dict(image_id=image_id)])
    evaluator.gather()
    return evaluator.compute()
