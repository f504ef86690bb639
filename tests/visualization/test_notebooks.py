import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from vitkit.visualization.notebooks import show


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)
    return path


def ipython(shell) -> dict[str, ModuleType]:
    """Return a stand-in for IPython whose pictures are the arguments that they were made from."""
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: shell
    display.shown = []
    display.Image = lambda **settings: settings
    display.display = display.shown.append
    return {"IPython": package, "IPython.display": display}


def test_picture_is_shown_in_a_notebook(picture, monkeypatch, capsys):
    modules = ipython(shell=object())
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    show(picture, width=300)
    assert modules["IPython.display"].shown == [{"filename": str(picture), "width": 300}]
    assert capsys.readouterr().out == ""


def test_path_of_the_picture_is_printed_in_a_script(picture, monkeypatch, capsys):
    for name, module in ipython(shell=None).items():
        monkeypatch.setitem(sys.modules, name, module)
    show(picture)
    monkeypatch.delitem(sys.modules, "IPython")
    show(picture)
    assert capsys.readouterr().out == f"{picture}\n" * 2


def test_a_missing_picture_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no image '.*b.png'"):
        show(tmp_path / "b.png")
