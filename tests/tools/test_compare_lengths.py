import importlib

import pytest

from vitkit.evaluation.text import TextEvaluator
from vitkit.tools import compare_lengths


def test_curves_of_several_results_are_drawn(tmp_path, capsys):
    evaluator = TextEvaluator(range(1))
    evaluator.update([{"text": "a b c d"}], [{"index": 0, "source_text": "w x", "references": ["a b c d"]}])
    evaluator.compute()
    evaluator.write_results(tmp_path / "one.json")
    files = [str(tmp_path / "one.json"), f"second={tmp_path / 'one.json'}"]
    compare_lengths.main([*files, "--out", str(tmp_path / "new" / "a.png")])
    assert (tmp_path / "new" / "a.png").is_file()
    lines = capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit, match=r"one\.json: another curve is named 'one' already\. Name them: NAME=RESULTS"):
        compare_lengths.main([files[0], files[0], "--out", str(tmp_path / "b.png")])
    other = TextEvaluator(range(1), metrics=["chrf"])
    other.load_results(tmp_path / "one.json")
    other.compute()
    other.write_results(tmp_path / "chrf.json")
    with pytest.raises(SystemExit, match=r"chrf\.json: has chrf by length, and others bleu; expected one metric"):
        compare_lengths.main([files[0], str(tmp_path / "chrf.json"), "--out", str(tmp_path / "b.png")])
    compare_lengths.main([str(tmp_path / "chrf.json"), "--out", str(tmp_path / "b.png")])
    assert lines[0].split() == ["one", "1-5:", "100.0", "(1)"] and lines[1].startswith("second ")


def test_other_files_are_refused(tmp_path):
    row = '"first": 1, "last": 5, "count": 3'
    contents = {
        "field": '{"by_length": [{"first": 1}]}',
        "list": "[]",
        "empty": '{"by_length": []}',
        "text": f'{{"by_length": [{{{row}, "bleu": "x"}}]}}',
        "nan": f'{{"by_length": [{{{row}, "bleu": NaN}}]}}',
        "digits": f'{{"by_length": [{{{row}, "bleu": {"9" * 5000}}}]}}',
        "nested": "[" * 200_000,
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    for name in (*contents, "none"):
        with pytest.raises(SystemExit, match=rf"{name}\.json") as caught:
            compare_lengths.main([str(tmp_path / f"{name}.json"), "--out", str(tmp_path / "a.png")])
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("tool", ["report", "compare_lengths", "plot_log", "compare", "label_errors", "test"])
def test_outputs_that_cannot_be_written_are_refused_before_the_work(tool, tmp_path):
    (tmp_path / "a.html").mkdir()
    (tmp_path / "file").touch()
    main = importlib.import_module(f"vitkit.tools.{tool}").main
    inputs = ["none.json", "other.json"] if tool == "compare" else ["none.json"]
    for out, message in (("a.html", "is a folder; expected the name of a file"), ("file/b.html", "cannot be written")):
        with pytest.raises(SystemExit, match=message) as caught:
            main([*inputs, "--out", str(tmp_path / out)])
        assert "\n" not in str(caught.value)
