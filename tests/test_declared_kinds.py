"""A model, head or backbone says what kind it is: code outside of their rooms does not ask for their classes."""

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from vitkit.protocols.model import Model
from vitkit.registry import BACKBONES, HEADS, MODELS
from vitkit.structures import Detections, InstanceDetections, PanopticPrediction, PhraseDetections, SemanticPrediction

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(f"vitkit.{room}" for room in ("models", "heads", "seq2seq", "backbones"))
PREFIXES = tuple(f"{room}." for room in ROOMS)
FILES = [
    path
    for folder in ("vitkit", "configs", "tools", "model_zoo")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not ".".join(path.relative_to(ROOT).parts).startswith(PREFIXES)
]


def modules_of_rooms(tree: ast.AST) -> dict[str, object]:
    """Return what a file imports from the rooms, by its name in the file."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PREFIXES):
            module = importlib.import_module(node.module)
            found |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
    return found


@cache
def registered_names() -> set[str]:
    return {name for registry in (MODELS, HEADS, BACKBONES) for name in registry.names()}


def class_questions(source: str) -> list[str]:
    """Return the places of a file where it asks for the class of a model, head or backbone, or of a part of one."""
    tree = ast.parse(source)
    imported, places = modules_of_rooms(tree), []
    registered = registered_names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            parts = [part for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)]
            classes = [imported.get(part.id) for part in parts]
            asks = any(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes)
        elif isinstance(node, ast.Compare):  # type(model).__name__ == "DETR"
            sides = (node.left, *node.comparators)
            names = any(isinstance(side, ast.Attribute) and side.attr == "__name__" for side in sides)
            constants = (part for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant))
            asks = names and any(constant.value in registered for constant in constants)
        else:
            continue
        places += [f"line {node.lineno}: {ast.unparse(node)}"] if asks else []
    return places


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_asks_for_the_class_of_a_model(path):
    assert not class_questions(path.read_text(encoding="utf-8"))


def test_questions_are_found():
    source = "from vitkit.models.detr import DETR as D\nisinstance(model, int | D)\ntype(model).__name__ == 'DETR'"
    assert [place.partition(":")[0] for place in class_questions(source)] == ["line 2", "line 3"]
    assert not class_questions("isinstance(model, int)\ntype(model).__name__ == name")


FIELDS = {
    name
    for kind in (Detections, InstanceDetections, SemanticPrediction, PanopticPrediction, PhraseDetections)
    for name in kind.__annotations__
} | {"class_scores", "features", "text", "masked_tokens"}


def test_every_model_says_what_it_takes_and_returns():
    MODELS.load_packages()
    for name in MODELS.names():
        cls = MODELS.resolve(name)[0]
        if not f"{cls.__module__}.".startswith(PREFIXES):
            continue
        assert issubclass(cls, Model) and cls.takes, name
        # Those of segmentation depend on the tasks, and are said by the built model.
        assert cls.returns or cls.classifies_masks, name
        assert set(cls.returns) <= FIELDS, name
