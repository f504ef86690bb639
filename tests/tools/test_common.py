"""The tools' common handling of a model's name."""

import pytest

from vitkit.tools import analyze, browse
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
