"""Several evaluators at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError
from vitkit.registry import EVALUATORS, Spec


@EVALUATORS.register
class CombinedEvaluator:
    """Several evaluators of the same predictions, such as PQ, mask AP and mIoU of one panoptic model.

    Args:
        dataset: the evaluated dataset, of which each asks what it needs.
        evaluator: a list of their specs; `per_class` is the first's.
    Raises:
        ConfigError: the list is empty.
    """

    def __init__(self, dataset: Any, *, evaluator: Sequence[Spec]):
        if not evaluator:
            raise ConfigError("CombinedEvaluator: evaluator is empty; expected a list of evaluators.")
        self.evaluators = [EVALUATORS.build(spec, dataset=dataset) for spec in evaluator]
        self.per_class_metric = getattr(self.evaluators[0], "per_class_metric", "AP")

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch: what all of them need."""
        for evaluator in self.evaluators:
            evaluator.update(predictions, targets)

    def gather(self) -> None:
        """Brings all ranks' batches to the main process."""
        for evaluator in self.evaluators:
            evaluator.gather()

    def compute(self) -> dict[str, float]:
        """All metrics, on the main process; an empty dict elsewhere."""
        return {name: value for evaluator in self.evaluators for name, value in evaluator.compute().items()}

    def table(self) -> str:
        """The tables one below the other; empty on other processes."""
        return "\n\n".join(filter(None, (evaluator.table() for evaluator in self.evaluators)))

    def per_class(self) -> dict[str, float]:
        """Of the first evaluator."""
        return self.evaluators[0].per_class()

    def write_results(self, path: str | Path) -> list[Path]:
        """Writes what each of them writes: the first to `path`, the others to NAME_EVALUATOR.json beside it
        (NAME_EVALUATOR2.json and so on, if there are several of a kind)."""
        written = []
        for evaluator, own in zip(self.evaluators, self._paths(path)):
            written += evaluator.write_results(own) or [own]
        return written

    def load_results(self, path: str | Path) -> None:
        """Takes predictions that `write_results` wrote before, in place of `update`.

        Raises:
            DataError: a file is missing or wrong.
        """
        for evaluator, own in zip(self.evaluators, self._paths(path)):
            evaluator.load_results(own)

    def _paths(self, path: str | Path) -> list[Path]:
        path = Path(path)
        names = [type(evaluator).__name__ for evaluator in self.evaluators]
        # Of several of a kind the later ones are numbered.
        numbers = [names[1:k].count(name) + 1 for k, name in enumerate(names)]
        suffixes = [f"{name}{number if number > 1 else ''}" for name, number in zip(names, numbers)]
        return [path, *(path.with_name(f"{path.stem}_{suffix}.json") for suffix in suffixes[1:])]
