"""The cache folder that all processes of a machine share, its locks, and the checksums by which files are known."""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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


def file_digest(path: Path, algorithm: str) -> str:
    """Return the checksum of a file, in hexadecimal digits, by an algorithm of hashlib."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def hold_lock(path: Path, waiting: str | None = None, *, wait: bool = True) -> Iterator[None]:
    """Let one process of the machine at a time in; the system releases the lock when a process ends, even by SIGKILL.

    Where there are no locks, nothing is held.

    Args:
        path: the lock's file, which is made, and removed if it is empty in the end; whoever holds it may rename it.
        waiting: is logged if another process is in; None: nothing.
        wait: whether another process that is in is waited for.
    Raises:
        BlockingIOError: another process is in, and is not waited for.
    """
    if fcntl is None:
        yield
        return
    while True:
        with path.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                if waiting is not None:
                    logger.info("%s", waiting)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                logger.debug("%s: the file system has no locks (%s)", path, error.strerror)
            if _is_at(lock, path):  # otherwise, whoever held it has removed or renamed it in the meantime
                try:
                    yield
                finally:
                    if _is_at(lock, path) and not path.stat().st_size:
                        path.unlink()
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
