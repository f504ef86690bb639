"""The interface of criteria: the losses of a batch."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor, nn


class Criterion(nn.Module):
    """Base of the criteria in CRITERIA: `criterion(outputs, targets)` returns the weighted losses of a batch.

    `forward` takes the model's outputs and a target for each sample. It returns name -> loss; the sum of the losses is
    minimized. The names are the same whatever the targets, even without any.
    """

    class_activation: Literal["softmax", "sigmoid"] | None = None
    """The kind of class logits that it is for, see `Model`; None: any."""
    meters: Mapping[str, Any] = MappingProxyType({})
    """Measured quantities other than losses: name -> `vitkit.distributed.RatioMeter`."""
    training_only: bool = False
    """Whether it reads what its model returns only in training mode; evaluations then have no loss."""
    needs_outputs: Sequence[str] = ()
    """The fields of the model's outputs that it always reads, checked on the first batch, before training, unless it is
    `training_only`."""
    needs_targets: Sequence[str] = ()
    """The fields of each target that it always reads, checked likewise."""
    epoch: int = 0
    """The epoch of the training, counted from 0; a run sets it."""
    step_share: Tensor | None = None
    """In a run with `train.images_per_step`, (k,): the normalizers of `count`, averaged over the step's batches,
    divided by those of this batch."""

    def count(self, targets: Sequence[Mapping[str, Any]]) -> float | tuple[float, ...]:
        """Return the normalizer of the losses, such as the number of objects; or k, the last that of class losses."""
        return len(targets)

    def late_changes(self) -> Sequence[tuple[str, nn.Module, int]]:
        """Return its parts that compute something else from an epoch on: name, module, and that epoch, counted from 0.

        A run that ends before warns.
        """
        return ()
