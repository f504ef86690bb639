"""Watch what a case does to files, and run tools in its process.

A case's folder holds `data`, its input, and while it is checked `victim`, files that nobody may touch, `out`, where
tools write, and `tmp`.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fuzz.formats import OPTIONS
from fuzz.isolation import CodeError, OutsideError
from fuzz.world import read_json

from vitkit.errors import VitkitError

VICTIM = "@VICTIM@"
"""In the files of a case, the path of the folder that nobody may touch."""
MARKER = "marker"
"""The file that code in an input would write, in the folder of the case."""
SCRIPT = "<script>fuzz"
"""Text that must never be part of a page as it is."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {f"os.{name}": 1 for name in ("remove", "mkdir", "rmdir", "truncate", "chmod", "utime")} | {"os.rename": 2}
"""Event -> number of its first arguments that are paths which it changes."""
_PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "pty.spawn")
_SECRETS = ("/etc/passwd", "/dev/zero", "/dev/random", "/dev/urandom", "/proc/self/environ")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class RefusedError(VitkitError):
    """A tool ended with a message instead of a result."""


class Watch:
    """What a process does to files, from audit events."""

    def __init__(self, folder: Path):
        self.folder = os.path.realpath(folder)
        self.written = [f"{self.folder}/{name}" for name in ("out", "tmp")] + ["/dev/null", "/dev/shm", "/proc/self"]
        self.active = False
        self.outside: list[str] = []
        self.processes: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if not self.active:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, str | bytes):
                self._touch(event, path, changes=bool(flags & _WRITES))
        elif event in _CHANGES:
            for path in args[: _CHANGES[event]]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._touch(event, _absolute(event, os.fspath(path), args), changes=True)
        elif event in ("os.link", "os.symlink"):
            self._touch(event, os.fspath(args[1]), changes=True)
            self._touch(event, os.fspath(args[0]), changes=False)
        elif event in _PROCESSES:
            self.processes.append(f"{event} {args[0]!r:.200}")

    def _touch(self, event: str, path: str | bytes, *, changes: bool) -> None:
        if len(path) > os.pathconf("/", "PC_PATH_MAX"):  # no file has such a path, and resolving it takes minutes
            return
        try:
            real = os.path.realpath(os.fsdecode(path))
        except ValueError:  # a NUL in it, which no file has
            return
        if changes and not any(real == root or real.startswith(f"{root}/") for root in self.written):
            self.outside.append(f"{event} changes {real}")
        elif real.startswith(f"{self.folder}/victim/") or real in _SECRETS:
            self.outside.append(f"{event} reads {real}")


def _absolute(event: str, path: str | bytes, args: tuple) -> str | bytes:
    """Return a path that is relative to an open folder, as when a tree is removed, as an absolute one."""
    if event in ("os.remove", "os.rmdir") and args[1] >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), os.fsdecode(path))
    return path


@contextmanager
def guarded(folder: Path, world: Path, *, connects: bool = False) -> Iterator[dict]:
    """Complete a case's files, and check afterwards that nothing outside its output was touched; yield its options.

    Args:
        connects: whether connections are part of the case.

    Raises:
        CodeError: code of the input ran.
        OutsideError: a file was touched.
    """
    options = read_json(folder / OPTIONS)
    for name in ("victim", "out", "tmp", "data"):
        (folder / name).mkdir(exist_ok=True)
    for k, name in enumerate(options.get("image_files", ())):
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            shutil.copy(world / "images" / f"{k % 3}.jpg", path)
    for path in (folder / "data").rglob("*"):
        if path.is_file() and VICTIM.encode() in (data := path.read_bytes()):
            path.write_bytes(data.replace(VICTIM.encode(), os.fsencode(folder / "victim")))
    shutil.copy(world / "images" / "0.jpg", folder / "victim" / "secret.jpg")
    (folder / "victim" / "secret.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    before = _contents(folder)
    tempfile.tempdir = str(folder / "tmp")
    os.environ |= {"TMPDIR": str(folder / "tmp"), "XDG_CONFIG_HOME": str(folder / "tmp"), "NO_COLOR": "1"}
    sys.dont_write_bytecode = True
    watch = Watch(folder)
    watch.active = True
    try:
        yield options
    finally:
        watch.active = False
        after = _contents(folder)
        if "victim/marker" in after or "marker" in after:
            raise CodeError("code in the input wrote its marker")
        started = [event for event in watch.processes if not (connects and event.startswith("socket"))]
        if started:
            raise CodeError(started[0])
        if changed := [name for name in before | after if before.get(name) != after.get(name)]:
            raise OutsideError(f"changed: {changed[:3]}")
        if watch.outside:
            raise OutsideError(watch.outside[0])


def _contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file in the case's folder that no tool may change."""
    paths = (path for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in ("out", "tmp"))
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.is_file()
    }


def run_tool(main: Callable[[list[str]], object], arguments: Sequence[str]) -> str:
    """Run a tool, and return what it printed.

    Raises:
        RefusedError: it ended with a message.
    """
    printed, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaint):
            main(list(arguments))
    except SystemExit as end:
        if end.code not in (None, 0):
            last = complaint.getvalue().strip().splitlines()
            raise RefusedError(end.code if isinstance(end.code, str) else last[-1] if last else "no message") from end
    text = printed.getvalue()
    assert not _CONTROL.search(text), f"control characters on the terminal: {_CONTROL.search(text)} in {text[:500]!r}"
    return text


def check_pages(folder: Path) -> None:
    """Check that no page in a folder contains markup of the input."""
    for path in folder.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert SCRIPT not in text and "<img src=x onerror" not in text, f"{path.name} contains markup of the input"
