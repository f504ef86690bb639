"""Panoptic quality (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.errors import DataError
from vitkit.evaluation.base import SampleEvaluator, get_predicted_field, read_results, require_annotations
from vitkit.evaluation.maps import (
    check_size,
    decode_ids,
    encode_ids,
    make_map_folder,
    map_folder,
    map_name,
    positions_of,
    read_ids,
)
from vitkit.evaluation.sample_statistics import PanopticStatistics
from vitkit.io.coco_schema import panoptic_result_issues, raise_issues
from vitkit.io.image_files import MAX_PIXELS, check_inside
from vitkit.io.output import write_bytes, write_text
from vitkit.ops.label_maps import count_values
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS
from vitkit.structures import PanopticMap, PanopticPrediction, SegmentInfo

_VOID = 0
_OFFSET = 1 << 24


class _StoredSegments(NamedTuple):
    """The matches and the predicted segments of one image."""

    matches: np.ndarray
    """(C, 4) float64, see `match_segments`."""
    segments: list[SegmentInfo]
    png: bytes
    """The predicted map, PNG-encoded."""


@EVALUATORS.register
class PanopticEvaluator(SampleEvaluator):
    """PQ, SQ and RQ over all classes, things and stuff, as defined by COCO's panopticapi, in 0..1.

    The metrics are PQ, SQ, RQ, PQ_things, …, PQ_stuff, …; -1 without a class to average. Every image counts; the
    segments of an image without a prediction are missed. Classes without any segment, true or wrongly predicted, are
    left out of the means.

    Raises:
        ConfigError: the dataset has no panoptic ground truth.
    """

    per_class_metric = "PQ"

    needs_dataset = ("image_ids", "classes", "category_ids", "things", "load_panoptic")

    def __init__(self, dataset: Dataset):
        require_annotations(dataset, "panoptic", "PanopticEvaluator")
        super().__init__(dataset)
        self._position_of = positions_of(dataset.image_ids)

    def measures(self, metric: str) -> bool:
        """Return whether the dataset has a segment, if it counts them."""
        num_segments = self.dataset.num_objects
        return num_segments is None or num_segments > 0

    def update(self, predictions: Sequence[PanopticPrediction], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: `panoptic` (H, W) and `segments_info`, at the size of the original images.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            DataError: a map differs in size from the true one, or does not contain the segments listed for it, or a
                segment's class is not one of the dataset's.
            ConfigError: the model predicts no panoptic maps.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            if target["image_id"] not in self.stored_predictions:
                ids = get_predicted_field(prediction, "panoptic", "PanopticEvaluator").cpu().numpy()
                self._add(target["image_id"], PanopticMap(ids, prediction["segments_info"]))

    def _add(self, image_id: int, predicted: PanopticMap) -> None:
        truth = self.dataset.load_panoptic(self._position_of[image_id])
        check_size(predicted.panoptic, truth.panoptic, image_id)
        _check_prediction(predicted, image_id, len(self.dataset.classes))
        plain = {"id": int, "label": int, "score": float}
        segments = [{name: plain[name](s[name]) for name in plain if name in s} for s in predicted.segments_info]
        matches = match_segments(truth, predicted, len(self.dataset.classes))
        self.stored_predictions[image_id] = _StoredSegments(matches, segments, encode_ids(predicted.panoptic))

    def read_predicted_map(self, image_id: Any) -> PanopticMap:
        """Return the predicted segments; none if the image has no prediction."""
        if image_id not in self.stored_predictions:
            return PanopticMap(np.zeros_like(self.dataset.load_panoptic(self._position_of[image_id]).panoptic), [])
        prediction = self.stored_predictions[image_id]
        return PanopticMap(decode_ids(prediction.png), prediction.segments)

    def statistics(self) -> PanopticStatistics:
        matches = np.zeros((len(self._position_of), len(self.dataset.classes), 4))
        for k, (image_id, position) in enumerate(self._position_of.items()):
            if image_id in self.stored_predictions:
                matches[k] = self.stored_predictions[image_id].matches
            else:
                truth = self.dataset.load_panoptic(position)
                nothing = PanopticMap(np.zeros_like(truth.panoptic), [])
                matches[k] = match_segments(truth, nothing, len(self.dataset.classes))
        things = np.asarray(self.dataset.things, bool)
        return PanopticStatistics(list(self._position_of), self.dataset.classes, things, matches)

    def _table_lines(self) -> list[str]:
        """Return the nine metrics in percent, and the numbers of classes."""
        things = np.asarray(self.dataset.things, bool)
        has_segments = np.array([self._by_class[name]["PQ"] >= 0 for name in self.dataset.classes])
        lines = [f"{'':<8}{'PQ':>7}{'SQ':>7}{'RQ':>7}{'classes':>9}"]
        groups = (("all", "", things | True), ("things", "_things", things), ("stuff", "_stuff", ~things))
        for name, suffix, chosen in groups:
            values = (self.metrics[f"{metric}{suffix}"] for metric in ("PQ", "SQ", "RQ"))
            shown = "".join(f"{'–' if value < 0 else f'{100 * value:.1f}':>7}" for value in values)
            lines.append(f"{name:<8}{shown}{np.count_nonzero(chosen & has_segments):>9}")
        return lines

    def write_results(self, path: str | Path) -> list[Path]:
        """Write the predictions in COCO's panoptic format, which panopticapi and COCO's server read.

        Returns:
            the file `path`, and the folder of the maps: NAME for NAME.json.
        """
        path = Path(path)
        folder = make_map_folder(path)
        annotations = []
        for image_id, prediction in sorted(self.stored_predictions.items()):
            name = map_name(image_id)
            write_bytes(folder / name, prediction.png, below=folder)
            segments = [
                {name: value for name, value in segment.items() if name != "label"}
                | {"category_id": int(self.dataset.category_ids[segment["label"]])}
                for segment in prediction.segments
            ]
            annotations.append({"image_id": image_id, "file_name": name, "segments_info": segments})
        categories = [
            {"id": int(raw), "name": name, "isthing": int(thing)}
            for raw, name, thing in zip(self.dataset.category_ids, self.dataset.classes, self.dataset.things)
        ]
        write_text(path, json.dumps({"annotations": annotations, "categories": categories}))
        return [path, folder]

    def load_results(self, path: str | Path) -> None:
        """Read predictions that were written earlier, in place of `update`.

        Args:
            path: the JSON file, whose maps are in the folder of the same name; or that folder.
        Raises:
            DataError: a file is missing or invalid, or is for other images or classes.
        """
        path = Path(path)
        path = path.with_suffix(".json") if path.is_dir() else path
        label_of = {raw: label for label, raw in enumerate(self.dataset.category_ids)}
        content = read_results(path)
        raise_issues(panoptic_result_issues(content, self._position_of, label_of), f"results '{path}'")
        annotations = content["annotations"]
        check_inside(map_folder(path), (annotation["file_name"] for annotation in annotations), f"results '{path}'")
        max_pixels = self.dataset.max_image_pixels or MAX_PIXELS
        for annotation in annotations:
            segments = [
                {key: value for key, value in s.items() if key in ("id", "score")}
                | {"label": label_of[s["category_id"]]}
                for s in annotation["segments_info"]
            ]
            ids = read_ids(map_folder(path) / annotation["file_name"], max_pixels=max_pixels)
            self._add(annotation["image_id"], PanopticMap(ids, segments))


def _check_prediction(predicted: PanopticMap, image_id: int, num_classes: int) -> None:
    """Raise a DataError if map and segments_info contradict each other or do not fit the dataset."""
    listed = [segment["id"] for segment in predicted.segments_info]
    in_map = set(count_values(predicted.panoptic)[0].tolist()) - {_VOID}
    for ids, what in (
        (in_map - set(listed), "in the predicted map and not in segments_info"),
        (set(listed) - in_map, "in segments_info and not in the predicted map"),
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
    """Match the predicted segments of one image with the true ones.

    A predicted and a true segment of the same class match if their IoU is above one half, where void pixels of the
    ground truth are ignored; so no segment can have two matches. Crowds match nothing. A predicted segment of which
    more than half lies in void or in a crowd of its class is not counted as wrong.

    Returns:
        (num_classes, 4) float64: the sum of the matches' IoU, the number of matches, of predicted segments without a
        match, and of true segments without a match.
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
