"""What a config writes is what the constructors of the models of text take."""

import dataclasses

import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit.registry import MODELS, parameters_of
from vitkit.seq2seq.decoding import DecodingSettings

SIZE = 11
DECODING = dict(decoding=dict(method="beam", beams=3, n_best=2, max_length=7))
SOURCE = dict(source_size=SIZE, target_size=SIZE)
STACK = dict(
    d_model=16, num_heads=2, d_ffn=24, dropout=0.2, norm_first=True, activation="gelu", final_norm=True,
    positions="learned", max_length=20, tied_output=False,
)  # fmt: skip
ONE_TEXT = dict(scale_embedding=False, norm_eps=1e-3)
IMAGE = dict(
    backbone=dict(type="ResNet", depth=18, pretrained=False, out_features=["res2"]), freeze_backbone=True,
    target_size=SIZE,
)  # fmt: skip
MODELS_OF_TEXT = {
    "Transformer": SOURCE
    | STACK
    | DECODING
    | dict(num_layers=[1, 2], shared_embeddings=False, output_bias=True, word_vectors=None),
    "CausalLanguageModel": STACK
    | DECODING
    | ONE_TEXT
    | dict(target_size=SIZE, num_layers=1, output_bias=True, word_vectors=None),
    "PrefixLanguageModel": SOURCE
    | STACK
    | DECODING
    | ONE_TEXT
    | dict(num_layers=1, output_bias=True, word_vectors=None),
    "MaskedLanguageModel": STACK
    | ONE_TEXT
    | dict(
        target_size=SIZE, num_layers=1, mask_id=4, mask_share=0.3, embedding_norm=True, class_token=True,
        word_vectors=None,
    ),
    "RNNTranslator": SOURCE
    | DECODING
    | dict(
        attention="dot", bidirectional=True, cell="lstm", num_layers=2, d_embedding=8, d_hidden=12, dropout=0.2,
        scheduled_sampling=0.5, word_vectors=None, max_source_length=30,
    ),
    "TransformerCaptioner": IMAGE
    | STACK
    | DECODING
    | dict(num_encoder_layers=1, num_decoder_layers=2, output_bias=True),
    "ShowAttendTell": IMAGE
    | DECODING
    | dict(
        attention="hard", gated=False, expected_probability=0.25, hard_inference="expected", d_embedding=8, d_model=12,
        d_attention=10, dropout=0.2, scheduled_sampling=0.5,
    ),
}  # fmt: skip


def constructor_of(name: str) -> type:
    return MODELS.resolve(name)[0]


def registered_models_of_text() -> set[str]:
    models = {constructor_of(name) for name in MODELS.names()}
    return {model.__name__ for model in models if model.__module__.startswith("vitkit.seq2seq")}


def test_every_model_of_text_is_compared():
    assert MODELS_OF_TEXT.keys() == registered_models_of_text()


@pytest.mark.parametrize("name", MODELS_OF_TEXT)
def test_arguments_are_compared_completely_and_none_is_a_dataclass(name):
    parameters = parameters_of(constructor_of(name))
    assert parameters.keys() - MODELS_OF_TEXT[name].keys() <= {"source_vocabulary", "target_vocabulary"}
    assert not [p.name for p in parameters.values() if dataclasses.is_dataclass(p.default)]


@pytest.mark.parametrize("name", MODELS_OF_TEXT)
def test_config_and_constructor_take_the_same_words(name):
    words = MODELS_OF_TEXT[name]
    torch.manual_seed(0)
    from_config = MODELS.build(dict(type=name, **words))
    torch.manual_seed(0)
    from_python = constructor_of(name)(**words)
    assert repr(from_python) == repr(from_config)
    assert_same_weights(from_python, from_config)
    plain = {k: v for k, v in vars(from_config).items() if isinstance(v, int | float | str | DecodingSettings)}
    assert plain == {k: v for k, v in vars(from_python).items() if k in plain}
    if "decoding" in words:
        assert from_python.decoding == DecodingSettings(method="beam", beams=3, n_best=2, max_length=7)
