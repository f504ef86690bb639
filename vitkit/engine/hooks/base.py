"""The base of hooks, and the check of a user's own."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vitkit.engine.run import TrainRun
from vitkit.engine.step import Step
from vitkit.errors import ConfigError
from vitkit.registry import nearest

_CALLED = ("before_", "after_", "during_", "on_")
"""How the names of methods begin that a run calls."""
_HOOK = "See class Hook in vitkit/engine/hooks/base.py."


class Hook:
    """Base of objects that take part in a run besides the steps; methods are called on all ranks unless stated
    otherwise.

    A subclass overrides the methods it needs. Those that return a context enclose a part of the run: write them as
    generators with `@contextmanager` that `yield` at the point where that part runs.

    What needs the gradients of a step registers itself at the optimizer when the training starts:
    `run.optimizer.register_step_pre_hook`.
    """

    def during_training(self, run: TrainRun) -> AbstractContextManager[None]:
        """Enclose the training, entered after the run is restored; an error that ends the run passes through it."""
        return nullcontext()

    def before_epoch(self, run: TrainRun) -> None:
        """Prepare for the first batch of an epoch, or of the rest of it after resuming."""

    def after_step(self, run: TrainRun, step: Step) -> None:
        """Called after a step that was taken or, if `step.decision.take` is False, skipped."""

    def on_log(self, run: TrainRun, record: Mapping[str, Any]) -> None:
        """Handle a record of log.jsonl; only called on the main process.

        Args:
            record: `kind` is "train", with step, epoch, loss, losses (by name), lr, it_s, data_share and memory_mb; or
                "val", with step, epoch and metrics (by name). Both have minutes and processor_minutes, the training
                time so far.
        """

    def after_epoch(self, run: TrainRun) -> None:
        """Called after an epoch's batches, before its evaluation."""

    def during_evaluation(self, run: TrainRun) -> AbstractContextManager[None]:
        """Enclose an evaluation."""
        return nullcontext()

    def after_evaluation(self, run: TrainRun, metrics: Mapping[str, float]) -> None:
        """Called with the evaluator's metrics; metrics of the training batches are included as train_NAME."""

    def ends_epoch(self, run: TrainRun) -> bool:
        """Return whether the epoch ends after this step and is evaluated, although batches are left; asked after each
        step and epoch. All ranks must agree."""
        return False

    def should_end(self, run: TrainRun) -> bool:
        """Return whether the run is complete although epochs are left; asked before each epoch and after its
        evaluation. All ranks must agree."""
        return False


def check_hook(hook: Any) -> None:
    """Check that a hook derives from `Hook`, which has its methods, and that each takes the arguments of its calls.

    Raises:
        ConfigError: it does not.
    """
    name = f"hook {type(hook).__name__}"
    if not isinstance(hook, Hook):
        raise ConfigError(f"{name}: does not derive from Hook. Write: class {type(hook).__name__}(Hook). {_HOOK}")
    methods = dict(inspect.getmembers(Hook, inspect.isfunction))
    for method, _ in inspect.getmembers(type(hook), inspect.isfunction):
        if method.startswith(_CALLED) and method not in methods:
            raise ConfigError(f"{name}.{method}: is never called. {nearest(method, methods)} {_HOOK}")
    for method, base in methods.items():
        arguments = list(inspect.signature(base).parameters)[1:]
        try:
            inspect.signature(getattr(hook, method)).bind(*arguments)
        except TypeError as error:
            raise ConfigError(f"{name}.{method}: is called with ({', '.join(arguments)}): {error}. {_HOOK}") from error
