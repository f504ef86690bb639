"""Folders are layers: each imports only those below it, so that it can be read and used without those above it."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.data.formats.detecting import FORMATS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitkit"

# Lowest first. A folder, or a file that stands alone, imports itself and what lower lines have; those of one line do
# not import each other.
CORE = (
    ("text_format",),
    ("errors", "structures"),
    ("registry", "protocols", "devices", "io"),
    ("distributed", "text"),
    ("logging", "model_zoo"),
    ("config", "ops"),
    ("weights",),
    ("kernels",),
    ("nn",),
    ("backbones", "necks", "matchers", "losses", "training_queries"),
    ("heads",),
    ("models",),
    ("seq2seq",),
    ("data", "evaluation"),
    ("engine",),
)
APPS = (
    ("datasets", "export_reading", "interop", "visualization"),
    ("inference", "report"),
    ("explanations", "export_writing", "conversion", "analysis"),
    ("doctor", "training"),
    ("starter", "reproduction"),
    ("pretraining",),
)
MODELS = {"kernels", "nn", "backbones", "necks", "matchers", "losses", "training_queries", "heads", "models", "seq2seq"}
"""The folders of models, which know neither data nor runs, and which data and runs do not know."""
LAYERS = (*CORE, *(tuple(f"apps.{name}" for name in layer) for layer in APPS))
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
NOT_BELOW = {
    **{room: {"weights", "config", "model_zoo"} for room in MODELS},
    **{room: {*MODELS, "weights", "config", "model_zoo"} for room in ("data", "evaluation")},
    # Steps, hooks and evaluation receive built objects; `nn` has what they do to any model.
    "engine": {*MODELS, "evaluation", "model_zoo"} - {"nn", "kernels"},
}
"""Room -> rooms of lower lines that it does not import either."""
DATA = (("transforms", "formats", "text"), ("datasets",), ("synthetic", "loading"))
"""The folders of data, lowest first: like rooms, each imports itself and what lower lines have."""
DATA_LEVEL = {folder: level for level, folders in enumerate(DATA) for folder in folders}


def room_of(module: str) -> str | None:
    """Return the room that a module belongs to: "heads" for "vitkit.heads.detr", "apps.report" for what is in it.

    None for other packages, and for vitkit itself, whose public names are imported when they are first used.
    """
    package, *names = module.split(".")
    if package != "vitkit" or not names or names[0].startswith("__"):
        return None
    return ".".join(names[:2]) if names[0] == "apps" else names[0]


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the full names of all that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    modules = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module
            # `from vitkit import heads` and `from vitkit.apps import report` import a room by a name.
            modules |= {f"{base}.{alias.name}" for alias in node.names}
    return modules


def allowed(room: str, imported: str) -> bool:
    if room == imported:
        return True
    if imported not in LEVEL or LEVEL[imported] >= LEVEL[room]:
        return False
    return imported not in NOT_BELOW.get(room, ())


@functools.cache
def packages_of_registries() -> dict[str, set[str]]:
    """Return the packages that each registry imports, by the registry's name: those of `Registry(kind, *packages)`."""
    body = ast.parse((PACKAGE / "registry.py").read_text(encoding="utf-8")).body
    calls = [node for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return {
        node.targets[0].id: {package.value for package in node.value.args[1:]}
        for node in calls
        if getattr(node.value.func, "id", None) == "Registry"
    }


def built_by(path: Path) -> set[str]:
    """Return the packages whose classes a file builds by their registered names, as in `HEADS.build(...)`."""
    built = [node.value for node in nodes_of(path) if isinstance(node, ast.Attribute) and node.attr == "build"]
    return {package for name in built for package in packages_of_registries().get(getattr(name, "id", None), ())}


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def own_room(path: Path) -> str:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_every_folder_has_an_import_level():
    assert {own_room(path) for path in FILES} == LEVEL.keys() - {"model_zoo"} | {"apps.__init__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_to_lower_levels(path):
    rooms = {module: room_of(module) for module in imports_of(path)}
    wrong = [m for m, room in rooms.items() if room is not None and not allowed(own_room(path), room)]
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_a_registry_builds_lies_no_higher(path):
    # A registry imports its classes when it builds one, so it could reach up where no import shows it.
    wrong = {module for module in built_by(path) if LEVEL[room_of(module)] > LEVEL[own_room(path)]}
    assert not wrong, f"{path.relative_to(ROOT)} builds classes of {', '.join(wrong)}"


def test_registries_of_files_are_found():
    assert built_by(PACKAGE / "models" / "base.py") == {"vitkit.backbones", "vitkit.necks", "vitkit.heads"}
    assert built_by(PACKAGE / "models" / "grounding_dino.py") == {"vitkit.nn.text_encoders"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_tools_or_configs(path):
    assert not [m for m in imports_of(path) if m.split(".")[0] in ("tools", "configs")]
    assert not {room_of(m) for m in imports_of(path)} & {"tools", "configs"}


def test_folders_of_data_only_import_lower_ones():
    assert {path.parent.name for path in (PACKAGE / "data").glob("*/*.py")} == DATA_LEVEL.keys()
    wrong = []
    for path in sorted((PACKAGE / "data").glob("*/*.py")):
        imported = {m.split(".")[2] for m in imports_of(path) if m.startswith("vitkit.data.")} & DATA_LEVEL.keys()
        above = {f for f in imported - {path.parent.name} if DATA_LEVEL[f] >= DATA_LEVEL[path.parent.name]}
        wrong += [f"{path.relative_to(ROOT)} imports {folder}" for folder in sorted(above)]
    assert not wrong, ", ".join(wrong)


def test_no_import_is_hidden_in_a_string():
    assert not [path.name for path in FILES if 'import_module("vitkit.' in path.read_text(encoding="utf-8")]


ZOO_FILES = [ROOT / "model_zoo" / "__init__.py", *(ROOT / "model_zoo" / "converters").glob("*.py")]
"""The index and the converters; scripts and notebooks use what they like."""


@pytest.mark.parametrize("path", ZOO_FILES, ids=lambda path: path.name)
def test_model_zoo_lies_below_what_finds_and_loads_weights(path):
    rooms = {module: room_of(module) for module in imports_of(path)}
    wrong = [m for m, room in rooms.items() if room is not None and not allowed("model_zoo", room)]
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(wrong)}"


ENTRANCES = {"vitkit.engine.trainer"}  # the run, which apps and tools start
"""Files of the core that only apps and tools import."""


def test_core_has_only_files_that_the_core_uses():
    core = [path for path in FILES if not own_room(path).startswith("apps.")]
    imported = {m for path in core for m in imports_of(path)}
    imported |= {m.rpartition(".")[0] for m in imported}
    imported |= {f"vitkit.data.formats.{form.module}" for form in FORMATS.values()}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in core if path.stem != "__init__"}
    # A config names registered classes.
    unused = {n for n, path in names.items() if n not in imported and ".register" not in path.read_text("utf-8")}
    assert unused == ENTRANCES, "what only an app uses belongs in its folder"


def test_no_room_has_circular_imports():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    imports = {
        name: {
            next((other for other in (m, m.rpartition(".")[0]) if other in files and other != name), None)
            for m in imports_of(path)
        }
        - {None}
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
        ("models", "text", True),
        ("models", "apps.inference", False),
        ("seq2seq", "models", True),
        ("backbones", "weights", False),
        ("weights", "model_zoo", True),
        ("model_zoo", "weights", False),
        ("backbones", "model_zoo", False),
        ("weights", "seq2seq", False),
        ("weights", "config", True),
        ("config", "weights", False),
        ("protocols", "distributed", False),
        ("registry", "protocols", False),
        ("distributed", "logging", False),
        ("evaluation", "io", True),
        ("evaluation", "data", False),
        ("evaluation", "apps.report", False),
        ("io", "ops", False),
        ("nn", "heads", False),
        ("config", "registry", True),
        ("config", "ops", False),
        ("data", "ops", True),
        ("data", "models", False),
        ("data", "engine", False),
        ("engine", "data", True),
        ("engine", "apps.visualization", False),
        ("engine", "models", False),
        ("engine", "apps.inference", False),
        ("apps.inference", "models", True),
        ("apps.inference", "apps.export_reading", True),
        ("data", "apps.datasets", False),
        ("apps.export_reading", "apps.inference", False),
        ("apps.export_writing", "apps.conversion", False),
        ("apps.starter", "apps.training", True),
        ("models", "tools", False),
    ],
)
def test_import_rule_detects_violations(room, imported, expected):
    assert allowed(room, imported) is expected


def test_importing_a_backbone_loads_only_what_it_needs():
    # Packages import none of their files: registries do when a name is asked for.
    code = "import sys, vitkit.backbones.resnet; print(*(name for name in sys.modules if name.startswith('vitkit.')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = run.stdout.split()
    assert "vitkit.backbones.resnet" in loaded
    assert len(loaded) <= 18, sorted(loaded)
    assert not {"vitkit.backbones.swin", "vitkit.nn.fusion", "vitkit.protocols.model"} & set(loaded)
