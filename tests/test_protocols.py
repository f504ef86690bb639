import pytest
from helpers.plain_dataset import PlainDataset
from torch import nn

import vitkit
from vitkit import BACKBONES, CRITERIA, DATASETS, EVALUATORS, HEADS, MODELS, NECKS
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.text import LanguageModelEvaluator
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.evaluator import Evaluator
from vitkit.protocols.model import DenseModel, GenerativeModel, Model, child

BASES = [(DATASETS, Dataset), (EVALUATORS, Evaluator), (MODELS, Model), (CRITERIA, Criterion)]


def classes_in(registry) -> list[type]:
    return sorted({registry.resolve(name)[0] for name in registry.names()}, key=lambda cls: cls.__name__)


@pytest.mark.parametrize(("registry", "base"), BASES, ids=lambda value: getattr(value, "kind", ""))
def test_every_class_derives_from_the_base_of_its_kind(registry, base):
    assert all(issubclass(cls, base) and not getattr(cls, "__abstractmethods__", None) for cls in classes_in(registry))


@pytest.mark.parametrize(("registry", "base"), BASES, ids=lambda value: getattr(value, "kind", ""))
def test_a_class_without_the_base_is_refused_by_name(registry, base):
    class Words:
        pass

    name = rf"vitkit\.{base.__name__}"
    message = rf"^{registry.kind} Words does not derive from {name}, .* Write: class Words\({name}\)\.$"
    with pytest.raises(ConfigError, match=message):
        registry.register(Words)
    with pytest.raises(ConfigError, match=message):
        registry.build(Words())
    assert "Words" not in registry
    assert getattr(vitkit, base.__name__) is base


def test_a_dataset_without_its_methods_is_refused_when_it_is_built(monkeypatch):
    monkeypatch.setattr(DATASETS, "_constructors", dict(DATASETS._constructors))

    @DATASETS.register
    class Words(Dataset):
        def __len__(self):
            return 0

    with pytest.raises(ConfigError, match="dataset Words: .*__getitem__"):
        DATASETS.build("Words")


def test_a_dataset_says_what_it_lacks():
    words = PlainDataset(image_ids=[7, 9])
    assert (words.classes, words.things, words.annotations, list(words.sample_ids())) == (None, None, (), [7, 9])
    assert not words.has_vocabularies
    with pytest.raises(DataError, match="dataset PlainDataset has no boxes or masks of objects"):
        words.ground_truth()
    with pytest.raises(DataError, match="dataset PlainDataset has no panoptic maps"):
        words.load_panoptic(0)


LOADERS = {
    "objects": "ground_truth",
    "panoptic": "load_panoptic",
    "semantic": "load_semantic",
    "captions": "references",
    "regions": "located",
}


@pytest.mark.parametrize("cls", classes_in(DATASETS), ids=lambda cls: cls.__name__)
def test_a_dataset_has_the_methods_of_its_annotations(cls):
    assert set(cls.annotations) <= {*LOADERS, "label"}
    for kind, name in LOADERS.items():
        assert (getattr(cls, name) is not getattr(Dataset, name)) == (kind in cls.annotations)


def test_an_evaluator_that_reads_no_files_says_so(tmp_path):
    evaluator = LanguageModelEvaluator(PlainDataset(image_ids=[]))
    with pytest.raises(ConfigError, match=r"a\.json: LanguageModelEvaluator cannot read predictions from files"):
        evaluator.load_results(tmp_path / "a.json")
    assert (evaluator.parts, evaluator.per_class(), evaluator.score_thresholds()) == ((evaluator,), {}, None)


@pytest.mark.parametrize("registry", [BACKBONES, NECKS, HEADS, MODELS, CRITERIA], ids=lambda r: r.kind)
def test_every_part_of_a_model_and_every_criterion_is_a_module(registry):
    assert all(issubclass(cls, nn.Module) for cls in classes_in(registry))


@pytest.mark.parametrize("cls", classes_in(MODELS), ids=lambda cls: cls.__name__)
def test_model_has_at_most_one_way_to_predict(cls):
    assert not (isinstance(cls, DenseModel) and isinstance(cls, GenerativeModel))


def test_querying_vocabularies_creates_none():
    dataset = DATASETS.build(dict(type="ShapesCaptions", num_images=2, split="train"))
    assert dataset.has_vocabularies
    assert "_vocabulary" not in vars(dataset) or dataset._vocabulary is None


def test_child_returns_only_submodules():
    model = nn.Module()
    model.backbone = BACKBONES.build("ResNet", depth=18, pretrained=False)
    model.neck = "a word"
    assert child(model, "backbone") is model.backbone
    assert child(model, "neck") is None
    assert child(model, "head") is None
