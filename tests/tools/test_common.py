"""The tools' common handling of a model's name."""

import pytest

from vitkit.tools import analyze, browse
from vitkit.tools.common import without_weights


def test_weights_of_a_config_are_dropped_if_none_are_needed(tmp_path):
    weights = tmp_path / "best.pth"
    weights.touch()
    assert without_weights([str(weights), "a.b=1"]) == ["a.b=1"]
    assert without_weights(["detr_r50"]) == [] and without_weights([]) == []
    assert without_weights(["a.b=" + 300 * "c"]) == ["a.b=" + 300 * "c"]  # longer than a file name may be
    assert without_weights(["bset.pth", "a.b=1"]) == ["bset.pth", "a.b=1"]  # a typo stays, and is an error


@pytest.mark.parametrize("tool", [analyze, browse])
def test_tools_that_need_no_weights_accept_a_config_with_weights(tool, tmp_path):
    (tmp_path / "best.pth").touch()
    args = tool.parse_args(["quickstart/detr", str(tmp_path / "best.pth"), "model.num_queries=3"])
    assert args.overrides == ["model.num_queries=3"]
