"""Measure the evaluation of drawn detections as many as LVIS's: 5,000 images with 300 each, of 1,203 classes."""

from functools import partial
from typing import Any

import numpy as np
import torch

from vitkit.evaluation.lvis import LvisEvaluator
from vitkit.io.coco_schema import ANNOTATED_CLASSES
from vitkit.protocols.dataset import Dataset
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

NUM_IMAGES, NUM_DETECTIONS, NUM_CLASSES, SIDE = 5_000, 300, 1_203, 640
NUM_OBJECTS, NUM_PRESENT, NUM_ABSENT = 12, 4, 12
"""Objects of an image, their classes, and the classes that the image certainly does not show; about those of LVIS."""


class DrawnTruth(Dataset):
    """Images with random boxes, each annotated for some classes."""

    annotations = ("objects",)
    category_ids = range(1, NUM_CLASSES + 1)

    def __init__(self, num_images: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.image_ids, self.classes = range(1, num_images + 1), [f"class {k}" for k in self.category_ids]
        self.boxes_xywh = random_boxes(rng, (num_images, NUM_OBJECTS))
        drawn = np.stack([rng.permutation(NUM_CLASSES)[: NUM_PRESENT + NUM_ABSENT] for _ in self.image_ids])
        self.labels, self.absent = drawn[:, np.arange(NUM_OBJECTS) % NUM_PRESENT], drawn[:, NUM_PRESENT:]

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("only its ground truth is read")

    def ground_truth(self) -> dict[str, Any]:
        absent, incomplete = ANNOTATED_CLASSES
        labels, boxes = self.labels + 1, self.boxes_xywh
        rows = [(image, row) for image in range(len(self)) for row in range(NUM_OBJECTS)]
        return {
            "images": [
                {"id": k, "width": SIDE, "height": SIDE, absent: (self.absent[k - 1] + 1).tolist(), incomplete: []}
                for k in self.image_ids
            ],
            "annotations": [
                {
                    "id": number, "image_id": image + 1, "category_id": int(labels[image, row]), "iscrowd": 0,
                    "bbox": boxes[image, row].tolist(), "area": float(boxes[image, row, 2:].prod()),
                }
                for number, (image, row) in enumerate(rows, 1)
            ],
            "categories": [
                {"id": k, "name": name, "frequency": "rcf"[k % 3]} for k, name in zip(self.category_ids, self.classes)
            ],
        }  # fmt: skip


def random_boxes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return boxes of all sizes, (*shape, 4) xywh in pixels."""
    sizes = np.exp(rng.uniform(np.log(8), np.log(SIDE / 2), (*shape, 2)))
    return np.concatenate([rng.uniform(0, SIDE - sizes), sizes], axis=-1)


def evaluation(num_images: int = NUM_IMAGES) -> Call:
    """Return a call that evaluates detections, of which some are objects and the others are anywhere."""
    dataset, rng = DrawnTruth(num_images), np.random.default_rng(1)
    boxes = random_boxes(rng, (num_images, NUM_DETECTIONS)).astype(np.float32)
    boxes[:, :NUM_OBJECTS] = dataset.boxes_xywh + rng.normal(0, 3, (num_images, NUM_OBJECTS, 4))
    boxes[..., 2:] = boxes[..., :2] + boxes[..., 2:].clip(1)
    labels = rng.integers(0, NUM_CLASSES, (num_images, NUM_DETECTIONS))
    labels[:, :NUM_OBJECTS] = dataset.labels
    scores = rng.random((num_images, NUM_DETECTIONS), dtype=np.float32)
    fields = {"boxes_xyxy": boxes, "labels": labels, "scores": scores}

    def run() -> dict[str, float]:
        evaluator = LvisEvaluator(dataset)
        for index, image_id in enumerate(dataset.image_ids):
            prediction = {name: torch.from_numpy(values[index]) for name, values in fields.items()}
            evaluator.update([prediction], [{"image_id": image_id}])
        evaluator.gather()
        return evaluator.compute()

    return run


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure the evaluation from predictions in memory to metrics."""
    what = f"{NUM_IMAGES} images, {NUM_DETECTIONS} detections each, {NUM_CLASSES} classes"
    return compare(what, {"LVIS's evaluation": partial(evaluation)}, options)
