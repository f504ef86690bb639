"""Files of predictions, as `vitkit test --eval-only` scores them."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.annotations import odd_segmentation
from fuzz.formats import Format
from fuzz.images import odd_image
from fuzz.mutate import mutate_json
from fuzz.world import read_json, run_lengths

from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.errors import DataError
from vitkit.evaluation.captions import CaptionEvaluator
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.semantic import SemanticEvaluator
from vitkit.evaluation.text import TextEvaluator

KINDS = ("bbox", "segm", "panoptic", "semantic", "captions", "text")


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    kind = rng.choice(KINDS)
    path = folder / f"{kind}.json"
    maps = folder / kind
    if kind in ("bbox", "segm"):
        path.write_bytes(mutate_json(_detections(rng, masks=kind == "segm"), rng))
    elif kind == "captions":
        path.write_bytes(mutate_json([{"image_id": 10 + k, "caption": "a cat"} for k in range(3)], rng))
    elif kind == "text":
        row = {"text": "a dog", "source": "ein Hund", "references": ["a dog runs"]}
        path.write_bytes(mutate_json({"sentences": [{"index": k, **row} for k in range(3)]}, rng))
    elif kind == "panoptic":
        shutil.copytree(world / "maps", maps)
        content = read_json(world / "panoptic.json")
        whole = rng.random() < 0.5
        path.write_bytes(json.dumps(content).encode() if whole else mutate_json(content, rng))
        if whole:
            (maps / "1.png").write_bytes(odd_image(world / "maps" / "1.png", rng))
    else:
        shutil.copytree(world / "labels", maps)
        path.write_bytes(b"{}")
        (maps / "1.png").write_bytes(odd_image(world / "labels" / "1.png", rng))


def _detections(rng: random.Random, *, masks: bool) -> list[dict[str, Any]]:
    results = []
    for k in range(3):
        result = {"image_id": 10 + k, "category_id": 3, "bbox": [4, 5, 10, 12], "score": 0.5 + k / 10}
        if masks:
            result["segmentation"] = odd_segmentation(rng) if rng.random() < 0.3 else run_lengths()
        results.append(result)
    return results


def check(folder: Path, world: Path) -> None:
    """Check that accepted predictions give finite metrics in their range."""
    path = next(folder.glob("*.json"))
    images, kind = str(world / "images"), path.stem
    if kind in ("bbox", "segm"):
        dataset = CocoDetection(images, str(world / "instances.json"), masks=kind == "segm")
        evaluator = CocoEvaluator(dataset, iou_types=[kind])
    elif kind == "captions":
        evaluator = CaptionEvaluator(CocoCaptions(images, str(world / "captions.json"), min_count=1))
    elif kind == "text":
        evaluator = TextEvaluator(range(3))
    elif kind == "panoptic":
        evaluator = PanopticEvaluator(CocoPanoptic(images, str(world / "maps"), str(world / "panoptic.json")))
    else:
        evaluator = SemanticEvaluator(SemanticFolder(images, str(world / "labels"), classes=["cat", "sky"]))
    evaluator.load_results(path)
    assert evaluator.stored_predictions or kind != "semantic"
    metrics = evaluator.compute()
    assert metrics and all(math.isfinite(value) and -1 <= value <= 1000 for value in metrics.values()), metrics
    assert evaluator.table()
    for name, value in metrics.items():
        assert kind in ("captions", "text") or value <= 1 + 1e-9, (name, value)
    assert not any(np.isnan(value) for value in metrics.values())


FORMATS = [Format("results", _write, check, DataError, 6)]
