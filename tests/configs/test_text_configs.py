"""Text configs: valid, buildable with vocabularies, of the published size."""

import pytest
import torch

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.registry import CRITERIA, OPTIMIZERS, SCHEDULES
from vitkit.seq2seq.captioner import Captioner

TRANSLATION = (
    "quickstart/translation",
    "quickstart/prefix_language_model",
    "translation_rnn_multi30k",
    "translation_rnnsearch_multi30k",
    "translation_transformer_multi30k",
    "transformer_base_wmt14",
    "transformer_big_wmt14",
    "transformer_base_wmt14_fr",
    "transformer_big_wmt14_fr",
)
CAPTIONING = (
    "quickstart/captioning",
    "overfit/captioning",
    "caption_sat_soft_flickr8k",
    "caption_sat_hard_flickr8k",
    "caption_transformer_coco",
)
LANGUAGE_MODELS = (
    "language_model_causal_multi30k",
    "language_model_masked_multi30k",
    "quickstart/causal_language_model",
    "quickstart/masked_language_model",
)


@pytest.mark.parametrize("name", [name for name in TRANSLATION if "big" not in name])
def test_translation_configs_build(name):
    config = load_config(name)
    model = build_model({**config["model"], "source_size": 50, "target_size": 50})
    assert hasattr(model, "generate")
    _build_the_rest(config, model)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_model_configs_build(name):
    config = load_config(name)
    mask = dict(mask_id=4) if "masked" in name else {}
    _build_the_rest(config, build_model({**config["model"], "target_size": 50, **mask}))


@pytest.mark.parametrize("name", CAPTIONING)
def test_captioning_configs_build(name):
    config = load_config(name)
    model = build_model({**config["model"], "target_size": 50})
    assert isinstance(model, Captioner)
    _build_the_rest(config, model)


def test_hard_and_soft_attention_configs_differ_only_in_their_attention():
    soft, hard = (load_config(f"caption_sat_{name}_flickr8k") for name in ("soft", "hard"))
    assert (soft["model"].pop("attention"), hard["model"].pop("attention")) == ("soft", "hard")
    assert hard["criterion"].pop("reinforce") and hard["criterion"].pop("entropy")
    assert soft == hard


def _build_the_rest(config, model):
    CRITERIA.build(config["criterion"])
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    epochs = config["train"]["epochs"]
    SCHEDULES.build(config["schedule"], optimizer=optimizer, steps_per_epoch=100, epochs=epochs)


def test_transformer_settings_are_those_of_the_paper():
    # Section 5.3: the rate is d_model ** -0.5 * warmup_steps ** -0.5 at its peak.
    for name, d_model, dropout in (
        ("transformer_base_wmt14", 512, 0.1),
        ("transformer_big_wmt14", 1024, 0.3),
        ("transformer_base_wmt14_fr", 512, 0.1),
        ("transformer_big_wmt14_fr", 1024, 0.1),
    ):
        config = load_config(name)
        with torch.device("meta"):
            model = build_model({**config["model"], "source_size": 50, "target_size": 50})
        layer = model.encoder.layers[0]
        assert (layer.norm1.normalized_shape, layer.dropout.p) == ((d_model,), dropout)
        language = "fr" if name.endswith("_fr") else "de"
        assert config["data"]["test"]["languages"] == f"en-{language}"
        assert config["data"]["train"]["target"].endswith(f"train.{language}")
        optimizer = config["optimizer"]
        assert optimizer["lr"] == pytest.approx((d_model * config["schedule"]["warmup_steps"]) ** -0.5, rel=0.02)
        assert (optimizer["betas"], optimizer["eps"]) == ((0.9, 0.98), 1e-9)
        assert config["criterion"]["label_smoothing"] == 0.1
        assert config["model"]["decoding"]["beams"] == 4


def test_configs_with_and_without_attention_are_otherwise_equal():
    rnn, rnnsearch = (load_config(f"translation_{name}_multi30k") for name in ("rnn", "rnnsearch"))
    assert (rnn["model"].pop("attention"), rnnsearch["model"].pop("attention")) == (None, "additive")
    assert rnn == rnnsearch


def test_settings_that_a_config_leaves_out_can_be_overridden():
    path = "translation_transformer_multi30k"
    config = load_config(path, ["model.decoding.beams=8", "data.train.vocabulary.min_count=2"])
    assert config["model"]["decoding"] == dict(method="greedy", max_length=100, beams=8)
    assert config["data"]["train"]["vocabulary"]["min_count"] == 2
    for wrong, message in (("beams=four", "expected int"), ("beam=3", "Did you mean 'beams'")):
        with pytest.raises(ConfigError, match=message):
            load_config(path, [f"model.decoding.{wrong}"])
