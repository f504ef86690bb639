"""Every registered model is explained, or refused with the reason."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.every_model import (
    CLASSIFIERS,
    CLIPS,
    DENSE,
    IMAGE,
    MASKS,
    PRETRAINING,
    PROMPT,
    TEXTS,
    VIT,
    dense_model,
    text_model,
)
from matplotlib.figure import Figure

from vitkit import build_model
from vitkit.apps.explanations import backbones
from vitkit.apps.explanations.api import explain_image
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.explanations.text_figures import explain_text
from vitkit.apps.inference import Predictor
from vitkit.errors import ConfigError
from vitkit.registry import BACKBONES, CRITERIA, MODELS

CRITERION = dict(
    type="MaskCriterion",
    matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0),
    weights=dict(labels=2.0, mask=5.0, dice=5.0),
    no_object_weight=0.1,
)


@pytest.fixture
def unsaved(monkeypatch):
    """Skip the rendering of figures, which takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())


def check(draw, expected, folder: Path) -> Explanation | None:
    """Draw, and compare the files with those of the result, or the error that explains why there are none."""
    result = Explanation(folder, stem="p")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            draw(result)
        return None
    draw(result)
    assert {path.stem.partition("_")[2] for path in folder.glob("*.png")} == expected
    assert all(5_000 < path.stat().st_size < 5e6 for path in folder.glob("*.html"))
    assert sorted(result.files) == sorted(folder.glob("[!.]*"))
    return result


def request(**options) -> ExplainRequest:
    return ExplainRequest(**{"beams": 2, "html": True} | options)


def test_every_registered_model_is_tested():
    def classes_of(registry):  # other tests may have registered some of their own
        classes = {registry.resolve(name)[0] for name in registry.names()}
        return {cls.__name__ for cls in classes if cls.__module__.startswith("vitkit.")}

    others = {"Classifier", "DistilledClassifier"}  # classifiers are explained by their backbone
    assert classes_of(MODELS) == {name.split()[0] for name in (*DENSE, *TEXTS, *PRETRAINING)} | others
    assert classes_of(BACKBONES) == set(CLASSIFIERS)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_and_captioners_are_explained(name, unsaved, tmp_path):
    expected = DENSE[name][1]
    criterion = CRITERIA.build(CRITERION) if "loss_points" in expected else None
    queries = [] if "words" in expected or name.startswith("PerPixelClassification") else [0]
    asked = request(queries=queries, criterion=criterion)
    predictor = Predictor(dense_model(name), list("abc"))
    if "text" in predictor.model.takes:
        predictor = predictor.with_text(PROMPT)
    result = check(lambda result: explain_image(predictor, IMAGE, asked, result), expected, tmp_path)
    notes = "\n".join(result.notes) if result else ""
    assert ("no figures of masks" in notes) == (name == "DETRSegmentation")
    assert ("no figure of a panoptic map: the model's tasks are semantic" in notes) == (name == "MaskFormer")
    without_points = expected != MASKS | {"panoptic", "loss_points", "points"} and "masks" in expected
    assert ("no figure of the loss's points" in notes) == without_points
    more = ("loss_points", "prompt_heads", "rollout")  # ECDet's backbone has global attention
    pages = 0 if isinstance(expected, str) else 1 + sum(name in expected for name in more)  # queries, backbone
    assert len(list(tmp_path.glob("*.html"))) == pages


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_are_explained(name, unsaved, tmp_path):
    torch.manual_seed(0)
    spec, expected = CLASSIFIERS[name]
    predictor = Predictor(build_model(dict(type="Classifier", backbone=dict(type=name, **spec), num_classes=3)), "abc")
    predictor.sampling = expected if expected == CLIPS else None
    check(lambda result: explain_image(predictor, IMAGE, request(), result), expected, tmp_path)


@pytest.mark.parametrize("name", PRETRAINING)
def test_models_that_learn_without_labels_are_explained(name, unsaved, tmp_path):
    torch.manual_seed(0)
    options, expected = PRETRAINING[name]
    predictor = Predictor(build_model(dict(type=name, backbone=dict(type="ViT", **VIT), **options)), ())
    result = check(lambda result: explain_image(predictor, IMAGE, request(), result), expected, tmp_path)
    assert ("loss of the removed patches, mean of 3 masks" in result.numbers) == (name == "MAE")
    with pytest.raises(ConfigError, match="^queries: not for "):
        explain_image(predictor, IMAGE, request(), Explanation(tmp_path), options=["queries"])


def test_page_says_how_many_layers_are_left_out(unsaved, tmp_path, monkeypatch):
    monkeypatch.setattr(backbones, "MAX_LAYERS", 1)
    vit = dict(type="ViT", d_model=16, depth=2, num_heads=2, image_size=64)
    predictor = Predictor(build_model(dict(type="Classifier", backbone=vit, num_classes=3)), "abc")
    explain_image(predictor, IMAGE, request(), Explanation(tmp_path))
    assert "What ViT attends to; 1 of 2 layers" in next(tmp_path.glob("*.html")).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TEXTS)
def test_text_models_are_explained(name, unsaved, tmp_path):
    model, vocabularies = text_model(name)
    loaded = SimpleNamespace(model=model, vocabularies=vocabularies)
    check(lambda result: explain_text(loaded, "a", request(), result), TEXTS[name][1], tmp_path)
