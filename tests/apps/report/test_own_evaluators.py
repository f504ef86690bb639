"""Evaluators of users have reports and comparisons with intervals, without a change to vitkit."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.browser import open_page
from helpers.plain_dataset import PlainDataset

import vitkit
from vitkit import EVALUATORS, apps, build_dataset, load_config
from vitkit.apps.report import prediction_image, report_sections, write_report
from vitkit.apps.report.comparison import Compared, write_comparison
from vitkit.apps.report.sections import (
    ConfusionMatrix,
    Curve,
    Details,
    Gallery,
    Image,
    LineChart,
    PixelOverlay,
    Section,
    Table,
    overall_section,
    resample,
)
from vitkit.errors import ConfigError
from vitkit.evaluation.base import SampleEvaluator
from vitkit.evaluation.bootstrap import Scores, weighted_ratio
from vitkit.evaluation.text import LanguageModelEvaluator

NASTY = "<script>alert(1)</script>"


class Counted(PlainDataset):
    """Images with a number of objects."""

    classes, image_ids, has_images = None, list(range(8)), True

    def load_image(self, index):
        return np.full((60, 80, 3), 30 * index, np.uint8)


class CountStatistics(NamedTuple):
    sample_ids: list
    errors: np.ndarray
    class_names: tuple = ()

    def scores(self, weights):
        ones = np.ones(len(self.errors))
        overall = {"mean_error": weighted_ratio(weights, self.errors, ones)}
        return Scores({**overall, "exact": weighted_ratio(weights, self.errors == 0, ones)}, {})

    def sample_scores(self):
        return "error", -self.errors


class CountEvaluator(SampleEvaluator):
    """How far predicted numbers of objects are from the true ones."""

    lower_is_better = ("mean_error",)

    def update(self, predictions, targets):
        for prediction, target in zip(predictions, targets, strict=True):
            self.stored_predictions[target["image_id"]] = abs(prediction["count"] - target["count"])

    def statistics(self):
        return CountStatistics(
            list(self.stored_predictions), np.array(list(self.stored_predictions.values()), np.float64)
        )

    def _table_lines(self):
        return [str(self.metrics)]


class IllustratedCountEvaluator(CountEvaluator):
    """Also has a page of its own."""


@report_sections.register
def illustrated_sections(evaluator: IllustratedCountEvaluator):
    statistics = evaluator.statistics()
    _, scores = resample(statistics)
    levels = np.linspace(0, 1, 5)
    image = Image(3, NASTY, PixelOverlay(np.eye(60, 80, dtype=bool)), caption=(NASTY, "second line"))
    own = Image(None, "drawn here", pixels=np.zeros((40, 50, 3), np.uint8))
    return [
        overall_section(scores.overall),
        Section(f"Errors {NASTY}", [Table(("image", "error"), [[NASTY, 1], ["1", 0.25]], NASTY)], NASTY),
        Section("Curves", [LineChart([Curve(NASTY, levels, levels)], NASTY, "x", "y")]),
        Section("Images", [Details(NASTY, [Gallery("worst", [[image], [own, image]])])]),
        Section("Matrix", [ConfusionMatrix(np.array([[2, 1], [0, 3]]), [NASTY, "b"], lambda *cell: [image])]),
    ]


@prediction_image.register
def illustrated_image(evaluator: IllustratedCountEvaluator, index):
    return Image(index, "", PixelOverlay(np.ones((60, 80), bool)))


def evaluated(kind, offsets):
    evaluator = kind(Counted())
    targets = [dict(image_id=k, count=5) for k in range(8)]
    evaluator.update([dict(count=5 + offset) for offset in offsets], targets)
    evaluator.gather()
    evaluator.compute()
    return evaluator


def test_statistics_are_enough_for_a_report_with_intervals(tmp_path):
    evaluator = evaluated(CountEvaluator, [0, 0, 1, 2, 0, 4, 0, 1])
    page = write_report(evaluator, tmp_path / "report.html", title="counts").read_text()
    assert re.search(r'<th scope="row">mean_error</th><td>1\.000<small>0\.\d+ to \d\.\d+</small></td>', page)


def test_own_sections_are_shown_and_escaped(tmp_path):
    evaluator = evaluated(IllustratedCountEvaluator, range(8))
    path = write_report(evaluator, tmp_path / "report.html", title=NASTY)
    page = path.read_text()
    assert NASTY not in page and page.count("&lt;script&gt;alert(1)") > 10
    assert page.count("<h2>") == 5 and page.count('src="data:image/jpeg') == 3
    assert "<small>" in page and "<b>&lt;script" in page and "<br>second line" in page
    with open_page(path, width=400) as (opened, issues):
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        opened.locator("button[data-cell]").first.click()
        assert opened.locator("dialog[open] img").count() == 1 and not issues


def test_own_evaluators_are_compared(tmp_path):
    models = [
        Compared(name, evaluated(IllustratedCountEvaluator, offsets))
        for name, offsets in (("a", [2, 3, 4, 2, 3, 2, 5, 2]), ("b", [0, 1, 0, 0, 1, 0, 0, 0]))
    ]
    comparison = write_comparison(models, tmp_path / "comparison.html")
    assert comparison.differences[0]["mean_error"].significant
    page = (tmp_path / "comparison.html").read_text()
    assert re.search(r'mean_error</th>.*?<td class="won">-2\.625', page) and page.count("data:image/jpeg") > 2


def test_evaluators_without_statistics_have_a_report_of_their_metrics(tmp_path):
    class Plain(vitkit.Evaluator):
        def __init__(self, dataset):
            self.dataset = dataset

        def update(self, predictions, targets): ...

        def gather(self): ...

        def compute(self):
            return {"accuracy": 0.25}

        def table(self):
            return ""

    page = write_report(Plain(Counted()), tmp_path / "report.html", title="plain").read_text()
    assert "<td>0.250</td>" in page and "Plain has no per-sample statistics" in page
    with pytest.raises(ConfigError, match="does not derive from vitkit.Evaluator"):
        write_report(object(), tmp_path / "report.html", title="object")


def test_the_evaluator_of_the_readme_and_its_page_are_one_file_that_a_config_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(EVALUATORS, "_constructors", dict(EVALUATORS._constructors))
    text = (Path(apps.__file__).parent / "report" / "README.md").read_text(encoding="utf-8")
    (tmp_path / "counts.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], encoding="utf-8")
    source = "def config():\n    return dict(imports=['counts.py'], evaluator=dict(type='CountEvaluator'))\n"
    (tmp_path / "config.py").write_text(source)
    config = load_config(tmp_path / "config.py")
    dataset = build_dataset(dict(type="ShapesDetection", num_images=4, image_size=48))
    evaluator = EVALUATORS.build(config["evaluator"], dataset=dataset)
    for k, image_id in enumerate(dataset.image_ids):
        target = dataset[k]["target"]
        scores = torch.tensor([0.9] * (len(target["labels"]) + k) + [0.4])  # k too many, and one that is not counted
        evaluator.update([dict(scores=scores)], [dict(target, image_id=image_id)])
    evaluator.gather()
    assert evaluator.compute()["mean_error"] == 1.5
    page = write_report(evaluator, tmp_path / "report.html", title="counts").read_text()
    assert "mean_error" in page and page.count("data:image/jpeg") == 4


def test_a_subclass_keeps_the_report_of_its_base(tmp_path):
    class Mine(LanguageModelEvaluator):
        pass

    class Sentences(PlainDataset):
        noun, image_ids = "sentences", [0, 1]

    evaluator = Mine(Sentences())
    for index in range(2):
        evaluator.update([dict(logits=torch.zeros(2, 5))], [dict(index=index, tokens=torch.tensor([3, 4]))])
    evaluator.compute()
    page = write_report(evaluator, tmp_path / "report.html", title="mine").read_text()
    assert "perplexity" in page and "from a bootstrap over the sentences" in page


def test_unknown_parts_are_named(tmp_path):
    class Wrong(CountEvaluator):
        pass

    @report_sections.register(Wrong)
    def wrong_sections(evaluator):
        return [Section("Wrong", ["<p>text</p>"])]

    with pytest.raises(TypeError, match="a part of type str; expected one of Alert, Bars"):
        write_report(evaluated(Wrong, range(8)), tmp_path / "report.html", title="wrong")
