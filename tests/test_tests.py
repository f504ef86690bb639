"""The tests themselves: what several of them share is a helper, so that a test module can be moved or removed alone."""

import ast
import configparser
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MODULES = {path.stem for path in TESTS.rglob("test_*.py")}


OTHER_NAMES = {"sklearn": "scikit_learn", "panopticapi": "panopticapi_lite", "aiohttp": "fsspec"}
"""The distributions that bring a package, by its name."""
WITHOUT_INSTALLATION = {"fcntl", "resource", "setuptools", "triton", "vitkit", "huggingface_hub"}
"""What Python, PyTorch, timm or pip bring, if the system has it, and this package."""


def imported_by(path: Path) -> set[str]:
    """Return the test modules that a file imports."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imported |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {part for alias in node.names for part in alias.name.split(".")}
    return imported & MODULES


def test_packages_that_tests_skip_without_are_installed_by_ci_or_by_the_nightly_command():
    settings = configparser.ConfigParser()
    settings.read(TESTS.parent / "setup.cfg", encoding="utf-8")
    extras = settings["options.extras_require"]
    nightly = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("every night")[2].split("```")[1]
    listed = [settings["options"]["install_requires"], extras["test"], extras["docs"], nightly]
    listed += [extras[name] for name in re.search(r"\[(.*?)\]", nightly)[1].split(",")]
    words = {word.lower().replace("-", "_") for word in re.findall(r"[A-Za-z][\w-]*", "\n".join(listed))}
    skipping = re.compile(r"importorskip\(\s*f?\"(\w+)")
    packages = {name for path in TESTS.rglob("*.py") for name in skipping.findall(path.read_text(encoding="utf-8"))}
    assert packages > {"transformers", "lvis", "optuna"}
    assert {OTHER_NAMES.get(name, name) for name in packages} - words - WITHOUT_INSTALLATION == set()


def test_no_module_imports_a_test_module():
    found = {path.relative_to(TESTS).as_posix(): imported_by(path) for path in TESTS.rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}, "what they share belongs in tests/helpers"


def test_files_that_are_run_first_exist():
    from conftest import LONGEST

    assert not [name for name in LONGEST if not (TESTS / f"{name}.py").is_file()]


def test_tests_for_every_night_exist():
    from conftest import NIGHTLY

    for name in NIGHTLY:
        path, _, function = name.partition("[")[0].partition("::")
        assert f"\ndef {function}" in (TESTS / path).read_text(encoding="utf-8"), name
