"""Every model predicts on a GPU what it predicts on the CPU. The GPU is emulated: it refuses tensors of two devices."""

from dataclasses import is_dataclass, replace

import numpy as np
import pytest
import torch
from helpers.emulated_gpu import emulated_gpu, to_device
from helpers.every_model import CLASSIFIERS, CLIPS, DENSE, IMAGE, PROMPT, TEXTS, dense_model, text_model

from vitkit import build_model
from vitkit.apps.inference import MaskFiller, Predictor, TextContinuer, Translator
from vitkit.kernels import deformable_attention
from vitkit.seq2seq.decoding import DecodingSettings

IMAGES = [IMAGE, np.random.default_rng(1).integers(0, 255, (64, 48, 3), dtype=np.uint8)]
LARGE = np.random.default_rng(2).integers(0, 255, (100, 90, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    monkeypatch.setattr(deformable_attention, "_has_triton", lambda: False)


def assert_close(got, expected):
    if isinstance(expected, torch.Tensor):
        assert type(got) is torch.Tensor, "not moved to the CPU"
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    elif isinstance(expected, dict):
        for name in expected:
            assert_close(got[name], expected[name])
    elif is_dataclass(expected):
        assert_close(vars(got), vars(expected))
    elif isinstance(expected, list | tuple):
        for ours, theirs in zip(got, expected, strict=True):
            assert_close(ours, theirs)
    else:
        assert got == (pytest.approx(expected, abs=1e-3) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_and_captioners_predict_the_same(name):
    model = dense_model(name)
    text = PROMPT if "text" in model.takes else None
    predictor = Predictor(model, list("abc"), text=text)
    expected = predictor.run(IMAGES)
    is_dense = "words" not in DENSE[name][1]
    of_tiles = predictor.predict([LARGE], tiles=64, batch_size=8)[0].fields if is_dense else {}
    with emulated_gpu():
        predictor = Predictor(to_device(model), list("abc"), text=text)
        assert_close(predictor.run(IMAGES), expected)
        if is_dense:
            assert_close(predictor.predict([LARGE], tiles=64, batch_size=8)[0].fields, of_tiles)


@pytest.mark.parametrize("name", [name for name, (_, figures) in CLASSIFIERS.items() if figures != CLIPS])
def test_classifiers_predict_the_same(name):
    torch.manual_seed(0)
    model = build_model(dict(type="Classifier", backbone=dict(type=name, **CLASSIFIERS[name][0]), num_classes=3))
    expected = Predictor(model, list("abc")).run(IMAGES)
    with emulated_gpu():
        assert_close(Predictor(to_device(model), list("abc")).run(IMAGES), expected)


# torch packs the texts of a recurrent network on both devices, which the emulation does not know.
@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"RNNTranslator"}))
@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_text_models_predict_the_same(name, method):
    def answers():
        if name == "MaskedLanguageModel":
            return MaskFiller(model, vocabularies)(["a <mask> b", "<mask>"])
        if name == "CausalLanguageModel":
            return TextContinuer(model, vocabularies)(texts, decoding=settings)
        model.decoding = settings
        return Translator(model, vocabularies)(texts)

    texts = ["a b", "c", "", "a b c"]
    settings = replace(DecodingSettings(max_length=6, top_k=3), method=method)
    model, vocabularies = text_model(name)
    expected = answers()
    with emulated_gpu():
        to_device(model)
        assert_close(answers(), expected)
