"""Run a case of broken input in a separate process, so that hangs, crashes and excessive memory count as failures."""

import faulthandler
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vitkit.errors import VitkitError

SECONDS = 20
"""A case with more processor time, or with four times as much wall time, counts as a hang. Most take milliseconds."""
MEMORY = 3 << 30
"""Bytes that a case may map in addition to those of its parent."""
LONGEST_MESSAGE = 6000
LONGEST_SENT = 1 << 16


class Outcome(NamedTuple):
    """How a case ended."""

    kind: str
    """"accepted": all checks of its result passed; "error": it ended in one of vitkit's errors; otherwise "failure",
    "hang" or "crash"."""
    message: str

    @property
    def ended_well(self) -> bool:
        return self.kind in ("accepted", "error")


def run_isolated(case: Callable[[Path], None], folder: Path, error: type[VitkitError]) -> Outcome:
    """Run a case in a fork of this process, with limits of time and memory.

    A fork has everything imported already, so that a case costs about ten milliseconds.

    Args:
        case: reads the files in `folder`, and checks the result if they are accepted.
        folder: the case's working directory.
        error: the error with which it may be refused.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        _run_in_child(case, folder, error, sender)
    os.close(sender)
    sent = _read_until(receiver, time.monotonic() + 4 * SECONDS)
    os.close(receiver)
    if sent is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if sent is None:
        return Outcome("hang", f"longer than {4 * SECONDS} s")
    if not sent:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        name = signal.Signals(number).name if number else f"exit status {os.waitstatus_to_exitcode(status)}"
        return Outcome("hang" if number == signal.SIGXCPU else "crash", name)
    kind, _, message = sent.decode(errors="replace").partition("\n")
    return Outcome(kind, message)


def _read_until(receiver: int, deadline: float) -> bytes | None:
    """Return what a child sends until it ends; None if it has not ended by the deadline."""
    sent = b""
    while True:
        ready, _, _ = select.select([receiver], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(receiver, LONGEST_SENT)
        if not part:
            return sent
        sent += part


def _run_in_child(case: Callable[[Path], None], folder: Path, error: type[VitkitError], sender: int) -> None:
    try:
        _limit()
        os.chdir(folder)
        try:
            case(folder)
            outcome = Outcome("accepted", "")
        except error as expected:
            outcome = _judge(str(expected))
        except BaseException as other:
            lines = traceback.format_exception(other)
            outcome = Outcome("failure", f"{type(other).__name__}: {str(other)[:300]}\n{''.join(lines[-6:])[-3000:]}")
        os.write(sender, f"{outcome.kind}\n{outcome.message}".encode(errors="backslashreplace")[:LONGEST_SENT])
    finally:
        os._exit(0)


def _judge(message: str) -> Outcome:
    if not message.strip():
        return Outcome("failure", "an error without a message")
    if len(message) > LONGEST_MESSAGE:
        return Outcome("failure", f"a message of {len(message)} characters: {message[:200]}")
    return Outcome("error", message)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, [pages * resource.getpagesize() + MEMORY] * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # otherwise pytest's handler would print a traceback at a crash
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # C libraries print messages
    os.dup2(nowhere, 2)
