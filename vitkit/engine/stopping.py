"""Ending a run early without losing any of it: SIGTERM, as schedulers send, and SIGINT, as ctrl-C does."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vitkit.distributed import is_main

# torchrun passes ctrl-C on to processes that the terminal has told already.
_SAME_REQUEST_SECONDS = 1.0


class Stopped(SystemExit):
    """A run has saved its state and ends, as a signal asked it to.

    The exit status is 128 + the signal's number, 143 for SIGTERM and 130 for SIGINT, as shells have it: 0 would tell
    a scheduler that the run is complete, and 1 that it failed.
    """

    def __init__(self, number: signal.Signals):
        super().__init__(128 + number)
        self.signal = number


class StopSignals:
    """While it is entered, SIGTERM and SIGINT are requests to stop; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._interrupts = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        # Python delivers signals to the main thread alone, and lets no other one set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def interrupting(self, enabled: bool = True) -> Iterator[None]:
        """Within it a request does not wait for the end of a step.

        Raises:
            Stopped: at the request, or at once if there was one.
        """
        self._interrupts = enabled
        try:
            if enabled and self.received is not None:
                raise Stopped(self.received)
            yield
        finally:
            self._interrupts = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number), now
            if is_main():
                # Whatever is being printed when the signal comes, this may not wait for it.
                os.write(2, f"{self.received.name}: ending after this step, with a checkpoint\n".encode())
        elif number == signal.SIGINT and now - self._since > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self._interrupts:
            self._interrupts = False
            raise Stopped(self.received)
