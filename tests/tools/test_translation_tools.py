"""Text from training to translation, through the tools."""

import io
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image

from vitkit.apps.inference import load
from vitkit.apps.inference.translator import BATCH
from vitkit.errors import DataError
from vitkit.tools import predict, translate
from vitkit.tools import test as evaluate_tool
from vitkit.tools import train as train_tool
from vitkit.weights import read_checkpoint

pytestmark = pytest.mark.smoke

SMALL = [
    "data.train.num_pairs=200",
    "data.val.num_pairs=20",
    "data.tokens_per_gpu=128",  # validation has several batches
    "model.d_model=32",
    "model.d_ffn=32",
    "model.num_layers=1",
    "train.epochs=1",
    "--device=cpu",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "translation"
    train_tool.main(["configs/quickstart/translation.py", *SMALL, "--run-dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def checkpoint(run):
    return str(run / "last.pth")


@pytest.fixture
def translated(checkpoint, capsys):
    def call(*arguments):
        translate.main([checkpoint, "--device", "cpu", "--max-length", "6", *arguments])
        return capsys.readouterr()

    return call


def test_checkpoint_contains_the_vocabularies_of_the_run(run):
    saved = read_checkpoint(run / "last.pth")
    assert set(saved["vocabularies"]) == {"source", "target"} and "classes" not in saved
    assert len(saved["model"]["decoder.embedding.weight"]) == 120


def test_the_checkpoint_is_evaluated_with_its_own_vocabulary(checkpoint, tmp_path, capsys):
    arguments = ["configs/quickstart/translation.py", checkpoint, *SMALL, "--out", str(tmp_path / "r.json")]
    evaluate_tool.main(arguments)
    printed = capsys.readouterr().out
    assert "chrF nrefs:1|case:mixed" in printed and "perplexity" in printed
    assert "exact match" in printed and "BLEU" not in printed  # single words have no four in a row
    assert (tmp_path / "r_by_length.png").is_file()
    evaluate_tool.main(
        ["configs/quickstart/translation.py", *SMALL, "--per-class", "--eval-only", str(tmp_path / "r.json")]
    )
    assert "chrF by words of the source" in capsys.readouterr().out


def test_a_checkpoint_without_vocabularies_is_refused(tmp_path):
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "a.pth")
    with pytest.raises(SystemExit, match=r"a\.pth: contains no vocabularies; expected a checkpoint of a model of text"):
        evaluate_tool.main(["configs/quickstart/translation.py", str(tmp_path / "a.pth"), *SMALL])
    with pytest.raises(SystemExit, match=r"a\.pth: has no config, unlike a run's checkpoint.* Give its config as well"):
        translate.main([str(tmp_path / "a.pth"), "one"])


def test_a_resumed_run_keeps_its_vocabulary(run, checkpoint, tmp_path):
    # Other training text would give another vocabulary, to which the weights would not fit.
    arguments = ["configs/quickstart/translation.py", *SMALL, "data.train.vocabulary.size=100"]
    train_tool.main([*arguments, "--init", checkpoint, "--run-dir", str(tmp_path / "next")])
    assert (
        read_checkpoint(tmp_path / "next" / "last.pth")["vocabularies"] == read_checkpoint(checkpoint)["vocabularies"]
    )


def test_each_input_line_gives_one_output_line(translated, monkeypatch, tmp_path):
    printed = translated("one hundred", "", "seven €")
    assert len(printed.out.splitlines()) == 3 and printed.out.splitlines()[1] == ""
    assert "1 of 3 lines is empty, and translated as such" in printed.err
    assert "1 characters or words are not in the vocabulary: '€' 1x" in printed.err

    (tmp_path / "in.txt").write_text("one hundred\n\nseven €\n", encoding="utf-8")
    translated("--input", str(tmp_path / "in.txt"), "--out", str(tmp_path / "new" / "out.txt"))
    assert (tmp_path / "new" / "out.txt").read_text(encoding="utf-8") == printed.out

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("one hundred\r\n\nseven €".encode())))
    assert translated().out == printed.out


def test_loaded_run_translates_its_argument(run, checkpoint, capsys):
    translate.main([str(run), "--device", "cpu", "one hundred", "two"])
    expected = capsys.readouterr().out.splitlines()
    config = str(run / "config.json")
    translate.main([config, checkpoint, "--device", "cpu", "one hundred", "two"])
    assert capsys.readouterr().out.splitlines() == expected
    model = load(run)
    assert [str(t) for t in model(["one hundred", "", "two"])] == [expected[0], "", expected[1]]
    one = load(checkpoint)("two", beams=3, n_best=2)
    assert one.source == "two" and len(one.n_best) == 2 and one.text == one.n_best[0][1]
    stream = model(text for text in ["two"])
    assert next(stream).text == expected[1] and model.predict("two")[0].text == expected[1]
    model.model.decoding = replace(model.model.decoding, method="sample", temperature=5.0)
    assert [str(t) for t in model(["two"] * 4, batch_size=2)] == [str(t) for t in model(["two"] * 4)]
    with pytest.raises(DataError, match="got int; the model expects text"):
        model([1])
    with pytest.raises(SystemExit, match="reads text, not images. Use vitkit translate"):
        predict.main([str(run), "--input", __file__, "--device", "cpu"])


def test_several_translations_are_printed_with_scores(translated):
    lines = translated("one hundred", "two", "--n-best", "3").out.splitlines()
    assert lines[3] == lines[7] == "" and len(lines) == 8
    scores = [float(line.split("\t")[0]) for line in lines[:3]]
    assert scores == sorted(scores, reverse=True)


def test_sampled_translations_depend_only_on_the_seed(translated, checkpoint, capsys):
    def sampled(seed):
        return translated("one hundred", "two", "--sample", "--top-k", "20", "--n-best", "2", "--seed", seed).out

    assert sampled("3") == sampled("3") != sampled("5")
    assert len(sampled("3").splitlines()) == 6
    lines = translated(*["one hundred"] * (2 * BATCH), "--sample", "--seed", "3").out.splitlines()
    assert lines[:BATCH] != lines[BATCH:]
    for wrong, message in ((("--top-p", "0.5"), "need --sample"), (("--sample", "--beams", "2"), "give one")):
        with pytest.raises(SystemExit):
            translate.main([checkpoint, "one", *wrong])
        assert message in capsys.readouterr().err


def test_alignment_matrices_are_drawn(translated, tmp_path):
    translated("one hundred", "two", "--attention", str(tmp_path / "a.png"), "--beams", "2")
    assert {path.name for path in tmp_path.glob("[!.]*")} <= {"a_1.png", "a_2.png"}


def test_alignment_matrices_of_words_have_fewer_columns(tmp_path, capsys):
    for name, options in (("tokens.png", []), ("words.png", ["--words"])):
        arguments = ["numbers_translator", "two hundred", "--attention", str(tmp_path / name), *options]
        translate.main([*arguments, "--device", "cpu"])
    tokens, words = (Image.open(tmp_path / f"{name}.png") for name in ("tokens", "words"))
    assert words.width < tokens.width or words.height < tokens.height
    capsys.readouterr()
    with pytest.raises(SystemExit):
        translate.main(["numbers_translator", "two", "--words"])
    assert "--words: needs --attention" in capsys.readouterr().err


def test_long_sentences_are_an_error_or_truncated(checkpoint, translated):
    with pytest.raises(SystemExit, match=r"line 1: \d+ tokens, including the end; expected at most 5\. Split the line"):
        translate.main([checkpoint, "one hundred two thousand three", "--max-source", "5"])
    printed = translated("one hundred two thousand three", "--max-source", "5", "--truncate")
    assert "line 1: cut from" in printed.err and printed.out.count("\n") == 1
    with pytest.raises(SystemExit):
        translated("one", "--max-source", "1", "--truncate")


def test_bad_input_is_named(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_bytes(b"one\ntw\xff\n")
    with pytest.raises(SystemExit, match=r"in\.txt, line 2: byte 0xff is not UTF-8"):
        translate.main([checkpoint, "--input", str(tmp_path / "in.txt")])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff")))
    with pytest.raises(SystemExit, match=r"standard input, line 2: is not UTF-8"):
        translate.main([checkpoint])
    with pytest.raises(SystemExit, match=r"TEXT 2: is not UTF-8"):
        translate.main([checkpoint, "one", "tw\udcff"])
    with pytest.raises(SystemExit, match=r"decoding\.beams: got 0; expected at least 1"):
        translate.main([checkpoint, "one", "--beams", "0"])
