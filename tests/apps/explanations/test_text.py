from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import build_model
from vitkit.apps.explanations import text as text_attention_module
from vitkit.apps.explanations.text import beam_tree, draw_beam_tree, text_attention, text_inputs, word_attention
from vitkit.apps.inference import MaskFiller, Translator
from vitkit.apps.inference.words import word_spans
from vitkit.errors import ConfigError, DataError
from vitkit.seq2seq.decoding import DecodingSettings, decode
from vitkit.structures import BOS, EOS
from vitkit.text.vocabulary import Vocabulary

WORDS = Vocabulary.train("word", ["one two three four five"], mask=True)
SMALL = dict(d_model=16, num_heads=2, d_ffn=16, dropout=0.0, num_layers=2)
SPECS = {
    "Transformer": dict(type="Transformer", **SMALL),
    "RNNTranslator": dict(type="RNNTranslator", d_embedding=8, d_hidden=8),
    "CausalLanguageModel": dict(type="CausalLanguageModel", **SMALL),
    "MaskedLanguageModel": dict(type="MaskedLanguageModel", **SMALL),
    "PrefixLanguageModel": dict(type="PrefixLanguageModel", **SMALL),
}


def text_model(name: str, seed: int = 0) -> tuple[torch.nn.Module, dict[str, Vocabulary]]:
    torch.manual_seed(seed)
    sides = ("target",) if name in ("CausalLanguageModel", "MaskedLanguageModel") else ("source", "target")
    vocabularies = dict.fromkeys(sides, WORDS)
    return build_model(SPECS[name], vocabularies=vocabularies).eval(), vocabularies


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Transformer", {"encoder": 2, "decoder": 2, "cross": 2}),
        ("RNNTranslator", {"cross": 1}),
        ("CausalLanguageModel", {"decoder": 2}),
        ("MaskedLanguageModel", {"encoder": 2}),
        ("PrefixLanguageModel", {"decoder": 2}),
    ],
)
def test_rows_and_columns_are_the_tokens_and_sum_to_one(name, kinds):
    model, vocabularies = text_model(name)
    if "source" in vocabularies:
        model.decoding = DecodingSettings(max_length=4)
    attention = text_attention(model, vocabularies, "two one")
    assert {layer.kind for layer in attention.layers} == set(kinds)
    for layer in attention.layers:
        assert layer.weights.shape[1:] == (len(layer.rows), len(layer.columns))
        assert torch.allclose(layer.weights.sum(-1), torch.ones(layer.weights.shape[:2]))
        prefix = 3 if name == "PrefixLanguageModel" else 0  # two words and EOS
        assert layer.kind != "decoder" or (layer.weights.triu(1)[:, prefix:] == 0).all()
        assert not prefix or (layer.rows[:prefix] == ["▁two", "▁one", "</s>"] and (layer.weights[:, 0, :3] > 0).all())
    assert {kind: len(attention.of_kind(kind)) for kind in kinds} == kinds
    for step in attention.expected:
        assert len(step.tokens) == 5 and list(step.probabilities) == sorted(step.probabilities, reverse=True)


def test_expected_tokens_are_the_softmax_of_the_logits():
    model, vocabularies = text_model("CausalLanguageModel")
    attention = text_attention(model, vocabularies, "two one", num_expected=1)
    ids = [BOS, *WORDS.encode("two one")]
    with torch.no_grad():
        p = model(torch.tensor([ids]))["logits"][0].softmax(-1)
    assert [step.after for step in attention.expected] == WORDS.token_texts(ids)
    assert [step.tokens[0] for step in attention.expected] == WORDS.token_texts(p.argmax(-1).tolist())
    assert [step.probabilities[0] for step in attention.expected] == pytest.approx(p.max(-1).values.tolist(), abs=1e-4)


def test_a_masked_language_model_reads_masks_and_the_end_of_the_text():
    model, vocabularies = text_model("MaskedLanguageModel")
    attention = text_attention(model, vocabularies, "two <mask> one")
    assert attention.layers[0].rows == ["▁two", "<mask>", "▁one", "</s>"]
    best = MaskFiller(model, vocabularies)("two <mask> one", n_best=1)[0][0]
    expected = dict(zip(attention.expected[1].tokens, attention.expected[1].probabilities))
    assert expected.get(f"▁{best.token}", best.probability) == pytest.approx(best.probability, abs=1e-4)


@pytest.mark.parametrize("name", ["Transformer", "RNNTranslator"])
def test_beam_tree_has_the_probability_of_every_prefix(name):
    model, _ = text_model(name)
    source = torch.tensor([[*WORDS.encode("three one five"), EOS]])
    inputs = {"source": source, "source_padding": torch.zeros_like(source, dtype=torch.bool)}
    settings = DecodingSettings(max_length=5)
    nodes = beam_tree(model, inputs, settings, beams=3)

    def prefix(i: int | None) -> list[int]:
        return [] if i is None else [*prefix(nodes[i].parent), nodes[i].token]

    for i, node in enumerate(nodes):
        tokens = prefix(i)
        assert len(tokens) == node.step
        with torch.no_grad():
            logits = model(**inputs, target_in=torch.tensor([[BOS, *tokens[:-1]]]))["logits"]
        log_probs = logits[0].log_softmax(-1)
        assert node.log_prob == pytest.approx(float(log_probs[range(len(tokens)), tokens].sum()), abs=1e-3)
    best = decode(model, inputs, DecodingSettings(method="beam", beams=3, n_best=3, max_length=5))[0][0].tokens
    assert [node.token for node in nodes if node.is_best and node.token != EOS] == best


@pytest.mark.parametrize("max_length", [1, 3])
def test_beam_tree_has_the_last_token_of_hypotheses_at_the_length_limit(max_length):
    model, vocabularies = text_model("Transformer")
    settings = DecodingSettings(max_length=max_length, min_length=max_length - 1)
    inputs = text_inputs(model, vocabularies, "two one")
    hypotheses = decode(model, inputs, replace(settings, method="beam", beams=3, n_best=3))[0]
    assert any(len(hypothesis.tokens) == max_length for hypothesis in hypotheses)
    last = [node for node in beam_tree(model, inputs, settings, beams=3) if node.step == max_length]
    assert [node.token for node in last] == [[*hypothesis.tokens, EOS][max_length - 1] for hypothesis in hypotheses]
    expected = [hypothesis.score * settings.penalty(max_length) for hypothesis in hypotheses]
    assert [node.log_prob for node in last] == pytest.approx(expected)
    assert [node.is_best for node in last] == [True, False, False]


def test_inputs_are_the_sentence_read_by_the_model():
    one = WORDS.encode("two one")
    inputs = text_inputs(*text_model("Transformer"), "two one")
    assert inputs["source"].tolist() == [[*one, EOS]] and not inputs["source_padding"].any()
    inputs = text_inputs(*text_model("CausalLanguageModel"), "two one")
    assert {name: value.tolist() for name, value in inputs.items()} == {"tokens": [[BOS, *one]]}


@pytest.mark.parametrize("name", ["Transformer", "RNNTranslator"])
def test_an_alignment_has_a_row_for_each_token_of_the_translation(name):
    model, vocabularies = text_model(name, seed=2)  # with this seed, it does not end at once
    model.decoding = DecodingSettings(max_length=4)
    translator = Translator(model, vocabularies)
    attention, source, target = translator.align("two one")
    best = decode(model, text_inputs(model, vocabularies, "two one"), model.decoding, return_attention=True)[0][0]
    assert source == WORDS.token_texts([*WORDS.encode("two one"), EOS])
    assert target == WORDS.token_texts(best.tokens) and target
    assert torch.equal(attention, best.attention) and attention.shape == (len(target), 3)
    assert torch.allclose(attention.sum(-1), torch.ones(len(target)))


LETTERS = Vocabulary.train("char", ["one two three four five"], mask=True)


def model_of_letters(name: str) -> tuple[torch.nn.Module, dict[str, Vocabulary]]:
    """Return a model whose tokens are letters, which writes few of them if it translates."""
    vocabularies = dict.fromkeys(text_model(name)[1], LETTERS)
    torch.manual_seed(2)
    model = build_model(SPECS[name], vocabularies=vocabularies).eval()
    if "source" in vocabularies:
        model.decoding = DecodingSettings(max_length=4)
    return model, vocabularies


@pytest.mark.parametrize("name", SPECS)
def test_attention_among_letters_is_joined_to_that_among_words(name):
    model, vocabularies = model_of_letters(name)
    pieces = text_attention(model, vocabularies, "two one")
    words = text_attention(model, vocabularies, "two one", words=True)
    assert words.expected == pieces.expected
    for layer, joined in zip(pieces.layers, words.layers, strict=True):
        assert joined.kind == "decoder" or joined.columns == ["two", "one", "</s>"]
        assert joined.weights.shape == (len(layer.weights), len(joined.rows), len(joined.columns))
        assert torch.allclose(joined.weights.sum(-1), torch.ones(joined.weights.shape[:2]))
        assert "".join(joined.rows) == "".join(layer.rows).replace("▁", "")


@pytest.mark.parametrize("name", ["Transformer", "RNNTranslator"])
def test_an_alignment_of_words_is_that_of_their_letters(name):
    translator = Translator(*model_of_letters(name))
    pieces, (attention, source, target) = translator.align("two one"), translator.align("two one", words=True)
    assert source == ["two", "one", "</s>"] and "".join(target) == "".join(pieces.target_tokens).replace("▁", "")
    assert attention.shape == (len(target), 3)
    columns = torch.stack([part.sum(-1) for part in pieces.attention.split([3, 4, 1], dim=1)], dim=1)
    assert torch.allclose(attention, torch.stack([columns[span].mean(0) for span in word_spans(pieces.target_tokens)]))


def test_attention_is_that_of_greedy_decoding_if_the_config_asks_for_several_texts():
    model, vocabularies = text_model("Transformer")
    model.decoding = DecodingSettings(max_length=4)
    expected = text_attention(model, vocabularies, "two one").layers
    model.decoding = DecodingSettings(method="beam", n_best=3, max_length=4)
    layers = text_attention(model, vocabularies, "two one").layers
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(layers, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "seed", "is_cut"),
    [("Transformer", 4, False), ("Transformer", 2, True), ("RNNTranslator", 9, False), ("RNNTranslator", 2, True)],
)
def test_rows_of_cross_attention_are_the_written_tokens(name, seed, is_cut):
    model, vocabularies = text_model(name, seed)
    model.decoding = DecodingSettings(max_length=4)
    layer = text_attention(model, vocabularies, "two one").of_kind("cross")[0]
    attention, _, written = Translator(model, vocabularies).align("two one")
    assert layer.rows == [*written, *([] if is_cut else ["</s>"])]
    assert (len(written) == 4) == is_cut
    assert torch.allclose(layer.weights.mean(0)[: len(written)], attention, atol=1e-6)


def test_models_without_an_alignment_are_named():
    model, vocabularies = text_model("Transformer")
    with pytest.raises(DataError, match="align: no token"):
        Translator(model, vocabularies).align(" ")
    prefix = build_model(dict(type="PrefixLanguageModel", **SMALL), vocabularies=vocabularies)
    with pytest.raises(ConfigError, match="PrefixLanguageModel has no separate attention to a source"):
        Translator(prefix, vocabularies).align("two one")


def test_beam_tree_is_drawn(tmp_path):
    model, vocabularies = text_model("Transformer")
    model.decoding = DecodingSettings(max_length=3)
    path = tmp_path / "new" / "beams.png"
    draw_beam_tree(model, vocabularies["target"], text_inputs(model, vocabularies, "two one"), path, beams=2)
    assert np.asarray(Image.open(path).convert("L")).std() > 5


@pytest.mark.parametrize(("prompt", "root"), [("", "<s>"), ("two", "\u2581two"), ("two one", "… \u2581one")])
def test_beam_tree_of_a_continuation_starts_at_the_last_word_of_the_prompt(prompt, root, monkeypatch):
    model, vocabularies = text_model("CausalLanguageModel")
    model.decoding = DecodingSettings(max_length=3)
    roots = []
    monkeypatch.setattr(text_attention_module, "draw_beams", lambda *_, root, **__: roots.append(root))
    draw_beam_tree(model, vocabularies["target"], text_inputs(model, vocabularies, prompt), "a.png", beams=2)
    assert roots == [root]


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_words_of_a_caption_have_attention_maps(kind):
    torch.manual_seed(0)
    backbone = dict(type="ResNet", depth=18, norm="bn", out_features=["res4"], pretrained=False)
    spec = dict(type="ShowAttendTell", backbone=backbone, attention=kind, d_embedding=8, d_model=8, d_attention=8)
    model = build_model(spec, vocabularies={"target": WORDS}).eval()
    model.decoding = DecodingSettings(max_length=3)
    images = torch.rand(1, 3, 32, 48)
    words, weights = word_attention(model, dict(images=images, padding_mask=torch.zeros(1, 32, 48, dtype=torch.bool)))
    assert weights.shape == (len(words), 2, 3) and len(words) == 3
    assert torch.allclose(weights.sum((1, 2)), torch.ones(3))
    assert ((weights > 0).sum((1, 2)) == (1 if kind == "hard" else 6)).all()
