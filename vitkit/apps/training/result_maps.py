"""Predicted maps of semantic and panoptic evaluators as PNG files, in a folder beside the results file."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.apps.output import write_bytes, write_text
from vitkit.apps.training.result_checks import panoptic_result_issues
from vitkit.errors import DataError
from vitkit.evaluation.maps import positions_of
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.semantic import SemanticEvaluator
from vitkit.io.coco_schema import raise_issues
from vitkit.io.folders import declare_output
from vitkit.io.image_files import MAX_PIXELS, check_inside, read_label_colors, read_label_map
from vitkit.io.json_files import read_json
from vitkit.ops.label_maps import colors_to_ids, count_values
from vitkit.structures import PanopticMap


def read_results(path: str | Path) -> Any:
    """Return the content of a results file.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    return read_json(path, key="results", remedy="Give the file that vitkit test wrote.")


def write_semantic(evaluator: SemanticEvaluator, path: Path) -> list[Path]:
    """Write the metrics of the last `compute()` as JSON, and the predictions as PNG files of raw category ids.

    Returns:
        the file `path`, and the folder of the PNG files: NAME for NAME.json.
    """
    folder = _make_map_folder(path)
    for image_id, prediction in evaluator.stored_predictions.items():
        _write_map(folder, _map_name(image_id), prediction.png)
    classes = [
        {"id": int(raw), "name": name, **evaluator.class_metrics.get(name, {})}
        for raw, name in zip(evaluator.dataset.category_ids, evaluator.dataset.classes)
    ]
    write_text(path, json.dumps({**evaluator.metrics, "classes": classes}))
    return [path, folder]


def load_semantic(evaluator: SemanticEvaluator, path: str | Path) -> None:
    """Read predictions that were written earlier, in place of `update`.

    Args:
        path: the folder of the PNG files, or the results file that they belong to.
    Raises:
        DataError: there is no prediction, or one is invalid.
    """
    path, dataset = Path(path), evaluator.dataset
    folder = path if path.is_dir() else _map_folder(path)
    raw_ids = [int(raw) for raw in dataset.category_ids]
    table = np.full(1 << 16, len(raw_ids), np.int64)
    table[raw_ids] = range(len(raw_ids))
    positions, max_pixels = positions_of(dataset.image_ids), dataset.max_image_pixels or MAX_PIXELS
    for image_id in positions:
        path = folder / _map_name(image_id)
        if not path.is_file():
            continue
        raw = read_label_map(path, "results", max_pixels=max_pixels)
        labels = table[raw]
        if labels.max() == len(raw_ids):
            values, counts = count_values(raw[labels == len(raw_ids)])
            raise DataError(
                f"results '{path}': value {values[0]} at {counts[0]} pixels is not a category id of the dataset "
                f"({len(raw_ids)} classes, {min(raw_ids)} to {max(raw_ids)})."
            )
        evaluator.add(image_id, labels)
    if not evaluator.stored_predictions:
        example = folder / _map_name(next(iter(positions)))
        raise DataError(
            f"results: '{folder}' has no prediction for any of {len(positions)} images; expected PNG of "
            f"category ids, such as '{example}'."
        )


def write_panoptic(evaluator: PanopticEvaluator, path: Path) -> list[Path]:
    """Write the predictions in COCO's panoptic format, which panopticapi and COCO's server read.

    Returns:
        the file `path`, and the folder of the maps: NAME for NAME.json.
    """
    folder, dataset = _make_map_folder(path), evaluator.dataset
    annotations = []
    for image_id, prediction in sorted(evaluator.stored_predictions.items()):
        name = _map_name(image_id)
        _write_map(folder, name, prediction.png)
        segments = [
            {name: value for name, value in segment.items() if name != "label"}
            | {"category_id": int(dataset.category_ids[segment["label"]])}
            for segment in prediction.segments
        ]
        annotations.append({"image_id": image_id, "file_name": name, "segments_info": segments})
    categories = [
        {"id": int(raw), "name": name, "isthing": int(thing)}
        for raw, name, thing in zip(dataset.category_ids, dataset.classes, dataset.things)
    ]
    write_text(path, json.dumps({"annotations": annotations, "categories": categories}))
    return [path, folder]


def load_panoptic(evaluator: PanopticEvaluator, path: str | Path) -> None:
    """Read predictions that were written earlier, in place of `update`.

    Args:
        path: the JSON file, whose maps are in the folder of the same name; or that folder.
    Raises:
        DataError: a file is missing or invalid, or is for other images or classes.
    """
    path, dataset = Path(path), evaluator.dataset
    path = path.with_suffix(".json") if path.is_dir() else path
    label_of = {raw: label for label, raw in enumerate(dataset.category_ids)}
    content = read_results(path)
    raise_issues(panoptic_result_issues(content, positions_of(dataset.image_ids), label_of), f"results '{path}'")
    annotations = content["annotations"]
    check_inside(_map_folder(path), (annotation["file_name"] for annotation in annotations), f"results '{path}'")
    max_pixels = dataset.max_image_pixels or MAX_PIXELS
    for annotation in annotations:
        segments = [
            {key: value for key, value in s.items() if key in ("id", "score")} | {"label": label_of[s["category_id"]]}
            for s in annotation["segments_info"]
        ]
        ids = read_ids(_map_folder(path) / annotation["file_name"], max_pixels=max_pixels)
        evaluator.add(annotation["image_id"], PanopticMap(ids, segments))


def read_ids(path: Path, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the (H, W) int32 segment ids of a PNG with three channels.

    Raises:
        DataError: the file is missing or damaged.
    """
    return colors_to_ids(read_label_colors(path, "results", max_pixels=max_pixels))


def _map_name(image_id: Any) -> str:
    """Return the file name of an image's map: twelve digits, as in COCO, for a number, else the id (perhaps a path)."""
    return f"{image_id:012d}.png" if isinstance(image_id, int | np.integer) else f"{image_id}.png"


def _make_map_folder(path: Path) -> Path:
    """Make the folder of the maps that belong to the results file `path`, which are not data, and return it."""
    folder = _map_folder(path)
    with suppress(OSError):  # writing into it says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
        declare_output(folder)
    return folder


def _map_folder(path: Path) -> Path:
    """Return the folder of the maps that belong to the results file `path`: NAME for NAME.json."""
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}_maps")


def _write_map(folder: Path, name: str, data: bytes) -> None:
    """Write an encoded map; the name may contain folders."""
    write_bytes(folder / name, data, below=folder)
