"""The parts of vitkit import in one direction, so that each can be read and used without those above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitkit"

# Lowest first. A room may import itself and the rooms of lower lines; rooms on the same line do not import each other.
LAYERS = (
    ("words", "files"),
    ("errors", "structures"),
    ("protocols", "registry", "devices", "data.io", "seq2seq.vocabulary"),
    ("distributed",),
    ("logging",),
    ("config", "checkpoint"),
    ("ops",),
    ("kernels",),
    ("nn",),
    ("backbones", "necks", "matchers", "losses", "training_queries"),
    ("heads",),
    ("models",),
    ("seq2seq",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
LOW = {room for room in LEVEL if LEVEL[room] <= LEVEL["logging"]}
RUNS = {*LOW, "config", "checkpoint"}
BESIDE = {  # rooms outside of that order, and the rooms that each may import
    "data": {*LOW, "ops"},
    "evaluation": {*LOW, "ops"},
    # Steps, evaluation, hooks and checkpoints receive built objects: they know no concrete model, dataset or evaluator.
    "engine": {*RUNS, "ops", "kernels", "nn"},
    "visualization": {*LOW, "ops"},
    "analysis": {*LOW, "kernels", "nn"},
    "evaluation.report": {*LOW, "ops", "evaluation", "visualization"},
    # At the top: each uses whatever it needs.
    # Exported files and folders of the transformers library: inference reads them, and they are written from above it.
    "foreign models": {*LEVEL, "data", "model_zoo"},
    "inference": {*LEVEL, "data", "evaluation", "visualization", "model_zoo", "foreign models"},
    "deployment": {*LEVEL, "data", "visualization", "model_zoo", "inference", "foreign models"},
    "explanations": {*LEVEL, "data", "visualization", "inference"},
    "interop": {*LEVEL, "data", "model_zoo", "inference", "foreign models"},
    "analysis.reports": {*LEVEL, "data", "engine", "analysis", "visualization", "inference", "model_zoo"},
    "doctor": {*LEVEL, "data", "engine", "analysis"},
    "starter": {
        *LEVEL,
        "analysis",
        "data",
        "engine",
        "engine builders",
        "visualization",
        "evaluation",
        "evaluation.report",
        "doctor",
        "inference",
    },
    # The files of engine that build what a config names; the others do not import them.
    "engine builders": {
        *LEVEL,
        "data",
        "engine",
        "evaluation",
        "evaluation.report",
        "visualization",
        "inference",
        "foreign models",
    },
}
ENGINE_BUILDERS = ("api", "build", "comparing", "feature_cache", "results", "testing", "trainer", "validation")
FOREIGN_MODELS = (
    "deployment.exported",
    "deployment.graphs",
    "deployment.onnx_runner",
    "deployment.settings",
    "interop.backbones",
    "interop.detectors",
    "interop.masks",
    "interop.text",
    "interop.transformers_configs",
    "interop.transformers_settings",
)
ROOMS = LEVEL.keys() | BESIDE.keys()


def room_of(module: str) -> str | None:
    """Return the room that a module belongs to: "heads" for "vitkit.heads.detr", "data.io" for what is in data/io.

    None for other packages, and for vitkit itself, whose public names are imported when they are first used.
    """
    package, *names = module.split(".")
    if package != "vitkit" or not names or names[0].startswith("__"):
        return None
    if names[0] == "engine" and names[1:] and names[1] in ENGINE_BUILDERS:
        return "engine builders"
    if ".".join(names[:2]) in FOREIGN_MODELS:
        return "foreign models"
    return ".".join(names[:2]) if ".".join(names[:2]) in ROOMS else names[0]


def imports_of(path: Path) -> set[str]:
    """Return the full names of all that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            # `from vitkit import heads` and `from vitkit.data import io` import a room by a name.
            modules |= {f"{base}.{alias.name}" for alias in node.names}
    return modules


def allowed(room: str, imported: str) -> bool:
    if room == imported:
        return True
    if room in BESIDE:
        return imported in BESIDE[room]
    return imported in LEVEL and LEVEL[imported] < LEVEL[room]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def own_room(path: Path) -> str:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_every_package_has_an_import_level():
    assert {own_room(path) for path in FILES} <= ROOMS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_to_lower_levels(path):
    rooms = {module: room_of(module) for module in imports_of(path)}
    wrong = [m for m, room in rooms.items() if room is not None and not allowed(own_room(path), room)]
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_tools_or_configs(path):
    assert not [m for m in imports_of(path) if m.split(".")[0] in ("tools", "configs")]
    assert not {room_of(m) for m in imports_of(path)} & {"tools", "configs"}


@pytest.mark.parametrize("room", [room for room in LEVEL if "." in room])
def test_packages_of_low_rooms_import_nothing(room):
    # Importing vitkit.io also runs vitkit/data/__init__.py.
    package = PACKAGE / room.split(".")[0] / "__init__.py"
    assert not [module for module in imports_of(package) if room_of(module)]


def test_model_zoo_stands_alone():
    # Loading weights uses it, so it must not import higher rooms; scripts and notebooks do not count.
    files = [path for path in (ROOT / "model_zoo").glob("*.py") if "__main__" not in path.read_text(encoding="utf-8")]
    imported = {room_of(m) for path in files for m in imports_of(path)} - {None}
    assert files
    assert imported <= {"model_zoo", "errors", "checkpoint", "data.io"}


@pytest.mark.parametrize("room", ["checkpoint", "config", "data", "data.io", "evaluation", "evaluation.report"])
def test_files_of_a_room_have_no_circular_imports(room):
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES if own_room(path) == room}
    imports = {
        name: {
            other for other in files if other != name and any(f"{m}.".startswith(f"{other}.") for m in imports_of(path))
        }
        for name, path in files.items()
    }
    while free := [name for name, below in imports.items() if not below & imports.keys()]:
        for name in free:
            del imports[name]
    assert not imports


@pytest.mark.parametrize(
    ("room", "imported", "expected"),
    [
        ("heads", "nn", True),
        ("heads", "heads", True),
        ("heads", "training_queries", True),
        ("training_queries", "heads", False),
        ("models", "seq2seq", False),
        ("models", "seq2seq.vocabulary", True),
        ("seq2seq", "models", True),
        ("checkpoint", "model_zoo", False),
        ("checkpoint", "seq2seq", False),
        ("checkpoint", "config", False),
        ("protocols", "distributed", False),
        ("registry", "protocols", False),
        ("distributed", "logging", False),
        ("evaluation", "data.io", True),
        ("evaluation", "data", False),
        ("data.io", "ops", False),
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
def test_import_rule_detects_violations(room, imported, expected):
    assert allowed(room, imported) is expected
