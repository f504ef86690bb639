"""Folders that are written once for all processes of a run of the tests."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock  # of torch's requirements


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder that the first process that asks for it writes; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of all workers
    folder, written = base / name, base / f"{name}.written"
    with FileLock(base / f"{name}.lock"):
        if not written.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            folder.mkdir()
            write(folder)
            written.touch()
    return folder
