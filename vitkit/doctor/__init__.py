"""Checks a config's data and settings before hours are spent on a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vitkit.doctor import data_checks, training_checks
from vitkit.doctor.case import Case, Options
from vitkit.doctor.issues import VERDICTS, Issue, report
from vitkit.errors import VitkitError

CHECKS: dict[str, Callable[[Case], Iterator[Issue]]] = {
    check.__name__: check
    for check in (
        data_checks.annotations,
        data_checks.images,
        data_checks.same_classes,
        data_checks.class_balance,
        data_checks.empty_images,
        data_checks.train_val_leakage,
        data_checks.text,
        training_checks.weights,
        training_checks.queries,
        training_checks.detections,
        training_checks.sizes_after_resizing,
        training_checks.random_evaluation,
        training_checks.step_budget,
        training_checks.learning_rate,
        training_checks.precision,
        training_checks.memory,
        training_checks.overfit,
    )
}
"""All checks by name, in the order in which they run."""


def diagnose(
    config: Mapping[str, Any], options: Options | None = None, *, checks: Sequence[str] = tuple(CHECKS)
) -> Iterator[Issue]:
    """Check a config and its data.

    Args:
        config: the result of `load_config`; if it only has `data`, only the data is checked.
        options: how thorough the checks are, and for which machine.
        checks: names from CHECKS.
    """
    case = Case(config, options or Options())
    if "annotations" not in checks:  # this check reports such errors, and more
        for statistics in case.statistics.values():
            if statistics.dataset is None:
                yield from (issue for issue in statistics.issues if issue.check == "builds")
    for name in checks:
        try:
            yield from CHECKS[name](case)
        except VitkitError as error:
            yield Issue(name.replace("_", " "), "fail", str(error))
        except (RuntimeError, MemoryError) as error:  # from the model: wrong shapes, or no memory left
            yield Issue(name.replace("_", " "), "fail", f"ends with {type(error).__name__}: {error}")


__all__ = ["CHECKS", "VERDICTS", "Case", "Issue", "Options", "diagnose", "report"]
