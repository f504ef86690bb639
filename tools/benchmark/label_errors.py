"""Plant errors into the labels of boxes, and measure how many of the most suspicious labels are planted ones.

The errors are, a quarter each: boxes that are removed, random boxes that are added (of a label's size and class),
classes that are exchanged, boxes that are shifted by 40 to 80 % of their size. Predictions do not depend on the labels,
so that one file of results serves all seeds; the model must not have been trained on these images.

Example:
    python tools/benchmark/label_errors.py data/bccd/annotations/instances_val.json results.json
"""

import argparse
import copy
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from vitkit.data.io.json_files import read_json
from vitkit.evaluation.label_errors import KINDS, LabelError, find_label_errors
from vitkit.tools.common import errors_in_one_line

_SAME = 0.5


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("annotations", type=Path, help="a file in COCO's format")
    parser.add_argument("results", type=Path, help="predictions in COCO's result format, as tools/test.py writes them")
    parser.add_argument(
        "--part", type=float, default=0.05, help="fraction of the labels that become wrong (default: 0.05)"
    )
    parser.add_argument(
        "--first", type=int, default=50, help="number of suspicious labels that are reviewed (default: 50)"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of repetitions, each with another seed (default: 5)"
    )
    return parser.parse_args(argv)


def plant(truth: dict[str, Any], part: float, seed: int) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Return a copy of the labels with errors, and kind -> planted errors, with the original labels.

    Each planted error holds the `id` of its annotation (except for a missing one), `image_id`, and the correct `bbox`
    and `category_id` (except for an extra one).
    """
    rng = np.random.default_rng(seed)
    truth = copy.deepcopy(truth)
    annotations = truth["annotations"]
    candidates = [k for k, a in enumerate(annotations) if not a.get("iscrowd") and min(a["bbox"][2:]) > 4]
    count = max(1, round(part * len(candidates) / len(KINDS)))
    chosen = rng.permutation(candidates)[: 4 * count].reshape(4, -1).tolist()
    planted: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    sizes = {image["id"]: (image["width"], image["height"]) for image in truth["images"]}
    category_ids = [category["id"] for category in truth["categories"]]
    for kind, numbers in zip(KINDS, chosen):
        for k in numbers:
            annotation = annotations[k]
            planted[kind].append({key: annotation[key] for key in ("id", "image_id", "bbox", "category_id")})
            if kind == "class":
                others = [c for c in category_ids if c != annotation["category_id"]]
                annotation["category_id"] = int(rng.choice(others))
            elif kind == "box":
                annotation["bbox"] = shifted(annotation["bbox"], sizes[annotation["image_id"]], rng)
            elif kind == "extra":
                image_id = truth["images"][rng.integers(len(truth["images"]))]["id"]
                others = [a["bbox"] for a in annotations if a["image_id"] == image_id]
                box = free_box(annotation["bbox"][2:], sizes[image_id], others, rng)
                new_id = 10**9 + len(planted["extra"])
                annotations.append({**annotation, "id": new_id, "image_id": image_id, "bbox": box})
                planted["extra"][-1] |= {"id": new_id, "image_id": image_id}
    removed = {entry["id"] for entry in planted["missing"]}
    truth["annotations"] = [a for a in annotations if a["id"] not in removed]
    return truth, planted


def shifted(bbox: list[float], size: tuple[int, int], rng: np.random.Generator) -> list[float]:
    """Return a box moved by 40 to 80 % along one axis and by up to 20 % along the other; it stays in its image."""
    x, y, width, height = bbox
    for _ in range(50):
        far, near = rng.uniform(0.4, 0.8) * rng.choice([-1, 1]), rng.uniform(-0.2, 0.2)
        dx, dy = (far, near) if rng.random() < 0.5 else (near, far)
        moved = [x + dx * width, y + dy * height]
        if 0 <= moved[0] <= size[0] - width and 0 <= moved[1] <= size[1] - height:
            break
    return [float(np.clip(moved[0], 0, size[0] - width)), float(np.clip(moved[1], 0, size[1] - height)), width, height]


def free_box(
    sides: list[float], size: tuple[int, int], others: list[list[float]], rng: np.random.Generator
) -> list[float]:
    """Return a random box whose IoU with every other is below 0.3; after 50 attempts, the last box in any case."""
    for _ in range(50):
        corner = [float(rng.uniform(0, max(side - length, 1e-3))) for side, length in zip(size, sides)]
        if not others or largest_iou([*corner, *sides], others) < 0.3:
            break
    return [*corner, *sides]


def largest_iou(bbox: list[float], others: list[list[float]]) -> float:
    """Return the largest IoU of a box with others."""
    if not others:
        return 0.0
    boxes = np.array([bbox], np.float64), np.array(others, np.float64)
    return float(np.asarray(coco_mask.iou(*boxes, [0] * len(others))).max())


def is_planted(
    error: LabelError, truth: dict[str, Any], results: list[dict[str, Any]], planted: dict[str, list[dict[str, Any]]]
) -> str | None:
    """Return the kind of planted error that a suspicious label reveals; None if the label was not changed.

    A shifted box may be reported as a missing box at its correct location, or as a superfluous box.
    """
    if error.annotation >= 0:
        number = truth["annotations"][error.annotation]["id"]
        changed = {entry["id"]: kind for kind in ("extra", "class", "box") for entry in planted[kind]}
        return changed.get(number)
    result = results[error.prediction]
    for kind in ("missing", "box"):
        right = [entry["bbox"] for entry in planted[kind] if entry["image_id"] == error.image_id]
        if largest_iou(result["bbox"], right) >= _SAME:
            return kind
    return None


class Measured(NamedTuple):
    """Numbers of planted errors, and of those among the most suspicious labels, by kind."""

    planted: int
    """The number of planted errors of each kind."""
    hits: Counter[str]
    """Kind -> the number of its planted errors among the first labels of all kinds."""
    listed: Counter[str]
    """Kind -> the number of the first labels of all kinds that are listed as this kind."""
    of_own: Counter[str]
    """Kind -> the number of planted errors among the first `planted` labels that are listed as this kind."""


def measure(truth: dict[str, Any], results: list[dict[str, Any]], *, part: float, first: int, seed: int) -> Measured:
    """Plant errors and look for them."""
    wrong, planted = plant(truth, part, seed)
    errors = find_label_errors(wrong, results, [category["id"] for category in truth["categories"]])
    kinds = [is_planted(error, wrong, results, planted) for error in errors]
    hits = Counter(kind for kind in kinds[:first] if kind)
    count, of_own = len(planted["missing"]), Counter()
    for kind in KINDS:
        own = [k for k, error in enumerate(errors) if error.kind == kind][:count]
        of_own[kind] = sum(kinds[k] is not None for k in own)
    return Measured(count, hits, Counter(error.kind for error in errors[:first]), of_own)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        truth, results = read_json(args.annotations), read_json(args.results, key="results")
        totals = []
        for seed in range(args.seeds):
            planted, hits, listed, of_own = measure(truth, results, part=args.part, first=args.first, seed=seed)
            totals.append(sum(hits.values()))
            by_kind = "  ".join(f"{kind} {hits[kind]} of {planted} (listed {listed[kind]})" for kind in KINDS)
            alone = "  ".join(f"{kind} {of_own[kind]}" for kind in KINDS)
            print(f"seed {seed}: {totals[-1]} of the first {args.first} are planted:  {by_kind}")
            print(f"        planted among the first {planted} of each kind's own list:  {alone}")
        print(f"mean {np.mean(totals):.1f} of {args.first}")


if __name__ == "__main__":
    main()
