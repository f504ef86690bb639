"""Runs that end after a time, to be resumed later."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.distributed import broadcast_object
from vitkit.engine.run import TrainRun
from vitkit.errors import ConfigError
from vitkit.logging import print_line
from vitkit.protocols.learning import Hook


class EndAfter(Hook):
    """End the run after the epoch in which a time is reached; resuming it without this hook trains the other epochs.

    Args:
        minutes: time since the start of training, or since it was resumed.
    Raises:
        ConfigError: the time is not above 0.
    """

    def __init__(self, *, minutes: float):
        if not minutes > 0:
            raise ConfigError(f"EndAfter: minutes={minutes}: expected a value above 0.")
        self.minutes = minutes
        self.is_over = False

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`."""
        self._began, self.is_over = time.monotonic(), False
        yield

    def after_epoch(self, run: TrainRun) -> None:
        """Look at the main process's clock."""
        self.is_over = broadcast_object(time.monotonic() - self._began >= 60 * self.minutes)
        if self.is_over:
            print_line(f"ending with this epoch, as {self.minutes:.3g} minutes have passed")

    def should_end(self, run: TrainRun) -> bool:
        """Return whether the time was reached in an earlier epoch."""
        return self.is_over
