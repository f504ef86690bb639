"""The folder of a run: chosen, created and locked in one step, so that no two runs write into the same folder."""

import datetime
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitkit.distributed import broadcast_object, is_main
from vitkit.engine.checkpoints import CONFIG_NAME, LAST_NAME, newest_checkpoint
from vitkit.engine.resume import Launch, repeated_run
from vitkit.errors import ConfigError
from vitkit.logging import LOG_NAME

try:
    import fcntl  # only available on Unix
except ImportError:
    fcntl = None

logger = logging.getLogger("vitkit")
LOCK_NAME = ".lock"
# If a machine is lost, its locks stay on an NFS server until their lease ends, by default within 90 seconds.
_LEASE_SECONDS = 120.0


class FolderLock:
    """A lock on the folder that this process writes a run into, held until `release`.

    It is a POSIX record lock on the folder's file `.lock`. The system releases it when the process ends, even by
    SIGKILL; unlike a `flock` lock, it is not inherited by loading processes, which may outlive the process by seconds;
    and NFS shares it between machines, unless it is mounted with `nolock`.

    Args:
        path: the folder.
        option: the command-line option that named the folder, for error messages.
        is_new: whether the folder was created for this run, so that it is removed if no run begins.
        wait: seconds to wait for another process's lock.
    Raises:
        ConfigError: another process has locked it, or the folder is not writable.
    """

    def __init__(self, path: Path, *, option: str, is_new: bool = False, wait: float = 0.0):
        self.path, self._lock, self._is_new = path, path / LOCK_NAME, is_new
        deadline = time.monotonic() + wait
        while True:
            with writing_into(path, option=option):
                path.mkdir(parents=True, exist_ok=True)
                self._file = self._lock.open("a+", encoding="utf-8")
            try:
                self._acquire(option)
                if self.is_mine():  # a process that ended may have removed it in between
                    return
            except ConfigError:
                if time.monotonic() >= deadline:
                    self._file.close()
                    raise
                time.sleep(0.5)
            self._file.close()

    def _acquire(self, option: str) -> None:
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(
                    "%s cannot be locked here (%s): a second run in this folder would go unnoticed, so start none.",
                    self.path,
                    error.strerror,
                )
                return
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            raise ConfigError(
                f"{option} {self.path}: in use by {owner}. Wait until that run has ended, or end it. If its machine "
                f"is gone and a network file system has kept the lock, remove {self._lock}."
            ) from error
        with suppress(OSError):  # a lock can be held even if the disk is full
            now = datetime.datetime.now().astimezone()
            owner = f"process {os.getpid()} on {socket.gethostname()} since {now:%Y-%m-%d %H:%M:%S %Z}"
            self._file.truncate(0)
            os.write(self._file.fileno(), owner.encode())  # unbuffered, as closing would otherwise try to write again

    def is_mine(self) -> bool:
        """Return whether the folder is still the one that was locked, and not removed or replaced by another."""
        try:
            # Not by opening the file: closing it again would release the lock.
            return os.path.samestat(os.fstat(self._file.fileno()), self._lock.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock; a folder that was created for a run that did not begin is removed."""
        with suppress(OSError):
            if self.is_mine():
                self._lock.unlink()
                if self._is_new:
                    self.path.rmdir()  # fails unless it is empty
        self._file.close()


@dataclass
class RunFolder:
    """The folder of a run, as known to each rank."""

    path: Path
    checkpoint: Path | None
    """The checkpoint to resume from; None to start a new run."""
    lock: FolderLock | None
    """The lock, held by the main process; None on other ranks."""

    def is_mine(self) -> bool:
        """Return whether it is still this run's folder, as far as this rank knows."""
        return self.lock is None or self.lock.is_mine()


@contextmanager
def run_folder(
    launches: Sequence[Launch], *, resume: Path | None, run_dir: Path | None, default: Path
) -> Iterator[RunFolder]:
    """Choose a run's folder, and lock it against other processes until the run ends. All ranks must call it.

    Args:
        launches: launches of all ranks. If they repeat an earlier one, its run is resumed.
        resume: the folder of the run to resume.
        run_dir: the folder of a new run; None for `default`, numbered if it exists.
    Raises:
        ConfigError: there is no run to resume, the new run's folder contains a run, or another process uses it.
    """
    lock = chosen = None
    try:
        if is_main():
            lock, continues = _lock_chosen(launches, resume=resume, run_dir=run_dir, default=default)
            checkpoint = newest_checkpoint(lock.path) if continues else None
            if resume and checkpoint is None:
                raise ConfigError(f"--resume {resume}: none of its checkpoints can be read.")
            if not continues and (lock.path / LOG_NAME).exists():
                raise _holds_a_run(lock.path)
            chosen = lock.path, checkpoint
        path, checkpoint = broadcast_object(chosen)
        yield RunFolder(path, checkpoint, lock)
    finally:
        if lock is not None:
            lock.release()


def _lock_chosen(
    launches: Sequence[Launch], *, resume: Path | None, run_dir: Path | None, default: Path
) -> tuple[FolderLock, bool]:
    """Lock a run's folder; also return whether an existing run there continues."""
    if resume:
        return FolderLock(resume, option="--resume"), True
    repeated = repeated_run(launches, run_dir=run_dir, default=default)
    if repeated is not None and (repeated / CONFIG_NAME).is_file():
        return FolderLock(repeated, option="--run-dir", wait=_LEASE_SECONDS), True
    if run_dir is not None:
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"--run-dir {run_dir}: is a file; expected a folder, or a name that is free.")
        return FolderLock(run_dir, option="--run-dir", is_new=_make(run_dir)), False
    number, path = 1, default
    while not _make(path):
        number += 1
        path = default.with_name(f"{default.name}-{number}")
    return FolderLock(path, option="--run-dir", is_new=True), False


def _make(path: Path) -> bool:
    """Create a folder; return False if it exists. If several processes try, only one succeeds."""
    with writing_into(path):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if os.path.lexists(path):
                return False
            raise
    return True


def _holds_a_run(path: Path) -> ConfigError:
    remedy = f"Resume it with --resume {path}, or choose another folder."
    if newest_checkpoint(path) is None:
        remedy = "It has no checkpoint yet. Remove it, or choose another folder."
    return ConfigError(f"--run-dir {path}: holds a run already. {remedy}")


def check_resumable(run_dir: Path) -> None:
    """Raise an error unless a folder holds a config and a checkpoint.

    Raises:
        ConfigError: one of them is missing.
    """
    missing = [] if (run_dir / CONFIG_NAME).is_file() else [CONFIG_NAME]
    missing += [] if (run_dir / LAST_NAME).is_file() or any(run_dir.glob("step_*.pth")) else [LAST_NAME]
    if missing:
        raise ConfigError(
            f"--resume {run_dir}: holds no run to resume (no {missing[0]}). Give a run's folder; a run that was "
            "stopped before its first checkpoint is started anew, without --resume."
        )


@contextmanager
def writing_into(path: Path, *, option: str = "--run-dir") -> Iterator[None]:
    """Convert an error in writing to the run's folder to one that names the folder.

    Raises:
        ConfigError: the folder cannot be written to, for instance because the disk is read-only or full.
    """
    try:
        yield
    except OSError as error:
        remedy = "Copy the run to another place" if option == "--resume" else "Choose another folder with --run-dir"
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}). {remedy}.") from error
