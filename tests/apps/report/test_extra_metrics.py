"""A metric that a subclass of an evaluator adds reaches the table, the curves, the report and comparisons."""

import json

import pytest
from helpers.detection_files import CONFIG, write_data

import vitkit
from vitkit import EVALUATORS
from vitkit.apps.report import write_report
from vitkit.apps.report.comparison import Compared, write_comparison
from vitkit.apps.training.comparing import plot_runs
from vitkit.apps.training.results import score_file
from vitkit.errors import ConfigError
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.score_thresholds import find_best_row
from vitkit.tools import compare as compare_tool


class CountingEvaluator(CocoEvaluator):
    """COCO's metrics, and the highest F1 at an IoU of 0.3."""

    extra_metrics = ("bbox/F1_30",)

    def _compute(self):
        metrics = super()._compute()
        self.iou = 0.3
        return metrics | {"bbox/F1_30": find_best_row(self.statistics("bbox").rankings()).f1}


@pytest.fixture
def evaluators(tmp_path, monkeypatch):
    """Two models' evaluators, the second of which finds everything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        EVALUATORS, "_constructors", {**EVALUATORS._constructors, "CountingEvaluator": CountingEvaluator}
    )
    write_data(tmp_path, num_images=8)
    truth = json.loads((tmp_path / "truth.json").read_text())
    perfect = [{**{k: a[k] for k in ("image_id", "category_id", "bbox")}, "score": 0.9} for a in truth["annotations"]]
    (tmp_path / "perfect.json").write_text(json.dumps(perfect))
    (tmp_path / "config.py").write_text(CONFIG)
    evaluators = []
    for file in ("results.json", "perfect.json"):
        scored = score_file(tmp_path / file, annotations=tmp_path / "truth.json").evaluator
        evaluator = CountingEvaluator(scored.dataset)
        evaluator.stored_predictions = scored.stored_predictions
        evaluator.compute()
        evaluators.append(evaluator)
    return evaluators


def test_table_report_and_comparison_have_it(evaluators, tmp_path, capsys):
    first, second = evaluators
    value = first.metrics["bbox/F1_30"]
    assert 0 < value < 1 and second.metrics["bbox/F1_30"] == 1
    assert f"bbox/F1_30 {value:.4g}" in first.table().splitlines()
    page = write_report(first, tmp_path / "report.html", title="report").read_text()
    assert f'<th scope="row">bbox/F1_30</th><td>{value:.3f}' in page and "Added by CountingEvaluator." in page
    comparison = write_comparison([Compared("a", first), Compared("b", second)], tmp_path / "page.html")
    difference = comparison.differences[0]["bbox/F1_30"]
    assert (difference.first, difference.second) == (value, 1) and not difference.significant
    assert (
        "bbox/F1_30" in (tmp_path / "page.html").read_text() and "no interval" in (tmp_path / "page.html").read_text()
    )
    compare_tool.print_comparison(comparison)
    assert f"{value:.3f} -> 1.000  {1 - value:+.3f} (no interval)" in capsys.readouterr().out


def test_curves_have_it(evaluators, tmp_path):
    tiny = {"data.train.num_images": 4, "data.val.num_images": 2, "data.images_per_gpu": 2, "train.epochs": 1}
    tiny |= {"data.val.image_size": 64, "evaluator": dict(type="CountingEvaluator")}
    run = vitkit.train("quickstart/detr", run_dir=tmp_path / "run", device="cpu", **tiny)
    assert "bbox/F1_30" in run.metrics
    best = plot_runs({"run": run.path / "log.jsonl"}, tmp_path / "curves.png")
    assert {"bbox/AP", "bbox/AP50", "bbox/AP75", "bbox/F1_30"} == best["run"].keys()


def test_a_metric_that_is_declared_and_not_returned_is_named(evaluators):
    evaluators[0].extra_metrics = ("bbox/F2",)
    with pytest.raises(ConfigError, match="CountingEvaluator declares extra_metrics 'bbox/F2', which its _compute"):
        evaluators[0].compute()
