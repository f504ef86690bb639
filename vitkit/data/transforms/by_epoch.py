"""Transforms that change between epochs."""

from bisect import bisect_right
from collections.abc import Sequence

from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
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
    Raises:
        ConfigError: the numbers do not fit each other, they do not ascend, or transforms mix batches.
    """

    def __init__(self, *, transforms: Sequence[Spec], until_epochs: Sequence[int]):
        ascending = all(a < b for a, b in zip([0, *until_epochs], until_epochs))
        if len(until_epochs) != len(transforms) - 1 or not ascending:
            raise ConfigError(
                f"TransformsByEpoch: until_epochs is {list(until_epochs)} for {len(transforms)} transforms; expected "
                "the ends of all but the last of them, above 0 and ascending."
            )
        self.stages: list[Transforms] = [TRANSFORMS.build(spec) for spec in transforms]
        self.until_epochs = list(until_epochs)
        for stage in self.stages:
            if isinstance(stage, TransformsByEpoch) or hasattr(stage, "for_batches"):
                raise ConfigError(
                    f"TransformsByEpoch: transforms has {type(stage).__name__}, which cannot change between epochs."
                )

    def at(self, epoch: int) -> Transforms:
        """Return the transforms of an epoch."""
        return self.stages[bisect_right(self.until_epochs, epoch)]

    def __call__(self, sample: AnnotatedImage, *, seed: int | None = None) -> AnnotatedImage:
        """Raise an error: only a dataset knows the epoch."""
        raise ConfigError("TransformsByEpoch: is for the transforms of a dataset itself, and not inside others.")
