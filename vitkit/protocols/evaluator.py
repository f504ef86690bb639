"""The interface of evaluators: metrics of predictions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError
from vitkit.protocols.dataset import Dataset
from vitkit.structures import ScoreThresholds


def is_measured(value: float | None) -> bool:
    """Return whether a metric has a value: -1, nan, an infinity and None are those of data without what it measures."""
    return value is not None and math.isfinite(value) and value != -1


LOWER_IS_BETTER = ("loss", "nll", "perplexity")
"""The metrics of vitkit's evaluators of which a lower value is better."""


class Evaluator(ABC):
    """Base of the evaluators in EVALUATORS, which are built with `dataset`: computes metrics from predictions."""

    dataset: Dataset
    """The evaluated dataset, which the constructor sets."""
    takes_outputs: bool = False
    """Whether it reads each sample's raw outputs in place of predictions."""
    per_class_metric: str = "AP"
    """The metric that `per_class` returns."""
    lower_is_better: Sequence[str] = ()
    """The metrics of which a lower value is better."""
    extra_metrics: Sequence[str] = ()
    """The metrics that a subclass adds to those of its base in `_compute`: tables, reports and comparisons list them,
    without intervals if the statistics do not have them."""
    needs_dataset: Sequence[str] = ()
    """The attributes and methods of `Dataset` that it reads and that a dataset may lack, checked before training."""

    iou_types: Sequence[str] = ()
    """What IoU of detections it computes: "bbox", "segm" or both; `named_statistics` then has a
    `vitkit.evaluation.detection_statistics.DetectionStatistics` for each, which `vitkit test --thresholds` reads."""
    iou: float = 0.5
    """Smallest IoU of a correct detection, wherever detections are counted at a score threshold."""

    @abstractmethod
    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch."""

    @abstractmethod
    def gather(self) -> None:
        """Gather the batches of all ranks on the main process."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the metrics on the main process, an empty dict elsewhere.

        Where the data have nothing that a metric measures, it is -1 or nan; see `is_measured`.
        """

    @abstractmethod
    def table(self) -> str:
        """Return the metrics as lines to print; to be called after `compute`."""

    @property
    def parts(self) -> Sequence["Evaluator"]:
        """The evaluators that this one consists of; usually only itself."""
        return (self,)

    def check_dataset(self) -> None:
        """Check, before training, that the dataset provides what it needs, by default `needs_dataset`.

        Raises:
            VitkitError: something is missing or wrong.
        """
        require_parts(self, self.dataset)

    def measures(self, metric: str) -> bool:
        """Return, before training, whether the data have anything that a metric measures; True if it is not known."""
        return True

    # All of the following are to be called after `compute`, on the main process.

    def match_at(self, iou: float) -> None:
        """Use another `iou` from now on; the metrics stay as they are."""
        self.iou = iou

    def per_class(self) -> dict[str, float]:
        """Return class name -> metric; {} if there are no metrics by class."""
        return {}

    def details(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return the metrics of detections of each class, and of each range of sizes, with the number of "objects" of
        each."""
        raise ConfigError(f"{type(self).__name__} does not evaluate detections, which have details by class and size.")

    def score_thresholds(self) -> ScoreThresholds | None:
        """Return the best score thresholds for showing predictions; None if there are none."""
        return None

    def statistics(self) -> Any:
        """Return each sample's contribution to the metrics, a `vitkit.evaluation.bootstrap.SampleStatistics`.

        From it, reports and comparisons compute intervals.
        """
        raise ConfigError(
            f"{type(self).__name__} has no per-sample statistics, so its metrics cannot be resampled. Compare "
            "models by another evaluator."
        )

    def named_statistics(self) -> dict[str, Any]:
        """Return the statistics of everything that it evaluates; models are compared on what both have."""
        return {type(self).__name__: self.statistics()}

    def by_length(self) -> list[Any]:
        """Return the metrics of groups of texts by the length of their source, `vitkit.evaluation.text.LengthGroup`."""
        raise ConfigError(f"{type(self).__name__} has no metrics by the length of texts. Choose models that translate.")

    def write_results(self, path: str | Path) -> list[Path] | None:
        """Write the predictions; return the files, or None if `path` is the only one."""
        raise ConfigError(f"{path}: {type(self).__name__} does not write its predictions to files.")

    def load_results(self, path: str | Path) -> None:
        """Load what `write_results` wrote, in place of `update`."""
        raise ConfigError(f"{path}: {type(self).__name__} cannot read predictions from files. Evaluate the checkpoint.")


def require_parts(evaluator: Evaluator, dataset: Dataset) -> None:
    """Check that a dataset has the attributes and methods that an evaluator needs.

    Raises:
        ConfigError: one of them is None, or the method of `Dataset` that only raises an error.
    """
    for name in evaluator.needs_dataset:
        value = getattr(dataset, name, None)
        if value is None or getattr(value, "__func__", value) is getattr(Dataset, name, None):
            part = f"{name}()" if callable(getattr(Dataset, name, None)) else name
            raise ConfigError(
                f"dataset {type(dataset).__name__} has no {part}, which evaluator {type(evaluator).__name__} needs. "
                "See class Dataset in vitkit/protocols/dataset.py."
            )
