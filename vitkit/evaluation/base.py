"""Base of evaluators that store a prediction per sample, gathered from all ranks."""

import logging
import reprlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.distributed import gather_dicts, is_main
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.bootstrap import SampleStatistics
from vitkit.io.json_files import read_json
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.evaluator import Evaluator, require_parts
from vitkit.registry import require_base

logger = logging.getLogger("vitkit")


class SampleEvaluator(Evaluator):
    """Base of evaluators that store what the metrics need of each sample, and compute the metrics at the end.

    `update` stores a prediction for each sample that is not in `stored_predictions` yet: samplers repeat some samples
    to fill the last batch. `_compute` and `_table_lines` see the predictions of all ranks. The metrics are those of
    `statistics` if a subclass has no other `_compute`.

    Args:
        dataset: the evaluated dataset.
    """

    def __init__(self, dataset: Dataset):
        require_parts(self, dataset)
        self.dataset = dataset
        self.stored_predictions: dict[Any, Any] = {}
        """What the metrics need of each sample, by image id or by a sentence's index."""
        self.metrics: dict[str, float] = {}
        """Results of the last `compute()`; empty on other ranks."""
        self._by_class: dict[str, dict[str, float]] = {}
        """Class name -> metrics of the last `compute()`, where the evaluator has any."""

    @abstractmethod
    def _table_lines(self) -> list[str]: ...

    def gather(self) -> None:
        """Move the predictions of all ranks to the main process, sorted; samples of several ranks are kept once."""
        merged = gather_dicts(self.stored_predictions)
        if is_main():
            self.stored_predictions = {key: merged[key] for key in sorted(merged)}

    def compute(self) -> dict[str, float]:
        if not is_main():
            return {}
        self.metrics = self._compute()
        if missing := [name for name in self.extra_metrics if name not in self.metrics]:
            raise ConfigError(
                f"{type(self).__name__} declares extra_metrics {', '.join(map(repr, missing))}, which its _compute "
                "does not return."
            )
        return dict(self.metrics)

    def _compute(self) -> dict[str, float]:
        count = len(self.dataset.sample_ids())
        if missing := count - len(self.stored_predictions):
            logger.warning("%d of %d %s have no prediction and count as missed", missing, count, self.dataset.noun)
        return self._metrics_of(self.statistics())

    def _metrics_of(self, statistics: SampleStatistics) -> dict[str, float]:
        """Return the metrics of all samples, and set `_by_class`; -1 where there is no data for a metric."""
        overall, by_class = statistics.scores(np.ones((1, len(statistics.sample_ids))))
        self._by_class = {name: _first_values(metrics) for name, metrics in by_class.items()}
        return _first_values(overall)

    def per_class(self) -> dict[str, float]:
        """Return class name -> `per_class_metric` of the last `compute()`, -1 for a class without data."""
        return {name: m[self.per_class_metric] for name, m in self._by_class.items() if self.per_class_metric in m}

    def table(self) -> str:
        """Return the metrics of the last `compute()` as lines to print; empty on other processes."""
        if not self.metrics:
            return ""
        extra = (f"{name} {self.metrics[name]:.4g}" for name in self.extra_metrics)
        return "\n".join([*self._table_lines(), *extra])


def _first_values(metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: -1.0 if np.isnan(values[0]) else float(values[0]) for name, values in metrics.items()}


def get_predicted_field(prediction: Mapping[str, Any], field: str, evaluator: str) -> Any:
    """Return a field of a prediction.

    Raises:
        ConfigError: the model's predictions do not have the field.
    """
    if field not in prediction:
        raise ConfigError(
            f"evaluator {evaluator} needs {field!r}, but the model predicts {', '.join(prediction)}. Set model.tasks, "
            "or choose another evaluator."
        )
    return prediction[field]


def require_annotations(dataset: Dataset, kind: str, evaluator: str) -> None:
    """Check that a dataset has the annotations that an evaluator needs.

    Args:
        kind: one of `Dataset.annotations`.
    Raises:
        ConfigError: it does not have them, or does not derive from `Dataset`.
    """
    require_base("dataset", type(dataset), Dataset)
    if kind not in dataset.annotations:
        raise ConfigError(
            f"evaluator {evaluator}: needs {kind!r} annotations, and dataset {type(dataset).__name__} has "
            f"{', '.join(map(repr, dataset.annotations)) or 'none'}. Choose the evaluator of the dataset's task."
        )


def read_results(path: str | Path) -> Any:
    """Return the content of a results file.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    return read_json(path, key="results", remedy="Give the file that vitkit test wrote.")


def check_image_ids(results: Iterable[Any], dataset: Iterable[Any], name: str) -> None:
    """Check that results are for a dataset's images.

    Raises:
        DataError: some are not; the error says how many match.
    """
    theirs = {x for x in results if type(x) in (int, str)}
    ours = {int(x) if isinstance(x, np.integer | Tensor) else x for x in dataset}
    matching = len(theirs & ours)
    if matching < len(theirs):
        raise DataError(
            f"results '{name}': {matching} of their {len(theirs)} images are among the {len(ours)} of the data, not "
            f"{reprlib.repr(min(theirs - ours, key=str))}. Pass results for the same images."
        )
