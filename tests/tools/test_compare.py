"""The figures of vitkit compare: training curves of runs, and metrics by source length."""

import importlib
import json

import cv2
import numpy as np
import pytest

from vitkit.apps.training.comparing import plot_runs
from vitkit.apps.visualization.curves import line_colors, smooth
from vitkit.errors import DataError
from vitkit.evaluation.text import TextEvaluator
from vitkit.tools import compare


def write_log(folder, *, best_epoch, metric="bbox/AP", epochs=6):
    folder.mkdir(parents=True)
    lines = []
    for epoch in range(1, epochs + 1):
        losses = {"labels": 1 / epoch, "aux0_labels": 1.0}
        lines.append({"kind": "train", "step": 10 * epoch, "epoch": epoch, "loss": 2 / epoch, "losses": losses})
        score = 0.5 - 0.1 * abs(epoch - best_epoch)
        lines.append({"kind": "val", "step": 10 * epoch, "epoch": epoch, "metrics": {metric: score, "loss": 1.0}})
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_runs_are_compared_and_their_best_metrics_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a" / "detr", best_epoch=2)
    write_log(tmp_path / "b" / "detr", best_epoch=5)
    compare.main(["a/detr", "b/detr/log.jsonl", "--curves", "curves.png", "--losses", "loss", "labels"])
    printed = capsys.readouterr().out
    assert "a/detr  best bbox/AP 0.5 at epoch 2" in printed and "b/detr  best bbox/AP 0.5 at epoch 5" in printed
    image = cv2.imread("curves.png")
    assert image.shape[1] > 2 * image.shape[0] and image.std() > 10  # three panels


def test_axis_names_and_metrics_can_be_chosen(tmp_path, capsys):
    log = write_log(tmp_path / "run", best_epoch=3)
    compare.main(
        [str(log), "--x", "step", "--names", "mine", "--metrics", "bbox/AP", "--curves", str(tmp_path / "c.png")]
    )
    assert "mine  best bbox/AP 0.5 at step 30" in capsys.readouterr().out


def test_the_lowest_perplexity_is_the_best(tmp_path, capsys):
    lines = [
        {"kind": "val", "step": epoch, "epoch": epoch, "metrics": {"perplexity": value}}
        for epoch, value in enumerate((400.0, 35.0, 38.0), start=1)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    compare.main([str(log), "--metrics", "perplexity", "--curves", str(tmp_path / "c.png")])
    assert "best perplexity 35 at epoch 2" in capsys.readouterr().out


def test_single_run_shows_every_loss(tmp_path):
    compare.main([str(write_log(tmp_path / "run", best_epoch=3)), "--curves", str(tmp_path / "new" / "c.png")])
    assert (tmp_path / "new" / "c.png").is_file()


def test_logs_beside_runs_are_passed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a", best_epoch=2)
    write_log(tmp_path / "b", best_epoch=5)
    (tmp_path / "a.txt").write_text("what a has printed")
    compare.main(["a", "a.txt", "b", "--curves", "curves.png", "--names", "first", "second"])
    printed = capsys.readouterr().out
    assert printed.startswith("passed over, as they are logs: a.txt\n") and "second  best bbox/AP 0.5" in printed
    with pytest.raises(SystemExit):
        compare.main(["a", "a.txt", "a/log.jsonl"])
    assert "give at least two models or results files" in capsys.readouterr().err


def test_smoothing_is_a_fraction_of_the_curve():
    values = np.array([0.0, 0, 6, 0, 0])
    assert smooth(values, 3).tolist() == [0, 2, 2, 2, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "no log 'none"),
        (["{run}", "--metrics", "bbox/APP"], "no run has a 'bbox/APP'. Did you mean 'bbox/AP'"),
        (["{run}", "--losses", "label"], "no run has a 'label'. Did you mean 'labels'"),
        (["{run}", "--names", "a", "b"], "--names: got 2 for 1 model"),
        (["{run}", "{run}", "--names", "a", "a"], "are not different"),
        (["{run}", "--smooth", "2"], "expected a number from 0 to 1"),
    ],
)
def test_wrong_arguments_are_helpful_errors(tmp_path, capsys, arguments, message):
    run = write_log(tmp_path / "run", best_epoch=3)
    with pytest.raises(SystemExit) as error:
        compare.main([argument.format(run=run) for argument in arguments] + ["--curves", str(tmp_path / "c.png")])
    assert message in f"{error.value.code}\n{capsys.readouterr().err}"


def test_run_without_validation_is_drawn_with_others(tmp_path):
    write_log(tmp_path / "whole", best_epoch=3)
    log = write_log(tmp_path / "young", best_epoch=3) / "log.jsonl"
    log.write_text(log.read_text().splitlines()[0])
    logs = {name: tmp_path / name / "log.jsonl" for name in ("whole", "young")}
    assert plot_runs(logs, tmp_path / "c.png") == {"whole": {"bbox/AP": (0.5, 3.0)}, "young": {}}
    with pytest.raises(DataError, match="no run has a 'bbox/AP'"):
        plot_runs({"young": log}, tmp_path / "c.png", metrics=["bbox/AP"])


@pytest.mark.parametrize(
    "changes",
    [
        dict(step="1"), dict(step=-1), dict(step=[1]), dict(step=None), dict(epoch="1"), dict(epoch=1e400),
        dict(epoch=None), dict(loss="x"), dict(loss=[1]), dict(losses=[1]), dict(losses={"a": "b"}),
        dict(losses={"a": 10**400}), dict(losses=5),
    ],
)  # fmt: skip
def test_records_that_are_not_of_a_run_are_named(tmp_path, changes):
    record = {"kind": "train", "step": 1, "epoch": 1.0, "loss": 1.0, "losses": {"a": 1.0}}
    lines = [json.dumps(record), "not JSON", "[" * 100_000, json.dumps(record | changes)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit, match=r"log.jsonl' line 4: \w+ is ") as stopped:
        compare.main([str(tmp_path / "log.jsonl"), "--curves", str(tmp_path / "a.png")])
    assert "\n" not in str(stopped.value)


def test_each_term_of_the_loss_has_a_color_of_its_own(tmp_path):
    for count in (3, 10, 25):
        assert len({str(color) for color in line_colors(count)}) == count


def write_texts(path, **settings):
    evaluator = TextEvaluator(range(1), **settings)
    evaluator.update([{"text": "a b c d"}], [{"index": 0, "source_text": "w x", "references": ["a b c d"]}])
    evaluator.compute()
    evaluator.write_results(path)
    return str(path)


def test_metrics_are_drawn_by_source_length(tmp_path, capsys):
    files = [write_texts(tmp_path / f"{name}.json") for name in ("rnn", "transformer")]
    page = ["--out", str(tmp_path / "page.html")]
    compare.main([*files, "--by-length", str(tmp_path / "new" / "a.png"), *page])
    assert (tmp_path / "new" / "a.png").is_file() and (tmp_path / "page.html").is_file()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rnn", "1-5:", "100", "(1)"] and lines[1].startswith("transformer ")


@pytest.mark.parametrize("content", ['{"sentences": [{"index": 0}]}', "[]", '{"sentences": 5}', "[" * 200_000])
def test_files_that_are_not_of_a_text_model_are_one_line_errors(tmp_path, content):
    good = write_texts(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(SystemExit, match=r"bad\.json") as caught:
        compare.main([good, str(tmp_path / "bad.json"), "--by-length", str(tmp_path / "a.png")])
    assert "\n" not in str(caught.value) and not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("tool", ["compare", "data.label_errors", "test"])
def test_outputs_that_cannot_be_written_are_refused_before_the_work(tool, tmp_path):
    (tmp_path / "a.html").mkdir()
    (tmp_path / "file").touch()
    main = importlib.import_module(f"vitkit.tools.{tool}").main
    inputs = ["none.json", "other.json"] if tool == "compare" else ["none.json"]
    for out, message in (("a.html", "is a folder; expected a file"), ("file/b.html", "cannot be written")):
        with pytest.raises(SystemExit, match=message) as caught:
            main([*inputs, "--out", str(tmp_path / out)])
        assert "\n" not in str(caught.value)
