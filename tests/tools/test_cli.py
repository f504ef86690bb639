import errno
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from helpers.forked_python import forked_python

import vitkit
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


def test_exit_status_is_that_of_the_tool(train, monkeypatch):
    monkeypatch.setattr(train, "main", lambda argv: 3)
    assert cli.main(["train"]) == 3


def test_user_error_is_printed_without_a_traceback(train, monkeypatch, capsys):
    def fail(argv):
        raise ConfigError("train.epoch: unknown key")

    monkeypatch.setattr(train, "main", fail)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "vitkit train: train.epoch: unknown key\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's address space")
@pytest.mark.parametrize("gigabytes", [0.5, 1, 2])
def test_too_little_memory_to_load_a_command_is_a_one_line_error(gigabytes):
    limit = int(gigabytes * 2**30)
    script = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
    script += "from vitkit.tools.cli import main\nmain(['predict', 'shapes_vit', '--input', 'a.jpg'])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if torch.version.cuda is None and result.stderr.startswith("error: 'a.jpg'"):
        pytest.skip("enough for a torch without CUDA's libraries")
    assert result.returncode == 1 and result.stderr.startswith("vitkit: not enough memory to start (")
    assert result.stderr.count("\n") == 1


def test_help_lists_the_tools_with_their_summaries_and_imports_none(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib, "import_module", pytest.fail)
    monkeypatch.setenv("COLUMNS", "80")
    for argv in (["--help"], []):
        assert cli.main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.split()[:1] == ["train"] and len(line.split()) > 2 for line in lines)
        assert not any(line.split()[:1] in (["cli"], ["__init__"]) for line in lines)
        words = [line.split()[0] for line in lines if re.match(r"  \S", line)]
        assert words[:6] == ["start", "train", "predict", "test", "doctor", "ablate"] and words.count("train") == 1


def test_help_and_version_do_not_import_torch():
    script = """
import sys
from vitkit.tools.cli import main
assert main(["--help"]) == 0 and main(["--version"]) == 0
assert not {"torch", "numpy"} & sys.modules.keys()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"vitkit {vitkit.__version__}\n")


@pytest.mark.parametrize("words", [*(f"{name} --help" for name in cli.list_commands()), "ablate --list", "data"])
def test_help_of_commands_and_lists_do_not_import_torch(words):
    script = f"""
import sys
from vitkit.tools.cli import main
try:
    main({words.split()!r})
finally:
    assert not {{"torch", "timm", "matplotlib", "cv2"}} & sys.modules.keys()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) > 5


def test_dashes_and_underscores_are_the_same_and_groups_have_verbs(monkeypatch):
    module = types.ModuleType("vitkit.tools.data.make_shapes")
    module.main = lambda argv: 7
    monkeypatch.setitem(sys.modules, "vitkit.tools.data.make_shapes", module)
    assert cli.main(["data", "make-shapes"]) == cli.main(["data", "make_shapes"]) == 7


def test_unknown_tool_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "no command 'trian'. Did you mean 'train'" in capsys.readouterr().err
    assert cli.main(["benchmark", "detr"]) == 2  # which runs from a clone
    assert "no command 'benchmark'. " in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["train", "test"])
def test_closed_pipe_ends_the_printed_config_without_an_error(tool, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with forked_python(tmp_path) as forked:  # for one of them, as a new process takes seconds
        program = [sys.executable, "-m", "vitkit.tools.train"] if tool == "train" else [str(forked), "tools/test.py"]
        command = [*program, "configs/quickstart/detr.py", "--print-config"]
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    "error, message",
    [
        (OSError(errno.ENOSPC, "No space left", "predictions/a.jpg"), "predictions/a.jpg: No space left. Free space"),
        (FileExistsError(errno.EEXIST, "File exists", "a.txt"), "a.txt: expected a folder, but there is a file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a.txt/b"), "a.txt/b: expected a folder, but"),
        (MemoryError(), r"out of memory \(MemoryError\)"),
        (RuntimeError("can't allocate memory: 7 bytes.\nmore"), r"out of memory \(can't allocate memory: 7 bytes\.\)"),
        (OSError(errno.ENOSPC, "No space left"), "the output: No space left. Free space"),  # a stream has no name
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory .*Cannot allocate memory"),
    ],
)
def test_failures_of_the_machine_are_one_line_errors(error, message):
    from vitkit.tools.common import errors_in_one_line

    with pytest.raises(SystemExit, match=f"^error: {message}[^\n]*$"), errors_in_one_line():
        raise error


@pytest.mark.parametrize("tool", ["train", "test", "doctor"])
def test_too_long_file_name_is_a_one_line_error(tool):
    module = pytest.importorskip(f"vitkit.tools.{tool}")
    with pytest.raises(SystemExit, match="^error: (no config file )?'a{300}'"):
        module.main(["a" * 300])
