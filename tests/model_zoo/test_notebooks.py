import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from helpers.documents import command_in
from PIL import Image

from vitkit.config import config_names
from vitkit.registry import BACKBONES

FOLDER = ROOT / "model_zoo" / "notebooks"
NOTEBOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.py"))]
SECONDS = 300
"""The limit of a notebook's processor time in seconds, which bounds the time on any number of free cores."""

README = FOLDER / "README.md"
# The smoke tests also run with an installed wheel, without the clone's documents.
TEXT = README.read_text(encoding="utf-8") if README.is_file() else ""
TABLE = [line for line in TEXT.splitlines() if line.startswith("| ") and "`" in line]
COMMANDS = [command for line in TABLE for command in re.findall(r"`(vitkit [^`]+)`", line)]
OFFLINE = [line for line in COMMANDS if re.search(r"shapes_|numbers_|analyze", line)]
"""The commands of the README's table that need neither a download nor a training."""


def cells(path: Path) -> list[tuple[bool, list[str]]]:
    """Return for each cell whether it is prose, and its lines; lines before the first cell are an error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    assert starts[0] == 0
    return [(lines[i] == "# %% [markdown]", lines[i + 1 : j]) for i, j in zip(starts, [*starts[1:], len(lines)])]


def public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def test_there_are_seven_notebooks():
    assert [path.values[0].stem[0] for path in NOTEBOOKS] == list("1234567")


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_numbers_in_a_color_map_can_be_read(path):
    calls = re.findall(r"axes\.text\(.*", path.read_text(encoding="utf-8"))
    assert all("color=text_color(shown.to_rgba(value))" in call for call in calls)


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_uses_public_names_that_exist(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert all(public(node.attr) for node in nodes if isinstance(node, ast.Attribute))
    modules = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {(node.module, alias.name) for node in modules for alias in node.names}
    names |= {(alias.name, None) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert any(module.startswith("vitkit") for module, _ in names)
    for module, name in names:
        assert all(map(public, [*module.split("."), name or ""]))
        # Only packages that are installed with vitkit.
        assert module.split(".")[0] in {"vitkit", "torch", "matplotlib", "numpy", "scipy", "pathlib", "json"}
        assert name is None or hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_has_a_title_and_alternates_prose_and_code(path):
    first, *others = cells(path)
    assert first[0] and first[1][0].startswith("# # ")
    for is_prose, lines in (first, *others):
        text = "\n".join(lines).strip()
        assert text
        if is_prose:
            assert all(line.startswith("#") for line in text.splitlines())
            assert len(re.findall(r"\$\$", text)) % 2 == 0 and text.replace("$$", "").count("$") % 2 == 0
            assert text.count("{") == text.count("}")
        else:
            ast.parse(text)


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_names_files_and_sets_that_exist(path):
    prose = "\n".join(line for is_prose, lines in cells(path) if is_prose for line in lines)
    files = set(re.findall(r"(?:configs|vitkit|model_zoo)/[\w/]+\.(?:py|md)", prose))
    files |= {f"configs/ablations/{name}.py" for name in re.findall(r"vitkit ablate (\w+)", prose)}
    assert files and not [name for name in files if not (ROOT / name).is_file()]


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_needs_the_package_and_not_the_repository(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not [text for text in texts if "/" in text and len(text) < 200 and (ROOT / text).exists()]
    assert not [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "__file__"]


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_is_listed(path):
    assert f"\n| [{path.name}]({path.name}) |" in TEXT


def test_curves_of_a_notebook_are_the_measured_ones():
    tree = ast.parse((FOLDER / "5_detr.py").read_text(encoding="utf-8"))
    (drawn,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CURVES"
    )
    measured = {}
    for result in json.loads((ROOT / "model_zoo/ablations/detr_convergence.json").read_text(encoding="utf-8")):
        curve = tuple(round(evaluation["metrics"]["bbox/AP"], 3) for evaluation in result["evaluations"])
        measured.setdefault(result["arm"], []).append(curve)
    assert drawn == {arm: tuple(curves) for arm, curves in measured.items()}


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_converts_without_losing_cells(path):
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.read(path)
    assert [cell.cell_type == "markdown" for cell in notebook.cells] == [is_prose for is_prose, _ in cells(path)]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs_and_draws_within_five_minutes(path, tmp_path):
    import resource  # only available on Unix

    strings = (
        node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    )
    expected = {text for text in strings if isinstance(text, str) and text.endswith((".png", ".gif"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=os.environ | {"MPLBACKEND": "Agg"}, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr[-3000:]
    images = {image.name: image for image in tmp_path.rglob("*.*")}
    assert len(expected) >= 4 and expected <= set(images)
    assert all(np.asarray(Image.open(images[name]).convert("L")).std() > 5 for name in expected)
    assert sum(after[:2]) - sum(before[:2]) < SECONDS


def test_each_line_of_the_table_has_a_command():
    assert len(TABLE) > 30 and len(COMMANDS) > 25
    scripts = set(re.findall(r"`python (model_zoo/notebooks/\w+\.py)`", TEXT))
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    assert all("`vitkit " in line or "`python model_zoo/notebooks/" in line for line in TABLE)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_table_is_accepted_and_names_what_exists(command):
    module, arguments = command_in(command)
    importlib.import_module(module).parse_args(arguments)
    if module.endswith(".ablate"):
        assert (ROOT / "configs" / "ablations" / f"{arguments[0]}.py").is_file()
    elif not arguments[0].startswith("--"):
        index = json.loads((ROOT / "model_zoo" / "index.json").read_text(encoding="utf-8"))
        assert arguments[0] in {*config_names(), *index} or arguments[0] in BACKBONES


@pytest.mark.slow
def test_commands_of_the_table_that_need_no_download_run(tmp_path):
    (make_shapes,) = (line for line in TEXT.splitlines() if line.startswith("vitkit data make-shapes"))
    for command in (make_shapes, *OFFLINE):
        module, arguments = command_in(command)
        result = subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"
