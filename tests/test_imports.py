"""The parts of vitkit import in one direction, so that each can be read and used without those above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitkit"

# Lowest first. A part may import itself and lower lines; parts on the same line do not import each other,
# except for the modules at the very bottom.
BOTTOM = (
    "errors",
    "registry",
    "config",
    "structures",
    "protocols",
    "devices",
    "distributed",
    "logging",
    "checkpoint",
    "vocabulary",
)
LAYERS = (
    BOTTOM,
    ("ops",),
    ("kernels",),
    ("nn",),
    ("backbones", "necks", "heads", "matchers", "losses"),
    ("models", "seq2seq"),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
BESIDE = {  # parts outside of that order, and the parts that each may import
    "data": {*BOTTOM, "ops"},
    "evaluation": {*BOTTOM, "ops"},
    # Steps, evaluation, hooks and checkpoints receive built objects: they know no concrete model, dataset or evaluator.
    "engine": {*BOTTOM, "ops", "kernels", "nn"},
    "visualization": {*BOTTOM, "ops", "nn"},
    "analysis": {*BOTTOM, "kernels", "nn"},
    "report": {*BOTTOM, "ops", "evaluation", "visualization"},
    # At the top: each uses whatever it needs.
    "inference": {*LEVEL, "data", "evaluation", "visualization", "model_zoo"},
    "doctor": {*LEVEL, "data", "engine", "analysis"},
    # The files of engine that build what a config names; the others do not import them.
    "engine builders": {*LEVEL, "data", "engine", "evaluation", "visualization", "inference"},
}
ENGINE_BUILDERS = ("api", "build", "results", "testing", "trainer", "validation")


def part_of(module: str) -> str | None:
    """Return the part that a module belongs to: "heads" for "vitkit.heads.detr"; None for other packages."""
    names = module.split(".")
    if names[:2] == ["vitkit", "engine"] and names[2:] and names[2] in ENGINE_BUILDERS:
        return "engine builders"
    return (names[1] if len(names) > 1 else "") if names[0] == "vitkit" else None


def imports_of(path: Path) -> set[str]:
    """Return the full names of all modules that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            # `from vitkit import heads` imports a part by a name.
            modules |= {f"{base}.{alias.name}" for alias in node.names} if base == "vitkit" else {base}
    return modules


def allowed(part: str, imported: str) -> bool:
    if part == imported or (part, imported) == ("checkpoint", "model_zoo"):
        return True
    if part in BESIDE:
        return imported in BESIDE[part]
    if part in BOTTOM:
        return imported in BOTTOM
    return imported in LEVEL and LEVEL[imported] < LEVEL[part]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def own_part(path: Path) -> str:
    return part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_every_package_has_an_import_level():
    assert {own_part(path) for path in FILES} <= LEVEL.keys() | BESIDE.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_to_lower_levels(path):
    parts = {module: part_of(module) for module in imports_of(path)}
    wrong = [m for m, part in parts.items() if part is not None and not allowed(own_part(path), part)]
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_tools_or_configs(path):
    assert not [m for m in imports_of(path) if m.split(".")[0] in ("tools", "configs")]
    assert not {part_of(m) for m in imports_of(path)} & {"tools", "configs"}


def test_model_zoo_stands_alone():
    # checkpoint.py converts official key names with it, so it must not import higher parts; notebooks do not count.
    imported = {part_of(m) for path in (ROOT / "model_zoo").glob("*.py") for m in imports_of(path)} - {None}
    assert imported <= {"model_zoo", "errors", "checkpoint"}


def test_lowest_modules_have_no_circular_imports():
    def files(part: str) -> list[Path]:
        return sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / f"{part}.py"]

    present = [part for part in BOTTOM if all(path.exists() for path in files(part))]
    imports = {
        part: {part_of(m) for path in files(part) for m in imports_of(path)} & {*BOTTOM} - {part} for part in present
    }
    while free := [part for part, below in imports.items() if not below & imports.keys()]:
        for part in free:
            del imports[part]
    assert not imports


@pytest.mark.parametrize(
    ("part", "imported", "expected"),
    [
        ("heads", "nn", True),
        ("heads", "heads", True),
        ("heads", "losses", False),
        ("nn", "heads", False),
        ("config", "registry", True),
        ("config", "ops", False),
        ("data", "ops", True),
        ("data", "engine", False),
        ("engine", "models", False),
        ("engine", "engine builders", False),
        ("engine builders", "models", True),
        ("models", "tools", False),
    ],
)
def test_import_rule_detects_violations(part, imported, expected):
    assert allowed(part, imported) is expected
