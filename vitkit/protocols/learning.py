"""The interfaces of models that learn from another network, and of hooks, by which a method takes part in a run."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from torch import nn

from vitkit.structures import Batch


@runtime_checkable
class LearnsFromTeacher(Protocol):
    """A model that in training learns from a frozen network, which is no part of it; see `vitkit.models.teacher`."""

    teacher: str | Mapping[str, Any] | None
    """The config's teacher, see `vitkit.weights.teachers.find_teacher`; None if a module was given."""

    def build_teacher(self, backbone: Mapping[str, Any]) -> nn.Module:
        """Return the teacher network, with random weights: the backbone, or a model of it."""

    def take_teacher(self, network: nn.Module) -> None:
        """Learn from this network, whose weights are loaded."""

    def teacher_key(self) -> int | None:
        """Return a fingerprint of the network's weights, which checkpoints have; None if there is no network."""

    def measure_teacher(self, batches: Iterable[Batch]) -> None:
        """Measure the teacher's statistics that training needs on some training batches of each rank before a run."""


class Hook:
    """Base of objects that take part in a run besides the steps; methods are called on all ranks unless stated
    otherwise.

    A subclass overrides the methods it needs. Those that return a context enclose a part of the run: write them as
    generators with `@contextmanager` that `yield` at the point where that part runs.

    What needs the gradients of a step registers itself at the optimizer when the training starts:
    `run.optimizer.register_step_pre_hook`. A `run` is a `vitkit.engine.run.TrainRun`, a `step` a
    `vitkit.engine.step.Step`.
    """

    def during_training(self, run: Any) -> AbstractContextManager[None]:
        """Enclose the training, entered after the run is restored; an error that ends the run passes through it."""
        return nullcontext()

    def before_epoch(self, run: Any) -> None:
        """Prepare for the first batch of an epoch, or of the rest of it after resuming."""

    def after_step(self, run: Any, step: Any) -> None:
        """Called after a step that was taken or, if `step.decision.take` is False, skipped."""

    def on_log(self, run: Any, record: Mapping[str, Any]) -> None:
        """Handle a record of log.jsonl; only called on the main process.

        Args:
            record: `kind` is "train", with step, epoch, loss, losses (by name), lr, it_s, data_share and memory_mb; or
                "val", with step, epoch and metrics (by name). Both have minutes and processor_minutes, the training
                time so far.
        """

    def after_epoch(self, run: Any) -> None:
        """Called after an epoch's batches, before its evaluation."""

    def during_evaluation(self, run: Any) -> AbstractContextManager[None]:
        """Enclose an evaluation."""
        return nullcontext()

    def after_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        """Called with the evaluator's metrics; metrics of the training batches are included as train_NAME."""

    def ends_epoch(self, run: Any) -> bool:
        """Return whether the epoch ends after this step and is evaluated, although batches are left; asked after each
        step and epoch. All ranks must agree."""
        return False

    def should_end(self, run: Any) -> bool:
        """Return whether the run is complete although epochs are left; asked before each epoch and after its
        evaluation. All ranks must agree."""
        return False
