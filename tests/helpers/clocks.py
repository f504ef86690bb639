"""A fake clock, so that what a test asserts about times does not depend on how busy the machine is."""


class Clock:
    """Takes the place of the module `time` in the module under test."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    perf_counter = process_time = monotonic
