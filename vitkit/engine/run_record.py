"""Records in a run's folder how the run was started: run.json."""

import datetime
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vitkit.devices import device_name
from vitkit.distributed import world_size

RECORD_NAME = "run.json"
_PACKAGES = ("vitkit", "torch", "torchvision", "timm", "numpy", "albumentations", "pycocotools")


def record_start(run_dir: Path, device: torch.device) -> None:
    """Append this start to the list in the run's `run.json`, which has one entry per start or resumption.

    An entry has the time, the command, its folder, the machine, versions, the state of the git repositories of vitkit
    and of the folder (commit, branch, changed files), and the device.
    """
    path = run_dir / RECORD_NAME
    starts = []
    with suppress(OSError, ValueError):
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    repositories = (git_state(folder) for folder in (Path(__file__).parent, Path.cwd()))
    start = {
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "versions": _versions(),
        "git": list({state["folder"]: state for state in repositories if state}.values()),
        "device": {
            "type": device.type,
            "name": processor_name() if device.type == "cpu" else device_name(device),
            "processes": world_size(),
            "threads": torch.get_num_threads(),
        },
    }
    temporary = path.with_name(f"{RECORD_NAME}.tmp")
    temporary.write_text(json.dumps({"starts": [*starts, start]}, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the repository that contains a folder: root folder, commit, branch, changed files; None if there is no
    repository, or no git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.rstrip("\n")

    try:
        top, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
        branch = git("rev-parse", "--abbrev-ref", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"folder": top, "commit": commit, "branch": branch, "changed": [line[3:] for line in changed]}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions | {"cuda": torch.version.cuda, "system": platform.platform()}


def processor_name() -> str:
    """Return the processor's name as Linux reports it, or the best description that other systems give."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
