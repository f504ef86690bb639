"""How a run's folder is chosen, and kept from other processes."""

import errno
import os
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.clocks import Clock
from helpers.processes import PROCESSES

from vitkit.engine import run_folder as module
from vitkit.engine.run_folder import LOCK_NAME, FolderLock, run_folder
from vitkit.errors import ConfigError
from vitkit.weights.locate import RUN_CONFIG


def claim(path: Path, **options) -> FolderLock:
    return FolderLock(path, **{"option": "--run-dir", **options})


def hold(path: Path) -> None:
    """Lock a folder, start a process like a forked loader worker, and wait."""
    lock = claim(path)
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    (path / "locked").touch()
    time.sleep(600)
    lock.release()


def choose(stack: ExitStack, default: Path, *, run_dir: Path | None = None, resume: Path | None = None):
    return stack.enter_context(run_folder([], resume=resume, run_dir=run_dir, default=default))


@pytest.fixture
def holder(tmp_path):
    """A process that has locked the folder."""
    process = PROCESSES.Process(target=hold, args=(tmp_path,))
    process.start()
    while not (tmp_path / "locked").exists():
        assert process.is_alive()
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_folder_in_use_names_the_process_and_is_free_once_it_is_killed(tmp_path, holder):
    with pytest.raises(ConfigError, match=rf"in use by process {holder.pid} on \S+ since 2\d\d\d-") as error:
        claim(tmp_path, option="--resume")
    assert f"remove {tmp_path / LOCK_NAME}" in str(error.value)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    lock = claim(tmp_path)  # at once, although the process that it forked still lives
    assert lock.is_mine()
    lock.release()
    assert {path.name for path in tmp_path.iterdir()} == {"locked"}


def test_process_that_has_just_locked_the_folder_is_waited_for_until_it_has_named_itself(tmp_path, holder, monkeypatch):
    lock, clock = tmp_path / LOCK_NAME, Clock()
    monkeypatch.setattr(module, "time", clock)
    lock.write_text("")
    with pytest.raises(ConfigError, match="in use by another process"):  # on a full disk
        claim(tmp_path)
    monkeypatch.setattr(clock, "sleep", lambda _: lock.write_text("process 7 on a node"))
    with pytest.raises(ConfigError, match="in use by process 7 on a node"):
        claim(tmp_path)


def test_repeated_launch_waits_for_a_lock_that_is_released_soon(tmp_path, holder):
    killed = threading.Event()

    def kill():
        killed.set()
        holder.kill()

    threading.Timer(0.2, kill).start()
    claim(tmp_path, wait=60.0).release()
    assert killed.is_set()  # the holder may be seen to be alive for a moment after its locks are gone


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, None])
def test_missing_file_locks_are_reported_and_the_run_continues(tmp_path, monkeypatch, caplog, number):
    def lockf(*_):
        raise OSError(number, os.strerror(number))

    if number is None:
        monkeypatch.setattr(module, "fcntl", None)  # as on Windows
    else:
        monkeypatch.setattr(module.fcntl, "lockf", lockf)
    with ExitStack() as stack:
        assert choose(stack, tmp_path / "run").path == tmp_path / "run"
        (message,) = caplog.messages
        assert "run cannot be locked here" in message and "would go unnoticed" in message
        # New folders still get consecutive names.
        assert choose(stack, tmp_path / "run").path == tmp_path / "run-2"


def test_only_the_new_folder_of_a_run_that_did_not_start_is_removed(tmp_path):
    default, given = tmp_path / "runs" / "detr", tmp_path / "given"
    given.mkdir()
    with ExitStack() as stack:
        choose(stack, default)
        choose(stack, default, run_dir=given)
    assert not default.exists() and not list(given.iterdir())
    with ExitStack() as stack:
        choose(stack, default)
        (default / RUN_CONFIG).touch()
    assert [path.name for path in default.iterdir()] == [RUN_CONFIG]


def test_folder_that_was_removed_or_replaced_is_no_longer_owned(tmp_path):
    lock = claim(tmp_path / "run")
    assert lock.is_mine()
    shutil.rmtree(tmp_path / "run")
    assert not lock.is_mine()
    other = claim(tmp_path / "run")
    assert other.is_mine() and not lock.is_mine()
    lock.release()  # does not release the other's lock
    assert other.is_mine()
    other.release()


def test_folder_lock_on_a_full_disk_hides_no_other_error(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ValueError, match="the run's own error"):
            lock = FolderLock(tmp_path / "run", option="--run-dir", is_new=True)
            try:
                raise ValueError("the run's own error")
            finally:
                lock.release()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run").exists()


def test_read_only_folder_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nothing" / "here")
    for folder, reason in {"file": "Not a directory", "broken": "File exists"}.items():
        message = rf"--run-dir .*detr: cannot be written \({reason}\)\. Choose another folder with --run-dir"
        with ExitStack() as stack, pytest.raises(ConfigError, match=message):
            choose(stack, tmp_path / folder / "detr")
    (tmp_path / "run").mkdir()

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(
        ConfigError, match=r"--resume .*run: cannot be written \(Read-only file system\)\. Copy the run"
    ):
        claim(tmp_path / "run", option="--resume")
