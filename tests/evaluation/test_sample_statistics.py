"""Metrics of resampled images equal those of an evaluator that sees each image the same number of times."""

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset

from vitkit import EVALUATORS, build_dataset
from vitkit.apps.report.intervals import bootstrap_weights
from vitkit.evaluation.text import LanguageModelEvaluator, TextEvaluator


class Repeated(PlainDataset):
    """A dataset with images of another one, each repeated as often as in a resample."""

    def __init__(self, dataset, positions):
        self._dataset, self._positions = dataset, positions
        self.image_ids = list(range(len(positions)))
        for name in ("annotations", "classes", "category_ids", "things"):
            setattr(self, name, getattr(dataset, name))

    def __len__(self):
        return len(self._positions)

    def load_semantic(self, index):
        return self._dataset.load_semantic(self._positions[index])

    def load_panoptic(self, index):
        return self._dataset.load_panoptic(self._positions[index])

    def references(self, index):
        return self._dataset.references(self._positions[index])


def check(dataset, spec, predict, *, without=()):
    """Compare three resamples of a dataset of six images with new evaluators on the resampled images."""
    evaluator = EVALUATORS.build(spec, dataset=dataset)
    ids = list(dataset.image_ids)
    for k, image_id in enumerate(ids):
        if k not in without:
            evaluator.update([predict(k)], [{"image_id": image_id, "label": k % 3}])
    metrics = evaluator.compute()
    statistics = evaluator.statistics()
    weights = bootstrap_weights(len(ids), 3, seed=1)
    scores = statistics.scores(weights)
    got = {name: np.nan_to_num(values, nan=-1.0) for name, values in scores.overall.items()}
    assert {name: values[0] for name, values in got.items()} == pytest.approx(metrics)
    per_class = evaluator.per_class() if scores.by_class else {}
    for name, value in per_class.items():
        assert np.nan_to_num(next(iter(scores.by_class[name].values()))[0], nan=-1.0) == pytest.approx(value)
    for row in range(1, len(weights)):
        positions = np.repeat(np.arange(len(ids)), weights[row].astype(int)).tolist()
        again = EVALUATORS.build(spec, dataset=Repeated(dataset, positions))
        for image_id, k in enumerate(positions):
            if k not in without:
                again.update([predict(k)], [{"image_id": image_id, "label": k % 3}])
        assert {name: values[row] for name, values in got.items()} == pytest.approx(again.compute())
    name, ranks = statistics.sample_scores()
    assert name and ranks.shape == (len(ids),)
    return ranks


def shapes(task):
    return build_dataset(dict(type="ShapesSegmentation", task=task, num_images=6, image_size=48, split="val"))


@pytest.mark.parametrize("without", [(), (2,)])
def test_semantic_metrics_are_recomputed_from_sample_statistics(without):
    dataset = shapes("semantic")

    def predict(k):
        labels = dataset.load_semantic(k).astype(np.int64)
        labels[: 6 * k] = 0
        labels[labels >= len(dataset.classes)] = 0
        return dict(semantic=torch.from_numpy(labels))

    ranks = check(dataset, dict(type="SemanticEvaluator"), predict, without=without)
    assert ranks[0] == 1.0 and ranks.argmin() == (2 if without else 5)


@pytest.mark.parametrize("without", [(), (2,)])
def test_panoptic_metrics_are_recomputed_from_sample_statistics(without):
    dataset = shapes("panoptic")

    def predict(k):
        ids, segments = dataset.load_panoptic(k)
        ids = ids.copy()
        ids[: 6 * k] = 0
        return dict(panoptic=torch.from_numpy(ids), segments_info=[s for s in segments if (ids == s["id"]).any()])

    assert check(dataset, dict(type="PanopticEvaluator"), predict, without=without)[0] == 1.0


@pytest.mark.parametrize("without", [(), (2,)])
def test_classification_metrics_are_recomputed_from_sample_statistics(without):
    dataset = build_dataset(dict(type="ShapesClassification", num_images=6, image_size=32, split="val"))
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(rng.dirichlet(np.ones(len(dataset.classes)), size=6))
    check(dataset, dict(type="ClassificationEvaluator"), lambda k: dict(class_scores=scores[k]), without=without)


class Sentences:
    def __len__(self):
        return 6


TEXTS = ["a dog runs", "a cat", "two men on a bench", "the red house", "a boy with a ball", "nothing here"]
REFERENCES = [
    ["a dog runs fast", "the dog runs"],
    ["a cat sits"],
    ["two men sit on a bench"],
    ["a house"],
    ["a boy with a ball"],
    ["rain"],
]


@pytest.mark.parametrize("metrics", [("bleu", "chrf", "exact_match"), ("exact_match",)])
def test_text_metrics_are_recomputed_from_sample_statistics(metrics):
    def evaluated(positions):
        dataset = type("Many", (), {"__len__": lambda self: len(positions)})()
        evaluator = TextEvaluator(dataset, smallest_group=2, metrics=metrics)
        for index, k in enumerate(positions):
            target = dict(index=index, source_text="eins zwei " * (k + 1), references=REFERENCES[k])
            evaluator.update([dict(text=TEXTS[k])], [target])
        return evaluator, evaluator.compute()

    evaluator, expected = evaluated(range(6))
    statistics = evaluator.statistics()
    weights = bootstrap_weights(6, 3, seed=2)
    scores = statistics.scores(weights)
    assert {name: values[0] for name, values in scores.overall.items()} == pytest.approx(expected)
    groups = {name: next(iter(values.values()))[0] for name, values in scores.by_class.items()}
    assert groups == pytest.approx(evaluator.per_class()) and len(groups) > 1
    for row in range(1, 4):
        _, again = evaluated(np.repeat(np.arange(6), weights[row].astype(int)).tolist())
        assert {name: values[row] for name, values in scores.overall.items()} == pytest.approx(again)
    assert statistics.sample_scores()[1].argmax() == 4


def test_caption_metrics_are_recomputed_except_for_document_frequencies():
    class Captioned(PlainDataset):
        annotations = ("captions",)

        def __init__(self, positions):
            self._positions, self.image_ids = positions, list(range(len(positions)))

        def references(self, index):
            return REFERENCES[self._positions[index]]

    def evaluated(positions):
        evaluator = EVALUATORS.build(dict(type="CaptionEvaluator"), dataset=Captioned(positions))
        for image_id, k in enumerate(positions):
            evaluator.update([dict(text=TEXTS[k])], [dict(image_id=image_id)])
        return evaluator, evaluator.compute()

    evaluator, expected = evaluated(list(range(6)))
    weights = bootstrap_weights(6, 3, seed=3)
    overall = evaluator.statistics().scores(weights).overall
    assert {name: values[0] for name, values in overall.items()} == pytest.approx(expected)
    for row in range(1, 4):
        _, again = evaluated(np.repeat(np.arange(6), weights[row].astype(int)).tolist())
        for name in again.keys() - {"CIDEr-D"}:
            assert overall[name][row] == pytest.approx(again[name])


def test_perplexity_is_recomputed_from_sample_statistics():
    evaluator = LanguageModelEvaluator(Sentences())
    generator = torch.Generator().manual_seed(0)
    for index in range(6):
        logits = torch.randn(index + 2, 9, generator=generator)
        evaluator.update([dict(logits=logits)], [dict(index=index, tokens=torch.arange(1, index + 3))])
    expected = evaluator.compute()
    overall = evaluator.statistics().scores(np.ones((1, 6))).overall
    assert {name: values[0] for name, values in overall.items()} == pytest.approx(expected)
