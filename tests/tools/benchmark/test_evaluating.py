import pytest

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark.evaluating import DrawnTruth, evaluation


def test_drawn_detections_are_scored_by_lvis_rules():
    metrics = evaluation(num_images=8)()
    assert 0.2 < metrics["bbox/AP"] < metrics["bbox/AP50"] < 1 and all(0 <= metrics[f"bbox/AP{k}"] <= 1 for k in "rcf")
    image = DrawnTruth(8).ground_truth()["images"][0]
    assert len(image["neg_category_ids"]) == 12 and not image["not_exhaustive_category_ids"]
