"""Frozen networks from which models learn, kept out of the models' own parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.models.base import ModelOnBackbone, network_key
from vitkit.registry import Spec
from vitkit.structures import Batch


class FrozenNetwork:
    """Holds a network in evaluation mode without gradients, which does not become a submodule of its owner.

    So the network is in no state dict, optimizer, moving average or synchronization of the module.
    """

    def __init__(self, network: nn.Module):
        self.network = network.eval().requires_grad_(False)
        self.key: int | None = None
        """A fingerprint of the weights, once it was needed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenNetwork":
        """Return the same network, which copies of a model share, such as the average of its weights."""
        return self


class TaughtModel(ModelOnBackbone):
    """Base of models that learn from a frozen network: a run loads its weights each time it is started or resumed.

    Only training needs the network: a trained model is evaluated and exported without it.
    """

    teacher: Spec | None = None
    """The teacher as the config names it; None if the constructor was given a module."""
    frozen_teacher: FrozenNetwork | None = None
    """The teacher with its weights; None before `take_teacher`, as always outside of training runs."""
    teacher_feature: str = ""
    """The name of the teacher's map that is learned, if one is."""

    def set_teacher(self, teacher: Spec | nn.Module) -> None:
        """Take a module, or keep the spec for the run; to be called last in the constructor."""
        if isinstance(teacher, nn.Module):
            self.take_teacher(teacher)
        else:
            self.teacher = teacher

    def build_teacher(self, backbone: Spec) -> nn.Module:
        """See `vitkit.protocols.learning.LearnsFromTeacher`."""
        raise NotImplementedError

    def take_teacher(self, network: nn.Module) -> None:
        """Learn from this network from now on; it is frozen."""
        self.frozen_teacher = FrozenNetwork(network)

    def teacher_key(self) -> int | None:
        """See `vitkit.protocols.learning.LearnsFromTeacher`."""
        frozen = self.frozen_teacher
        if frozen is not None and frozen.key is None:
            frozen.key = network_key(frozen.network, self.teacher_feature)
        return None if frozen is None else frozen.key

    def measure_teacher(self, batches: Iterable[Batch]) -> None:
        """See `vitkit.protocols.learning.LearnsFromTeacher`; nothing is measured by default."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TaughtModel":
        """Move the teacher to the same device as the model."""
        super()._apply(fn, recurse)
        if self.frozen_teacher is not None:
            with torch.no_grad():
                self.frozen_teacher.network._apply(fn)
        return self
