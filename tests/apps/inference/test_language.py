"""Loaded language models continue text like `decode`, and fill masks by probability."""

import pytest
import torch

from vitkit import build_model
from vitkit.apps.inference import MaskFiller, TextContinuer, Translator
from vitkit.errors import ConfigError, DataError
from vitkit.seq2seq.decoding import DecodingSettings, decode
from vitkit.structures import BOS, EOS
from vitkit.text.vocabulary import Vocabulary

SMALL = dict(d_model=16, num_heads=2, d_ffn=16, dropout=0.0, num_layers=1, max_length=20)
WORDS = Vocabulary.train("word", ["one two three four five six seven eight ."], mask=True)


def make(kind: str, cls: type, vocabulary: Vocabulary = WORDS):
    torch.manual_seed(0)
    vocabularies = {"target": vocabulary}
    return cls(build_model(dict(type=kind, **SMALL), vocabularies=vocabularies), vocabularies)


@pytest.fixture
def continuer():
    return make("CausalLanguageModel", TextContinuer)


@pytest.fixture
def filler():
    return make("MaskedLanguageModel", MaskFiller)


def test_text_is_continued_as_decoded(continuer):
    settings = DecodingSettings(max_length=6)
    ids = [BOS, *WORDS.encode("two one")]
    expected = decode(continuer.model, {"tokens": torch.tensor([ids])}, settings)[0][0]
    (got,) = continuer("two one ", decoding=dict(max_length=6))
    assert got.text == f"two one {WORDS.decode(expected.tokens)}" == str(got)
    assert got.score == pytest.approx(expected.score) and got.prompt == "two one "
    several = continuer(["three", "two one "], decoding=dict(max_length=6, method="beam", n_best=2))
    assert [len(best) for best in several] == [2, 2]
    assert all(a.score >= b.score and a.text.startswith(a.prompt.strip()) for a, b in several)


def test_characters_missing_from_the_vocabulary_are_kept(continuer):
    (got,) = continuer("two  €uro", decoding=dict(max_length=3))
    settings = DecodingSettings(max_length=3)
    ids = [BOS, *WORDS.encode("two €uro")]
    written = decode(continuer.model, {"tokens": torch.tensor([ids])}, settings)[0][0].tokens
    assert got.text == "two  €uro" + "".join(WORDS.token_texts(written)).replace("▁", " ")


def test_samples_depend_only_on_the_seed_and_the_index_of_the_text(continuer):
    drawn = dict(method="sample", max_length=10)
    texts = [best[0].text for best in continuer(["one"] * 40, decoding=drawn)]
    assert texts == [best[0].text for best in continuer(["one"] * 40, decoding=drawn)]
    assert len(set(texts)) > 20
    assert continuer("one", decoding=drawn | {"seed": 39})[0].text == texts[39]


def test_text_ends_at_the_last_position_without_shortening_others(continuer):
    long = " ".join(["one"] * 17)
    settings = dict(max_length=8, min_length=7)
    alone = continuer("two", decoding=settings)
    beside_long = continuer(["two", long], decoding=settings | {"min_length": 0})
    assert len(beside_long[0][0].text.split()) <= 9
    assert len(beside_long[1][0].text.replace(".", " .").split()) <= 17 + 3  # 18 tokens with BOS, of 20 positions
    assert len(WORDS.encode(alone[0].text)) >= 8
    with_least = continuer(["two", long], decoding=settings)
    assert with_least[0][0].text == alone[0].text
    assert len(WORDS.encode(with_least[1][0].text)) >= 17 + 2  # two of the three that have room
    with pytest.raises(DataError, match="text 2: 21 tokens, including its beginning or end; expected at most 20"):
        continuer(["two", " ".join(["one"] * 20)])


def test_masks_are_filled_by_probability(filler):
    text = "one <mask> three <mask>."
    ids = [*WORDS.encode("one"), WORDS.mask_id, *WORDS.encode("three"), WORDS.mask_id, *WORDS.encode("one.")[1:], EOS]
    with torch.no_grad():
        probabilities = filler.model.predict(torch.tensor([ids]))[0].softmax(-1)
    first, second = filler(text, n_best=4)
    for candidates, position in ((first, 1), (second, 3)):
        values = [c.probability for c in candidates]
        assert values == sorted(values, reverse=True) and len(values) == 4
        for candidate in candidates:
            token = next(i for i, t in enumerate(WORDS.tokens) if t.lstrip("▁") == candidate.token)
            assert candidate.probability == pytest.approx(float(probabilities[position, token]), abs=1e-6)
    joined = {False: "one {} three <mask>.", True: "one{} three <mask>."}  # a full stop brings no space along
    assert all(c.text == joined[c.token == "."].format(c.token) for c in first)
    assert len(filler([text, "<mask>"])) == 2
    everything = {candidate.token for candidate in filler("<mask>", n_best=100)[0]}
    assert everything == {token.lstrip("▁") for token in WORDS.tokens[5:]}  # no special tokens


def test_a_mask_takes_the_space_before_it():
    characters = Vocabulary.train("char", ["ab ba"], mask=True)
    filler = make("MaskedLanguageModel", MaskFiller, characters)
    texts = {c.token: c.text for c in filler("ab <mask>a", n_best=8)[0]}
    assert texts["b"] == "ab ba"
    pieces = Vocabulary.train("bpe", ["ein mann läuft.", "ein mann und ein hund"] * 4, size=40, mask=True)
    for text, expected in (
        ("ein <mask> läuft.", ["ein", "<mask>", "läuft", "."]),
        ("ein <mask>.", ["ein", "<mask>", "."]),
        ("<mask>", ["<mask>"]),
        ("€<mask><mask>", ["", "<unk>", "<mask>", "<mask>"]),
    ):
        tokens = pieces.encode_masked(text)
        assert "".join(pieces.token_texts(tokens)).replace("▁", "") == "".join(expected)
        assert tokens.count(pieces.mask_id) == text.count("<mask>")
        if text != "<mask>" and "€" not in text:
            assert tokens[: tokens.index(pieces.mask_id)] == pieces.encode("ein")
    assert pieces.unknown["€"] == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, f: c([1]), DataError, "got int; the model expects text, or a list of texts."),
        (lambda c, f: f(1), DataError, "got int; the model expects text, or a list of texts."),
        (lambda c, f: c("one", decoding=dict(top_q=1)), ConfigError, "decoding: unknown argument 'top_q'. Did you"),
        (lambda c, f: c("one", decoding=dict(temperature=0)), ConfigError, "decoding.temperature: got 0"),
        (lambda c, f: f(["<mask>", "one"]), DataError, "text 2: 'one' has no mask. Write <mask> for each hidden"),
        (lambda c, f: f("one " * 20 + "<mask>"), DataError, "text 1: 22 tokens, including its beginning or end; expe"),
        (lambda c, f: f("<mask>", n_best=0), ConfigError, "n_best: got 0; expected at least 1."),
        (lambda c, f: Vocabulary.train("word", ["a"]).encode_masked("<mask>"), ConfigError, "has no <mask>; expected"),
    ],
)
def test_wrong_input_is_named(call, error, message, continuer, filler):
    with pytest.raises(error) as raised:
        call(continuer, filler)
    assert message in str(raised.value)


def test_translator_warns_of_unknown_words_once(caplog):
    vocabularies = {"source": WORDS, "target": WORDS}
    model = build_model(dict(type="Transformer", **(SMALL | dict(max_length=200))), vocabularies=vocabularies)
    translator = Translator(model, vocabularies)
    with caplog.at_level("WARNING", "vitkit"):
        translator(["one two", "one alpha beta", "three"])
        translator("alpha two")
    assert caplog.messages == ["'one alpha beta': not in the vocabulary, and translated as unknown: 'alpha', 'beta'"]
