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
    (tmp_path / "a.json").write_text('{"by_length": [{"first": 1}]}')
    for name in ("a.json", "none.json"):
        with pytest.raises(SystemExit, match=rf"{name}: no results that tools/test\.py wrote of a translation model"):
            compare_lengths.main([str(tmp_path / name)])
