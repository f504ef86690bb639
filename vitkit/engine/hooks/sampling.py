"""Scheduled sampling, which trains a decoder to continue from words that it predicted."""

from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.engine.run import TrainRun
from vitkit.errors import ConfigError
from vitkit.protocols.learning import Hook
from vitkit.registry import HOOKS


@HOOKS.register
class ScheduledSampling(Hook):
    """Increase the fraction of words that a recurrent decoder reads from its own predictions, linearly from epoch to
    epoch (Bengio et al. 2015, section 2.4, https://arxiv.org/abs/1506.03099).

    The model has `set_sampling(fraction)`, which sets that fraction.

    Args:
        end: the fraction in the last epoch; it is zero in the first.
    Raises:
        ConfigError: `end` is out of range.
    """

    def __init__(self, end: float = 0.25):
        if not 0 <= end <= 1:
            raise ConfigError(f"ScheduledSampling: end={end}: expected 0 to 1.")
        self.end = end

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`.

        Raises:
            ConfigError: the model has no recurrent decoder.
        """
        if not hasattr(run.model, "set_sampling"):
            raise ConfigError(f"train.hooks: ScheduledSampling: {type(run.model).__name__} has no recurrent decoder.")
        yield

    def before_epoch(self, run: TrainRun) -> None:
        """Set the fraction for the epoch."""
        run.model.set_sampling(self.end * run.progress.epoch / max(1, run.settings.epochs - 1))
