"""The record in a run's folder of how the run was started."""

import json
import subprocess
import sys

import torch

import vitkit
from vitkit.engine.run_folder import RECORD_NAME, git_state, record_start


def test_each_start_is_recorded_with_command_versions_and_device(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "tools/train.py", "my config.py"])
    for count in (1, 2):
        record_start(tmp_path, torch.device("cpu"))
        starts = json.loads((tmp_path / RECORD_NAME).read_text())["starts"]
        assert len(starts) == count
    assert starts[1]["command"] == "python tools/train.py 'my config.py'"
    assert starts[1]["versions"].get("vitkit", vitkit.__version__) == vitkit.__version__
    assert starts[1]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert starts[1]["device"]["type"] == "cpu" and starts[1]["device"]["name"] and starts[1]["device"]["threads"] >= 1


def test_git_state_names_the_commit_and_the_changed_files(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-b", "trunk")
    for name in ("kept.py", "a b.py"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-m", "first")
    (tmp_path / "kept.py").write_text("2\n")
    (tmp_path / "new.py").write_text("3\n")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert (state["folder"], state["branch"], state["changed"]) == (str(tmp_path.resolve()), "trunk", ["kept.py"])
