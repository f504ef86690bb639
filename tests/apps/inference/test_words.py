import pytest
import torch

from vitkit.apps.inference.translator import Alignment
from vitkit.apps.inference.words import attention_of_words, join_words, word_spans
from vitkit.data.synthetic.number_words import NumberWords
from vitkit.text.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], []),
        (["▁t", "h", "ree", "</s>"], ["three", "</s>"]),
        (["<s>", "▁", "t", "h", "ree"], ["<s>", "three"]),  # a space by itself belongs to the word after it
        (["<s>", "three", "</s>", "four"], ["<s>", "three", "</s>", "four"]),
        (["▁twenty", "-", "th", "ree", "▁", "."], ["twenty", "-", "three", "."]),
        (["▁a", "<mask>", "b"], ["a", "<mask>", "b"]),
        (["▁dre", "iß", "ig", "▁hundert"], ["dreißig", "hundert"]),
    ],
)
def test_tokens_are_joined_to_words(tokens, words):
    assert join_words(tokens) == words
    spans = word_spans(tokens)
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(len(tokens)))


@pytest.mark.parametrize("kind", ["char", "bpe", "unigram", "word"])
def test_every_kind_of_token_is_joined_to_the_words_that_a_vocabulary_of_words_has(kind):
    texts = list(NumberWords(50).sides[0])
    size = 40 if kind in ("bpe", "unigram") else None
    vocabulary, by_word = (Vocabulary.train(k, texts, size=n) for k, n in ((kind, size), ("word", None)))
    for text in texts[:10]:
        expected = [token.replace("▁", "") for token in by_word.token_texts(by_word.encode(text))]
        assert join_words(vocabulary.token_texts(vocabulary.encode(text))) == expected


def test_a_words_attention_is_the_mean_of_its_tokens_to_the_sum_of_the_tokens_of_another():
    rows, columns = ["▁d", "rei", "</s>"], ["▁th", "ree", "▁x"]
    weights = torch.tensor([[[0.1, 0.3, 0.6], [0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]])
    got = attention_of_words(weights, rows, columns)
    assert torch.allclose(got, torch.tensor([[[0.6, 0.4], [0.0, 1.0]]]))


def test_a_compound_is_left_in_the_parts_that_translate_words():
    tokens = ["▁", "ein", "und", "zwan", "zig", "▁ja", "h", "r"]
    columns = ["▁t", "wenty", "-", "one", "▁years"]  # four words
    weights = torch.tensor(
        [
            [0.1, 0.1, 0.3, 0.2, 0.3],  # a space alone is no part
            [0.0, 0.1, 0.1, 0.8, 0.0],
            [0.0, 0.1, 0.8, 0.1, 0.0],
            [0.5, 0.4, 0.0, 0.1, 0.0],
            [0.4, 0.5, 0.0, 0.0, 0.1],
            [0.0, 0.0, 0.0, 0.0, 1.0],
            [0.0, 0.0, 0.6, 0.0, 0.4],
            [0.0, 0.0, 0.0, 0.0, 1.0],
        ]
    )
    aligned = Alignment(weights, columns, tokens).by_word()
    assert aligned.source_tokens == ["twenty", "-", "one", "years"]
    assert aligned.target_tokens == ["ein", "und", "zwanzig", "jahr"]
    expected = [[0.15, 0.2, 0.5, 0.15], [0.1, 0.8, 0.1, 0.0], [0.9, 0.0, 0.05, 0.05], [0.0, 0.2, 0.0, 0.8]]
    torch.testing.assert_close(aligned.attention, torch.tensor(expected))
