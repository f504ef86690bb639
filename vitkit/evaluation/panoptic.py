"""Panoptic quality (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868)."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from vitkit.distributed import gather_objects, is_main
from vitkit.errors import DataError
from vitkit.evaluation.maps import (
    check_size,
    encode_ids,
    map_folder,
    map_name,
    positions_of,
    predicted_field,
    read_ids,
    require_method,
    write_map,
)
from vitkit.ops.label_maps import count_values
from vitkit.registry import EVALUATORS
from vitkit.structures import PanopticMap, PanopticPrediction, SegmentInfo

logger = logging.getLogger("vitkit")

_VOID = 0
_OFFSET = 1 << 24


class PanopticDataset(Protocol):
    """What the evaluator asks of a dataset."""

    classes: Sequence[str]
    category_ids: Sequence[int]
    things: Sequence[bool]
    image_ids: Sequence[int]

    def load_panoptic(self, index: int) -> PanopticMap: ...


class _Answer(NamedTuple):
    """What is kept of one image."""

    matches: np.ndarray
    """(C, 4) float64, see `match_segments`."""
    segments: list[SegmentInfo]
    picture: bytes
    """The predicted map as PNG."""


@EVALUATORS.register
class PanopticEvaluator:
    """PQ, SQ and RQ over all classes, those of things and those of stuff, by the definition of COCO's panopticapi.

    Every image counts: where one has no prediction, its segments count as missed. Classes without any segment, true or
    wrongly predicted, do not count for the means.

    Args:
        dataset: the evaluated dataset.
    Raises:
        ConfigError: the dataset has no panoptic truth.
    """

    per_class_metric = "PQ"
    """What `per_class` gives."""

    def __init__(self, dataset: PanopticDataset):
        require_method(dataset, "load_panoptic", "PanopticEvaluator")
        self.dataset = dataset
        self._position_of = positions_of(dataset.image_ids)
        self._answers: dict[int, _Answer] = {}
        self._metrics: dict[str, float] = {}
        self._quality = np.zeros((len(dataset.classes), 4))

    def update(self, predictions: Sequence[PanopticPrediction], targets: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch; an image that was seen before is left out.

        Args:
            predictions: `panoptic` (H, W) and `segments_info`, of the original images.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            DataError: a map has another size than the true one, or does not hold the segments listed for it, or a
                segment's class is not one of the dataset's.
            ConfigError: the model predicts no panoptic maps.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            if target["image_id"] not in self._answers:
                ids = predicted_field(prediction, "panoptic", "PanopticEvaluator").cpu().numpy()
                self._add(target["image_id"], PanopticMap(ids, prediction["segments_info"]))

    def _add(self, image_id: int, predicted: PanopticMap) -> None:
        truth = self.dataset.load_panoptic(self._position_of[image_id])
        check_size(predicted.panoptic, truth.panoptic, image_id)
        _check_prediction(predicted, image_id, len(self.dataset.classes))
        segments = [
            SegmentInfo(
                id=int(s["id"]), label=int(s["label"]), **({"score": float(s["score"])} if "score" in s else {})
            )
            for s in predicted.segments_info
        ]
        matches = match_segments(truth, predicted, len(self.dataset.classes))
        self._answers[image_id] = _Answer(matches, segments, encode_ids(predicted.panoptic))

    def gather(self) -> None:
        """Moves the answers of all ranks to the main process; an image that several ranks saw is kept once."""
        merged = {}
        for answers in gather_objects(self._answers):
            merged = answers | merged
        if is_main():
            self._answers = merged

    def compute(self) -> dict[str, float]:
        """The metrics "PQ", "SQ", "RQ" of all classes, "PQ_things", …, "PQ_stuff", … in 0..1, on the main process; an
        empty dict elsewhere. They are -1 where there is no class to take the mean of."""
        if not is_main():
            return {}
        sums = sum((answer.matches for answer in self._answers.values()), np.zeros((len(self.dataset.classes), 4)))
        missing = [position for image_id, position in self._position_of.items() if image_id not in self._answers]
        if missing:
            logger.warning(
                "%d of %d images have no prediction and count as missed", len(missing), len(self._position_of)
            )
        for position in missing:
            truth = self.dataset.load_panoptic(position)
            sums += match_segments(truth, PanopticMap(np.zeros_like(truth.panoptic), []), len(sums))
        iou, right, too_many, missed = sums.T
        found = right + too_many + missed
        weight = np.maximum(right + 0.5 * too_many + 0.5 * missed, 0.5)
        self._quality = np.stack([iou / weight, iou / np.maximum(right, 1), right / weight, found])
        things = np.asarray(self.dataset.things, bool)
        self._metrics = {}
        for suffix, chosen in (("", things | True), ("_things", things), ("_stuff", ~things)):
            counted = chosen & (found > 0)
            means = self._quality[:3, counted].mean(axis=1) if counted.any() else (-1.0,) * 3
            self._metrics |= {f"{name}{suffix}": float(mean) for name, mean in zip(("PQ", "SQ", "RQ"), means)}
        return dict(self._metrics)

    def table(self) -> str:
        """The nine numbers of the last `compute()` in percent, and of how many classes; empty on other processes."""
        if not self._metrics:
            return ""
        things, found = np.asarray(self.dataset.things, bool), self._quality[3] > 0
        lines = [f"{'':<8}{'PQ':>7}{'SQ':>7}{'RQ':>7}{'classes':>9}"]
        for name, suffix, chosen in (("all", "", found), ("things", "_things", things), ("stuff", "_stuff", ~things)):
            values = (self._metrics[f"{metric}{suffix}"] for metric in ("PQ", "SQ", "RQ"))
            shown = "".join(f"{'-' if value < 0 else f'{100 * value:.1f}':>7}" for value in values)
            lines.append(f"{name:<8}{shown}{np.count_nonzero(chosen & found):>9}")
        return "\n".join(lines)

    def per_class(self) -> dict[str, float]:
        """Class name -> PQ of the last `compute()`, -1 for a class without segments; empty on other processes."""
        if not self._metrics:
            return {}
        quality, _, _, found = self._quality
        return {name: float(q) if n else -1.0 for name, q, n in zip(self.dataset.classes, quality, found)}

    def write_results(self, path: str | Path) -> list[Path]:
        """Writes the predictions in COCO's panoptic format, which panopticapi and COCO's server read.

        Returns:
            the file `path`, and the folder of the maps: NAME for NAME.json.
        """
        path = Path(path)
        folder = map_folder(path)
        annotations = []
        for image_id, answer in sorted(self._answers.items()):
            name = map_name(image_id)
            write_map(folder, name, answer.picture)
            segments = [
                {name: value for name, value in segment.items() if name != "label"}
                | {"category_id": int(self.dataset.category_ids[segment["label"]])}
                for segment in answer.segments
            ]
            annotations.append({"image_id": image_id, "file_name": name, "segments_info": segments})
        categories = [
            {"id": int(raw), "name": name, "isthing": int(thing)}
            for raw, name, thing in zip(self.dataset.category_ids, self.dataset.classes, self.dataset.things)
        ]
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"annotations": annotations, "categories": categories}), encoding="utf-8")
        return [path, folder]

    def load_results(self, path: str | Path) -> None:
        """Takes predictions that were written before, in place of `update`.

        Args:
            path: the JSON file, whose maps lie in the folder of that name; or that folder.
        Raises:
            DataError: a file is missing or wrong, or is of other images or classes.
        """
        path = Path(path)
        path = path.with_suffix(".json") if path.is_dir() else path
        label_of = {raw: label for label, raw in enumerate(self.dataset.category_ids)}
        for annotation in _read_annotations(path):
            image_id = annotation["image_id"]
            if image_id not in self._position_of:
                raise DataError(
                    f"results '{path}': image_id {image_id!r} is not among the dataset's {len(self._position_of)} "
                    "images. Give results of the config's data.val."
                )
            unknown = [s for s in annotation["segments_info"] if s.get("category_id") not in label_of]
            if unknown:
                raise DataError(
                    f"results '{path}': image {image_id} has a segment of category_id "
                    f"{unknown[0].get('category_id')!r}, which is not among the dataset's {len(label_of)} classes."
                )
            segments = [
                {key: value for key, value in s.items() if key in ("id", "score")}
                | {"label": label_of[s["category_id"]]}
                for s in annotation["segments_info"]
            ]
            self._add(image_id, PanopticMap(read_ids(map_folder(path) / annotation["file_name"]), segments))


def _read_annotations(path: Path) -> list[dict[str, Any]]:
    try:
        annotations = json.loads(path.read_bytes())["annotations"]
    except OSError as error:
        raise DataError(f"results: cannot read '{path}' ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"results: '{path}' is no JSON of panoptic results, {{'annotations': [...]}}.") from error
    keys = {"image_id", "file_name", "segments_info"}
    if not all(isinstance(annotation, dict) and keys <= annotation.keys() for annotation in annotations):
        raise DataError(f"results '{path}': an entry of 'annotations' lacks one of {', '.join(sorted(keys))}.")
    seen = set()
    for annotation in annotations:
        image_id, segments = annotation["image_id"], annotation["segments_info"]
        if not isinstance(image_id, int | str):
            raise DataError(f"results '{path}': image_id {image_id!r:.120}; expected a number or a name.")
        if image_id in seen:
            raise DataError(f"results '{path}': image {image_id!r} is there twice. Leave one of them out.")
        seen.add(image_id)
        if not isinstance(segments, list) or not all(
            isinstance(s, dict) and all(isinstance(s.get(key), int) for key in ("id", "category_id")) for s in segments
        ):
            raise DataError(
                f"results '{path}': image {image_id!r} has segments_info {segments!r:.120}; expected segments, "
                "a list with the numbers 'id' and 'category_id' of each."
            )
    return annotations


def _check_prediction(predicted: PanopticMap, image_id: int, num_classes: int) -> None:
    listed = [segment["id"] for segment in predicted.segments_info]
    found = set(np.unique(count_values(predicted.panoptic)[0]).tolist()) - {_VOID}
    for ids, what in (
        (found - set(listed), "in the predicted map and not in segments_info"),
        (set(listed) - found, "in segments_info and not in the predicted map"),
        ({i for i in listed if listed.count(i) > 1}, "in segments_info more than once"),
        ({i for i in listed if not 0 < i < _OFFSET}, f"not between 1 and {_OFFSET - 1}"),
    ):
        if ids:
            raise DataError(f"image {image_id}: segment ids {sorted(ids)[:5]} are {what}. Every segment has one entry.")
    labels = [segment["label"] for segment in predicted.segments_info]
    if labels and not 0 <= min(labels) <= max(labels) < num_classes:
        raise DataError(
            f"image {image_id}: predicted labels {min(labels)} to {max(labels)}, but the dataset has {num_classes} "
            "classes. Was the model built or trained for other classes?"
        )


def match_segments(truth: PanopticMap, predicted: PanopticMap, num_classes: int) -> np.ndarray:
    """Which segments of one image are found.

    A predicted and a true segment of one class match if their IoU is above one half, void pixels of the truth left
    out; no segment then has two matches. Crowds match nothing. Not counted as wrong is a predicted segment that lies
    by more than half in void or in the crowd of its class.

    Returns:
        (num_classes, 4) float64: the sum of the matches' IoU, matches, predicted segments without match, true segments
        without.
    """
    result = np.zeros((num_classes, 4))
    true_of = {segment["id"]: segment for segment in truth.segments_info}
    predicted_of = {segment["id"]: segment for segment in predicted.segments_info}
    codes, pixels = count_values(truth.panoptic.astype(np.int64) * _OFFSET + predicted.panoptic)
    overlap = {divmod(code, _OFFSET): count for code, count in zip(codes.tolist(), pixels.tolist())}
    true_area, predicted_area = dict.fromkeys(true_of, 0), dict.fromkeys(predicted_of, 0)
    for (true_id, predicted_id), count in overlap.items():
        if true_id in true_area:
            true_area[true_id] += count
        if predicted_id in predicted_area:
            predicted_area[predicted_id] += count

    matched_true, matched_predicted = set(), set()
    for (true_id, predicted_id), both in overlap.items():
        if true_id not in true_of or predicted_id not in predicted_of or true_of[true_id].get("iscrowd"):
            continue
        label = true_of[true_id]["label"]
        if label != predicted_of[predicted_id]["label"]:
            continue
        in_void = overlap.get((_VOID, predicted_id), 0)
        iou = both / (true_area[true_id] + predicted_area[predicted_id] - both - in_void)
        if iou > 0.5:
            result[label, :2] += iou, 1
            matched_true.add(true_id)
            matched_predicted.add(predicted_id)

    crowd_of = {}
    for true_id, segment in true_of.items():
        if segment.get("iscrowd"):
            crowd_of[segment["label"]] = true_id  # of several crowds of a class the last counts, as in panopticapi
        elif true_id not in matched_true:
            result[segment["label"], 3] += 1
    for predicted_id, segment in predicted_of.items():
        if predicted_id in matched_predicted:
            continue
        excused = overlap.get((_VOID, predicted_id), 0)
        if segment["label"] in crowd_of:
            excused += overlap.get((crowd_of[segment["label"]], predicted_id), 0)
        if excused <= 0.5 * predicted_area[predicted_id]:
            result[segment["label"], 2] += 1
    return result
