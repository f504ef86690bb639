"""Average precision of resampled images equals COCOeval's on the resampled dataset."""

import numpy as np
import pytest
from helpers.plain_dataset import PlainDataset

from vitkit.apps.report.intervals import bootstrap_weights, estimate, paired_difference
from vitkit.apps.report.pages.coco import counts_by_score
from vitkit.evaluation.coco import CocoEvaluator, metric_names
from vitkit.evaluation.detection_statistics import THRESHOLDS

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 9, "name": "never"}]


class Truth(PlainDataset):
    """A dataset that has only annotations."""

    annotations = ("objects",)

    def __init__(self, images, annotations):
        self._content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
        self.category_ids = [c["id"] for c in CATEGORIES]
        self.classes = [c["name"] for c in CATEGORIES]
        self.image_ids = [image["id"] for image in images]

    def ground_truth(self):
        return self._content


def random_data(num_images=14, seed=0):
    """Images with objects of all sizes, some of them crowds, and predictions of all kinds."""
    rng = np.random.default_rng(seed)
    images = [{"id": 10 + k, "width": 400, "height": 400} for k in range(num_images)]
    annotations, results = [], []
    for image in images:
        for _ in range(rng.integers(0, 6)):
            x, y, side = *rng.uniform(0, 200, 2), rng.choice([20, 60, 150])
            category = int(rng.choice([3, 7]))
            box = [float(x), float(y), float(side), float(side)]
            crowd = int(rng.random() < 0.15)
            annotation = dict(id=len(annotations) + 1, image_id=image["id"], category_id=category, bbox=box)
            annotations.append({**annotation, "area": float(side * side), "iscrowd": crowd})
            for _ in range(rng.integers(0, 4)):
                jitter = rng.normal(0, side * 0.08, 4)
                near = [box[0] + jitter[0], box[1] + jitter[1], side + abs(jitter[2]), side + abs(jitter[3])]
                predicted = category if rng.random() < 0.8 else int(rng.choice([3, 7, 9]))
                score = float(rng.random())
                results.append(dict(image_id=image["id"], category_id=predicted, bbox=near, score=score))
        for _ in range(rng.integers(0, 3)):
            box = [*rng.uniform(0, 300, 2).tolist(), 40.0, 40.0]
            results.append(dict(image_id=image["id"], category_id=3, bbox=box, score=float(rng.random() * 0.7)))
    return images, annotations, results


def evaluated(images, annotations, results, tmp_path):
    import json

    evaluator = CocoEvaluator(Truth(images, annotations))
    (tmp_path / "results.json").write_text(json.dumps(results))
    evaluator.load_results(tmp_path / "results.json")
    return evaluator, evaluator.compute()


def resampled(images, annotations, results, counts):
    """Return copies of the images under new ids, in the order of the originals."""
    new = ([], [], [])
    for image, count in zip(images, counts.astype(int)):
        for _ in range(count):
            image_id = 1000 + len(new[0])
            new[0].append({**image, "id": image_id})
            for entries, copies in ((annotations, new[1]), (results, new[2])):
                copies += [{**e, "image_id": image_id} for e in entries if e["image_id"] == image["id"]]
    return new[0], [{**a, "id": k} for k, a in enumerate(new[1], start=1)], new[2]


@pytest.mark.parametrize("seed", range(3))
def test_resampled_metrics_equal_cocoeval_on_the_resampled_images(seed, tmp_path):
    data = random_data(seed=seed)
    evaluator, metrics = evaluated(*data, tmp_path)
    statistics = evaluator.statistics()
    weights = bootstrap_weights(len(statistics.sample_ids), 4, seed=seed)
    overall, by_class = statistics.scores(weights)
    assert list(overall) == [f"bbox/{name}" for name in metric_names()]
    for row, counts in enumerate(weights):
        again, expected = (evaluator, metrics) if row == 0 else evaluated(*resampled(*data, counts), tmp_path)
        got = {name: float(np.nan_to_num(values[row], nan=-1.0)) for name, values in overall.items()}
        assert got == pytest.approx(expected, abs=1e-12)
        details, sizes = again.details()
        for name, values in by_class.items():
            for metric in ("AP", "AP50", "AP75", "AR"):
                assert np.nan_to_num(values[metric][row], nan=-1.0) == pytest.approx(details[name][metric], abs=1e-12)
        for size, values in statistics.by_size(weights).items():
            assert np.nan_to_num(values["AP75"][row], nan=-1.0) == pytest.approx(sizes[size]["AP75"], abs=1e-12)


def test_threshold_counts_equal_those_of_the_matches(tmp_path):
    evaluator, _ = evaluated(*random_data(seed=5), tmp_path)
    statistics = evaluator.statistics()
    right, predicted, objects = statistics.threshold_counts()
    ranking = statistics.ranking(0, iou=0)
    level = int(np.flatnonzero(THRESHOLDS == 0.4)[0])
    one, all_of_one, objects_of_one = statistics.threshold_counts([0])
    assert one[level].sum() == (ranking.correct & (ranking.scores >= 0.4)).sum()
    assert all_of_one[level].sum() == (ranking.scores >= 0.4).sum()
    assert objects_of_one.sum() == ranking.num_objects.sum() <= objects.sum()
    assert (right <= predicted).all() and (np.diff(predicted.sum(axis=1)) <= 0).all()


def test_scores_below_all_thresholds_count_at_none(tmp_path):
    images, annotations, results = random_data(seed=5)
    evaluator, _ = evaluated(images, annotations, [{**r, "score": r["score"] - 2} for r in results], tmp_path)
    right, predicted, objects = evaluator.statistics().threshold_counts()
    assert not right.any() and not predicted.any() and objects.any()


def test_calibration_counts_by_hand(tmp_path):
    images = [{"id": 1, "width": 100, "height": 100}]
    annotations = [dict(id=1, image_id=1, category_id=3, bbox=[0, 0, 10, 10], area=100, iscrowd=0)]
    boxes = [([0, 0, 10, 10], 0.92), ([50, 50, 10, 10], 0.96), ([80, 80, 10, 10], 0.31), ([20, 20, 9, 9], 0.01)]
    results = [dict(image_id=1, category_id=3, bbox=box, score=score) for box, score in boxes]
    evaluator, _ = evaluated(images, annotations, results, tmp_path)
    count, total, right = counts_by_score(evaluator.statistics())[:, :, 0]
    assert count.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 2]
    assert total[9] == pytest.approx(1.88) and right[9] == 1 and right[3] == 0


def test_interval_covers_the_middle_of_its_resamples():
    values = np.r_[0.5, np.linspace(0, 1, 1001), np.nan]
    assert estimate(values) == pytest.approx((0.5, 0.025, 0.975))
    assert np.isnan(estimate(np.array([np.nan, 0.1])).low)


def test_paired_difference_is_significant_only_if_its_interval_excludes_zero():
    noise = np.random.default_rng(0).normal(0, 0.1, 1001)
    first = 0.5 + noise
    assert paired_difference(first, first + 0.01).significant  # unpaired, the intervals overlap almost wholly
    assert not paired_difference(first, first[::-1]).significant


def test_resamples_have_as_many_images_as_the_data():
    weights = bootstrap_weights(7, 5, seed=1)
    assert weights.shape == (6, 7) and (weights.sum(axis=1) == 7).all() and (weights[0] == 1).all()
    assert bootstrap_weights(3000).shape[0] == 201
