"""The report of a detector: the file's content without a browser; and the full page in one, if it is installed."""

import json
import re

import numpy as np
import pytest
from helpers.browser import open_page
from helpers.detection_files import CONFIG, evaluator_of, write_data

from vitkit.apps.report import write_report
from vitkit.apps.report.matching import confusion_matrix
from vitkit.apps.report.pages.coco import count_groups
from vitkit.apps.training.results import score_file
from vitkit.errors import ConfigError
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.score_thresholds import compute_threshold_rows
from vitkit.tools import test as test_tool


def page_data(path):
    """Return the data that the page's script reads."""
    return json.loads(re.search(r'class="data">(.*?)</script>', path.read_text(), re.S)[1])


@pytest.mark.parametrize("masks", [False, True])
def test_page_contains_the_numbers_and_is_self_contained(masks, tmp_path):
    write_data(tmp_path, masks=masks)
    evaluator = evaluator_of(tmp_path, masks=masks)
    path = write_report(evaluator, tmp_path / "out" / "report.html", title="A <title>")
    page = path.read_text()
    assert "A &lt;title&gt;" in page and "<b>bird</b>" not in page and len(page) < 10_000_000
    assert not re.search(r"""(src|href)=['"](?!data:|#)""", page) and "http" not in page.replace("http-equiv", "")
    assert evaluator.limit_line() in page and "(max_dets)" in page
    for value in evaluator.metrics.values():
        assert f"<td>{value:.3f}" in page or value < 0
    data = page_data(path)
    assert all(image["url"].startswith("data:image/jpeg") for image in data["images"])
    assert ("masks" in data["images"][0]) == masks
    counts = data["curves"]["values"][0][40][9:]
    (row,) = compute_threshold_rows(evaluator.statistics().rankings(), [0.4])
    assert counts == [row.true_positives, row.false_positives] and data["curves"]["values"][0][40][0] == round(
        row.precision, 3
    )


def test_report_without_predictions_says_so(tmp_path):
    write_data(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    page = write_report(evaluator_of(tmp_path), tmp_path / "report.html", title="none").read_text()
    assert "There is no prediction: everything is missed." in page and "<td>0.000" in page


def test_images_without_prediction_and_unreadable_images_are_named(tmp_path, caplog):
    results = write_data(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps([r for r in results if r["image_id"] != 3]))
    evaluator = evaluator_of(tmp_path)
    (tmp_path / "images" / "2.png").write_bytes(b"damaged")
    path = write_report(evaluator, tmp_path / "report.html", title="some")
    assert "1 of 5 images has no prediction." in path.read_text()
    assert "2.png" in caplog.text
    assert sum("url" in image for image in page_data(path)["images"]) == 4


def test_images_are_shown_under_their_own_ids(tmp_path):
    write_data(tmp_path)
    content = json.loads((tmp_path / "truth.json").read_text())
    content["images"].reverse()  # COCOeval sorts them by id
    (tmp_path / "truth.json").write_text(json.dumps(content))
    scored = score_file(tmp_path / "results.json", annotations=tmp_path / "truth.json", images=tmp_path / "images")
    assert list(scored.evaluator.dataset.image_ids) == [5, 4, 3, 2, 1]
    (tmp_path / "images" / "2.png").write_bytes(b"damaged")
    data = page_data(write_report(scored.evaluator, tmp_path / "report.html", title="reversed"))
    assert [image["name"] for image in data["images"] if "url" not in image] == ["2.png"]


def test_report_follows_the_iou(tmp_path, monkeypatch):
    write_data(tmp_path)
    counts = {}
    metrics = {}
    for iou in (0.3, 0.5, 0.62, 0.9):
        scored = score_file(tmp_path / "results.json", annotations=tmp_path / "truth.json")
        scored.evaluator.iou = iou
        path = write_report(scored.evaluator, tmp_path / "report.html", title="report")
        data, page = page_data(path), path.read_text()
        assert f"at an IoU of {iou:g}" in page and f"AP{100 * iou:.0f} without" in page
        truth, results = scored.evaluator.dataset.ground_truth(), scored.evaluator.results()
        matched = [m >= 0 for image in data["images"] for m in image["matched"]]
        matrix = confusion_matrix(truth, results, [1, 2, 3], threshold=0.0, iou=iou)
        assert sum(matched) == matrix[:3, :3].sum()
        counts[iou] = data["curves"]["values"][0][0][9]
        assert counts[iou] == compute_threshold_rows(scored.evaluator.statistics().rankings(), [0.0])[0].true_positives
        scores = scored.evaluator.statistics().scores(np.ones((1, len(truth["images"])))).overall
        metrics[iou] = {name: values[0] for name, values in scores.items()}
    assert counts[0.9] < counts[0.62] <= counts[0.5] <= counts[0.3]
    for iou in (0.3, 0.62, 0.9):  # COCO's own metrics do not depend on it
        assert metrics[iou] == pytest.approx(metrics[0.5], nan_ok=True)
    with pytest.raises(ConfigError, match="got iou=0.05; expected more than 0.1, up to 1"):
        CocoEvaluator(scored.evaluator.dataset, iou=0.05)
    options = ["--eval-only", "results.json", "--annotations", "truth.json", "--report", "again.html"]
    monkeypatch.chdir(tmp_path)
    test_tool.main([*options, "--iou", "0.9"])
    assert page_data(tmp_path / "again.html")["curves"] == data["curves"]


def test_images_are_grouped_by_their_number_of_objects():
    assert count_groups(np.array([1, 1, 2, 3, 4, 9.0, 0])) == [(1, 1), (2, 3), (4, 9)]
    assert count_groups(np.array([5.0, 5, 5])) == [(5, 5)]
    assert count_groups(np.zeros(3)) == []


def test_tool_writes_the_report_from_results_only(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    test_tool.main(["config.py", "--eval-only", "results.json", "--report", "out/report.html"])
    assert "the report is out/report.html" in capsys.readouterr().out
    (tmp_path / "cut.json").write_text((tmp_path / "results.json").read_text()[:200])
    with pytest.raises(SystemExit, match=r"cut.json: not valid JSON .* truncated"):
        test_tool.main(["config.py", "--eval-only", "cut.json", "--report", "out/report.html"])


def test_confusion_matrix_follows_the_threshold_in_a_browser(tmp_path):
    write_data(tmp_path, num_images=6)
    content = json.loads((tmp_path / "truth.json").read_text())
    for annotation in content["annotations"][::5]:
        annotation["iscrowd"] = 1
    (tmp_path / "truth.json").write_text(json.dumps(content))
    evaluator = evaluator_of(tmp_path)
    path = write_report(evaluator, tmp_path / "report.html", title="report")
    truth, results = evaluator.dataset.ground_truth(), evaluator.results()
    with open_page(path, width=390) as (page, issues):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for threshold in (0.0, 0.3, 0.62, 0.97):
            page.locator(".threshold").focus()
            page.evaluate(
                "value => { const s = document.querySelector('.threshold'); s.value = value;"
                " s.dispatchEvent(new Event('input')); }",
                round(100 * threshold),
            )
            page.wait_for_timeout(300)
            rows = page.locator(".confusion.live tbody tr").all()
            shown = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
            expected = confusion_matrix(truth, results, evaluator.dataset.category_ids, threshold=threshold)
            assert [[int(text or 0) for text in row] for row in shown] == expected.tolist()
        page.locator(".best").focus()
        page.keyboard.press("Enter")
        page.wait_for_timeout(300)
        page.locator(".confusion button").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] canvas").count() >= 1
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        assert not issues
