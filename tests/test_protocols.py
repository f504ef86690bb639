import pytest
from torch import nn

import vitkit  # noqa: F401 - registers all parts
from vitkit import BACKBONES, CRITERIA, DATASETS, EVALUATORS, HEADS, MODELS, NECKS
from vitkit.protocols import DenseModel, Evaluator, GenerativeModel, HasClasses, HasThings, HasVocabularies, child


def classes_in(registry) -> list[type]:
    return sorted({registry.resolve(name)[0] for name in registry.names()}, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", classes_in(EVALUATORS), ids=lambda cls: cls.__name__)
def test_every_evaluator_has_the_methods_of_the_protocol(cls):
    methods = [name for name in vars(Evaluator) if not name.startswith("_")]
    assert methods
    assert all(callable(getattr(cls, name, None)) for name in methods)


@pytest.mark.parametrize("cls", classes_in(DATASETS), ids=lambda cls: cls.__name__)
def test_every_dataset_has_indexing_and_a_length(cls):
    assert callable(getattr(cls, "__len__", None))
    assert callable(getattr(cls, "__getitem__", None))


@pytest.mark.parametrize("registry", [BACKBONES, NECKS, HEADS, MODELS, CRITERIA], ids=lambda r: r.kind)
def test_every_part_of_a_model_and_every_criterion_is_a_module(registry):
    assert all(issubclass(cls, nn.Module) for cls in classes_in(registry))


@pytest.mark.parametrize("cls", classes_in(MODELS), ids=lambda cls: cls.__name__)
def test_model_has_at_most_one_way_to_predict(cls):
    assert not (isinstance(cls, DenseModel) and isinstance(cls, GenerativeModel))


def test_capabilities_of_a_class_without_a_base_are_detected():
    class Words:
        classes = ("a", "b")

        def __len__(self):
            return 0

    assert isinstance(Words(), HasClasses)
    assert not isinstance(Words(), HasThings)
    assert not isinstance(Words(), HasVocabularies)


def test_querying_vocabularies_creates_none():
    dataset = DATASETS.build(dict(type="ShapesCaptions", num_images=2, split="train"))
    assert isinstance(dataset, HasVocabularies)
    assert "_vocabulary" not in vars(dataset) or dataset._vocabulary is None


def test_child_returns_only_submodules():
    model = nn.Module()
    model.backbone = BACKBONES.build("ResNet", depth=18, pretrained=False)
    model.neck = "a word"
    assert child(model, "backbone") is model.backbone
    assert child(model, "neck") is None
    assert child(model, "head") is None
