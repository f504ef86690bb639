"""The cache folder that all processes of a machine share, and its locks."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl  # only available on Unix
except ImportError:
    fcntl = None

logger = logging.getLogger("vitkit")

PACK = "pack.json"
"""The file that describes a pack, see `vitkit.io.packs`."""
MOUNTED_PACK = os.path.join(".pack", "origin")
"""The file by which a folder is known as one that stands for a pack, see `vitkit.io.packs.mount`."""


def cache_folder() -> Path:
    """Return the cache's folder: $VITKIT_CACHE, or vitkit in the user's cache folder."""
    if folder := os.environ.get("VITKIT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitkit"


@contextmanager
def hold_lock(path: Path, waiting: str | None = None) -> Iterator[None]:
    """Let one process of the machine at a time in; the system releases the lock when a process ends.

    Args:
        path: the lock's file, which is made.
        waiting: is logged if another process is in; None: nothing.
    """
    with path.open("ab") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    logger.info("%s", waiting)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                logger.debug("%s: the file system has no locks (%s)", path, error.strerror)
        yield
