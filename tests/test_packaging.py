"""The content of an installed copy."""

import configparser
import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vitkit
from vitkit import model_zoo

ROOT = Path(__file__).resolve().parents[1]


def python_files(folder: Path) -> list[Path]:
    """Return the files below a folder that are part of a package, which notebooks are not."""
    return [file for file in folder.rglob("*.py") if file.parent.name != "notebooks"]


def test_every_package_has_an_init_file():
    for folder in ("vitkit", "configs", "model_zoo", "tools"):
        for file in python_files(ROOT / folder):
            assert (file.parent / "__init__.py").is_file(), file.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", minversion="70.1")  # it builds wheels without another package
    # Built from a copy, since building leaves folders beside the sources.
    work = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (work / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (work / "source" / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"  # as pip and build do
    command = [sys.executable, "-c", build, str(work)]
    result = subprocess.run(command, cwd=work / "source", capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    (path,) = work.glob("vitkit-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_contains_configs_tools_and_model_zoo(wheel):
    names = set(wheel.namelist())
    for name in ("configs/detr_r50.py", "configs/quickstart/detr.py", "configs/parts/coco.py", "tools/train.py"):
        assert f"vitkit/{name}" in names
    pages = ("apps/report/report.html", "apps/report/report.js", "apps/starter/gallery.html", "apps/report/page.html")
    assert {f"vitkit/{page}" for page in (*pages, "apps/explanations/attention.css")} <= names
    assert {"vitkit/model_zoo/index.json", "vitkit/engine/trainer.py"} <= names
    guides = {f"vitkit/{folder}/README.md" for folder in ("data", "apps/export_writing", "configs/bccd", "model_zoo")}
    assert guides <= names  # messages name them
    weights = {entry["url"] for name, entry in model_zoo.index().items() if model_zoo.is_packaged(name)}
    assert weights and {f"vitkit/model_zoo/{file}" for file in weights} <= names
    # Nothing may be installed beside the package, where it would occupy a name such as "tools".
    assert {name.split("/")[0] for name in names} == {"vitkit", f"vitkit-{vitkit.__version__}.dist-info"}


def test_wheel_contains_every_python_file_of_the_packages(wheel):
    expected = {f"vitkit/{file.relative_to(ROOT / 'vitkit')}" for file in (ROOT / "vitkit").rglob("*.py")}
    for folder in ("configs", "model_zoo", "tools"):
        expected |= {f"vitkit/{folder}/{file.relative_to(ROOT / folder)}" for file in python_files(ROOT / folder)}
    names = set(wheel.namelist())
    of_clones = {name for name in expected if name.startswith("vitkit/tools/benchmark/")}
    assert expected - of_clones <= names and of_clones and not of_clones & names


def test_wheel_installs_the_vitkit_command(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    assert dict(entries["console_scripts"]) == {"vitkit": "vitkit.tools.cli:main"}


def test_wheel_contains_neither_notebooks_nor_lab_records_nor_tests_and_stays_small(wheel):
    names = wheel.namelist()
    assert not [name for name in names if "notebooks/" in name or "test_" in name or name.endswith("measurements.md")]
    assert sum(entry.compress_size for entry in wheel.infolist()) < 14e6
    assert max(entry.file_size for entry in wheel.infolist()) < 3.2e6


def test_wheel_is_typed_and_says_what_it_is(wheel):
    assert "vitkit/py.typed" in wheel.namelist()
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = email.message_from_string(wheel.read(name).decode())
    assert metadata["Version"] == vitkit.__version__ and metadata["License-Expression"] in ("Apache-2.0", None)
    assert "Typing :: Typed" in metadata.get_all("Classifier") and metadata["Keywords"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {vitkit.__version__}\n" in citation
