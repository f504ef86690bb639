"""The valid files that cases change: three images with annotations of every kind; and small models."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from vitkit import build_model
from vitkit.apps.inference import Predictor

HEIGHT, WIDTH = 32, 40
GRAY = np.full((32, 32, 3), 128, np.uint8)
"""An image for models that are built for this size."""
_BACKBONE = dict(type="ViT", d_model=16, depth=1, num_heads=2, patch_size=16, image_size=32, pretrained=False)
CLASSIFIER = dict(type="Classifier", backbone=_BACKBONE)
CATEGORIES = [{"id": 3, "name": "cat", "isthing": 1}, {"id": 7, "name": "sky", "isthing": 0}]


def make_world(folder: Path) -> Path:
    """Write the images, the maps and the annotation files."""
    rng = np.random.default_rng(0)
    for name in ("images", "maps", "labels"):
        (folder / name).mkdir(parents=True)
    for k in range(3):
        image = cv2.resize(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8), (WIDTH, HEIGHT))
        cv2.imwrite(str(folder / "images" / f"{k}.jpg"), image)
        ids = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        ids[:16, :, 2], ids[16:, 5:30, 2] = 1, 2
        cv2.imwrite(str(folder / "maps" / f"{k}.png"), ids)
        cv2.imwrite(str(folder / "labels" / f"{k}.png"), np.where(ids[:, :, 2] == 0, 255, ids[:, :, 2] - 1))
    for name, annotations in (("instances", _objects()), ("panoptic", _segments()), ("captions", _captions())):
        images = [{"id": 10 + k, "file_name": f"{k}.jpg", "height": HEIGHT, "width": WIDTH} for k in range(3)]
        content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read_json(path: Path) -> Any:
    """The content of a valid file."""
    return json.loads(path.read_bytes())


def run_lengths() -> dict[str, Any]:
    """Return a mask of 20 pixels."""
    return {"size": [HEIGHT, WIDTH], "counts": [100, 20, HEIGHT * WIDTH - 120]}


def _objects() -> list[dict[str, Any]]:
    """Return for each image an object with a polygon and one with run lengths, which is a crowd in the last image."""
    objects = []
    for k in range(3):
        polygon = [[4, 5, 14 + k, 5, 14 + k, 17, 4, 17]]
        for j, segmentation in enumerate((polygon, run_lengths())):
            fields = {"image_id": 10 + k, "category_id": (3, 7)[j], "bbox": [4, 5, 10 + k, 12], "area": 120}
            crowd = {"iscrowd": j if k == 2 else 0}
            objects.append({"id": len(objects) + 1, **fields, **crowd, "segmentation": segmentation})
    return objects


def _segments() -> list[dict[str, Any]]:
    listed = [dict(id=1, category_id=3, iscrowd=0), dict(id=2, category_id=7, iscrowd=0)]
    return [{"image_id": 10 + k, "file_name": f"{k}.png", "segments_info": listed} for k in range(3)]


def _captions() -> list[dict[str, Any]]:
    return [{"id": k + 1, "image_id": 10 + k, "caption": "a cat on a mat"} for k in range(3)]


def small_predictor(spec: dict[str, Any]) -> Predictor:
    """Return a model with two classes and random weights; the same in every process."""
    torch.manual_seed(0)
    return Predictor(build_model(spec, classes=["cat", "dog"]), ["cat", "dog"])
