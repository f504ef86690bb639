"""A text is tokenized and encoded once for all images, and anew where the result would differ."""

import json

import numpy as np
import pytest
import torch
from helpers.grounding_models import build_small, small_config
from PIL import Image

import vitkit
from vitkit.apps.inference import Predictor
from vitkit.apps.inference.encoded_text import EncodedOnce
from vitkit.errors import ConfigError
from vitkit.models import grounding_dino
from vitkit.nn.text_encoders import TransformerTextEncoder
from vitkit.structures import Batch
from vitkit.text.vocabulary import Vocabulary
from vitkit.tools import predict
from vitkit.weights import save_checkpoint

IMAGES = [np.random.default_rng(i).integers(0, 255, (96, 128, 3), dtype=np.uint8) for i in range(5)]
TEXT = "a red star . cat ."


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train("word", ["a red star .", "a blue cat ."])


@pytest.fixture
def model(vocabulary):
    return build_small(vocabulary, max_tokens=16)


@pytest.fixture
def calls(monkeypatch):
    """Return the calls of the tokenizer, and of the text encoder with the number of prompts."""
    made, tokenize, encode = [], grounding_dino.encode_phrases, TransformerTextEncoder.forward

    def count(self, tokens, phrase_ids):
        made.append(len(tokens))
        return encode(self, tokens, phrase_ids)

    monkeypatch.setattr(TransformerTextEncoder, "forward", count)
    monkeypatch.setattr(
        grounding_dino, "encode_phrases", lambda *args, **named: made.append("tokens") or tokenize(*args, **named)
    )
    return made


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(folder / f"{number}.png")
    return folder


def fields(predictions):
    return [
        {name: value.tolist() for name, value in p.fields.items() if isinstance(value, torch.Tensor)}
        for p in predictions
    ]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, [1]), ({"batch_size": 5}, [5]), ({"batch_size": 2}, [2, 1]), ({"tiles": 64, "batch_size": 3}, [3])],
    ids=["one", "five", "two", "tiles"],
)
def test_a_prompt_is_encoded_once_for_a_folder(model, photos, calls, options, sizes):
    predictor = Predictor(model, ()).with_text(TEXT)
    assert calls == ["tokens"]
    predictor(str(photos), threshold=0.0, **options)
    predictor(str(photos), threshold=0.0, **options)
    assert calls == ["tokens", *sizes]


def test_a_prompt_is_encoded_once_for_a_stream_of_frames(model, calls):
    for _ in Predictor(model, ())((image for image in IMAGES), text=TEXT):
        pass
    assert calls == ["tokens", 1]


def test_long_prompts_and_captions_are_encoded_once(model, calls):
    predictor = Predictor(model, ())
    predictor.predict(IMAGES, text=["a red star", "cat", "blue", "a blue cat", "star", "red"])
    assert calls == ["tokens", 1, 1]  # two parts, since the model takes 16 tokens
    calls.clear()
    predictor.predict(IMAGES, text="a red star, a blue cat", text_threshold=0.5)
    assert calls == [1]


def test_predict_and_explain_encode_a_prompt_once(model, vocabulary, photos, calls, tmp_path):
    config = json.dumps(dict(model=small_config(max_tokens=16), data={}))
    vocabularies = {"target": vocabulary.to_json()}
    weights = str(tmp_path / "weights.pth")
    save_checkpoint(weights, {"model": model.state_dict(), "vocabularies": vocabularies, "config": config})
    out = str(tmp_path / "out")
    predict.main([weights, "--input", str(photos), "--text", TEXT, "--out", out, "--no-draw"])
    assert calls == ["tokens", 1]
    calls.clear()
    vitkit.explain(weights, image=IMAGES[0], text=TEXT, threshold=0.0, queries=[0], out=tmp_path)
    assert calls == ["tokens", 1]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"batch_size": 5}], ids=["one", "two", "five"])
def test_predictions_equal_those_of_a_text_for_each_image(model, options, monkeypatch):
    predictor = Predictor(model, ()).with_text(TEXT)
    once = fields(predictor.predict(IMAGES, threshold=0.0, **options))
    monkeypatch.setattr(EncodedOnce, "by", lambda *_: None)
    assert once == fields(predictor.predict(IMAGES, threshold=0.0, **options)) and once[0]["scores"]


def test_texts_of_one_model_are_kept_apart(model, calls):
    predictor = Predictor(model, ())
    cat, star = predictor.with_text("cat"), predictor.with_text("a red star")
    first = fields(cat.predict(IMAGES[:1], threshold=0.0))
    assert fields(star.predict(IMAGES[:1], threshold=0.0)) != first
    assert fields(cat.predict(IMAGES[:1], threshold=0.0)) == first
    assert calls == ["tokens", "tokens", 1, 1]


@pytest.mark.parametrize("part", ["embedding", "projection", "replaced"])
def test_other_weights_encode_anew(model, vocabulary, calls, part):
    predictor = Predictor(model, ()).with_text(TEXT)
    before = fields(predictor.predict(IMAGES[:1], threshold=0.0))
    with torch.no_grad():
        if part == "embedding":
            model.text_encoder.embedding.weight += 0.5
        elif part == "projection":
            model.text_projection.weight.mul_(2)
        else:
            model.text_projection = torch.nn.Linear(16, 64).eval()
    after = fields(predictor.predict(IMAGES[:1], threshold=0.0))
    assert after != before and after == fields(Predictor(model, ()).with_text(TEXT).predict(IMAGES[:1], threshold=0.0))
    assert calls == ["tokens", 1, 1, "tokens", 1]


def test_another_precision_encodes_anew(model, calls):
    predictor = Predictor(model, ()).with_text(TEXT)
    predictor.predict(IMAGES[:1])
    predictor.precision = "bf16"
    predictor.predict(IMAGES[:1])
    assert calls == ["tokens", 1, 1]


def test_hooks_see_the_encoder_in_every_batch(model):
    seen, predictor = [], Predictor(model, ()).with_text(TEXT)
    predictor.predict(IMAGES[:1])
    handle = model.text_encoder.register_forward_hook(lambda *_: seen.append(1))
    predictor.predict(IMAGES[:2])
    assert len(seen) == 2
    handle.remove()


def test_gradients_of_an_image_flow_beside_an_encoded_text(model):
    predictor = Predictor(model, ()).with_text(TEXT)
    predictor.predict(IMAGES[:1])
    with torch.inference_mode():
        encoded = predictor.inputs_of(predictor.prepare(IMAGES[:1]), model)["text"]
    image = torch.rand(1, 3, 96, 128, requires_grad=True)
    model(image, text=encoded)["pred_logits"].sum().backward()
    assert image.grad.any() and model.text_encoder.embedding.weight.grad is None


def test_a_model_that_takes_text_derives_from_its_base():
    class Other(vitkit.Model):
        takes = ("images", "text")
        returns = ("boxes_xyxy",)

        def postprocess(self, outputs, image_sizes):
            return []

    other = Other()
    other.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"Other takes text, so it must derive from vitkit\.models\.text_prompted"):
        Predictor(other, ()).with_text("cat")


def test_prompts_of_a_batch_move_with_it(model):
    batch = Batch({"prompt": model.tokenize([TEXT, "cat"])}, [{}, {}])
    moved = batch.to("meta").inputs["prompt"]
    assert moved.shape == (2, 8) and all(field.is_meta for field in moved)
