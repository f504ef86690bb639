"""Captions: sentences in which it is not known which words name a thing."""

import logging

import pytest
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.text.prompts import Caption, encode_caption, encode_phrases, name_objects
from vitkit.text.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train("word", ["a dog chases the red ball , t-shirt ?", "."])


def test_tokens_are_those_of_the_sentence_and_phrases_are_sentences(vocabulary):
    caption = encode_caption(vocabulary, "a dog.  the red, red ball")
    first, second = (encode_phrases(vocabulary, [text]).tokens[1:-1] for text in ("a dog", "the red , red ball"))
    assert caption.prompt.tokens == [2, *first, *second, 3]
    assert caption.prompt.phrase_ids == [-1, *[0] * 3, *[1] * 6, -1]
    assert caption.words == ["a", "dog", "the", "red", "red", "ball"] and caption.sentences == [0, 0, 1, 1, 1, 1]
    assert caption.word_of == [-1, 0, 1, -1, 2, 3, -1, 4, 5, -1, -1]
    assert caption.prompt.is_word == [word >= 0 for word in caption.word_of]


def test_words_keep_their_hyphens_and_always_end_with_a_dot(vocabulary):
    caption = encode_caption(vocabulary, '"t-shirt", dog?! ... ball')
    assert caption.words == ["t-shirt", "dog", "ball"] and caption.sentences == [0, 0, 1]
    assert caption.prompt == encode_caption(vocabulary, '"t-shirt", dog?! ball. !..').prompt
    assert encode_caption(vocabulary, "dog?!").prompt == encode_caption(vocabulary, "dog?").prompt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no word"),
        (" . ! ", "it has no word"),
        ("zebra", "'zebra': the tokenizer knows no word of it"),
        ("a dog . the ball", "the caption has 8 tokens; the model takes 7. Give its sentences one by one"),
    ],
)
def test_captions_that_are_none_are_refused(vocabulary, text, message):
    with pytest.raises(DataError, match=message):
        encode_caption(vocabulary, text, max_tokens=7)


def test_a_caption_is_one_text_and_its_threshold_a_probability():
    with pytest.raises(DataError, match="expected one text, since text_threshold is for a caption"):
        Caption(["a dog"])
    with pytest.raises(ConfigError, match="text_threshold=2: expected a probability, 0 to 1"):
        Caption("a dog", 2)


def probabilities(caption, *rows):
    """Return (Q, T) in which each word has the given probability, and all other tokens 0.9."""
    tokens = torch.full((len(rows), len(caption.word_of) + 2), 0.9)  # with padding
    for row, values in enumerate(rows):
        for token, word in enumerate(caption.word_of):
            if word >= 0:
                tokens[row, token] = values[word]
    return tokens


def test_a_name_is_the_words_around_the_best_one(vocabulary):
    caption = encode_caption(vocabulary, "a dog chases the red ball . the dog")
    rows = [
        [0.0, 0.6, 0.1, 0.0, 0.0, 0.3, 0.0, 0.0],  # words with a gap between them are other things
        [0.0, 0.0, 0.1, 0.0, 0.5, 0.6, 0.4, 0.4],  # as are those of another sentence
        [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],  # below the threshold there is still the best word
    ]
    scores, best, names = name_objects(probabilities(caption, *rows), caption, 0.25)
    assert names == ["dog", "red ball", "a"]
    assert scores.tolist() == pytest.approx([0.6, 0.6, 0.2]) and best.tolist() == [1, 5, 0]


def test_names_are_whole_words_also_if_only_one_piece_reaches_the_threshold():
    pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    from helpers.grounding_models import BERT_TOKENS, bert_vocabulary

    vocabulary = bert_vocabulary()
    caption = encode_caption(vocabulary, "A red Hotdogs")
    assert caption.prompt.tokens[1:-1] == [BERT_TOKENS[t] for t in ("a", "red", "hot", "##dog", "##s", ".")]
    tokens = torch.tensor([[0.9, 0.0, 0.0, 0.1, 0.5, 0.1, 0.9, 0.9]])
    assert name_objects(tokens, caption, 0.25)[2] == ["Hotdogs"]


def test_another_script_is_warned_of(caplog):
    pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    from helpers.grounding_models import bert_vocabulary

    vocabulary = bert_vocabulary("с", "##о", "##б", "##а", "##к")
    with caplog.at_level(logging.WARNING, "vitkit"):
        encode_caption(vocabulary, "собака")
        encode_phrases(vocabulary, ["собака", "cat"])
    first, second = (record.getMessage() for record in caplog.records)
    assert first == second and first.startswith("text: the tokenizer splits 'собака' into single letters")
