import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.visualization.notebooks import show


@pytest.fixture
def figure(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)
    return path


def ipython(shell) -> dict[str, ModuleType]:
    """Return a stand-in for IPython whose figures are the arguments that they were made from."""
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: shell
    display.shown = []
    display.Image = lambda **settings: settings
    display.display = display.shown.append
    return {"IPython": package, "IPython.display": display}


def test_figure_is_shown_in_a_notebook(figure, monkeypatch, capsys):
    modules = ipython(shell=object())
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    show(figure, width=300)
    assert modules["IPython.display"].shown == [{"filename": str(figure), "width": 300}]
    assert capsys.readouterr().out == ""


def test_path_of_the_figure_is_printed_in_a_script(figure, monkeypatch, capsys):
    for name, module in ipython(shell=None).items():
        monkeypatch.setitem(sys.modules, name, module)
    show(figure)
    monkeypatch.delitem(sys.modules, "IPython")
    show(figure)
    assert capsys.readouterr().out == f"{figure}\n" * 2


def test_a_missing_figure_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no image '.*b.png'"):
        show(tmp_path / "b.png")
