"""Records state what was measured, and tell an edit by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from vitkit.apps.reproduction import read_record
from vitkit.apps.reproduction.records import TABLE, Figure, Record, format_table, read_records, sum_of
from vitkit.apps.reproduction.versions import SOURCES, source_digest, versions
from vitkit.errors import DataError
from vitkit.tools import reproduce

FIGURES = [Figure("box AP", "bbox/AP", 42.0, 42.06, 41.3, 42.8), Figure("AP50", "bbox/AP50", 62.4, 61.0, 60.5, 61.9)]
RECORD = Record(
    name="bccd/detr",
    command="vitkit reproduce bccd/detr --train data.root=DIR",
    source="a paper",
    figures=FIGURES,
    not_measured=[],
    metrics={"bbox/AP": 0.4206, "bbox/AP50": 0.61, "bbox/APs": None},
    weights={"source": "https://example.org/weights.pth", "sha256": "0" * 64, "bytes": 7},
    data={"name": "BCCD", "split": "val", "counts": {"images": 87}},
    num_samples=87,
    subset=False,
    versions={"torch": "2.14.1"},
    device="a processor",
    precision="fp32",
    timing={"date": "2026-11-29", "seconds": 3.5},
)


def test_record_is_read_as_it_was_written(tmp_path):
    path = RECORD.write(tmp_path)
    assert path.name == "bccd-detr.json" and read_record(path) == RECORD
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["figures"][0]["difference"] == pytest.approx(0.06)
    assert [figure["agrees"] for figure in content["figures"]] == [True, False]
    assert (tmp_path / TABLE).read_text(encoding="utf-8") == format_table([(path.name, RECORD)])
    assert RECORD.line().startswith(
        "| `bccd/detr` | BCCD val, 87 | box AP 42: 42.06 [41.30, 42.80], +0.06; AP50 62.4: 61.00 [60.50, 61.90], -1.40 "
        "| **no** |"
    )


def test_splits_and_subsets_have_files_of_their_own(tmp_path):
    test = replace(RECORD, data={**RECORD.data, "split": "test"})
    subset = replace(RECORD, num_samples=50, subset=True)
    names = [record.write(tmp_path).name for record in (RECORD, test, subset)]
    assert names == ["bccd-detr.json", "bccd-detr-test.json", "bccd-detr-50_images.json"]
    assert list(read_records(tmp_path)) == sorted(names)
    assert len((tmp_path / TABLE).read_text(encoding="utf-8").splitlines()) == 6 + len(names)


@pytest.mark.parametrize(
    ("published", "low", "high", "agrees"),
    [
        (42.0, 41.3, 42.8, True),
        (42.0, 42.04, 42.8, True),  # 42.04 is published as 42.0
        (42.0, 42.06, 42.8, False),
        (0.78, 0.7804, 0.9, True),  # fractions have three decimals, also those that end in 0
        (0.78, 0.7806, 0.9, False),
        (0.78, None, None, False),
    ],
)
def test_a_figure_agrees_if_it_lies_in_the_interval_or_rounds_to_its_end(published, low, high, agrees):
    assert Figure("AP", "AP", published, 0.79 if published < 1 else 42.5, low, high).agrees is agrees


def test_a_figure_without_an_interval_agrees_if_the_measured_one_is_rounded_to_it():
    assert Figure("PCK", "keypoints/PCK", 0.954, 0.95449, None, None).agrees
    assert not Figure("PCK", "keypoints/PCK", 0.954, 0.9551, None, None).agrees


EDITS = {
    "measured": lambda text: text.replace("42.06", "43.06"),
    "metric": lambda text: text.replace("0.4206", "0.4306"),
    "date": lambda text: text.replace("2026-11-29", "2026-11-28"),
    "weights": lambda text: text.replace("0" * 64, "1" * 64),
    "new key": lambda text: text.replace('"form": 1', '"form": 1, "note": "better"'),
    "removed sum": lambda text: re.sub(r'"sum": "[^"]*"', '"other": 1', text),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_by_hand_is_found(edit, tmp_path, capsys):
    path = RECORD.write(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(EDITS[edit](text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    with pytest.raises(DataError, match=r"bccd-detr.json: its content has the sum .*edited by hand.*vitkit reproduce"):
        read_record(path)
    with pytest.raises(SystemExit) as status:
        reproduce.main(["--verify", str(path)])
    assert status.value.code == 1 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": 2}, "is not a record of form 1"),
        ({"figures": [{**FIGURES[0]._asdict(), "difference": 9.0, "agrees": True}]}, "contradicts itself"),
        ({"metrics": {"bbox/AP": 0.43}}, "states box AP 42.06, but bbox/AP is 0.43"),
        ({"weights": {}}, "has another form .KeyError: 'sha256'"),
        ({"versions": None}, "has another form"),
        ({"figures": 7}, "has another form"),
        ({"metrics": {"bbox/AP": 10**400}}, "has another form"),
        ({"timing": {}}, "has another form .KeyError: 'date'"),
        ({"name": "other"}, "is the record other.json"),
    ],
)
def test_a_record_of_another_form_is_an_error_although_its_sum_is_right(change, message, tmp_path):
    path = RECORD.write(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8")) | change
    path.write_text(json.dumps({**content, "sum": sum_of(content)}), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_record(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"form": 1}', '{"form": 1, "x": NaN}', "null"])
def test_what_is_no_record_is_an_error(text, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(DataError, match="record"):
        read_record(path)


def test_a_missing_record_is_an_error_in_one_line(capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["--verify", "missing.json"])
    assert "missing.json" in capsys.readouterr().err


def test_order_and_blanks_of_the_json_do_not_matter(tmp_path):
    path = RECORD.write(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(content.items()))), encoding="utf-8")
    assert read_record(path) == RECORD


def test_unchanged_records_pass(tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        reproduce.main(["--verify", str(RECORD.write(Path(tmp_path)))])
    assert status.value.code == 0 and "unchanged; vitkit reproduce bccd/detr" in capsys.readouterr().out


def test_the_checksum_of_the_sources_tells_changes_that_no_commit_has(tmp_path, capsys):
    for name in ("__init__.py", "nn/__init__.py", "nn/a.py", "tools/__init__.py", "notes/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = source_digest({"vitkit": tmp_path})
    for other in ("notes/b.py", "tools/__init__.py"):  # not of the package, and elsewhere in a clone
        (tmp_path / other).write_text("other")
    assert source_digest({"vitkit": tmp_path}) == before
    (tmp_path / "nn/a.py").write_text("IOUS = (0.4,)")
    assert source_digest({"vitkit": tmp_path}) != before
    assert versions()[SOURCES] == source_digest()
    for digest, said in ((source_digest(), "this"), (before, "other")):
        path = replace(RECORD, versions={**RECORD.versions, SOURCES: digest}).write(tmp_path)
        with pytest.raises(SystemExit):
            reproduce.main(["--verify", str(path)])
        assert f"unchanged, measured by {said} code; vitkit reproduce" in capsys.readouterr().out
