"""Semantic segmentation metrics: IoU of regions and of their boundaries, and pixel accuracy."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.errors import DataError
from vitkit.evaluation.base import SampleEvaluator, get_predicted_field, require_annotations
from vitkit.evaluation.maps import (
    boundary_counts,
    check_size,
    decode_labels,
    encode_labels,
    make_map_folder,
    map_folder,
    map_name,
    positions_of,
)
from vitkit.evaluation.sample_statistics import SemanticStatistics
from vitkit.io.image_files import MAX_PIXELS, read_label_map
from vitkit.io.output import write_bytes, write_text
from vitkit.ops.label_maps import count_values
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS
from vitkit.structures import IGNORE_INDEX, SemanticPrediction

_MAX_NAMED = 40  # with more classes, the table leaves them out
_MEANS = {"IoU": "mIoU", "accuracy": "mean_accuracy", "boundary IoU": "boundary_mIoU"}
"""Metric of each class -> name of its mean over the classes."""


class _Counts(NamedTuple):
    """The pixels of one image."""

    codes: np.ndarray
    """The pairs of classes that occur: true class * (C + 1) + predicted class, C meaning none."""
    pixels: np.ndarray
    """Number of pixels of each pair."""
    boundaries: np.ndarray | None
    """(3, C) int32, see `boundary_counts`; None if boundaries are not compared."""


class _StoredMap(NamedTuple):
    """The counts and the predicted map of one image."""

    counts: _Counts
    png: bytes
    """The prediction as a PNG of raw category ids."""


@EVALUATORS.register
class SemanticEvaluator(SampleEvaluator):
    """Mean IoU, pixel accuracy and mean class accuracy over all pixels of the dataset that are not ignored, in 0..1.

    The metrics are mIoU, pixel_accuracy, mean_accuracy and boundary_mIoU; -1 if no pixel is labeled. Every image
    counts; the pixels of an image without a prediction are missed. A class without any true pixel has no IoU and is
    left out of the means.

    Boundary IoU (Cheng et al. 2021, https://arxiv.org/abs/2103.16562) compares only the pixels of a region that are
    near its edge; as for IoU, the pixels are summed over the dataset.

    Args:
        dataset: the evaluated dataset.
        boundary: also compute boundary IoU (takes several milliseconds per image).
    Raises:
        ConfigError: the dataset has no semantic ground truth.
    """

    per_class_metric = "IoU"

    needs_dataset = ("image_ids", "classes", "category_ids", "load_semantic")

    def __init__(self, dataset: Dataset, *, boundary: bool = True):
        require_annotations(dataset, "semantic", "SemanticEvaluator")
        super().__init__(dataset)
        self.boundary = boundary
        self._position_of = positions_of(dataset.image_ids)
        self._raw = np.asarray(dataset.category_ids, np.int64)
        self._raw = self._raw.astype(np.uint8 if self._raw.max() < 256 else np.uint16)

    def update(self, predictions: Sequence[SemanticPrediction], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: `semantic` (H, W), at the size of the original images.
            targets: the same images' targets, of which only `image_id` is read.
        Raises:
            DataError: a predicted map differs in size from the true one, or contains a class that the dataset lacks.
            ConfigError: the model predicts no semantic maps.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            if target["image_id"] not in self.stored_predictions:
                semantic = get_predicted_field(prediction, "semantic", "SemanticEvaluator")
                self._add(target["image_id"], semantic.cpu().numpy())

    def _add(self, image_id: Any, predicted: np.ndarray) -> None:
        if predicted.min() < 0 or predicted.max() >= len(self.dataset.classes):
            raise DataError(
                f"image {image_id}: predicted classes {predicted.min()} to {predicted.max()}, but the dataset has "
                f"{len(self.dataset.classes)} classes. Was the model built or trained for other classes?"
            )
        predicted = predicted.astype(np.uint8)
        truth = self.dataset.load_semantic(self._position_of[image_id])
        check_size(predicted, truth, image_id)
        counts = self._counts(truth, predicted)
        self.stored_predictions[image_id] = _StoredMap(counts, encode_labels(self._raw[predicted]))

    def _counts(self, truth: np.ndarray, predicted: np.ndarray) -> _Counts:
        num_classes = len(self.dataset.classes)
        codes = truth.astype(np.int32) * (num_classes + 1) + np.minimum(predicted, num_classes)
        codes, pixels = count_values(codes[truth != IGNORE_INDEX])
        return _Counts(codes, pixels, boundary_counts(truth, predicted, num_classes) if self.boundary else None)

    def _counts_of(self, image_id: Any) -> _Counts:
        """Return the counts of an image; all its pixels are missed if it has no prediction."""
        if image_id in self.stored_predictions:
            return self.stored_predictions[image_id].counts
        truth = self.dataset.load_semantic(self._position_of[image_id])
        return self._counts(truth, np.full_like(truth, IGNORE_INDEX))

    def confusion_matrix(self) -> np.ndarray:
        """Return (C, C + 1) int64 pixel counts: rows are true classes, columns predicted ones, the last none."""
        num_classes = len(self.dataset.classes)
        flat = np.zeros(num_classes * (num_classes + 1), np.int64)
        for counts in map(self._counts_of, self._position_of):
            flat[counts.codes] += counts.pixels
        return flat.reshape(num_classes, num_classes + 1)

    def read_predicted_map(self, image_id: Any) -> np.ndarray:
        """Return the (H, W) uint8 predicted labels; `IGNORE_INDEX` everywhere if the image has no prediction."""
        if image_id not in self.stored_predictions:
            return np.full_like(self.dataset.load_semantic(self._position_of[image_id]), IGNORE_INDEX)
        label_of = np.full(1 << 16, IGNORE_INDEX, np.uint8)
        label_of[self._raw] = np.arange(len(self._raw))
        return label_of[decode_labels(self.stored_predictions[image_id].png)]

    def statistics(self) -> SemanticStatistics:
        ids, num_classes = list(self._position_of), len(self.dataset.classes)
        regions = np.zeros((len(ids), 3, num_classes))
        boundaries = np.zeros((len(ids), 3, num_classes)) if self.boundary else None
        for k, counts in enumerate(map(self._counts_of, ids)):
            flat = np.bincount(counts.codes, counts.pixels, minlength=num_classes * (num_classes + 1))
            matrix = flat.reshape(num_classes, num_classes + 1)
            regions[k] = matrix.diagonal(), matrix[:, :-1].sum(axis=0), matrix.sum(axis=1)
            if boundaries is not None:
                boundaries[k] = counts.boundaries
        return SemanticStatistics(ids, self.dataset.classes, *regions.transpose(1, 0, 2), boundaries)

    def _table_lines(self) -> list[str]:
        """Return the means in percent, and a line for each class if there are few."""
        columns = {column: mean for column, mean in _MEANS.items() if mean in self.metrics}
        width = max(len("all classes"), *map(len, self.dataset.classes))
        lines = [f"{'class':<{width}} " + " ".join(f"{column:>12}" for column in columns)]
        named = self.dataset.classes if len(self.dataset.classes) <= _MAX_NAMED else ()
        for name in named:
            values = (self._by_class[name][column] for column in columns)
            lines.append(f"{name:<{width}} " + " ".join(f"{_percent(value):>12}" for value in values))
        means = (self.metrics[mean] for mean in columns.values())
        lines.append(f"{'all classes':<{width}} " + " ".join(f"{_percent(value):>12}" for value in means))
        accuracy = _percent(self.metrics["pixel_accuracy"])
        lines.append(f"pixel accuracy {accuracy} % of {len(self.dataset.image_ids)} images")
        return lines

    def write_results(self, path: str | Path) -> list[Path]:
        """Write the metrics of the last `compute()` as JSON, and the predictions as PNG files of raw category ids.

        Returns:
            the file `path`, and the folder of the PNG files: NAME for NAME.json.
        """
        path = Path(path)
        folder = make_map_folder(path)
        for image_id, prediction in self.stored_predictions.items():
            write_bytes(folder / map_name(image_id), prediction.png, below=folder)
        classes = [
            {"id": raw, "name": name, **self._by_class.get(name, {})}
            for raw, name in zip(self._raw.tolist(), self.dataset.classes)
        ]
        write_text(path, json.dumps({**self.metrics, "classes": classes}))
        return [path, folder]

    def load_results(self, path: str | Path) -> None:
        """Read predictions that were written earlier, in place of `update`.

        Args:
            path: the folder of the PNG files, or the results file that they belong to.
        Raises:
            DataError: there is no prediction, or one is invalid.
        """
        path = Path(path)
        folder = path if path.is_dir() else map_folder(path)
        label_of = {raw: label for label, raw in enumerate(self._raw.tolist())}
        table = np.full(1 << 16, len(label_of), np.int64)
        table[list(label_of)] = list(label_of.values())
        max_pixels = self.dataset.max_image_pixels or MAX_PIXELS
        for image_id in self._position_of:
            path = folder / map_name(image_id)
            if not path.is_file():
                continue
            raw = read_label_map(path, "results", max_pixels=max_pixels)
            labels = table[raw]
            if labels.max() == len(label_of):
                values, counts = count_values(raw[labels == len(label_of)])
                raise DataError(
                    f"results '{path}': value {values[0]} at {counts[0]} pixels is not a category id of the dataset "
                    f"({len(label_of)} classes, {self._raw.min()} to {self._raw.max()})."
                )
            self._add(image_id, labels)
        if not self.stored_predictions:
            example = folder / map_name(next(iter(self._position_of)))
            raise DataError(
                f"results: '{folder}' has no prediction for any of {len(self._position_of)} images; expected PNG of "
                f"category ids, such as '{example}'."
            )


def _percent(value: float) -> str:
    return "-" if value < 0 else f"{100 * value:.2f}"
