"""Comparisons refuse runs and models that cannot be compared."""

import pytest
from helpers.plain_dataset import PlainDataset

from vitkit.apps.training.comparing import draw_lengths, score_models
from vitkit.apps.training.results import ScoredResults
from vitkit.errors import ConfigError
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.text import TextEvaluator


def test_images_have_no_source_length(tmp_path):
    dataset = PlainDataset(annotations=["label"], classes=["cat"], image_ids=[1])
    photos = ClassificationEvaluator(dataset)
    other = TextEvaluator(range(1))
    with pytest.raises(ConfigError, match="photos: ClassificationEvaluator has no metrics by the length of texts"):
        draw_lengths([ScoredResults("photos", photos, None, None)], tmp_path / "a.png")
    chrf = TextEvaluator(range(1), metrics=["chrf"])
    with pytest.raises(ConfigError, match="the models have different metrics: BLEU, chrF"):
        draw_lengths([ScoredResults("a", other, None, None), ScoredResults("b", chrf, None, None)], tmp_path / "a.png")


def test_all_names_are_looked_up_before_the_first_model_runs(monkeypatch):
    monkeypatch.setattr("vitkit.apps.training.comparing.test", lambda *_, **__: pytest.fail("a model ran"))
    with pytest.raises(ConfigError, match="'nosuch' is neither a model of the zoo"):
        score_models(["shapes_dino", "nosuch"])
