"""COCO's annotation files: detection with masks, panoptic segments, captions."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.formats import OPTIONS, Format, naming, write_options
from fuzz.mutate import mutate_json
from fuzz.world import HEIGHT, WIDTH, read_json

from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.errors import DataError
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.io.segmentations import encode_segmentation
from vitkit.structures import PanopticMap

FILE = "fuzzed.json"
_TASKS = ("panoptic", "instance", "semantic")


def write_file(name: str, rng: random.Random, folder: Path, world: Path, **options: Any) -> None:
    """Write a changed annotation file, and the options that it is read with."""
    content = read_json(world / f"{name}.json")
    if name == "instances" and rng.random() < 0.4:
        annotation = rng.choice(content["annotations"])
        annotation["segmentation"] = odd_segmentation(rng)
        annotation["iscrowd"] = rng.choice([0, 1])
        (folder / FILE).write_bytes(json.dumps(content).encode())
    else:
        (folder / FILE).write_bytes(mutate_json(content, rng))
    write_options(folder, **options)


def odd_segmentation(rng: random.Random) -> Any:
    """Return polygons or run lengths that are wrong, or unusual but valid."""
    size, pixels = [HEIGHT, WIDTH], HEIGHT * WIDTH
    far = rng.choice([2**31, -(2**31), 1e30, 1e308, 2**63, 400.0, -400, 40.000001])
    counts = rng.choice(
        [[pixels], [0, pixels], [pixels, 0], [0.5, pixels - 0.5], [-1, pixels + 1], [pixels + 1], [2**32 + pixels], []]
        + [["1280"], [True, pixels - 1], [None], "", "0", "PPYo1", "`c1", "1" * 200, "\ud800", "é", "\0", "o" * 50]
        + [[1] * pixels, [0] * 5000 + [pixels], {"a": 1}, 5, None]
    )
    polygon = rng.choice(
        [[4, 5, far, 5, 14, 17], [4, 5, 14, 5], [4, 5, 14, 5, 14], [1, 1] * 3, [0, 0, 40, 0, 40, 32, 0, 32], []]
        + [[4.5, 5.5, 14.25, 5, 14, 17.75], ["4", 5, 6, 7, 8, 9], [4, 5, None, 5, 14, 17], [True] * 6, [1, 2] * 5000]
    )
    sizes = rng.choice([size] * 3 + [size[::-1], [HEIGHT], [HEIGHT + 0.0, WIDTH], [-HEIGHT, WIDTH], [2**31, 2**31]])
    return rng.choice([[polygon], [polygon, polygon], {"size": sizes, "counts": counts}, {"counts": counts}, [], "x"])


def check_detection(folder: Path, world: Path) -> None:
    """Check that nothing in an accepted file is lost or changed: objects by image, their classes and boxes."""
    options = read_json(folder / OPTIONS)
    with naming(FILE):
        dataset = CocoDetection(str(world / "images"), str(folder / FILE), **options)
        truth = dataset.ground_truth()
    samples = [dataset[k] for k in range(len(dataset))]
    for sample in samples:
        check_boxes(sample["target"], len(dataset.classes))
    check_evaluation(dataset, truth, masks=options["masks"])
    try:
        given = json.loads((folder / FILE).read_bytes())
    except ValueError:  # a byte order mark
        return
    if options["bad_boxes"] == "error":
        check_nothing_lost(given, dataset, samples, truth, masks=options["masks"])


def check_boxes(target: dict[str, Any], num_classes: int) -> None:
    """Check that boxes are finite and inside the image, labels are classes, and each mask has a pixel."""
    boxes, labels = target["boxes_cxcywh"], target["labels"]
    assert boxes.shape == (len(labels), 4) and boxes.isfinite().all()
    assert (boxes[:, :2] - boxes[:, 2:] / 2 >= -1e-5).all() and (boxes[:, :2] + boxes[:, 2:] / 2 <= 1 + 1e-5).all()
    assert (boxes[:, 2:] >= 0).all() and ((labels >= 0) & (labels < num_classes)).all()
    if "masks" in target:
        assert len(target["masks"]) == len(labels) and target["masks"].flatten(1).any(1).all()


def check_nothing_lost(given: Any, dataset: Any, samples: list, truth: dict[str, Any], *, masks: bool) -> None:
    """Compare the loaded samples with the file's content."""
    assert len(samples) == len(given["images"]) and len(truth["annotations"]) == len(given["annotations"])
    names = {c["id"]: str(c["name"]) for c in given["categories"]}
    for image, sample in zip(given["images"], samples):
        target = sample["target"]
        mine = [a for a in given["annotations"] if a["image_id"] == image["id"] and not a.get("iscrowd")]
        expected = Counter(names[a["category_id"]] for a in mine)
        loaded = Counter(dataset.classes[label] for label in target["labels"].tolist())
        assert loaded == expected or (masks and loaded <= expected)  # a mask without pixels is dropped
        if loaded == expected:
            size = np.array([image["width"], image["height"]] * 2)
            boxes = np.array([a["bbox"] for a in mine], np.float64).reshape(-1, 4)
            corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1).clip(0, size)
            center, extent = (target["boxes_cxcywh"].numpy() * size).reshape(-1, 2, 2).swapaxes(0, 1)
            assert np.allclose(np.concatenate([center - extent / 2, center + extent / 2], axis=1), corners, atol=1e-3)


def check_evaluation(dataset: Any, truth: dict[str, Any], *, masks: bool) -> None:
    """Check that the file's objects, evaluated as predictions, score exactly 1."""
    evaluator = CocoEvaluator(dataset, iou_types=["bbox", "segm"] if masks else ["bbox"])
    objects = [a for a in truth["annotations"] if not a["iscrowd"]]
    keys = ("image_id", "category_id", "bbox", "segmentation")
    results = [{"score": 1.0, **{key: a[key] for key in keys if key in a}} for a in objects]
    if masks:
        for result, a in zip(results, objects):
            result["segmentation"] = encode_for_results(a["segmentation"], truth, a["image_id"])
    Path("own.json").write_text(json.dumps(results))
    evaluator.load_results("own.json")
    metrics = evaluator.compute()
    assert evaluator.table() and all(np.isfinite(value) and -1 <= value <= 1 for value in metrics.values()), metrics
    areas = [a["area"] for a in objects]
    # A box that reaches out of its image is unchanged in the truth; areas outside every size range are not counted.
    if areas and all(0 <= area < 1e10 for area in areas):
        assert metrics["bbox/AP"] > 0.9, metrics


def encode_for_results(segmentation: Any, truth: dict[str, Any], image_id: int) -> dict[str, Any]:
    """Return a segmentation as run lengths in the form of results files."""
    image = next(image for image in truth["images"] if image["id"] == image_id)
    encoded = encode_segmentation(segmentation, image["height"], image["width"])
    counts = encoded["counts"]
    return {"size": list(encoded["size"]), "counts": counts.decode() if isinstance(counts, bytes) else counts}


def check_panoptic(folder: Path, world: Path) -> None:
    """Check that each segment has a separate mask, and the truth scores 1 against itself."""
    task = read_json(folder / OPTIONS)["task"]
    with naming(FILE):
        dataset = CocoPanoptic(str(world / "images"), str(world / "maps"), str(folder / FILE), task=task)
    for k in range(len(dataset)):
        target = dataset[k]["target"]
        assert len(target["masks"]) == len(target["labels"]) and (target["labels"] < len(dataset.classes)).all()
        assert task != "semantic" or (target["masks"].sum(0) <= 1).all()
    dataset.ground_truth()
    if task == "panoptic":
        evaluator = PanopticEvaluator(dataset)
        num_segments = 0
        for index, image_id in enumerate(dataset.image_ids.tolist()):
            ids, segments = dataset.load_panoptic(index)
            plain = [{"id": s["id"], "label": s["label"]} for s in segments if not s["iscrowd"]]
            num_segments += len(plain)
            kept = np.where(np.isin(ids, [s["id"] for s in plain]), ids, 0)
            evaluator._add(image_id, PanopticMap(kept, plain))
        metrics = evaluator.compute()
        assert metrics["PQ"] == (1 if num_segments else -1), metrics


def check_captions(folder: Path, world: Path) -> None:
    """Check that each image has a caption whose tokens are in the vocabulary."""
    with naming(FILE):
        dataset = CocoCaptions(str(world / "images"), str(folder / FILE), min_count=1)
    for k in range(len(dataset)):
        target = dataset[(k, k)]["target"]
        assert target["references"] and (target["tokens"] < len(dataset.target_vocabulary)).all()
    assert np.isfinite(dataset.aspect_ratios()).all()


def _write_detection(rng: random.Random, folder: Path, world: Path) -> None:
    options = {"masks": rng.random() < 0.6, "bad_boxes": rng.choice(["error", "error", "drop"])}
    write_file("instances", rng, folder, world, **options)


def _write_panoptic(rng: random.Random, folder: Path, world: Path) -> None:
    write_file("panoptic", rng, folder, world, task=rng.choice(_TASKS))


def _write_captions(rng: random.Random, folder: Path, world: Path) -> None:
    write_file("captions", rng, folder, world)


FORMATS = [
    Format("coco", _write_detection, check_detection, DataError, 6),
    Format("panoptic", _write_panoptic, check_panoptic, DataError, 4),
    Format("captions", _write_captions, check_captions, DataError, 2),
]
