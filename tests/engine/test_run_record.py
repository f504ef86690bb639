"""The record in a run's folder of how the run was started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.engine.run_folder import RECORD_NAME, record_start
from vitkit.io.git_files import read_git_state


def test_each_start_is_recorded_with_command_versions_and_device(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "tools/train.py", "my config.py"])
    for count in (1, 2):
        record_start(tmp_path, torch.device("cpu"))
        starts = json.loads((tmp_path / RECORD_NAME).read_text())["starts"]
        assert len(starts) == count
    assert starts[1]["command"] == "python tools/train.py 'my config.py'"
    assert starts[1]["versions"]["vitkit"] == vitkit.__version__  # not that of the installation, which may be older
    assert starts[1]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert starts[1]["device"]["type"] == "cpu" and starts[1]["device"]["name"] and starts[1]["device"]["threads"] >= 1


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-b", "trunk/a")
    assert read_git_state(folder) == {"folder": str(folder), "commit": None, "branch": "trunk/a"}
    (folder / "kept.py").write_text("1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    return folder


def test_the_commit_and_branch_are_those_that_git_says(repository, tmp_path):
    assert read_git_state(tmp_path) is None
    expected = {"folder": str(repository), "commit": git(repository, "rev-parse", "HEAD"), "branch": "trunk/a"}
    (repository / "below").mkdir()
    assert read_git_state(repository / "below") == expected
    git(repository, "pack-refs", "--all")
    assert not (repository / ".git/refs/heads/trunk/a").exists()
    assert read_git_state(repository) == expected
    git(repository, "worktree", "add", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "--allow-empty", "-m", "second")
    second = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert read_git_state(tmp_path / "tree") == {"folder": str(tmp_path / "tree"), "commit": second, "branch": "other"}
    git(repository, "checkout", second)
    assert read_git_state(repository) == {"folder": str(repository), "commit": second, "branch": None}


def test_nothing_that_a_repository_names_is_run(repository, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'ran'}'\n")
    program.chmod(0o755)
    with (repository / ".git/config").open("a") as file:
        file.write(f'[core]\n\tfsmonitor = {program}\n\tpager = {program}\n[filter "x"]\n\tclean = {program}\n')
    (repository / ".gitattributes").write_text("* filter=x\n")
    (repository / "kept.py").write_text("2\n")
    monkeypatch.chdir(repository)
    record_start(tmp_path, torch.device("cpu"))
    states = json.loads((tmp_path / RECORD_NAME).read_text())["starts"][0]["git"]
    assert states[-1]["commit"] == git(repository, "rev-parse", "HEAD") and not (tmp_path / "ran").exists()
    git(repository, "status")  # the trap works
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("head", "branch"), [("ref: refs/heads/../../../secret", "../../../secret"), ("password", None), ("", None)]
)
def test_a_repository_that_somebody_wrote_by_hand_tells_nothing_else(tmp_path, head, branch):
    (tmp_path / "secret").write_text("a" * 40)
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text(head)
    os.mkfifo(tmp_path / ".git" / "packed-refs")
    state = read_git_state(tmp_path)
    assert state == ({"folder": str(tmp_path), "commit": None, "branch": branch} if head else None)
