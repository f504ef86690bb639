import json
import subprocess
import sys
import time
import unicodedata

import pytest
from helpers.plain_dataset import PlainDataset

from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.structures import BOS, EOS, PAD, UNK
from vitkit.text.vocabulary import (
    SPECIAL_TOKENS,
    TokenizerVocabulary,
    Vocabulary,
    normalize_text,
    set_vocabularies,
    vocabularies_from_json,
    vocabularies_of,
)
from vitkit.weights.tokenizer_files import read_tokens

TEXTS = [
    "A dog runs.",
    "A brown dog, quite old, runs over the grass.",
    'She says: "Two dogs run (fast)!"',
    "Ein Hund läuft über die Straße.",
    "T-Shirts aren't cheap; 3 cost 25 €.",
] * 5
KINDS = {"word": None, "char": None, "bpe": 120, "unigram": 90}


@pytest.fixture(params=KINDS)
def vocabulary(request):
    return Vocabulary.train(request.param, TEXTS, size=KINDS[request.param])


def test_special_tokens_come_first(vocabulary):
    assert tuple(vocabulary.tokens[:4]) == SPECIAL_TOKENS
    assert [vocabulary.tokens[i] for i in (PAD, UNK, BOS, EOS)] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert len(vocabulary) == len(set(vocabulary.tokens))


def test_decoding_restores_the_text(vocabulary):
    for text in TEXTS:
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.unknown.total() == 0


def test_encoding_many_texts_equals_encoding_each(vocabulary):
    assert vocabulary.encode_all(TEXTS) == [vocabulary.encode(text) for text in TEXTS]


def test_empty_text_has_no_tokens(vocabulary):
    assert vocabulary.encode("") == vocabulary.encode("  \t ") == []
    assert vocabulary.decode([]) == ""


def test_special_tokens_are_left_out_of_text(vocabulary):
    ids = vocabulary.encode("A dog runs.")
    assert vocabulary.decode([BOS, *ids, EOS, PAD, PAD]) == "A dog runs."


def test_names_of_special_tokens_in_a_text_are_ordinary_text(vocabulary):
    assert not {BOS, EOS, PAD} & set(vocabulary.encode("A dog <s> runs </s> <pad>."))


def test_json_restores_the_vocabulary(vocabulary):
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again == vocabulary
    assert again.tokens == vocabulary.tokens
    assert again.encode_all(TEXTS) == vocabulary.encode_all(TEXTS)


def test_training_twice_gives_the_same_vocabulary(vocabulary):
    again = Vocabulary.train(vocabulary.kind, TEXTS, size=KINDS[vocabulary.kind])
    assert again.to_json() == vocabulary.to_json()


def test_subwords_are_the_same_in_another_process():
    code = (
        "import json, sys; from vitkit.text.vocabulary import Vocabulary; texts = json.loads(sys.argv[1]);"
        "print([Vocabulary.train(kind, texts, size=90).tokens for kind in ('bpe', 'unigram')])"
    )
    found = subprocess.run([sys.executable, "-c", code, json.dumps(TEXTS)], capture_output=True, text=True, check=True)
    here = [Vocabulary.train(kind, TEXTS, size=90).tokens for kind in ("bpe", "unigram")]
    assert found.stdout.strip() == str(here)


def test_unknown_characters_are_counted():
    vocabulary = Vocabulary.train("bpe", TEXTS, size=90)
    ids = vocabulary.encode("A żółw runs, żó!")
    assert UNK in ids
    assert vocabulary.unknown == {"ż": 2, "ó": 2, "ł": 1}
    assert vocabulary.unknown.total() == 5


def test_unknown_words_are_counted():
    vocabulary = Vocabulary.train("word", ["a b", "a"])
    assert vocabulary.encode("a zebra b zebra") == [4, UNK, 5, UNK]
    assert vocabulary.unknown == {"zebra": 2}
    assert vocabulary.decode([4, UNK]) == "a<unk>"


def test_words_are_sorted_by_count_then_name():
    vocabulary = Vocabulary.train("word", ["b a, c", "c a"])
    assert vocabulary.tokens[4:] == ["▁a", "▁c", ",", "▁b"]
    assert Vocabulary.train("word", ["b a, c", "c a"], size=6).tokens[4:] == ["▁a", "▁c"]
    assert Vocabulary.train("word", ["b a, c", "c a"], min_count=2).tokens[4:] == ["▁a", "▁c"]


def test_rare_characters_are_left_out_of_subwords():
    texts = ["abc abd abe"] * 30 + ["abx"]
    assert "x" in Vocabulary.train("bpe", texts, size=20).tokens
    assert "x" not in Vocabulary.train("bpe", texts, size=20, min_count=2).tokens


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_many_characters_may_be_rare(kind):
    texts = ["abc abd"] * 30 + [f"a{chr(0x4E00 + i)}b" for i in range(60)]
    vocabulary = Vocabulary.train(kind, texts, size=20, min_count=2)
    assert vocabulary.decode(vocabulary.encode("abd \u4e00 abc")) == "abd <unk> abc"


@pytest.mark.parametrize("kind", KINDS)
def test_too_high_min_count_is_an_error(kind):
    with pytest.raises(ConfigError, match=r"vocabulary\.min_count=9: nothing in the text occurs that often"):
        Vocabulary.train(kind, ["a b"], size=20, min_count=9)


@pytest.mark.parametrize("odd", ["\0", "\u2585"])
def test_lines_with_unusual_characters_are_included(odd):
    vocabulary = Vocabulary.train("bpe", [f"{odd} c", "a b"], size=20)
    assert UNK not in vocabulary.encode("a b c")
    assert UNK in vocabulary.encode(odd) and vocabulary.unknown[odd] == 1


def test_long_lines_are_included():
    vocabulary = Vocabulary.train("bpe", ["ab " * 3000 + "c", "a b"], size=20)
    assert UNK not in vocabulary.encode("c")


def test_lowercasing_is_saved_with_the_vocabulary():
    vocabulary = Vocabulary.from_json(Vocabulary.train("char", ["ab"], lowercase=True).to_json())
    assert vocabulary.decode(vocabulary.encode("AB")) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_mask_token_follows_the_special_ones(kind):
    assert Vocabulary.train(kind, TEXTS, size=KINDS[kind]).mask_id is None
    vocabulary = Vocabulary.train(kind, TEXTS, size=KINDS[kind], mask=True)
    assert vocabulary.mask_id == 4 and vocabulary.tokens[4] == "<mask>"
    assert 4 not in vocabulary.encode("a <mask> dog")
    assert vocabulary.decode([4, *vocabulary.encode("A dog")]) == "A dog"


def test_normalized_text_has_single_blanks_and_composed_characters():
    assert normalize_text("  a\u00a0b \t c\n") == "a b c"
    assert normalize_text("a\u0308") == "ä"
    assert normalize_text("a\u2581b") == "a_b"


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match=r"vocabulary: got 'wordpiece'; expected one of word, char, bpe, unigram"):
        Vocabulary.train("wordpiece", TEXTS)
    with pytest.raises(ConfigError, match=r"vocabulary\.size: not set; a 'bpe' vocabulary needs a number of tokens"):
        Vocabulary.train("bpe", TEXTS)
    with pytest.raises(
        ConfigError, match=r"vocabulary\.size=20: the text has 4\d different characters .* at least 4\d"
    ):
        Vocabulary.train("bpe", TEXTS, size=20)
    with pytest.raises(ConfigError, match=r"vocabulary\.size=3: expected more than the 4 special tokens"):
        Vocabulary.train("word", TEXTS, size=3)
    for kind in KINDS:
        with pytest.raises(DataError, match="the training text is empty"):
            Vocabulary.train(kind, ["", " "], size=50)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "word"}', '{"format": "vitkit vocabulary 1", "kind": "bpe"}'])
def test_text_that_is_not_a_saved_vocabulary_is_refused(text):
    with pytest.raises(CheckpointError, match=r"vocabulary: not one that vitkit saved"):
        Vocabulary.from_json(text)


def test_equal_saved_vocabularies_become_one_object():
    texts = [Vocabulary.train("word", [text]).to_json() for text in ("a b", "c d")]
    shared = vocabularies_from_json({"source": texts[0], "target": texts[0]})
    assert shared["source"] is shared["target"]
    apart = vocabularies_from_json({"source": texts[0], "target": texts[1]})
    assert apart["source"] != apart["target"]


def test_vocabularies_of_a_dataset_are_read_and_replaced():
    dataset = PlainDataset(target_vocabulary="words")
    assert vocabularies_of(dataset) == {"target": "words"}
    assert vocabularies_of(PlainDataset()) == {}
    set_vocabularies(dataset, {"target": "others"})
    assert vocabularies_of(dataset) == {"target": "others"}


def damaged(kind: str, **changes) -> str:
    content = json.loads(Vocabulary.train(kind, TEXTS, size=60).to_json())
    return json.dumps({**content, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (damaged("word", tokens=[1, 2]), "expected distinct texts"),
        (damaged("word", tokens=["<pad>", "<unk>", "<s>", "</s>", "a", "a"]), "expected distinct texts"),
        (damaged("word", tokens=["a", "b", "c", "d"]), "begin with .*'a'.*; expected <pad>, <unk>, <s>, </s>"),
        (damaged("word", lowercase="no"), "lowercase is neither true nor false"),
        (damaged("bpe", sha256="0"), "the checksum of its model is wrong"),
    ],
)
def test_a_damaged_vocabulary_is_refused(text, message):
    with pytest.raises(CheckpointError, match=message):
        Vocabulary.from_json(text)


def test_a_subword_vocabulary_of_an_earlier_version_has_no_checksum():
    saved = Vocabulary.train("bpe", TEXTS, size=60)
    content = json.loads(saved.to_json())
    del content["sha256"]
    assert Vocabulary.from_json(json.dumps(content)) == saved
    with pytest.raises(CheckpointError, match="vocabularies: got 'x'"):
        vocabularies_from_json("x")
    with pytest.raises(CheckpointError, match="run.pth: vocabulary: not one that vitkit saved"):
        vocabularies_from_json({"target": "{}"}, "run.pth")


@pytest.mark.parametrize("line", ["ab" * 100_000, "a" + "\u0301\u0327" * 50_000, "x " * 50_000 + "y"])
def test_long_unusual_lines_take_only_seconds(line):
    """Each line once took minutes to hours: time grew with the square of the line's length."""
    start = time.process_time()
    vocabulary = Vocabulary.train("unigram", [line, *TEXTS], size=200)
    assert vocabulary.decode(vocabulary.encode(line)) == normalize_text(line)
    assert time.process_time() - start < 30


def test_long_texts_are_normalized_like_short_ones():
    text = "e\u0301 \uac00\u11a8 \u1100\u1161 caf\u00e9\u0327 " * 300
    assert normalize_text(text) == unicodedata.normalize("NFC", text).strip()


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer_json(**changes):
    tokens = {token: number for number, token in enumerate([*SPECIAL, "a", "##b", "h"])}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": tokens}
    model["max_input_chars_per_word"] = 100
    content = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    content |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    model.update(changes.pop("model", {}))
    return json.dumps({**content, **changes})


def repeated(count, **step):
    return {"type": "Sequence", "normalizers": [step] * count}


def nested(depth):
    step = {"type": "Lowercase"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


DAMAGED = {
    "unknown token": (dict(model=dict(unk_token="nothing")), "Missing \\[UNK\\]"),
    "two of a number": (dict(model=dict(vocab={**dict.fromkeys(SPECIAL, 0), "a": 5})), "'\\[CLS\\]', .* same number 0"),
    "precompiled": (dict(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "charsmap"),
    "nothing to cut": (dict(pre_tokenizer={"type": "FixedLength", "length": 0}), "non-zero"),
    "merges": (dict(model=dict(type="BPE", vocab={"a": 0, "ab": 1}, merges=["a ab", "ab a"])), "tokenizer: "),
    "nested": (dict(normalizer=nested(90)), "recursion"),
    "nested deeply": (dict(normalizer=json.loads("[" * 900 + "]" * 900)), "tokenizer: "),
    # Each of these, of 3 kB or less, would end the process when the library runs out of memory.
    "replaced": (dict(normalizer=repeated(40, type="Replace", pattern={"String": "a"}, content="aa")), "as long"),
    "inserted": (dict(normalizer=repeated(12, type="Replace", pattern={"Regex": ""}, content="x" * 99)), "as long"),
    "inserted at nothing": (
        dict(normalizer=repeated(12, type="Replace", pattern={"String": ""}, content="xx" * 99)),
        "as long",
    ),
    "bytes": (dict(normalizer=repeated(70, type="ByteLevel")), "as long"),
    "maps": (dict(normalizer=repeated(9, type="Precompiled", precompiled_charsmap="AAAA")), "as long"),
    "decoder": (
        dict(
            decoder={
                "type": "Sequence",
                "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
            }
        ),
        "as long",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_tokenizer_is_one_line(name, capfd):
    pytest.importorskip("tokenizers")
    changes, message = DAMAGED[name]
    with pytest.raises(ValueError, match=message) as caught:
        TokenizerVocabulary(tokenizer_json(**changes), range(5))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    saved = json.dumps({"format": "vitkit vocabulary 1", "kind": "tokenizer", "special": [0, 1, 2, 3, 4]})
    with pytest.raises(CheckpointError):
        Vocabulary.from_json(saved[:-1] + f', "tokenizer": {json.dumps(tokenizer_json(**changes))}}}')
    assert capfd.readouterr().err == ""


def test_tokens_in_lists_that_are_nested_too_deeply_are_a_checkpoint_error(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="tokenizer.json: does not have the model's tokens"):
        read_tokens(tmp_path, {"model_type": "bert", "vocab_size": 9})


def test_a_tokenizer_splits_a_text_in_one_way(monkeypatch):
    pytest.importorskip("tokenizers")
    tokens = {token: number for number, token in enumerate([*SPECIAL, "a", "b", "ab", "abab"])}
    model = dict(type="BPE", unk_token="[UNK]", vocab=tokens, merges=["a b", "ab ab"], dropout=0.5)
    model["continuing_subword_prefix"] = None
    vocabulary = TokenizerVocabulary(tokenizer_json(model=model), range(5))
    assert {tuple(vocabulary.encode("abab")) for _ in range(30)} == {(8,)}


def test_an_error_of_the_library_at_some_text_is_one_of_the_data(monkeypatch):
    pytest.importorskip("tokenizers")
    pattern = {"type": "Split", "pattern": {"Regex": "z"}, "behavior": "Isolated", "invert": False}
    vocabulary = TokenizerVocabulary(tokenizer_json(pre_tokenizer=pattern), range(5))

    class Panic(BaseException):
        pass

    class Broken:
        def encode_batch(self, *_, **__):
            raise Panic("index out of bounds")

    monkeypatch.setattr(vocabulary, "_tokenizer", Broken())
    with pytest.raises(DataError, match="the tokenizers library fails: index out of bounds"):
        vocabulary.encode("az")
