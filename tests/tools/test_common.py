"""The tools' common handling of a model's name."""

import errno
import multiprocessing
from pathlib import Path

import pytest

from vitkit.tools import analyze, browse
from vitkit.tools import test as evaluate
from vitkit.tools.common import errors_in_one_line, split_weights


def test_weights_before_overrides_are_split_off(tmp_path):
    weights = tmp_path / "best.pth"
    weights.touch()
    assert split_weights([str(weights), "a.b=1"]) == (str(weights), ["a.b=1"])
    assert split_weights(["hf:a/b", "a.b=1"]) == ("hf:a/b", ["a.b=1"])  # as in any other place
    assert split_weights(["detr_r50"]) == ("detr_r50", []) and split_weights([]) == (None, [])
    assert split_weights(["a.b=" + 300 * "c"]) == (None, ["a.b=" + 300 * "c"])  # longer than a file name may be
    assert split_weights(["bset.pth", "a.b=1"]) == (None, ["bset.pth", "a.b=1"])  # a typo stays, and is an error


@pytest.mark.parametrize("tool", [analyze, browse])
def test_tools_that_need_no_weights_accept_a_config_with_weights(tool, tmp_path):
    (tmp_path / "best.pth").touch()
    args = tool.parse_args(["quickstart/detr", str(tmp_path / "best.pth"), "model.num_queries=3"])
    assert args.overrides == ["model.num_queries=3"]


def test_an_error_in_a_users_own_code_is_one_line_that_names_the_place(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def fail():\n    {}['a']\n")
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(SystemExit, match=f"error: {path}, line 2: KeyError: 'a'"), errors_in_one_line():
        names["fail"]()


def test_too_small_a_dev_shm_is_named_as_the_cause(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")  # as Python says it of a lock's file

    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", full)
    with pytest.raises(SystemExit) as error, errors_in_one_line():
        context.Queue()
    assert str(error.value.code) == (
        "error: /dev/shm: no space left for what the processes that load data share. Give it more, in a container by "
        "--shm-size=8g or --ipc=host, or set data.num_workers=0."
    )


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_evaluated(monkeypatch):
    monkeypatch.chdir("/proc")
    with pytest.raises(SystemExit, match=r"^error: --out results\.json: cannot be written \(.*\)\. Choose another"):
        evaluate.main(["no_such_model"])
    with pytest.raises(SystemExit, match=r"^error: 'no_such_model' is neither"):
        evaluate.main(["no_such_model", "--print-config"])
