"""What is wrong with a config's data and settings, found before hours are spent.

Each check takes the case and yields findings; they run in this order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vitkit.doctor.case import Case, Options
from vitkit.doctor.data_checks import (
    annotations,
    class_balance,
    empty_images,
    images,
    same_classes,
    text,
    train_val_leakage,
)
from vitkit.doctor.findings import VERDICTS, Finding, report
from vitkit.doctor.training_checks import (
    learning_rate,
    memory,
    overfit,
    queries,
    sizes_after_resizing,
    step_budget,
    weights,
)
from vitkit.errors import VitkitError

CHECKS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    check.__name__: check
    for check in (
        annotations, images, same_classes, class_balance, empty_images, train_val_leakage, text,
        weights, queries, sizes_after_resizing, step_budget, learning_rate, memory, overfit,
    )
}  # fmt: skip


def diagnose(
    config: Mapping[str, Any], options: Options | None = None, *, checks: Sequence[str] = tuple(CHECKS)
) -> Iterator[Finding]:
    """Looks at a config and its data.

    Args:
        config: as `load_config` returns it; with `data` alone only the data is looked at.
        options: how thorough, and for which machine.
        checks: names from CHECKS.
    """
    case = Case(config, options or Options())
    for name in checks:
        try:
            yield from CHECKS[name](case)
        except VitkitError as error:
            yield Finding(name.replace("_", " "), "fail", str(error))
        except (RuntimeError, MemoryError) as error:  # of the model: shapes that do not fit, no memory left
            yield Finding(name.replace("_", " "), "fail", f"ends with {type(error).__name__}: {error}")


__all__ = ["CHECKS", "VERDICTS", "Case", "Finding", "Options", "diagnose", "report"]
