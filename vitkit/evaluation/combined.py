"""Runs several evaluators at once."""

from collections.abc import Container, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.evaluator import Evaluator
from vitkit.registry import EVALUATORS, Spec
from vitkit.structures import ScoreThresholds


def unused_name(name: str, taken: Container[str]) -> str:
    """Return the name of a further metric: NAME, or else the first of NAME_2, NAME_3, … that is not taken."""
    return next(each for k in count(1) if (each := name if k == 1 else f"{name}_{k}") not in taken)


@EVALUATORS.register
class CombinedEvaluator(Evaluator):
    """Several evaluators of the same predictions, such as PQ, mask AP and mIoU of one panoptic model.

    Args:
        dataset: the evaluated dataset, with what each evaluator requires.
        evaluator: a list of their specs; `per_class` is that of the first. The second metric of a name is NAME_2.
    Raises:
        ConfigError: the list is empty, or only some of them take outputs.
    """

    def __init__(self, dataset: Dataset, *, evaluator: Sequence[Spec]):
        if not evaluator:
            raise ConfigError("CombinedEvaluator: evaluator is empty; expected a list of evaluators.")
        self.dataset = dataset
        self.evaluators = [EVALUATORS.build(spec, dataset=dataset) for spec in evaluator]
        self.per_class_metric = self.evaluators[0].per_class_metric
        self.takes_outputs = self.evaluators[0].takes_outputs
        if any(evaluator.takes_outputs != self.takes_outputs for evaluator in self.evaluators):
            names = ", ".join(type(evaluator).__name__ for evaluator in self.evaluators)
            raise ConfigError(
                f"CombinedEvaluator: of {names}, some read a model's raw outputs, others its predictions. "
                "Evaluate them one after the other."
            )

    @property
    def parts(self) -> Sequence[Evaluator]:
        return self.evaluators

    def check_dataset(self) -> None:
        for evaluator in self.evaluators:
            evaluator.check_dataset()

    def measures(self, metric: str) -> bool:
        """See `Evaluator`; a metric is refused if all that evaluate detections refuse it."""
        answers, refusals = [], []
        for evaluator in self.evaluators:
            try:
                answers.append(evaluator.measures(metric))
            except ConfigError as error:
                refusals.append(error)
        if refusals and len(refusals) == sum(1 for evaluator in self.evaluators if evaluator.iou_types):
            raise refusals[0]
        return all(answers)

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        for evaluator in self.evaluators:
            evaluator.update(predictions, targets)

    def gather(self) -> None:
        for evaluator in self.evaluators:
            evaluator.gather()

    def compute(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for evaluator in self.evaluators:
            metrics |= {unused_name(name, metrics): value for name, value in evaluator.compute().items()}
        return metrics

    def table(self) -> str:
        """Return the evaluators' tables one below the other; empty on other processes."""
        return "\n\n".join(filter(None, (evaluator.table() for evaluator in self.evaluators)))

    def per_class(self) -> dict[str, float]:
        return self.evaluators[0].per_class()

    def score_thresholds(self) -> ScoreThresholds | None:
        """Return the thresholds of the first evaluator that has any; see `CocoEvaluator`."""
        per_evaluator = (evaluator.score_thresholds() for evaluator in self.evaluators)
        return next((thresholds for thresholds in per_evaluator if thresholds is not None), None)

    def write_results(self, path: str | Path) -> list[Path]:
        """Write each evaluator's results.

        Returns:
            the files: the first's `path`, the others' NAME_EVALUATOR.json beside it (NAME_EVALUATOR2.json and so on, if
            there are several of a kind), and any other files that the evaluators write.
        """
        written = []
        for evaluator, file in zip(self.evaluators, self.files_of_parts(path)):
            written += evaluator.write_results(file) or [file]
        return written

    def load_results(self, path: str | Path) -> None:
        """Read predictions that `write_results` wrote earlier, in place of `update`.

        Raises:
            DataError: a file is missing or invalid.
        """
        for evaluator, file in zip(self.evaluators, self.files_of_parts(path)):
            evaluator.load_results(file)

    def files_of_parts(self, path: str | Path) -> list[Path]:
        """Return the results file of each evaluator, see `write_results`."""
        path = Path(path)
        names = [type(evaluator).__name__ for evaluator in self.evaluators]
        # The second and later evaluators of a kind are numbered.
        numbers = [names[1:k].count(name) + 1 for k, name in enumerate(names)]
        suffixes = [f"{name}{number if number > 1 else ''}" for name, number in zip(names, numbers)]
        return [path, *(path.with_name(f"{path.stem}_{suffix}.json") for suffix in suffixes[1:])]
