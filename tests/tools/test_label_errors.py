"""Suspicious labels as a page and as corrections."""

import json
import re
from collections import Counter

import pytest
from helpers.browser import open_page
from helpers.detection_files import CONFIG, write_data

from vitkit.apps.datasets.fixing import apply_corrections
from vitkit.data.formats import read_annotations
from vitkit.tools.data import label_errors


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write labels without the third annotation, and perfect predictions."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path, num_images=8)
    truth = json.loads((tmp_path / "truth.json").read_text())
    results = [{**{k: a[k] for k in ("image_id", "category_id", "bbox")}, "score": 0.9} for a in truth["annotations"]]
    (tmp_path / "results.json").write_text(json.dumps(results))
    truth["annotations"].pop(2)
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


def test_corrections_fix_the_labels(folder, capsys):
    label_errors.main(["config.py", "--eval-only", "results.json", "--out", "out/labels.html", "--max-labels", "1"])
    assert "1 suspicious label: 1 missing" in capsys.readouterr().out
    (entry,) = json.loads((folder / "out" / "labels.json").read_text())
    data = read_annotations(folder / "truth.json", folder / "images")
    before = len(data.annotations)
    assert apply_corrections(data, folder / "out" / "labels.json") == Counter(add=1)
    assert len(data.annotations) == before + 1 and entry["action"] == "add"
    removed = json.loads((folder / "results.json").read_text())[2]
    assert entry["bbox"] == pytest.approx(removed["bbox"], abs=0.02)


def test_page_and_tool_warn_of_a_detector_that_finds_few_labels(folder, capsys):
    words = r"the detector finds (\d+)% of the \d+ labels, so that many of the suspicions may be its own errors"
    label_errors.main(["config.py", "--eval-only", "results.json", "--out", "strong.html"])
    assert not re.search(words, capsys.readouterr().out)
    results = json.loads((folder / "results.json").read_text())
    (folder / "few.json").write_text(json.dumps(results[::3]))
    label_errors.main(["config.py", "--eval-only", "few.json", "--out", "weak.html"])
    (share,) = re.findall(words, capsys.readouterr().out)
    assert 10 < int(share) < 70
    assert re.search(words[4:], (folder / "weak.html").read_text(encoding="utf-8"))
    assert not re.search(words[4:], (folder / "strong.html").read_text(encoding="utf-8"))


def test_page_is_reviewed_by_keys_and_exports_accepted_corrections(folder, tmp_path):
    label_errors.main(["config.py", "--eval-only", "results.json", "--max-labels", "3"])
    with open_page(folder / "label_errors.html", width=390) as (page, issues):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator(".begin").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("a")
        page.keyboard.press("r")
        assert page.locator(".count").inner_text().startswith("1 accepted, ")
        with page.expect_download() as download:
            page.locator(".export").click()
        assert download.value.suggested_filename == "corrections.json"  # not the file of all corrections
        exported = json.loads(download.value.path().read_text())
        assert exported == json.loads((folder / "label_errors.json").read_text())[:1] and not issues


def test_no_label_is_judged_without_predictions(folder, capsys):
    (folder / "results.json").write_text("[]")
    label_errors.main(["config.py", "--eval-only", "results.json"])
    assert "0 suspicious labels: none" in capsys.readouterr().out
    assert "no label can be judged" in (folder / "label_errors.html").read_text()
    assert json.loads((folder / "label_errors.json").read_text()) == []


def test_corrections_do_not_overwrite_the_predictions(folder, capsys):
    with pytest.raises(SystemExit):
        label_errors.main(["config.py", "--eval-only", "results.json", "--out", "results.html"])
    assert "the corrections would replace results.json" in capsys.readouterr().err


def test_data_without_boxes_is_refused(folder):
    (folder / "maps.py").write_text(
        'def config():\n    val = dict(type="ShapesClassification", num_images=3, image_size=48, split="val")\n'
        '    return dict(model=dict(type="DETR"), data=dict(val=val), evaluator=dict(type="CocoEvaluator"), '
        "train=dict(epochs=1))\n"
    )
    with pytest.raises(SystemExit, match="ShapesClassification has no boxes"):
        label_errors.main(["maps.py", "--eval-only", "results.json"])


def test_only_the_model_is_required(capsys):
    with pytest.raises(SystemExit):
        label_errors.parse_args([])
    assert "the following arguments are required: model\n" in capsys.readouterr().err
