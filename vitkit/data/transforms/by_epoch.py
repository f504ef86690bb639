"""Transforms that change between epochs."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf

from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms, TransformsBatches
from vitkit.errors import ConfigError
from vitkit.registry import TRANSFORMS, Spec


@TRANSFORMS.register
class TransformsByEpoch:
    """Different transforms in different epochs, such as strong ones that stop before a run's last epochs.

    A dataset of images applies those of the epoch that is being loaded, see `Dataset.set_epoch`; the first ones if it
    was told none. It is the outermost of a dataset's transforms.

    Args:
        transforms: the specs, in the order of the epochs.
        until_epochs: the epoch, counted from 0, at which each of them but the last ends.
        until_shares: the same as fractions of the run's epochs, which they then follow; one of the two is set.
    Raises:
        ConfigError: both or neither of the two are set, the numbers do not fit each other, they do not ascend, or
            transforms mix batches.
    """

    def __init__(
        self,
        *,
        transforms: Sequence[Spec],
        until_epochs: Sequence[int] | None = None,
        until_shares: Sequence[float] | None = None,
    ):
        if (until_epochs is None) == (until_shares is None):
            raise ConfigError(
                f"TransformsByEpoch: got until_epochs={until_epochs} and until_shares={until_shares}; expected one of "
                "them."
            )
        if until_shares is None:
            name, ends, limit, limits = "until_epochs", list(until_epochs), inf, "above 0"
        else:
            name, ends, limit, limits = "until_shares", list(until_shares), 1, "between 0 and 1"
        if len(ends) != len(transforms) - 1 or not all(a < b for a, b in pairwise([0, *ends, limit])):
            raise ConfigError(
                f"TransformsByEpoch: {name} is {ends} for {len(transforms)} transforms; expected the ends of all but "
                f"the last of them, {limits} and ascending."
            )
        self.stages: list[Transforms] = [TRANSFORMS.build(spec) for spec in transforms]
        self.ends, self.are_shares = ends, until_shares is not None
        for stage in self.stages:
            if isinstance(stage, TransformsByEpoch | TransformsBatches):
                raise ConfigError(
                    f"TransformsByEpoch: transforms has {type(stage).__name__}, which cannot change between epochs."
                )

    def at(self, epoch: int, num_epochs: int | None = None) -> Transforms:
        """Return the transforms of an epoch, in a run of so many; the first ones if shares are of an unknown number."""
        if self.are_shares:
            return self.stages[0 if num_epochs is None else bisect_right(self.ends, epoch / num_epochs)]
        return self.stages[bisect_right(self.ends, epoch)]

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Raise an error: only a dataset knows the epoch."""
        raise ConfigError("TransformsByEpoch: is for the transforms of a dataset itself, and not inside others.")
