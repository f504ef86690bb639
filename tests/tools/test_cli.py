import sys
import types

import pytest

from vitkit.errors import ConfigError

cli = pytest.importorskip("vitkit.tools.cli", reason="vitkit is not installed (pip install -e .)")


@pytest.fixture
def train(monkeypatch):
    """A stand-in for tools/train.py that keeps what it was called with."""
    module = types.ModuleType("vitkit.tools.train")
    module.calls = []
    module.main = lambda argv=None: module.calls.append((argv, sys.argv[0]))
    monkeypatch.setitem(sys.modules, "vitkit.tools.train", module)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vitkit"])
    return module


def test_tool_is_called_with_the_rest_of_the_arguments(train):
    assert cli.main(["train", "configs/a.py", "train.epochs=2"]) == 0
    assert train.calls == [(["configs/a.py", "train.epochs=2"], "vitkit train")]


def test_exit_status_is_the_tools(train, monkeypatch):
    monkeypatch.setattr(train, "main", lambda argv: 3)
    assert cli.main(["train"]) == 3


def test_users_error_is_printed_without_a_stack_trace(train, monkeypatch, capsys):
    def fail(argv):
        raise ConfigError("train.epoch: unknown key")

    monkeypatch.setattr(train, "main", fail)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "vitkit train: train.epoch: unknown key\n"


def test_help_lists_the_tools_with_their_summaries_and_imports_none(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib, "import_module", pytest.fail)
    for argv in (["--help"], []):
        assert cli.main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.split()[:1] == ["train"] and len(line.split()) > 2 for line in lines)
        assert not any(line.split()[:1] in (["cli"], ["__init__"]) for line in lines)


def test_dashes_may_stand_for_underscores(monkeypatch):
    module = types.ModuleType("vitkit.tools.make_shapes")
    module.main = lambda argv: 7
    monkeypatch.setitem(sys.modules, "vitkit.tools.make_shapes", module)
    assert cli.main(["make-shapes"]) == 7


def test_unknown_tool_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "no tool 'trian'. Did you mean 'train'" in capsys.readouterr().err
