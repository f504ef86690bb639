"""Text continued and masks filled on the command line."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitkit import build_model
from vitkit.apps.inference import MaskFiller, TextContinuer, load
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import explain, export, generate, predict, translate
from vitkit.weights import save_checkpoint

SMALL = dict(d_model=16, num_heads=2, d_ffn=16, num_layers=1, max_length=40)
WORDS = Vocabulary.train("word", ["one two three four five six seven eight ."], mask=True)
BOTH = ("source", "target")
KINDS = {
    "CausalLanguageModel": ("target",),
    "MaskedLanguageModel": ("target",),
    "Transformer": BOTH,
    "PrefixLanguageModel": BOTH,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Return kind -> a run's checkpoint with random weights."""
    torch.manual_seed(0)
    paths = {}
    for kind, sides in KINDS.items():
        spec = dict(type=kind, **SMALL)
        model = build_model(spec, vocabularies=dict.fromkeys(sides, WORDS))
        paths[kind] = str(tmp_path_factory.mktemp("run") / f"{kind}.pth")
        content = {"model": model.state_dict(), "config": json.dumps({"model": spec})}
        save_checkpoint(Path(paths[kind]), content | {"vocabularies": dict.fromkeys(sides, WORDS.to_json())})
    return paths


@pytest.fixture
def generated(models, capsys):
    def call(*arguments, kind="CausalLanguageModel"):
        limit = ("--max-length", "6") if kind == "CausalLanguageModel" else ()
        generate.main([models[kind], "--device", "cpu", *limit, *arguments])
        return capsys.readouterr()

    return call


def fails(tool, *arguments) -> str:
    with pytest.raises(SystemExit) as error:
        tool.main(list(arguments))
    return str(error.value)


def test_texts_from_arguments_a_file_or_a_pipe_give_one_line_each(generated, models, monkeypatch, tmp_path):
    printed = generated("two one", "", "four €")
    lines = printed.out.splitlines()
    assert len(lines) == 3 and lines[0].startswith("two one") and lines[2].startswith("four €")
    assert "1 characters or words are not in the vocabulary: '€' 1x" in printed.err
    model = load(models["CausalLanguageModel"])
    assert isinstance(model, TextContinuer) and model("two one", decoding=dict(max_length=6))[0].text == lines[0]
    (tmp_path / "in.txt").write_text("two one\n\nfour €\n", encoding="utf-8")
    generated("--input", str(tmp_path / "in.txt"), "--out", str(tmp_path / "new" / "out.txt"))
    assert (tmp_path / "new" / "out.txt").read_text(encoding="utf-8") == printed.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("two one\n\nfour €".encode())))
    assert generated().out == printed.out


def test_decoding_options_choose_the_tokens(generated):
    greedy = generated("two one").out
    assert generated("two one", "--greedy").out == generated("two one", "--temperature", "0").out == greedy
    assert generated("two one", "--top-k", "1").out == greedy
    drawn = [generated("two one", "--temperature", "2", "--seed", seed).out for seed in "334"]
    assert drawn[0] == drawn[1] != drawn[2]
    best = generated("two one", "--beams", "3", "--n-best", "2").out.splitlines()
    scores = [float(line.split("\t")[0]) for line in best[:2]]
    assert scores == sorted(scores, reverse=True) and best[2] == "" and len(best) == 3
    assert len(generated("two", "--top-p", "0.9", "--n-best", "3").out.splitlines()) == 4


def test_each_mask_gets_a_list_of_candidates(generated, models):
    lines = generated("one <mask> <mask>.", "--n-best", "2", kind="MaskedLanguageModel").out.splitlines()
    assert [line == "" for line in lines] == [False, False, True, False, False, True]
    probability, token, text = lines[0].split("\t")
    model = load(models["MaskedLanguageModel"])
    best = model("one <mask> <mask>.")[0][0]
    assert isinstance(model, MaskFiller) and (token, text) == (best.token, best.text)
    assert float(probability) == pytest.approx(best.probability, abs=1e-4)
    assert len(generated("<mask>", kind="MaskedLanguageModel").out.splitlines()) == 5 + 1


def test_other_models_and_tools_are_named(models):
    assert "Transformer translates text. Use vitkit translate" in fails(generate, models["Transformer"], "one")
    for kind in ("CausalLanguageModel", "MaskedLanguageModel"):
        assert "Use vitkit generate" in fails(translate, models[kind], "one")
        message = fails(predict, models[kind], "--input", __file__, "--device", "cpu")
        assert "reads text, not images. Use vitkit generate" in message
    message = fails(generate, models["MaskedLanguageModel"], "<mask>", "--top-p", "0.9", "--max-length", "3")
    assert "--top-p, --max-length: for decoder-only models, and this one fills masks. Use --n-best" in message
    assert "has no mask" in fails(generate, models["MaskedLanguageModel"], "one")
    assert "decoding.top_p: got 2.0" in fails(generate, models["CausalLanguageModel"], "one", "--top-p", "2")


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="older versions export nothing, which is said first")
@pytest.mark.parametrize("kind", ["CausalLanguageModel", "MaskedLanguageModel"])
def test_language_models_are_not_exported(models, kind):
    pytest.importorskip("onnx")
    assert f"no graph is defined for {kind}" in fails(export, models[kind], "--out", "never.onnx")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("CausalLanguageModel", ["--input", "no_such_file.txt"]),
        ("CausalLanguageModel", ["two", "--top-p", "2"]),
        ("MaskedLanguageModel", ["<mask>", "--n-best", "0"]),
        ("MaskedLanguageModel", ["<mask>", "--greedy"]),
    ],
)
def test_a_wrong_command_does_not_empty_the_file_at_out(models, tmp_path, kind, arguments):
    out = tmp_path / "out.txt"
    out.write_text("of an earlier run")
    fails(generate, models[kind], *arguments, "--device", "cpu", "--out", str(out))
    assert out.read_text() == "of an earlier run"


def test_a_translation_without_attention_does_not_empty_the_file_at_out(models, tmp_path):
    out = tmp_path / "out.txt"
    out.write_text("of an earlier run")
    options = ["--device", "cpu", "--out", str(out), "--attention", str(tmp_path / "a.png")]
    assert "no separate attention to a source" in fails(translate, models["PrefixLanguageModel"], "two one", *options)
    assert out.read_text() == "of an earlier run"


def test_texts_and_a_file_of_texts_are_contradictory():
    assert "give either TEXT or --input FILE" in fails(generate, "model.pth", "one", "--input", "a.txt")


def test_missing_vocabulary_and_missing_weights_are_errors(models, tmp_path):
    content = torch.load(models["CausalLanguageModel"], weights_only=True)
    del content["vocabularies"]
    torch.save(content, tmp_path / "a.pth")
    assert "a.pth: has no vocabularies. Expected" in fails(generate, str(tmp_path / "a.pth"))
    assert "a config has no weights" in fails(generate, "language_model_causal_multi30k", "one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--beams", "2", "--top-k", "3"), "--beams, --top-k: give one way to choose tokens"),
        (("--greedy", "--seed", "1"), "--greedy, --seed: give one way to choose tokens"),
        (("--greedy", "--n-best", "2"), "--n-best 2: the most probable tokens make one text"),
        (("--beams", "3", "--n-best", "5"), "--n-best 5: 3 beams find no more texts; use --beams 5"),
    ],
)
def test_contradictory_arguments_are_errors(arguments, message, capsys):
    assert fails(generate, "model.pth", "one", *arguments) == "2"
    assert message in capsys.readouterr().err


def test_image_for_a_text_model_is_an_error(models, tmp_path):
    config = tmp_path / "lm.py"
    config.write_text(
        f"def config():\n    return dict(model=dict(type='CausalLanguageModel', **{SMALL}), data=dict(val=dict("
        "type='NumberWords', num_pairs=4, split='val')))\n"
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    image = ("--image", str(tmp_path / "a.png"), "--out", str(tmp_path / "out"), "--device", "cpu")
    message = fails(explain, str(config), models["CausalLanguageModel"], *image)
    assert "CausalLanguageModel reads text, not images. Give a text." in message
