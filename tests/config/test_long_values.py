"""Values of any length, depth or size are an error of a few lines that names the key."""

import json

import pytest

from vitkit import load_config
from vitkit.apps.training.config_listing import format_config
from vitkit.errors import CheckpointError, ConfigError, DataError, VitkitError
from vitkit.io.json_files import read_json
from vitkit.text_format import shorten
from vitkit.weights.reading import read_checkpoint

OVERRIDES = {
    "train.epochs": "-" * 50_000 + "1",
    "model.num_queries": "[" * 90_000 + "]" * 90_000,
    "train.eval_every": "(" * 3000 + "1" + ")" * 3000,
    "train.patience": "not " * 9000 + "1",
    "train.seed": "0x" + "f" * 6000,
    "data.num_workers": "9" * 6000,
    "train.log_every": "1+" * 60_000 + "1",
    "a" * 100_000: "1",
    "model.type": "x" * 100_000,
    "imports": "[" + "a" * 5000 + ".py]",
    "imports.0": "a" * 5000,
    "model.backbone": "['a\\0b.py']",
}


@pytest.mark.parametrize("key", OVERRIDES, ids=lambda key: key[:20])
def test_a_value_that_is_too_long_or_too_deep_names_its_key(key):
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart/detr", [f"{key}={OVERRIDES[key]}"])
    assert key[:5] in str(caught.value) and len(str(caught.value)) < 2500 and "\n" not in str(caught.value)


def test_arguments_of_a_family_may_not_be_nested_deeply():
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config("mask2former:backbone=" + "-" * 50_000 + "1")


@pytest.mark.parametrize("config", ["quickstart/translation", "quickstart/causal_language_model"])
def test_a_length_below_1_is_refused(config):
    with pytest.raises(ConfigError, match=r"model.max_length: got -1; expected at least 1\."):
        load_config(config, ["model.max_length=-1"])


def test_a_long_name_in_a_file_is_a_missing_file(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CheckpointError, match="which is not beside it") as caught:
        read_checkpoint(index)
    assert len(str(caught.value)) < 2500
    with pytest.raises(DataError, match="annotations: no file"):
        read_json("n" * 5000)


def test_messages_are_shortened_in_their_middle():
    assert shorten("short") == "short"
    text = shorten("a" * 100_000 + " remedy")
    assert text.startswith("aaa") and text.endswith("a remedy") and "… (100007 characters) …" in text
    assert len(str(VitkitError("\n".join(["a" * 5000] * 5000)))) < 25_000
    assert str(ConfigError("first\n" + "b" * 3000 + "\nlast")).split("\n")[::2] == ["first", "last"]


def test_listing_shows_whole_names_that_have_dots():
    text = format_config(load_config("deimv2_s_coco"))
    assert "        backbone.detail. = 1.0" in text and "        backbone.projections. = 1.0" in text
