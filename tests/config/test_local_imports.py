"""A config imports the files beside it, which neither replace installed modules nor mix with those of other folders."""

import sys
from pathlib import Path

import pytest

from vitkit import load_config
from vitkit.errors import ConfigError

CONFIG = "from base_cfg import config as base\n\n\ndef config():\n    return dict(base(), evaluator='CocoEvaluator')\n"
BASE = "def config():\n    return dict(train=dict(epochs={}))\n"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "my_config.py"


def test_a_config_imports_the_one_beside_it_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    before = dict(sys.modules), list(sys.path), list(sys.meta_path)
    for number in (1, 2):  # the same name in two folders
        path = write(tmp_path / str(number), my_config=CONFIG, base_cfg=BASE.format(number))
        assert load_config(path)["train"]["epochs"] == number
        # And changed right after it was read.
        write(tmp_path / str(number), base_cfg=BASE.format(number + 5))
        assert load_config(path)["train"]["epochs"] == number + 5
    assert "base_cfg" not in sys.modules
    assert (sys.path, sys.meta_path) == before[1:] and not list(tmp_path.rglob("*.pyc"))


@pytest.mark.parametrize("init", [True, False], ids=["package", "folder"])
def test_a_config_imports_from_folders_beside_it_and_inside_its_function(tmp_path, init):
    source = "def config():\n    from parts.small import config as small\n    return small()\n"
    small = "from parts.number import EPOCHS\n\n\ndef config():\n    return dict(train=dict(epochs=EPOCHS))\n"
    path = write(tmp_path, my_config=source, parts__small=small, parts__number="EPOCHS = 3\n")
    if init:
        (tmp_path / "parts" / "__init__.py").write_text("from . import number\n")
    assert load_config(path)["train"]["epochs"] == 3
    assert not [name for name in sys.modules if name.partition(".")[0] == "parts"]


def test_installed_modules_are_not_shadowed(tmp_path):
    boom = "raise RuntimeError('shadowed')\n"
    source = "import colorsys, pytest, scipy.io, torch\n" + BASE.format(2)
    path = write(tmp_path, my_config=source, colorsys=boom, torch=boom, pytest=boom, scipy=boom, antigravity=boom)
    assert load_config(path)["train"]["epochs"] == 2


@pytest.mark.parametrize("loaded", [True, False], ids=["imported", "on the path"])
def test_a_module_of_the_program_with_the_same_name_is_an_error(tmp_path, monkeypatch, loaded):
    write(tmp_path / "program", base_cfg=BASE.format(9))
    path = write(tmp_path / "mine", my_config=CONFIG, base_cfg=BASE.format(1))
    monkeypatch.syspath_prepend(str(tmp_path / "program"))
    if loaded:
        import base_cfg  # noqa: F401
    with pytest.raises(ConfigError, match="my_config.py, line 1: ImportError: 'base_cfg' is both .* rename the first"):
        load_config(path)
    assert ("base_cfg" in sys.modules) is loaded
    sys.modules.pop("base_cfg", None)


def test_an_error_in_a_neighbor_names_its_line(tmp_path):
    path = write(tmp_path, my_config=CONFIG, base_cfg="def config(:\n")
    with pytest.raises(ConfigError, match=r"base_cfg\.py, line 1: SyntaxError"):
        load_config(path)


def test_a_file_in_imports_imports_the_files_beside_it(tmp_path):
    head = "from helper import WIDTH\nassert WIDTH == 7\n"
    source = "def config():\n    return dict(imports=['parts/my_head.py'])\n"
    path = write(tmp_path, my_config=source, parts__my_head=head, parts__helper="WIDTH = 7\n")
    assert load_config(path)["imports"] == [str(tmp_path / "parts" / "my_head.py")]
    assert "helper" not in sys.modules
