"""A text-prompted detector is trained on data of boxes, resumed, tested, loaded and checked by the doctor."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.grounding_models import bert_tokenizer

import vitkit
from vitkit.apps.doctor import DoctorOptions, run_checks
from vitkit.config import load_config
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_datasets, share_vocabularies
from vitkit.errors import VitkitError
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool
from vitkit.weights import read_checkpoint

pytestmark = pytest.mark.smoke

TINY = """
from vitkit.configs.quickstart.grounding import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["num_queries"] = 8
    cfg["model"]["backbone"]["base_channels"] = 8
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["text_encoder"].update(d_model=16, num_heads=2, d_ffn=16)
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=16)
    cfg["data"]["train"]["num_images"], cfg["data"]["val"]["num_images"] = 8, 4
    cfg["data"].update(images_per_gpu=2, val_images_per_gpu=2)
    cfg["train"].update(epochs=1, log_every=1, reference_batch_size=2)
    return cfg
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A config file that trains in seconds; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    return "tiny.py"


def train(*args):
    train_tool.main([*map(str, args), "--device", "cpu"])


def fails(main, *args) -> str:
    with pytest.raises(SystemExit) as error:
        main([*map(str, args), "--device", "cpu"])
    return str(error.value.code)


def test_a_run_is_tested_and_loaded_with_its_vocabulary(tiny, tmp_path, capsys):
    train(tiny, "train.ema_decay=0.9", "train.precision=bf16")
    run = tmp_path / "runs/tiny"
    saved = read_checkpoint(run / "last.pth")
    assert saved["vocabularies"].keys() == {"target"} and len(saved["classes"]) == 36
    printed = capsys.readouterr().out
    assert "bbox/AP_seen" in printed and "bbox/AP_unseen" in printed and (run / "predictions.png").is_file()
    test_tool.main([str(run), "--device", "cpu"])
    metrics = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert "matched_accuracy" in json.dumps(metrics)
    predictor = vitkit.load(run)
    image = np.zeros((64, 64, 3), np.uint8)
    prediction = predictor(image, text=["a red star", "star"], threshold=0.0)
    assert set(prediction.names) <= {"a red star", "star"} and len(prediction)
    with pytest.raises(VitkitError, match="knows no piece of the phrase 'zebra'"):
        predictor(image, text="zebra")


def test_a_resumed_run_ends_with_the_same_weights(tiny, tmp_path):
    settings = ["schedule=dict(type='MultiStepLR', drop_at_epochs=[9])", "data.num_workers=0"]
    train(tiny, *settings, "train.epochs=2", "--run-dir", "whole")
    train(tiny, *settings, "--run-dir", "parts")
    train("--resume", "parts", "train.epochs=2", "data.num_workers=1")
    whole, parts = (read_checkpoint(tmp_path / name / "last.pth")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(parts[key], value) for key, value in whole.items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [
                "data.prompts=None",
                "data.val.pairs=['red ring']",
                "data.train.pairs=['red ring']",
                "evaluator.groups=None",
            ],
            "data.prompts: not set, and GroundingDINO looks for what prompts name. Set data.prompt",
        ),
        (["data.prompts.phrases={'red stra': 'x'}"], "data.prompts.phrases: the data have no class 'red stra'"),
        (["data.prompts.phrases={'red ring': 'a. b'}"], "class 'red ring': .* has a '.'"),
        (["data.prompts.negative=3"], "data.prompts.negative.*Did you mean 'negatives'"),
        (["data.prompts.max_tokens=3"], "data.prompts.max_tokens: got 3; expected at least 4"),
        (["model.tokenizer=nowhere"], "tokenizer 'nowhere': there is no nowhere"),
    ],
)
def test_what_is_wrong_with_prompts_is_one_line(tiny, overrides, message, capsys):
    text = fails(train_tool.main, tiny, *overrides)
    assert re.search(message, text), text


def test_other_models_read_no_prompts(tiny):
    text = fails(train_tool.main, "quickstart/dino", "data.prompts=dict(negatives=3)", "--check")
    assert "data.prompts: DINO reads no prompts. Leave it out." in text


def test_the_named_tokenizer_encodes_prompts(tiny, tmp_path):
    pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    (tmp_path / "tokenizer.json").write_text(bert_tokenizer())
    config = load_config(tiny, ["model.tokenizer=tokenizer.json"])
    train_set, val_set = build_datasets(DataSettings(**config["data"]))
    vocabularies = share_vocabularies(train_set, val_set, None, config["model"])
    assert vocabularies["target"].numbers[2] == 101 and val_set.target_vocabulary is train_set.target_vocabulary


def test_the_doctor_knows_prompts(tiny):
    checks = ["annotations", "weights", "same_classes", "class_balance", "overfit"]
    issues = list(run_checks(load_config(tiny, []), DoctorOptions(overfit_steps=2, overfit_seconds=20), checks=checks))
    by_check = {issue.check: issue for issue in issues if issue.verdict != "ok"}
    assert by_check["same classes"].verdict == by_check["absent classes"].verdict == "note"
    assert "12 classes of data.val are found by phrases only: red star" in by_check["same classes"].message
    assert not [issue for issue in issues if issue.verdict == "fail" and issue.check != "overfit"]
    bad = load_config(tiny, ["data.prompts.phrases={'red ring': '.'}"])
    issues = list(run_checks(bad, DoctorOptions(overfit_steps=2), checks=checks))
    assert any(i.verdict == "fail" and i.check == "prompts" and "class 'red ring'" in i.message for i in issues)


PAIRS = ["red star", "blue star"]
OWN = {"red star": "red hollow donut", "blue star": "red pointed sparkle"}


def own_phrases(start, *more):
    """Arguments of a training from weights, whose vocabulary has none of the words that tell the classes apart."""
    data = [f"data.{split}.pairs={PAIRS}" for split in ("train", "val")]
    return [*start, *data, f"data.prompts.phrases={OWN}", "evaluator.groups=None", *more]


def test_new_words_get_vectors_of_their_own_and_old_ones_keep_theirs(tiny, tmp_path, caplog):
    pairs = [f"data.{split}.pairs={PAIRS}" for split in ("train", "val")]
    train(tiny, *pairs, "evaluator.groups=None", "data.prompts.phrases={}", "--run-dir", "old")
    train(tiny, *own_phrases(["--init", "old/last.pth"], "optimizer.lr=0.0", "--run-dir", "new"))
    old, new = (read_checkpoint(tmp_path / name / "last.pth") for name in ("old", "new"))
    words = [json.loads(saved["vocabularies"]["target"])["tokens"] for saved in (old, new)]
    assert words[1][: len(words[0])] == words[0]
    assert sorted(word[1:] for word in words[1][len(words[0]) :]) == ["donut", "hollow", "pointed", "sparkle"]
    vectors = [saved["model"]["text_encoder.embedding.weight"] for saved in (old, new)]
    assert len(vectors[1]) == len(words[1]) and vectors[1][: len(words[0])].equal(vectors[0])
    prompt = vitkit.load("new").model.tokenize([list(OWN.values())])
    assert (
        len({*prompt.tokens[0, 1:4].tolist()}) == 3 and prompt.tokens[0, 1:4].tolist() != prompt.tokens[0, 5:8].tolist()
    )


def test_a_run_is_not_resumed_with_words_that_it_does_not_know(tiny):
    train(tiny)
    text = fails(train_tool.main, "--resume", "runs/tiny", "data.prompts.phrases={'red circle': 'a red sparkle'}")
    assert re.search("last.pth does not know these words of the prompts: sparkle. To learn .*--init runs.tiny", text), (
        text
    )


def test_phrases_that_the_vocabulary_makes_the_same_are_an_error(caplog):
    predictor = vitkit.load("shapes_grounding")
    image = np.zeros((64, 64, 3), np.uint8)
    with pytest.raises(VitkitError, match="'red hollow donut' and 'red pointed sparkle' are the same to the model"):
        predictor(image, text=list(OWN.values()))
    with caplog.at_level("WARNING", "vitkit"):
        predictor(image, text="red donut . blue star")
        predictor(image, text="red donut . blue ring")
    (message,) = (text for text in caplog.messages if "does not know" in text)
    assert "does not know 'hollow', 'donut', 'pointed', 'sparkle'. Use other words, or train it with these." in message


def test_classes_that_the_tokenizer_makes_the_same_are_an_error(tiny, tmp_path):
    pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    (tmp_path / "tokenizer.json").write_text(bert_tokenizer())
    text = fails(train_tool.main, *own_phrases([tiny], "model.tokenizer=tokenizer.json", "--check"))
    assert "'red hollow donut' and 'red pointed sparkle' are the same to the model" in text, text
