"""Neighbors, linear classifiers and statistics of frozen features, against plain NumPy formulas."""

import math

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset

from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.frozen_features import spread_and_rank
from vitkit.evaluation.linear_probe import assign_folds, fit_linear
from vitkit.evaluation.nearest_neighbors import nearest_neighbors, vote
from vitkit.registry import EVALUATORS

CLASSES = ["a", "b", "c"]


def features_of(count, dim=6, *, noise=1.0, seed=0):
    """Return features around the center of each class, float32, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(CLASSES)
    centers = rng.normal(size=(len(CLASSES), dim))
    features = (centers[labels] + noise * rng.normal(size=(count, dim))).astype(np.float32)
    return torch.from_numpy(features), torch.from_numpy(labels)


def dataset_of(count):
    return PlainDataset(annotations=["label"], classes=CLASSES, image_ids=list(range(count)))


def evaluate(spec, features, labels):
    evaluator = EVALUATORS.build(spec, dataset=dataset_of(len(labels)))
    for start in range(0, len(labels), 4):
        ids = range(start, min(start + 4, len(labels)))
        targets = [{"image_id": i, "label": int(labels[i])} for i in ids]
        evaluator.update([{"features": features[i]} for i in ids], targets)
    evaluator.gather()
    return evaluator, evaluator.compute()


def knn_in_numpy(features, labels, k, temperature):
    """Classify each image by the others, by the formula of DINO's eval_knn.py."""
    x = features.double().numpy()
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    predicted = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        nearest = sorted(others, key=lambda j: -x[i] @ x[j])[:k]
        votes = np.zeros(len(CLASSES))
        for j in nearest:
            votes[labels[j]] += math.exp(x[i] @ x[j] / temperature)
        predicted.append(int(votes.argmax()))
    return np.array(predicted)


@pytest.mark.parametrize("count,k", [(50, 20), (50, 1), (9, 20), (2, 20)])
def test_neighbors_vote_as_in_numpy_however_few_there_are(count, k):
    features, labels = features_of(count)
    evaluator, metrics = evaluate(dict(type="NearestNeighbors", k=k), features, labels)
    predicted = knn_in_numpy(features, labels.numpy(), k, 0.07)
    assert [evaluator.stored_predictions[i].best[0] for i in range(count)] == predicted.tolist()
    assert metrics["knn/top1"] == pytest.approx((predicted == labels.numpy()).mean())
    assert metrics["knn/top5"] == 1.0 and "knn: top-1 accuracy" in evaluator.table()


def test_neighbors_are_searched_in_a_gallery_of_other_images():
    features, labels = features_of(40)
    queries, gallery = features[:10] * 3, features[10:]
    similarities, indices = nearest_neighbors(queries, 5, gallery)
    x, y = (v.numpy() / np.linalg.norm(v, axis=1, keepdims=True) for v in (queries, gallery))
    assert (indices.numpy() == np.argsort(-(x @ y.T), axis=1)[:, :5]).all()
    votes = vote(similarities, labels[10:][indices], len(CLASSES), temperature=0.07)
    assert torch.allclose(votes.sum(dim=1), torch.ones(10))
    assert nearest_neighbors(queries, 99, gallery)[1].shape == (10, 30)


def test_many_images_are_compared_in_parts(monkeypatch):
    features, _ = features_of(23)
    whole = nearest_neighbors(features, 4)
    monkeypatch.setattr("vitkit.evaluation.nearest_neighbors._AT_ONCE", 5)
    parts = nearest_neighbors(features, 4)
    assert torch.allclose(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_the_linear_fit_is_the_minimum_of_its_convex_function():
    features, labels = features_of(60, dim=8)
    features = features * torch.logspace(-3, 3, 8) + 5
    features[:, 3] = 7.0  # says nothing
    weight, bias = (value.numpy() for value in fit_linear(features, labels, 3, penalty=0.5))
    x = features.double().numpy()
    scale = np.where(x.std(axis=0) > 1e-9, x.std(axis=0), np.inf)
    z = (x - x.mean(axis=0)) / scale
    w = weight * np.where(np.isinf(scale), 0.0, scale)
    logits = x @ weight.T + bias
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    error = p - np.eye(3)[labels.numpy()]
    # The gradient of the sum of cross-entropies + penalty / 2 * |w|^2 is 0 at its only minimum.
    assert np.abs(error.T @ z + 0.5 * w).max() < 1e-4
    assert np.abs(error.sum(axis=0)).max() < 1e-4
    assert (weight[:, 3] == 0).all()


def test_the_linear_fit_equals_that_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    features, labels = features_of(60, dim=8)
    weight, bias = fit_linear(features, labels, 3)
    z = (features - features.mean(dim=0)) / features.std(dim=0, correction=0)
    theirs = linear_model.LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(z.numpy(), labels.numpy())
    ours = torch.nn.functional.linear(features.double(), weight, bias).softmax(dim=1)
    assert np.allclose(ours, theirs.predict_proba(z.numpy()), atol=1e-4)


def test_each_image_is_classified_by_what_the_others_taught():
    features, labels = features_of(30, noise=0.3)
    spec = dict(type="LinearProbe", folds=5)
    _, metrics = evaluate(spec, features, labels)
    assert metrics["probe/top1"] == 1.0 and metrics == evaluate(spec, features, labels)[1]
    # Noise that a classifier could learn by heart says nothing of images that it has not seen.
    noise = torch.randn(60, 200, generator=torch.Generator().manual_seed(0))
    _, metrics = evaluate(spec, noise, torch.arange(60) % 3)
    assert metrics["probe/top1"] < 0.6


def test_folds_have_about_as_many_images_of_each_class():
    labels = torch.tensor([0] * 10 + [1] * 5 + [2])
    folds = assign_folds(labels, 5)
    assert torch.bincount(folds).tolist() == [4, 3, 3, 3, 3]
    assert (
        torch.bincount(folds[labels == 0]).tolist() == [2] * 5
        and torch.bincount(folds[labels == 1]).tolist() == [1] * 5
    )


def test_statistics_show_a_collapse():
    independent = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    spread, rank = spread_and_rank(independent)
    assert spread == pytest.approx(1, abs=0.02) and rank == pytest.approx(16, abs=0.1)
    assert spread_and_rank(torch.ones(9, 4)) == (pytest.approx(0, abs=1e-7), pytest.approx(1, abs=1))
    on_a_line = torch.tensor([[1.0, 0.1 * i, 0.0] for i in range(2)])
    assert spread_and_rank(on_a_line)[1] == pytest.approx(1)

    dataset = PlainDataset(image_ids=list(range(3)))
    evaluator = EVALUATORS.build("FeatureStatistics", dataset=dataset)
    evaluator.update([{"features": x} for x in independent[:3]], [{"image_id": i} for i in range(3)])
    evaluator.gather()
    x = independent[:3].double().numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    s = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)
    s /= s.sum()
    metrics = evaluator.compute()
    assert metrics["spread"] == pytest.approx(x.std(axis=0).mean() * 4)
    assert metrics["rank"] == pytest.approx(np.exp(-(s * np.log(s + 1e-300)).sum()))
    assert "features of 3 images: spread" in evaluator.table()


def test_what_cannot_be_classified_is_an_error():
    features, labels = features_of(3)
    with pytest.raises(DataError, match="got 1 labeled image; expected at least 2"):
        evaluate("NearestNeighbors", features[:1], labels[:1])
    with pytest.raises(ConfigError, match="k=0, temperature=0.07; expected both above 0"):
        EVALUATORS.build(dict(type="NearestNeighbors", k=0), dataset=dataset_of(3))
    with pytest.raises(ConfigError, match="folds=1"):
        EVALUATORS.build(dict(type="LinearProbe", folds=1), dataset=dataset_of(3))
    with pytest.raises(ConfigError, match="NearestNeighbors needs 'features', but the model predicts logits"):
        EVALUATORS.build("NearestNeighbors", dataset=dataset_of(3)).update(
            [{"logits": features[0]}], [{"image_id": 0, "label": 0}]
        )
    with pytest.raises(ConfigError, match="NearestNeighbors, ClassificationE.*, some read a model's raw outputs"):
        EVALUATORS.build(
            dict(type="CombinedEvaluator", evaluator=["NearestNeighbors", "ClassificationEvaluator"]),
            dataset=dataset_of(3),
        )


def test_both_evaluators_run_on_the_same_features():
    features, labels = features_of(30, noise=0.3)
    both = dict(type="CombinedEvaluator", evaluator=["NearestNeighbors", "LinearProbe"])
    _, metrics = evaluate(both, features, labels)
    assert metrics == {"knn/top1": 1.0, "knn/top5": 1.0, "probe/top1": 1.0, "probe/top5": 1.0}


def test_statistics_have_the_names_of_the_metrics():
    features, labels = features_of(30, noise=2.0)
    evaluator, metrics = evaluate("NearestNeighbors", features, labels)
    overall = evaluator.statistics().scores(np.ones((1, 30))).overall
    assert {name: values.item() for name, values in overall.items()} == pytest.approx(metrics)


def test_a_rank_with_one_image_leaves_it_to_the_main_process(monkeypatch):
    features, _ = features_of(3)
    monkeypatch.setattr("vitkit.evaluation.frozen_features.is_main", lambda: False)
    evaluator = EVALUATORS.build("NearestNeighbors", dataset=dataset_of(3))
    evaluator.update([{"features": features[0]}], [{"image_id": 0, "label": 0}])
    evaluator.gather()
