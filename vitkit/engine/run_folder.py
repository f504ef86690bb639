"""The folder of a run: chosen, locked and, if a run is resumed, compared with its saved config; run.json in it records
each start."""

import datetime
import errno
import json
import logging
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitkit import __version__
from vitkit.config.load import cfg_diff, value_at
from vitkit.config.schema import MISSING
from vitkit.devices import describe_processor, device_name
from vitkit.distributed import broadcast_object, is_main, world_size
from vitkit.engine.checkpointing import find_newest_checkpoint
from vitkit.errors import ConfigError
from vitkit.io.atomic import write_atomically
from vitkit.logging import LOG_NAME
from vitkit.weights.locate import LAST_NAME, RUN_CONFIG

try:
    import fcntl  # only available on Unix
except ImportError:
    fcntl = None

logger = logging.getLogger("vitkit")
LOCK_NAME = ".lock"
RECORD_NAME = "run.json"
_LAUNCH_NAME = ".launch"
_TORCHRUN = "torchrun "
_THIS_PROCESS = f"process {uuid.uuid4().hex}"
"""Line in a mark that differs between all processes."""
# If a machine is lost, its locks stay on an NFS server until their lease ends, by default within 90 seconds.
_LEASE_SECONDS = 120.0
# Another process that has locked a folder is waited for so long to name itself; on a full disk it cannot.
_NAMING_SECONDS = 5.0
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "albumentations", "pycocotools")

# Their saved states contain these values: a change would have no effect, or would not fit.
_FIXED = ("optimizer", "schedule", "train.strategy", "train.lora", "data.train.vocabulary", "model.tokenizer")
_WITHOUT_EFFECT_ON_STEPS = (
    "data.val",
    "data.test",
    "data.root",
    "data.num_workers",
    "data.pin_memory",
    "data.val_images_per_gpu",
    "evaluator",
    "train.log_every",
    "train.eval_every",
    "train.best_metric",
    "train.patience",
    "train.save_every_minutes",
    "train.save_every_steps",
    "train.keep_checkpoints",
    "train.sharded_checkpoints",
    "train.activation_checkpointing",
)


class Launch(NamedTuple):
    """The job or command that launched this process."""

    names: frozenset[str]
    """Names that stay the same when the launch is repeated, but differ between launches."""
    is_repeated: bool
    """Whether Slurm (--requeue) reports that the job is running again."""


def current_launch() -> Launch:
    """Return how this process was launched."""
    names = set()
    if "SLURM_JOB_ID" in os.environ:
        names.add(f"slurm {os.environ['SLURM_JOB_ID']} {os.environ.get('SLURM_STEP_ID', '')}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names.add(f"{_TORCHRUN}{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    return Launch(frozenset(names), int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0)


def _attempt() -> str:
    """Return the line in a mark that tells the first run of a Slurm job and those after --requeue apart."""
    return f"attempt {os.environ.get('SLURM_RESTART_COUNT') or 0}"


def mark_launch(run_dir: Path, launches: Sequence[Launch]) -> None:
    """Record in the run's folder which launches started it, so that a repeated launch finds it again."""
    names = sorted(frozenset().union(*(launch.names for launch in launches)))
    if names:
        (run_dir / _LAUNCH_NAME).write_text("\n".join([*names, _THIS_PROCESS, _attempt()]), encoding="utf-8")


def find_repeated_run(launches: Sequence[Launch], *, run_dir: Path | None, default: Path) -> Path | None:
    """Return the folder of the run that these launches started earlier, or None for a new run."""
    names = frozenset().union(*(launch.names for launch in launches))
    is_repeated = any(launch.is_repeated for launch in launches)
    numbered = re.compile(rf"{re.escape(default.name)}(-\d+)?")  # not the runs of a config whose name begins alike
    marked = (mark.parent for mark in default.parent.glob(f"*/{_LAUNCH_NAME}"))
    folders = [folder for folder in marked if numbered.fullmatch(folder.name)]
    for folder in [run_dir] if run_dir else sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
        mark = folder / _LAUNCH_NAME
        lines = set(mark.read_text(encoding="utf-8").splitlines()) if mark.is_file() else set()
        if _THIS_PROCESS in lines:  # a Python program that trains several times
            continue
        common = names & lines
        # Not by torchrun's count of restarts: one that was refused a folder with another run is restarted as well. The
        # agent that started a run is the same that restarts it.
        if any(name.startswith(_TORCHRUN) for name in common):
            return folder
        if is_repeated and (run_dir or (common and _attempt() not in lines)):  # otherwise an earlier command of the job
            return folder
    return None


def describe_process() -> str:
    """Return what a locked file says of the process that has locked it, now."""
    now = datetime.datetime.now().astimezone()
    return f"process {os.getpid()} on {socket.gethostname()} since {now:%Y-%m-%d %H:%M:%S %Z}"


class FolderLock:
    """A lock on the folder that this process writes a run into, held until `release`: on its file `.lock`.

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
            # The system releases a POSIX record lock when the process ends, even by SIGKILL. Unlike a `flock` lock, it
            # is not inherited by loading processes, which may outlive the process by seconds, and NFS shares it between
            # machines, unless it is mounted with `nolock`.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(
                    f"{self.path} cannot be locked here ({error.strerror}): do not start a second run in this folder, "
                    "it would go unnoticed."
                )
                return
            raise ConfigError(
                f"{option} {self.path}: in use by {self._owner()}. Wait until that run has ended, or end it. If its "
                f"machine is gone and a network file system has kept the lock, remove {self._lock}."
            ) from error
        with suppress(OSError):  # a lock can be held even if the disk is full
            self._file.truncate(0)
            os.write(
                self._file.fileno(), describe_process().encode()
            )  # unbuffered, as closing would otherwise try to write again

    def _owner(self) -> str:
        """Return the text that the process holding the lock writes into the file shortly after locking it."""
        deadline = time.monotonic() + _NAMING_SECONDS
        while True:
            self._file.seek(0)
            if owner := self._file.read().strip():
                return owner
            if time.monotonic() >= deadline:
                return "another process"
            time.sleep(0.05)

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
            checkpoint = find_newest_checkpoint(lock.path) if continues else None
            if resume and checkpoint is None:
                raise ConfigError(f"--resume {resume}: none of its checkpoints can be read.")
            if not continues and (lock.path / LOG_NAME).exists():
                remedy = f"Resume it with --resume {lock.path}, or choose another folder."
                if find_newest_checkpoint(lock.path) is None:
                    remedy = "It has no checkpoint yet. Remove it, or choose another folder."
                raise ConfigError(f"--run-dir {lock.path}: already contains a run. {remedy}")
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
    repeated = find_repeated_run(launches, run_dir=run_dir, default=default)
    if repeated is not None and (repeated / RUN_CONFIG).is_file():
        return FolderLock(repeated, option="--run-dir", wait=_LEASE_SECONDS), True
    if run_dir is not None:
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"--run-dir {run_dir}: is a file; expected a folder, or an unused name.")
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


def report_changes(run_dir: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Warn about changed keys in a run's config, and explain the effects.

    Raises:
        ConfigError: one of the changed keys must not change.
    """
    changed = {key: f"{key}: {_text_at(saved, key)} -> {_text_at(config, key)}" for key in cfg_diff(saved, config)}
    fixed = {key: text for key, text in changed.items() if _is_in(key, _FIXED)}
    for key, text in changed.items():
        effect = "later steps differ from the original run's"
        if key == "train.epochs":
            effect = "what follows the run's length, such as a cosine schedule, follows the new one"
        elif _is_in(key, _WITHOUT_EFFECT_ON_STEPS):
            effect = "each step trains as before"
        if key not in fixed:
            logger.warning("resuming with a changed %s (allowed; %s)", text, effect)
    if fixed:
        raise ConfigError(
            f"--resume {run_dir}: {', '.join(fixed)} cannot change when a run is resumed "
            f"({'; '.join(fixed.values())}). To continue with other values, start a new run from its weights: "
            f"--init {run_dir / LAST_NAME}."
        )


def _is_in(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _text_at(config: Mapping[str, Any], key: str) -> str:
    value = value_at(config, key, MISSING)
    return "not set" if value is MISSING else repr(value)


def resume_command(run_dir: Path, *arguments: str) -> str:
    """Return the command that resumes the run in `run_dir`, when typed in the folder where this process was started."""
    tool = [sys.argv[0]] if Path(sys.argv[0]).name == "train.py" else ["-m", "vitkit.tools.train"]
    command, note = ["python", *tool], ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, nodes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
        across = ["--nnodes", str(nodes)] if nodes > 1 else []
        command = ["torchrun", *across, "--nproc-per-node", str(local), *tool]
        note = "    (with the --rdzv options as before)" if nodes > 1 else ""
    else:
        if sys.argv[0] in ("vitkit train", "vitkit start") and shutil.which("vitkit"):
            command = ["vitkit", "train"]
        if world_size() > 1:
            command = ["srun", *command]
    return shlex.join([*command, "--resume", str(run_dir), *arguments]) + note


def record_start(run_dir: Path, device: torch.device) -> None:
    """Append this start to the list in the run's `run.json`, which has one entry per start or resumption.

    An entry has the time, the command, its folder, the machine, versions, the commits and branches of the git
    repositories of vitkit and of the folder, and the device.
    """
    path = run_dir / RECORD_NAME
    starts = []
    with suppress(OSError, ValueError):
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    from vitkit.io.git_files import read_git_state  # only the main process records a start

    repositories = (read_git_state(folder) for folder in (Path(__file__).parent, Path.cwd()))
    start = {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "versions": _versions(),
        "git": list({state["folder"]: state for state in repositories if state}.values()),
        "device": {
            "type": device.type,
            "name": describe_processor() if device.type == "cpu" else device_name(device),
            "processes": world_size(),
            "threads": torch.get_num_threads(),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        },
    }
    text = json.dumps({"starts": [*starts, start]}, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), sync=False)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"vitkit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions | {"cuda": torch.version.cuda, "system": platform.platform()}
