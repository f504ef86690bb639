"""Write images with boxes, their annotations, and imperfect predictions to the disk."""

import json

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from vitkit import EVALUATORS, build_dataset

CLASSES = ("cat", "dog", "<b>bird</b>")
CONFIG = (
    'def config():\n    val = dict(type="CocoDetection", images="images", annotations="truth.json")\n'
    '    return dict(model=dict(type="DETR"), data=dict(val=val), evaluator=dict(type="CocoEvaluator"), '
    "train=dict(epochs=1))\n"
)


def write_data(folder, num_images=5, masks=False, seed=0):
    """Write images with objects, annotations and imperfect results; return the number of images."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir()
    images, annotations, results = [], [], []
    for image_id in range(1, num_images + 1):
        image = rng.integers(0, 255, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / "images" / f"{image_id}.png")
        images.append(dict(id=image_id, file_name=f"{image_id}.png", width=120, height=90))
        for _ in range(int(rng.integers(1, 5))):
            x, y = rng.uniform(0, 70, 2).tolist()
            box, category = [x, y / 2, 30.0, 25.0], int(rng.integers(1, 4))
            corners = [x, y / 2, x + 30, y / 2, x + 30, y / 2 + 25, x, y / 2 + 25]
            entry = dict(id=len(annotations) + 1, image_id=image_id, category_id=category, bbox=box, area=750.0)
            annotations.append({**entry, "iscrowd": 0, "segmentation": [corners]})
            for shift in rng.choice([1.0, 4.0, 14.0], size=2).tolist():
                predicted = category if rng.random() < 0.7 else int(rng.integers(1, 4))
                moved = [x + shift, y / 2, 30.0, 25.0]
                result = dict(image_id=image_id, category_id=predicted, bbox=moved, score=float(rng.random()))
                results.append({**result, "segmentation": rectangle(moved)} if masks else result)
    categories = [dict(id=k, name=name) for k, name in enumerate(CLASSES, start=1)]
    (folder / "truth.json").write_text(json.dumps(dict(images=images, annotations=annotations, categories=categories)))
    (folder / "results.json").write_text(json.dumps(results))
    return results


def rectangle(box):
    x, y, w, h = (round(v) for v in box)
    mask = np.zeros((90, 120), np.uint8, order="F")
    mask[y : y + h, x : x + w] = 1
    rle = coco_mask.encode(mask)
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def evaluator_of(folder, *, masks=False):
    data = dict(type="CocoDetection", images=str(folder / "images"), annotations=str(folder / "truth.json"))
    dataset = build_dataset({**data, "masks": masks})
    iou_types = ["bbox", "segm"] if masks else ["bbox"]
    evaluator = EVALUATORS.build(dict(type="CocoEvaluator", iou_types=iou_types), dataset=dataset)
    evaluator.load_results(folder / "results.json")
    evaluator.compute()
    return evaluator
