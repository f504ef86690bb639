"""The tests themselves: what several of them share is a helper, so that a test module can be moved or removed alone."""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MODULES = {path.stem for path in TESTS.rglob("test_*.py")}


def imported_by(path: Path) -> set[str]:
    """Return the test modules that a file imports."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            imported |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {part for alias in node.names for part in alias.name.split(".")}
    return imported & MODULES


def test_no_module_imports_a_test_module():
    found = {path.relative_to(TESTS).as_posix(): imported_by(path) for path in TESTS.rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}, "what they share belongs in tests/helpers"
