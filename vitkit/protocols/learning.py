"""What models and criteria provide that learn from another network, or from a teacher of their own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from vitkit.structures import Batch


@runtime_checkable
class LearnsFromTeacher(Protocol):
    """A model that in training learns from a frozen network, which is no part of it; see `vitkit.models.teacher`."""

    teacher: str | Mapping[str, Any] | None
    """The config's teacher, see `vitkit.weights.teachers.find_teacher`; None if a module was given."""

    def build_teacher(self, backbone: Mapping[str, Any]) -> nn.Module:
        """Return the network that is to teach, with random weights: the backbone, or a model of it."""

    def take_teacher(self, network: nn.Module) -> None:
        """Learn from this network, whose weights are loaded."""

    def teacher_key(self) -> int | None:
        """Return a fingerprint of the network's weights, which checkpoints have; None if there is no network."""

    def measure_teacher(self, batches: Iterable[Batch]) -> None:
        """Measure what training needs to know of the teacher, on some training batches of each rank before a run."""


@runtime_checkable
class LearnsFromItself(Protocol):
    """A model with a student, which is trained, and a teacher, which follows it and is what the run is for."""

    student_backbone: str
    """The name of the backbone that the optimizer changes; `backbone` is the teacher's."""

    def update_teacher(self, momentum: float) -> None:
        """Move the teacher's parameters towards the student's: by 1 - momentum."""

    def last_layer(self) -> Sequence[nn.Parameter]:
        """Return the parameters of the student's last layer, which is frozen at first."""


@runtime_checkable
class CentersTeacher(Protocol):
    """A criterion that compares a student with its teacher, whose outputs it centers and sharpens."""

    teacher_temperature: float | None
    """Temperature of the teacher's softmax, set before each epoch; None: nothing has set it."""

    def update_center(self, center: Tensor, *, step_taken: bool = True) -> None:
        """Move the center, in place, towards the mean of the teacher's outputs since the last call, if the optimizer
        took the step."""
