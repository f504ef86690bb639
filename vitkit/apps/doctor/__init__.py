"""Checks a config's data and settings before hours are spent on a run."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitkit.apps.doctor import data_checks, training_checks
from vitkit.apps.doctor.doctor_input import DoctorCase, DoctorOptions
from vitkit.apps.doctor.issues import VERDICTS, Issue, report
from vitkit.config import load_config
from vitkit.config.names import is_installed_name
from vitkit.devices import default_device
from vitkit.engine.settings import require
from vitkit.errors import ConfigError, VitkitError
from vitkit.registry import nearest
from vitkit.weights.locate import RUN_CONFIG

logger = logging.getLogger("vitkit.apps.doctor")
CHECKS: dict[str, Callable[[DoctorCase], Iterator[Issue]]] = {
    check.__name__: check
    for check in (
        data_checks.annotations,
        data_checks.images,
        data_checks.same_classes,
        data_checks.class_balance,
        data_checks.empty_images,
        data_checks.train_val_leakage,
        data_checks.flips,
        data_checks.text,
        training_checks.weights,
        training_checks.queries,
        training_checks.detections,
        training_checks.sizes_after_resizing,
        training_checks.random_evaluation,
        training_checks.step_budget,
        training_checks.learning_rate,
        training_checks.parameter_names,
        training_checks.precision,
        training_checks.memory,
        training_checks.overfit,
    )
}
"""All checks by name, in the order in which they run."""


def diagnose(
    config: str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    init: str | Path | None = None,
    gpus: int = 1,
    memory_gib: float | None = None,
    max_images: int = 1000,
    overfit_steps: int = 200,
    overfit_seconds: float = 120.0,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    device: str | None = None,
    trust: bool = False,
) -> list[Issue]:
    """Check a config's data and settings before hours are spent on a run, as `vitkit doctor` does.

    `[issue.message for issue in diagnose("configs/detr_r50.py") if issue.verdict == "fail"]`

    Args:
        config: a config: a file, the name of an installed one, a run's folder, or the result of `load_config`.
        overrides: `key.sub=value` changes to a config that is named.
        init: the weights that the run will start from.
        gpus: number of processes that will train.
        memory_gib: memory of the device that will train, in GiB; None: that of `device`.
        max_images: maximum number of images to load of each dataset.
        overfit_steps, overfit_seconds: limits of the check that overfits a few images.
        only: names from CHECKS; None: all.
        skip: checks to leave out.
        device: such as "cuda" or "cpu"; None: the accelerator that PyTorch finds, otherwise the CPU.
        trust: let saved configs import the code that they name, see `load_config`.
    Returns:
        an issue for each thing that was checked; `report` formats them as text.
    Raises:
        ConfigError: the config cannot be loaded or has no data, or there is no such check.
    """
    for name in (*(only or ()), *skip):
        if name not in CHECKS:
            raise ConfigError(f"no check {name!r}. {nearest(name, CHECKS)}")
    if not isinstance(config, Mapping):
        saved = os.path.join(config, RUN_CONFIG)
        is_run = os.path.isfile(saved) and not is_installed_name(config)
        config = load_config(saved if is_run else config, overrides, trust=trust)
    require(config, "data")
    options = DoctorOptions(
        device=torch.device(device or default_device()),
        gpus=gpus,
        memory_gib=memory_gib,
        init=None if init is None else str(init),
        max_images=max_images,
        overfit_steps=overfit_steps,
        overfit_seconds=overfit_seconds,
    )
    names = CHECKS if only is None else only
    return list(run_checks(config, options, checks=[name for name in names if name not in skip]))


def run_checks(
    config: Mapping[str, Any], options: DoctorOptions | None = None, *, checks: Sequence[str] = tuple(CHECKS)
) -> Iterator[Issue]:
    """Yield the issues that checks find in a config and its data.

    What takes more than a second is logged, at the level INFO of the logger "vitkit.apps.doctor".

    Args:
        config: the result of `load_config`; if it only has `data`, only the data is checked.
        options: how thorough the checks are, and for which machine.
        checks: names from CHECKS.
    """
    with _log_if_slow("reading the annotations"):
        case = DoctorCase(config, options or DoctorOptions())
    if "annotations" not in checks:  # this check reports such errors, and more
        for statistics in case.statistics.values():
            if statistics.dataset is None:
                yield from (issue for issue in statistics.issues if issue.check == "builds")
    for name in checks:
        try:
            with _log_if_slow(f"checking {name.replace('_', ' ')}"):
                yield from CHECKS[name](case)
        except VitkitError as error:
            yield Issue(name.replace("_", " "), "fail", str(error))
        except (RuntimeError, MemoryError) as error:  # from the model: wrong shapes, or no memory left
            yield Issue(name.replace("_", " "), "fail", f"ends with {type(error).__name__}: {error}")


@contextmanager
def _log_if_slow(doing: str) -> Iterator[None]:
    timer = threading.Timer(1.0, logger.info, (doing,))
    timer.daemon = True  # ctrl-C must not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


__all__ = ["CHECKS", "VERDICTS", "DoctorCase", "DoctorOptions", "Issue", "diagnose", "report", "run_checks"]
