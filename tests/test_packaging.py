"""The content of an installed copy."""

import configparser
import email
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vitkit
from vitkit import model_zoo

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = configparser.ConfigParser(interpolation=None)
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")


def python_files(folder: Path) -> list[Path]:
    """Return the files below a folder that are part of a package, which notebooks are not."""
    return [file for file in folder.rglob("*.py") if file.parent.name != "notebooks"]


def test_every_package_has_an_init_file():
    for folder in ("vitkit", "configs", "model_zoo", "tools"):
        for file in python_files(ROOT / folder):
            assert (file.parent / "__init__.py").is_file(), file.parent


def build(work: Path, kind: str = "wheel") -> zipfile.ZipFile:
    """Build a wheel, or an editable one, from a copy of the sources in work/vitkit: building leaves folders there."""
    pytest.importorskip("setuptools", minversion="70.1")  # it builds wheels without another package
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (work / "vitkit" / name).parent.mkdir(parents=True, exist_ok=True)
            (work / "vitkit" / name).write_bytes((ROOT / name).read_bytes())
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"  # as pip and build do
    command = [sys.executable, "-c", code, str(work)]
    result = subprocess.run(command, cwd=work / "vitkit", capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    (path,) = work.glob("vitkit-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return build(tmp_path_factory.mktemp("wheel"))


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
    of_clones = {name for name in expected if name.startswith(("vitkit/tools/benchmark/", "vitkit/tools/editable/"))}
    assert expected - of_clones <= names and of_clones and not of_clones & names


def test_wheel_installs_the_vitkit_command(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    assert dict(entries["console_scripts"]) == {"vitkit": "vitkit.tools.cli:main"}


def test_wheel_contains_neither_notebooks_nor_lab_records_nor_tests_and_stays_small(wheel):
    names = wheel.namelist()
    assert not [name for name in names if "notebooks/" in name or "test_" in name or name.endswith("measurements.md")]
    assert sum(entry.compress_size for entry in wheel.infolist()) < 16e6  # packaged models take 14.6
    assert max(entry.file_size for entry in wheel.infolist()) < 3.2e6


def test_wheel_is_typed_and_says_what_it_is(wheel):
    assert "vitkit/py.typed" in wheel.namelist()
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    metadata = email.message_from_string(wheel.read(name).decode())
    assert metadata["Version"] == vitkit.__version__ and metadata["License-Expression"] in ("Apache-2.0", None)
    assert "Typing :: Typed" in metadata.get_all("Classifier") and metadata["Keywords"]
    # The workflow that would try other systems has not run anywhere yet.
    systems = [name for name in metadata.get_all("Classifier") if name.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {vitkit.__version__}\n" in citation


def test_page_of_the_package_links_to_nothing_that_is_not_there(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    page = email.message_from_string(wheel.read(name).decode()).get_payload()
    links = re.findall(r"\]\((\S+)\)", page)
    assert page.startswith("# vitkit\n\nDetection and segmentation") and "\nvitkit start photos" in page
    if not SETTINGS["metadata"].get("url"):
        assert not links and "model_zoo has all names" in page and "![" not in page
    assert all(link.startswith("https://") for link in links)


def test_links_on_the_page_of_the_package_are_absolute_where_the_repository_has_an_address(monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    describe = runpy.run_path(str(ROOT / "setup.py"))["describe"]
    page = describe((ROOT / "README.md").read_text(encoding="utf-8"), "https://github.com/someone/vitkit")
    links = re.findall(r"\]\((\S+)\)", page)
    prefix = r"https://(github\.com/someone/vitkit/blob|raw\.githubusercontent\.com/someone/vitkit)/main/"
    files = [re.sub(prefix, "", link).partition("#")[0] for link in links]
    assert len(files) > 20 and all((ROOT / file).is_file() for file in files)
    assert links[0].startswith("https://raw.") and not any(link.startswith("https://raw.") for link in links[1:])
    text = "![a](b/c.png)\n\n[d](https://e.org/f) and [g](h.md#i)"
    assert describe(text, None) == "[d](https://e.org/f) and g"
    assert "[d](https://e.org/f) and [g](https://github.com/x/y/blob/main/h.md#i)" in describe(
        text, "https://github.com/x/y"
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, Path]:
    """Return the folder that contains an editable clone named vitkit, and the folder where its path file lies."""
    work = tmp_path_factory.mktemp("editable")
    build(work, "editable").extractall(work / "packages")
    return work, work / "packages"


@pytest.mark.parametrize("folder", [".", "vitkit", "vitkit/tests", "packages"])
def test_editable_install_is_imported_in_any_folder(folder, installed):
    work, packages = installed
    (work / "vitkit" / "tests").mkdir(exist_ok=True)
    # Without what is installed here (-S): only the path file counts, and these imports need no other package.
    code = f"""
import importlib.util, site, sys
sys.path.insert(0, "")
site.addsitedir({str(packages)!r})
import vitkit, vitkit.errors, vitkit.configs.detr_r50, vitkit.model_zoo, vitkit.tools
from vitkit import ConfigError
print(vitkit.__file__)
print(vitkit.configs.__file__)
print([importlib.util.find_spec(name) for name in ("vitkit.tests", "vitkit.numpy", "vitkit.editable")])
print([name for name in ("configs", "model_zoo", "tools", "tests", "setup") if importlib.util.find_spec(name)])
"""
    command = [sys.executable, "-E", "-S", "-c", code]
    result = subprocess.run(command, cwd=work / folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    package, configs, inside, top = result.stdout.splitlines()
    assert Path(package) == work / "vitkit" / "vitkit" / "__init__.py"
    assert Path(configs) == work / "vitkit" / "configs" / "__init__.py"
    assert inside == "[None, None, None]"
    # In the clone itself its folders are found because Python runs there.
    assert top == ("[]" if folder != "vitkit" else "['configs', 'model_zoo', 'tools', 'tests', 'setup']")


def test_editable_install_contains_nothing_but_a_path(installed):
    work, packages = installed
    (path_file,) = [path for path in packages.iterdir() if path.suffix != ".dist-info"]
    (folder,) = path_file.read_text().split()
    assert path_file.suffix == ".pth" and Path(folder) == work / "vitkit" / "tools" / "editable"
    assert [path.name for path in Path(folder).iterdir()] == ["vitkit"]
