"""Run cases of broken input in separate processes, so that hangs, crashes and excessive memory count as failures."""

import faulthandler
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import vitkit
from vitkit.errors import VitkitError, error_line

try:
    import resource  # only available on Unix
except ImportError:
    resource = None

SECONDS = 20
"""A case with more processor time, or with four times as much wall time, counts as a hang. Most take milliseconds."""
MEMORY = 2 << 30
"""Bytes that a case may map in addition to those of its parent."""
LARGEST_FILE = 256 << 20
"""Bytes of the largest file that a case may write."""
LONGEST_MESSAGE = 6000
KINDS = ("accepted", "error", "traceback", "wrong", "loss", "outside", "code", "memory", "hang", "crash")
"""How a case can end, see `Outcome`."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that would end a line, or that a terminal would obey."""
_NEXT_LINE = re.compile(r"\n(  |Read it)")
"""How the further lines begin of the few messages that list things: unexpected keys, code to be trusted."""
_PACKAGE = str(Path(vitkit.__file__).parent)
_TREE = str(Path(vitkit.__file__).parents[1])


class LostError(AssertionError):
    """Data is missing in the result, and nothing says so."""


class OutsideError(AssertionError):
    """A file outside the case's output folder was read, changed or linked."""


class CodeError(AssertionError):
    """Code from the input ran, or a process or a connection was started for it."""


class Outcome(NamedTuple):
    """How a case ended."""

    kind: str
    """"accepted": all checks of its result passed; "error": it ended in one of vitkit's errors; "traceback": in another
    one, or in a message that is not one line; "wrong": a check of the result failed; "loss", "outside" and "code": see
    the errors above; "memory", "hang" and "crash": it exceeded the limits, or ended the process."""
    message: str

    @property
    def ended_well(self) -> bool:
        return self.kind in ("accepted", "error")


def run_isolated(
    cases: Sequence[Callable[[Path], None]], folders: Sequence[Path], error: type[VitkitError]
) -> list[Outcome]:
    """Run cases in a fork of this process, with limits of time and memory for each.

    A fork has everything imported already, but copying a process of a gigabyte takes longer than most cases. Therefore
    cases share one, and those that follow a case that ended the process have another.

    Args:
        cases: each reads the files in its folder, and checks the result if they are accepted.
        folders: their working directories. Different ones, so that nothing kept under a path can serve another case.
        error: the error with which they may be refused.
    """
    outcomes: list[Outcome] = []
    for folder in folders:
        _answer(folder).unlink(missing_ok=True)
    while rest := folders[len(outcomes) :]:
        child = os.fork()
        if child == 0:
            _run_in_child(cases[len(outcomes) :], rest, error)
        _, status = os.waitpid(child, 0)
        for folder in rest:
            if not _answer(folder).exists():
                outcomes.append(_fatal(status))
                break
            kind, _, message = _answer(folder).read_text("utf-8").partition("\n")
            outcomes.append(Outcome(kind, message))
    return outcomes


def _answer(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.outcome")


def _fatal(status: int) -> Outcome:
    """Return the outcome of a case that ended its process."""
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome("hang" if name in ("SIGALRM", "SIGXCPU", "SIGKILL") else "crash", name)
    return Outcome("crash", f"exit status {os.waitstatus_to_exitcode(status)}")


def _run_in_child(cases: Sequence[Callable[[Path], None]], folders: Sequence[Path], error: type[VitkitError]) -> None:
    try:
        _limit_process()
        for case, folder in zip(cases, folders, strict=True):
            _limit_case()
            os.chdir(folder)
            try:
                case(folder)
                outcome = Outcome("accepted", "")
            except BaseException as raised:
                outcome = judge(raised, error)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _answer(folder).write_text(f"{outcome.kind}\n{outcome.message}", "utf-8", "backslashreplace")
    finally:
        os._exit(0)


def judge(raised: BaseException, expected: type[VitkitError]) -> Outcome:
    """Return the outcome of a case that raised an error, which it may do only if the error is one readable line."""
    if isinstance(raised, expected):
        line = error_line(raised)
        if not str(raised).strip():
            return Outcome("traceback", "an error without a message")
        if len(line) > LONGEST_MESSAGE:
            return Outcome("traceback", f"a message of {len(line)} characters: {line[:200]}")
        if _CONTROL.search(_NEXT_LINE.sub("", line)):
            return Outcome("traceback", f"a message with control characters {innermost(raised)}: {line[:300]!r}")
        return Outcome("error", line)
    if isinstance(raised, MemoryError) or "can't allocate memory" in str(raised):
        kind = "memory"
    else:
        kinds = {LostError: "loss", OutsideError: "outside", CodeError: "code", AssertionError: "wrong"}
        kind = next((kinds[owner] for owner in type(raised).__mro__ if owner in kinds), "traceback")
        if kind == "wrong" and _raised_by_vitkit(raised):
            kind = "traceback"
    lines = traceback.format_exception(raised)
    text = f"{type(raised).__name__}: {str(raised)[:300]} {innermost(raised)}"
    return Outcome(kind, f"{text}\n{''.join(lines[-6:])[-3000:]}")


def innermost(raised: BaseException) -> str:
    """Return the innermost line of vitkit that an error came from, by which failures are grouped."""
    frames = [frame for frame in traceback.extract_tb(raised.__traceback__) if _is_ours(frame.filename)]
    if not frames:
        return "(outside of vitkit)"
    return f"({Path(frames[-1].filename).relative_to(_TREE)}:{frames[-1].lineno} in {frames[-1].name})"


def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, f"{_TREE}/tools", f"{_TREE}/configs", f"{_TREE}/model_zoo"))


def _raised_by_vitkit(raised: BaseException) -> bool:
    frames = traceback.extract_tb(raised.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def _limit_process() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, [LARGEST_FILE] * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # otherwise pytest's handler would print a traceback at a crash
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # C libraries print messages
    os.dup2(nowhere, 2)


def _limit_case() -> None:
    """Limit what the process may use in addition to what it has used."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    seconds = math.ceil(time.process_time() + SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 4 * SECONDS)
    for limit, value in ((resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY), (resource.RLIMIT_CPU, seconds)):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))  # the hard limit could not be raised again
