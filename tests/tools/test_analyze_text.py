"""MACs of text models, compared with those counted by hand."""

import json
from pathlib import Path

import pytest

from vitkit import build_model
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import analyze
from vitkit.weights import save_checkpoint

D, FFN, SIZE = 8, 16, 10
SMALL = dict(d_model=D, d_ffn=FFN, num_heads=2, num_layers=1, max_length=12)


def config(folder: Path, kind: str, **settings) -> str:
    path = folder / f"{kind}.py"
    sizes = dict(target_size=SIZE) | ({} if "Language" in kind and "Prefix" not in kind else dict(source_size=SIZE))
    path.write_text(f"def config():\n    return dict(model={dict(type=kind, **sizes, **settings)!r})\n")
    return str(path)


def analyzed(capsys, *arguments: str) -> dict:
    analyze.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def attention(queries: int, keys: int) -> int:
    """Return the MACs of scores and values; the projections are counted in `layer`."""
    return 2 * queries * keys * D


def layer(tokens: int) -> int:
    """Return the MACs of projections, feed-forward network and two norms of five operations per value."""
    return tokens * (4 * D * D + 2 * D * FFN + 2 * 5 * D)


def test_macs_of_a_decoder_only_model_by_hand(tmp_path, capsys):
    report = analyzed(capsys, config(tmp_path, "CausalLanguageModel", **SMALL), "--lengths", "1", "4")
    last = 5 * D + D * SIZE  # the last norm and the logits of a token
    rows = report["parts"]
    assert rows[""]["forward"] == {"1": layer(1) + attention(1, 1) + last, "4": layer(4) + attention(4, 4) + 4 * last}
    # Token t attends to t tokens, whose keys and values are cached.
    assert rows[""]["inference"]["4"] == layer(4) + sum(attention(1, t) for t in (1, 2, 3, 4)) + 4 * last
    assert rows["stack.layers"]["inference"]["4"] == rows[""]["inference"]["4"] - 4 * last
    assert rows[""]["total"] == sum(p.numel() for p in build_model(dict(
        type="CausalLanguageModel", target_size=SIZE, **SMALL)).parameters())  # fmt: skip
    # Each product of the forward pass has two in the backward pass; norms have none that is counted.
    norms = 4 * 5 * D * 3
    assert report["step"]["4"] == 3 * (rows[""]["forward"]["4"] - norms) + norms and not report["unknown"]


def test_macs_of_a_translator_by_hand(tmp_path, capsys):
    path = config(tmp_path, "Transformer", **SMALL)
    report = analyzed(capsys, path, "--lengths", "4", "--depth", "2")
    rows = report["parts"]
    cross = 4 * 4 * D * D + 4 * 5 * D  # projections of four queries and four keys, and a third norm
    logits = 4 * D * SIZE
    assert rows["encoder"]["forward"]["4"] == rows["encoder"]["inference"]["4"] == layer(4) + attention(4, 4)
    assert rows["decoder"]["forward"]["4"] == layer(4) + cross + 2 * attention(4, 4) + logits
    written = sum(attention(1, t) for t in (1, 2, 3, 4)) + 4 * attention(1, 4)
    assert rows["decoder"]["inference"]["4"] == layer(4) + cross + written + logits


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("PrefixLanguageModel", SMALL),
        ("MaskedLanguageModel", SMALL),
        ("RNNTranslator", dict(d_embedding=4, d_hidden=6, cell="lstm")),
        (
            "TransformerCaptioner",
            dict(backbone=dict(type="ResNet", depth=18, pretrained=False), d_model=D, num_heads=2),
        ),
    ],
)
def test_every_kind_of_model_is_counted_and_printed(kind, settings, tmp_path, capsys):
    path = config(tmp_path, kind, **settings)
    if kind == "TransformerCaptioner":
        Path(path).write_text(Path(path).read_text().replace(f"'source_size': {SIZE}, ", ""))
    size = ["--size", "32x32"] if kind == "TransformerCaptioner" else []
    analyze.main([path, "--lengths", "3", "6", *size])
    printed = capsys.readouterr().out
    assert "train 3  train 6  infer 3  infer 6" in printed and "UNKNOWN" not in printed
    first = next(line for line in printed.splitlines() if line.startswith("(all)")).split()
    numbers = [float(number.replace(",", "")) for number in first[3:]]
    assert numbers[1] >= numbers[0] and numbers[3] >= numbers[2] and "a training step, forward and backward" in printed


def test_sizes_come_from_the_checkpoint_or_the_config(tmp_path, capsys):
    words = Vocabulary.train("word", ["one two three"])
    spec = dict(type="CausalLanguageModel", **SMALL)
    model = build_model(spec, vocabularies={"target": words})
    content = {"model": model.state_dict(), "config": json.dumps({"model": spec})}
    save_checkpoint(tmp_path / "a.pth", content | {"vocabularies": {"target": words.to_json()}})
    report = analyzed(capsys, str(tmp_path / "a.pth"), "--no-macs")
    assert report["parts"][""]["total"] == sum(p.numel() for p in model.parameters())
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps({"model": spec}))
    assert analyzed(capsys, str(alone), str(tmp_path / "a.pth"), "--no-macs")["parts"] == report["parts"]
    with pytest.raises(SystemExit, match="target_size: not set"):
        analyze.main(["quickstart/captioning", "--no-macs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quickstart/translation", "--time"), "--time: for models of images. Models of text have --lengths."),
        (("quickstart/translation", "--frames", "4", "--batch-size", "2"), "--frames, --batch-size: for models of"),
        (
            ("quickstart/translation", "--size", "64"),
            "--size: Transformer takes no images. Models of text have --lengths.",
        ),
        (("quickstart/translation", "--attention-matrices"), "--attention-matrices: for models of images"),
        (("quickstart/translation", "--training", "2"), "--training: for models of images"),
        (("resnet18", "--lengths", "8"), "--lengths: only for models of text. Give the --size of images."),
    ],
)
def test_options_for_other_models_are_named(arguments, message):
    with pytest.raises(SystemExit) as error:
        analyze.main(list(arguments))
    assert message in str(error.value)


def test_text_longer_than_the_positions_is_named(tmp_path):
    with pytest.raises(SystemExit, match="a text of 13 tokens or more, but the model has positions for 12"):
        analyze.main([config(tmp_path, "CausalLanguageModel", **SMALL), "--lengths", "13"])


def test_cost_of_a_training_by_hand(tmp_path, capsys):
    text = "the cat sat\n" * 3 + "a\n"  # 4 + 4 + 4 + 2 tokens with the ends of sentences: 3.5 on average, rounded 4
    (tmp_path / "train.txt").write_text(text)
    model = dict(type="CausalLanguageModel", **SMALL) | dict(max_length=64)
    train = dict(type="MonolingualText", file=f"{tmp_path}/train.txt", vocabulary=dict(kind="word"), objective="causal")
    path = tmp_path / "language_model.py"
    path.write_text(
        f"def config():\n    return dict(model={model!r}, data=dict(train={train!r}), train=dict(epochs=5))\n"
    )
    report = analyzed(capsys, str(path), "--training-macs")
    tokens = 4 + 4  # words, and the special tokens
    forward = layer(4) + attention(4, 4) + 4 * (5 * D + D * tokens)
    assert report["training"] == {
        "forward": forward, "samples": 4, "epochs": 5, "macs": 3 * forward * 4 * 5, "length": 4,
    }  # fmt: skip
    analyze.main([str(path), "model.target_size=8", "--samples", "1000", "--lengths", "4"])
    note = f"(a text of 4 tokens, {forward / 4:.4g} MACs per token)"
    assert f"training: 3 x {forward / 1e3:.4g} k MACs {note} x 1 k texts x 5 epochs = " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"mean length of the texts is unknown\. Give it: --lengths TOKENS"):
        analyze.main([str(path), "--samples", "1000", "model.target_size=8"])
    with pytest.raises(SystemExit, match=r"got 2 lengths\. Give the mean one only"):
        analyze.main([str(path), "--training-macs", "--lengths", "4", "8"])
