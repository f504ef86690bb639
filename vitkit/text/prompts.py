"""Prompts of text-prompted models: from phrases to tokens.

A prompt is a list of phrases, or one text in which dots separate them: "a red star . a cat ." Each phrase is tokenized
on its own, so it is known which tokens are whose: [CLS] a red star . a cat . [SEP]. A prompt always ends with a dot.
A caption is a text of sentences, in which it is not known which words name a thing.
"""

import logging
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.structures import BOS, EOS, PAD, UNK, PromptTokens
from vitkit.text.vocabulary import Vocabulary, normalize_text

logger = logging.getLogger("vitkit")

MAX_TOKENS = 256
"""The largest number of tokens of a prompt, the first and the last included, that published models are trained on."""
SEPARATOR = "."
_ENDS = (".", "?")
"""Characters at which the originals end a phrase."""

Prompt = str | Sequence[str]
"""A text of phrases that dots separate, or the phrases."""


class EncodedPrompt(NamedTuple):
    """The tokens of one prompt; fields as in `PromptTokens`."""

    tokens: list[int]
    phrase_ids: list[int]
    is_word: list[bool]


@dataclass(frozen=True)
class Caption:
    """Sentences whose words are to be located in an image: "a dog chases the red ball".

    Raises:
        DataError: `text` is not a text.
        ConfigError: `threshold` is not in 0..1.
    """

    text: str
    threshold: float = 0.25
    """The lowest probability of a word of an object's name; the default is that of the original's demo."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise DataError(f"text: got {self.text!r:.100}; expected one text, since text_threshold is for a caption.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"text_threshold={self.threshold}: expected a probability, 0 to 1.")


class EncodedCaption(NamedTuple):
    """The tokens of a caption, whose phrases are its sentences."""

    prompt: EncodedPrompt
    words: list[str]
    sentences: list[int]
    """The sentence of each word."""
    word_of: list[int]
    """The word of each token; -1 for those outside of words."""


def split_phrases(prompt: Prompt) -> list[str]:
    """Return the phrases of a prompt, with single spaces.

    Raises:
        DataError: there is no phrase, one is empty, ends within itself, or is there twice.
    """
    parts = prompt.split(SEPARATOR) if isinstance(prompt, str) else prompt
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise DataError(f"text: got {prompt!r:.100}; expected a text such as 'cat . dog .', or a list of phrases.")
    phrases = [normalize_text(part) for part in parts]
    if isinstance(prompt, str):
        phrases = [phrase for phrase in phrases if phrase]
    if not phrases or not all(phrases):
        what = "no phrase" if not any(phrases) else f"an empty phrase (number {phrases.index('') + 1})"
        raise DataError(f"text: {prompt!r:.100} has {what}; expected at least one word in each, as in 'cat . dog .'.")
    for phrase in phrases:
        if mark := next((mark for mark in _ENDS if mark in phrase), None):
            raise DataError(
                f"text: the phrase {phrase!r} has a {mark!r}, where the model takes it to end. Write it without."
            )
    folded = [phrase.lower() for phrase in phrases]
    for index, phrase in enumerate(folded):
        if phrase in folded[:index]:
            raise DataError(f"text: the phrase {phrases[index]!r} is given twice; expected each phrase once.")
    return phrases


def encode_phrases(
    vocabulary: Vocabulary, phrases: Iterable[str], *, max_tokens: int | None = MAX_TOKENS
) -> EncodedPrompt:
    """Return the tokens of phrases, as from `split_phrases`.

    Args:
        max_tokens: the largest number of tokens; None: any.
    Raises:
        ConfigError: the vocabulary has no separator.
        DataError: a phrase has only unknown pieces or another's tokens, or there are more tokens than `max_tokens`.
    """
    phrases, numbers = list(phrases), vocabulary.numbers
    separator, *encoded = _encode(vocabulary, [SEPARATOR, *phrases])
    _check_separator(vocabulary, separator)
    tokens, phrase_ids, is_word = [numbers[BOS]], [-1], [False]
    for phrase_id, (phrase, ids) in enumerate(zip(phrases, encoded)):
        if not ids or set(ids) == {UNK}:
            raise DataError(f"prompt: the tokenizer knows no piece of the phrase {phrase!r}. Use words that it knows.")
        _warn_of_letters(vocabulary, phrase, ids)
        tokens += [numbers[index] for index in (*ids, *separator)]
        phrase_ids += [phrase_id] * (len(ids) + 1)
        is_word += [True] * len(ids) + [False]
    check_different(phrases, encoded)
    tokens, phrase_ids, is_word = [*tokens, numbers[EOS]], [*phrase_ids, -1], [*is_word, False]
    if max_tokens is not None and len(tokens) > max_tokens:
        raise DataError(
            f"prompt: {len(phrases)} phrases have {len(tokens)} tokens; the model takes {max_tokens}. Give fewer "
            "phrases at a time."
        )
    return EncodedPrompt(tokens, phrase_ids, is_word)


def _encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts; warn of words that the vocabulary lacks, once of each."""
    before = set(vocabulary.unknown)
    encoded = vocabulary.encode_all(texts)
    if new := [repr(word) for word in vocabulary.unknown if word not in before]:
        logger.warning("prompt: the model does not know %s. Use other words, or train it with these.", ", ".join(new))
    return encoded


def check_different(phrases: Sequence[str], tokens: Iterable[Sequence[int]]) -> None:
    """Raise a DataError if two phrases have the same tokens, so that the model cannot tell them apart."""
    phrase_of: dict[tuple[int, ...], str] = {}
    for phrase, ids in zip(phrases, map(tuple, tokens)):
        if (other := phrase_of.setdefault(ids, phrase)) != phrase:
            raise DataError(
                f"prompt: {other!r} and {phrase!r} are the same to the model, which does not know the words that "
                "differ. Use words that it knows, or train it with these, from its weights (--init)."
            )


def join_prompts(prompts: Sequence[EncodedPrompt]) -> EncodedPrompt:
    """Return the prompt of the phrases of several, of at least one."""
    tokens, phrase_ids, is_word = prompts[0].tokens[:1], [-1], [False]
    for prompt in prompts:
        first = phrase_ids[-1] + 1
        tokens += prompt.tokens[1:-1]
        phrase_ids += [first + phrase_id for phrase_id in prompt.phrase_ids[1:-1]]
        is_word += prompt.is_word[1:-1]
    return EncodedPrompt([*tokens, *prompts[0].tokens[-1:]], [*phrase_ids, -1], [*is_word, False])


def spanned_tokens(vocabulary: Vocabulary, phrase: str, spans: Iterable[tuple[int, int]]) -> list[bool]:
    """Return which tokens of a phrase have a character in one of the spans, [begin, end) of the original text."""

    def normalize(index: int) -> int:
        return len(normalize_text(f"{phrase[:index]}|")) - 1

    ranges = [(normalize(begin), normalize(end)) for begin, end in spans]
    return [
        any(begin < token_end and token_begin < end for begin, end in ranges)
        for token_begin, token_end in vocabulary.token_spans(phrase)
    ]


_MARKS = re.escape(string.punctuation)
_WORDS = re.compile(rf"[.?]|[{_MARKS}]|[^\s{_MARKS}](?:[^\s.?]*[^\s{_MARKS}])?")
"""Matches the ends of sentences, other punctuation, and words, which may have some within."""
_AFTER_END = re.compile(rf"(?<=[.?])[\s{_MARKS}]+$")
"""Matches punctuation after the last sentence, which would be one without words."""


def encode_caption(vocabulary: Vocabulary, text: str, *, max_tokens: int = MAX_TOKENS) -> EncodedCaption:
    """Return the tokens of a caption, in the same form as those of phrases.

    Raises:
        ConfigError: the vocabulary has no separator.
        DataError: there is no word that the vocabulary knows, or there are more tokens than `max_tokens`.
    """
    pieces = [*_WORDS.findall(_AFTER_END.sub("", normalize_text(text))), SEPARATOR]
    separator, *encoded = _encode(vocabulary, [SEPARATOR, *pieces])
    _check_separator(vocabulary, separator)
    numbers = vocabulary.numbers
    tokens, phrase_ids, word_of, words, sentences, known = [numbers[BOS]], [-1], [-1], [], [], False
    sentence = 0
    for piece, ids in zip(pieces, encoded):
        is_word, is_end = piece not in string.punctuation, piece in _ENDS
        if is_end and sentence not in sentences[-1:]:
            continue  # the end of a sentence without words
        if is_word:
            words.append(piece)
            sentences.append(sentence)
            known = known or not set(ids) <= {UNK}
        tokens += [numbers[index] for index in ids]
        phrase_ids += [sentence] * len(ids)
        word_of += [len(words) - 1 if is_word else -1] * len(ids)
        sentence += is_end
    if not known:
        what = "the tokenizer knows no word of it" if words else "it has no word"
        raise DataError(f"text: {text!r:.100}: {what}. Write what to look for, as in 'a dog chases the red ball'.")
    _warn_of_letters(vocabulary, text, [index for ids in encoded for index in ids])
    tokens, phrase_ids, word_of = [*tokens, numbers[EOS]], [*phrase_ids, -1], [*word_of, -1]
    if len(tokens) > max_tokens:
        raise DataError(
            f"text: the caption has {len(tokens)} tokens; the model takes {max_tokens}. Give its sentences one by one."
        )
    prompt = EncodedPrompt(tokens, phrase_ids, [word >= 0 for word in word_of])
    return EncodedCaption(prompt, words, sentences, word_of)


def name_objects(probabilities: Tensor, caption: EncodedCaption, threshold: float) -> tuple[Tensor, Tensor, list[str]]:
    """Name each query by the words of a caption that it shows: the best one, and those around it.

    Args:
        probabilities: (Q, T), of each of the caption's tokens.
        threshold: the lowest probability of the words around the best one, which follow each other without a gap and
            within one sentence, so that a name does not join two things.
    Returns:
        the probability of each query's best word, (Q,), the word's index, (Q,) int64, and Q names. A word has the
        probability of its best token.
    """
    word_of = torch.tensor(caption.word_of, device=probabilities.device)
    within = word_of >= 0
    words = probabilities.new_zeros(len(probabilities), len(caption.words))
    index = word_of[within].expand(len(probabilities), -1)
    words = words.scatter_reduce(1, index, probabilities[:, : len(word_of)][:, within], "amax")
    scores, best = words.max(1)
    reaches, names = (words >= threshold).tolist(), []
    for row, start in zip(reaches, best.tolist()):
        first = last = start
        while first and row[first - 1] and caption.sentences[first - 1] == caption.sentences[start]:
            first -= 1
        while last + 1 < len(row) and row[last + 1] and caption.sentences[last + 1] == caption.sentences[start]:
            last += 1
        names.append(" ".join(caption.words[first : last + 1]))
    return scores, best, names


def _check_separator(vocabulary: Vocabulary, separator: Sequence[int]) -> None:
    if len(separator) != 1 or UNK in separator:
        raise ConfigError(f"prompt: the vocabulary has no {SEPARATOR!r}, which separates phrases. Train it with one.")
    if vocabulary.numbers[PAD] != 0:
        raise ConfigError(
            f"prompt: padding is token {vocabulary.numbers[PAD]} of the vocabulary; expected 0, as in BERT's."
        )


def _warn_of_letters(vocabulary: Vocabulary, phrase: str, ids: Sequence[int]) -> None:
    """Warn of a phrase in another script than the vocabulary's, which it splits into letters that mean nothing."""
    words = re.findall(r"[^\W\d_]+", phrase)
    foreign = [word for word in words if not word.isascii()]
    if vocabulary.kind == "tokenizer" and foreign == words and words and len(ids) >= len(re.sub(r"\s", "", phrase)):
        logger.warning(
            f"text: the tokenizer splits {phrase!r} into single letters, as of a language that it does not know: "
            "expect no useful detections. Write it in the model's language."
        )


def collate_prompts(prompts: Sequence[EncodedPrompt]) -> PromptTokens:
    """Return the prompts of a batch, padded to the longest."""
    length = max(len(prompt.tokens) for prompt in prompts)

    def pad(rows: Iterable[list[Any]], value: int | bool) -> Tensor:
        return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])

    return PromptTokens(*(pad(rows, value) for rows, value in zip(zip(*prompts), (PAD, -1, False))))
