"""Text to token ids and back: words, characters, or subwords that are learned from the text; or others' tokenizers.

The `sentencepiece` library trains and applies subwords: its pieces are the same in every process, unlike the unigram
pieces of `tokenizers` 0.23.
"""

import base64
import hashlib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal, get_args

import sentencepiece

from vitkit.errors import CheckpointError, ConfigError, DataError, VitkitError
from vitkit.structures import BOS, EOS, PAD, UNK

VocabularyKind = Literal["word", "char", "bpe", "unigram"]
SUBWORDS = ("bpe", "unigram")
SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
"""The special tokens in the order of their ids: PAD, UNK, BOS, EOS."""
MASK_TOKEN = "<mask>"
SPACE = "\u2581"
"""The character that stands for the space before a word, so that a text can be joined from its tokens only."""
_HIDDEN = "\ufdd0"
"""The character that stands for MASK_TOKEN while a text is split: a noncharacter, which no text contains."""
_RESERVED = "\0\u2585"
"""Characters that make sentencepiece leave out a line of the training text."""
_WORDS = rf"{SPACE}?\w+|{SPACE}?[^\w{SPACE}]|{SPACE}"
_LANGUAGE = re.compile(r">>.*?<<")
VOCABULARY_FORMAT = "vitkit vocabulary 1"
"""The `format` of a vocabulary's JSON."""
_MAX_TRAINED_LENGTH = 1000
"""The maximum length of a line that sentencepiece is trained on, in characters: its time grows with the square of the
length of a repetitive line."""
_TRAINED_AT_ONCE = re.compile(rf".{{1,{_MAX_TRAINED_LENGTH}}}(?= |$)|.{{{_MAX_TRAINED_LENGTH}}}", re.DOTALL)
"""Matches the parts of a line, which end before a space where possible."""
_NORMALIZED_AT_ONCE = re.compile(r"[\x00-\x7f]*[^\x00-\x7f]{0,256}")
"""Matches the parts of a long text that are normalized separately: the time for a run of combining marks, which ends at
an ASCII character, grows with the square of its length."""


def normalize_text(text: str) -> str:
    """Normalize text, the first step of every vocabulary: composed characters (NFC), single spaces, none at the ends.

    The character that vocabularies use for a space becomes an underscore.
    """
    parts = [text] if len(text) <= _MAX_TRAINED_LENGTH else _NORMALIZED_AT_ONCE.findall(text)
    text = "".join(unicodedata.normalize("NFC", part) for part in parts)
    return " ".join(text.replace(SPACE, "_").split())


class Vocabulary:
    """Tokens by id. `decode(encode(text))` equals `normalize_text(text)` if every token is in the vocabulary.

    Args:
        kind: "word" splits at spaces and punctuation, "char" at every character, "bpe" into pieces by byte pair
            encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909), "unigram" by a unigram language model
            (Kudo 2018, https://arxiv.org/abs/1804.10959). Pieces do not cross spaces, and contain either letters or
            punctuation.
        tokens: the tokens in the order of their ids, for "word" and "char"; SPECIAL_TOKENS first, then MASK_TOKEN if
            the vocabulary has one. For "bpe" and "unigram" only if they are not those of `model` in its order, as for
            Marian; a text may then also begin with a language, a token such as ">>fr<<".
        model: for "bpe" and "unigram", sentencepiece's serialized model, which splits text.
        lowercase: whether text is lower-cased first.

    Attributes:
        tokens: the tokens in the order of their ids.
        numbers: each token's number in the file that the vocabulary is from; its id, unless tokens are in another order
            there.
        unknown: counts of what `encode` did not find in the vocabulary: words for "word", characters for other kinds.
    """

    def __init__(
        self, kind: VocabularyKind, tokens: Sequence[str] = (), *, model: bytes | None = None, lowercase: bool = False
    ):
        _check_kind(kind)
        pieces = None
        if kind in SUBWORDS:
            if not model:
                raise ValueError(f"model: not set; a {kind!r} vocabulary needs sentencepiece's serialized model.")
            pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._has_own_ids = bool(pieces and tokens)
        if pieces and not tokens:
            tokens = [pieces.id_to_piece(index) for index in range(len(pieces))]
        self._set_tokens(kind, tokens, pieces=pieces, lowercase=lowercase)

    def _set_tokens(
        self,
        kind: str,
        tokens: Sequence[str],
        *,
        pieces: sentencepiece.SentencePieceProcessor | None = None,
        lowercase: bool = False,
    ) -> None:
        self.kind = kind
        self.lowercase = lowercase
        self.unknown: Counter[str] = Counter()
        self._pieces = pieces
        self.tokens = tokens = list(tokens)
        if not all(isinstance(token, str) for token in tokens) or len(set(tokens)) != len(tokens):
            raise ValueError("tokens: expected distinct texts.")
        if tuple(tokens[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS:
            raise ValueError(f"tokens: begin with {list(tokens[:4])!r:.100}; expected {', '.join(SPECIAL_TOKENS)}.")
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self.numbers: Sequence[int] = range(len(self.tokens))

    @classmethod
    def train(
        cls,
        kind: VocabularyKind,
        texts: Iterable[str],
        *,
        size: int | None = None,
        min_count: int = 1,
        lowercase: bool = False,
        mask: bool = False,
    ) -> "Vocabulary":
        """Learn the tokens of `texts`; the same texts give the same vocabulary.

        Args:
            size: the maximum number of tokens, special ones included (there may be fewer if the text has no more).
                None: all words or characters; subwords need a number.
            min_count: words or characters that occur less often become unknown tokens.
            lowercase: see the class.
            mask: whether to add MASK_TOKEN, for masked language models.
        Raises:
            ConfigError: `size` is missing, or too small for the characters of the text.
            DataError: there is no text.
        """
        _check_kind(kind)
        special = [*SPECIAL_TOKENS, MASK_TOKEN][: 4 + mask]
        if kind in SUBWORDS and size is None:
            raise ConfigError(
                f"vocabulary.size: not set; a {kind!r} vocabulary needs a number of tokens, such as 8000."
            )
        if size is not None and size <= len(special):
            raise ConfigError(f"vocabulary.size={size}: expected more than the {len(special)} special tokens.")
        prepared = (_prepare(text, lowercase) for text in texts)
        if kind in SUBWORDS:
            return cls(kind, model=_train_subwords(kind, prepared, special, size, min_count), lowercase=lowercase)
        split = _words if kind == "word" else _characters
        counts = Counter(token for text in prepared for token in split(text))
        _check_not_empty(counts)
        # Equally frequent tokens are sorted by name, so that the order of the texts does not matter.
        ranked = sorted((-count, token) for token, count in counts.items() if count >= min_count)
        if not ranked:
            raise ConfigError(f"vocabulary.min_count={min_count}: nothing in the text occurs that often.")
        room = None if size is None else size - len(special)
        return cls(kind, [*special, *(token for _, token in ranked[:room])], lowercase=lowercase)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_json() == other.to_json()

    __hash__ = None

    @property
    def mask_id(self) -> int | None:
        """The id of MASK_TOKEN; None in a vocabulary without one."""
        index = len(SPECIAL_TOKENS)
        return index if self.tokens[index : index + 1] == [MASK_TOKEN] else None

    @property
    def pieces_model(self) -> bytes | None:
        """sentencepiece's serialized model; None for words and characters."""
        return None if self._pieces is None else self._pieces.serialized_model_proto()

    def describe_unknown(self) -> str | None:
        """Return a line that lists the most frequent unknown words or characters; None if there are none."""
        if not self.unknown:
            return None
        frequent = ", ".join(f"{token!r} {count}x" for token, count in self.unknown.most_common(10))
        return f"{self.unknown.total()} characters or words are not in the vocabulary: {frequent}"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, without BOS and EOS; unknown ones are UNK and counted in `unknown`."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode many texts; for subwords this is several times faster than encoding them one by one."""
        texts = [_prepare(text, self.lowercase) for text in texts]
        split = _words if self.kind == "word" else _characters
        if self._has_own_ids:
            encoded = [[self._ids.get(piece, UNK) for piece in self._split(text)] for text in texts]
        elif self._pieces is not None:
            encoded = self._pieces.encode(texts)
        else:
            encoded = [[self._ids.get(token, UNK) for token in split(text)] for text in texts]
        for text, ids in zip(texts, encoded):
            if UNK in ids:
                self.unknown.update(token.replace(SPACE, "") for token in split(text) if token not in self._ids)
        return encoded

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        """Return, for each token of `encode(text)`, its characters [begin, end) in `normalize_text(text)`."""
        text = _prepare(text, self.lowercase)
        split = self._split if self._pieces is not None else _words if self.kind == "word" else _characters
        spans, end = [], 0 if self.kind == "char" else -1  # the others begin with a space that the text does not have
        for piece in split(text):
            begin, end = end, end + len(piece)
            spans.append((begin + piece.startswith(SPACE), end))
        return spans

    def encode_masked(self, text: str) -> list[int]:
        """Encode a text in which MASK_TOKEN stands for each hidden token, including the space before a word.

        Raises:
            ConfigError: the vocabulary has no mask token.
        """
        self._check_has_mask()
        if MASK_TOKEN not in text:
            return self.encode(text)
        text = _prepare(text.replace(_HIDDEN, "\ufffd").replace(MASK_TOKEN, _HIDDEN), self.lowercase)
        if self._pieces is None:
            tokens = (_words if self.kind == "word" else _characters)(text)
        else:
            # sentencepiece joins consecutive unknown characters to one piece, so pieces are split at the masks.
            pieces = self._pieces.encode(text, out_type=str)
            tokens = [part for piece in pieces for part in re.findall(f"{SPACE}?{_HIDDEN}|[^{_HIDDEN}]+", piece)]
            tokens = [token for token, after in zip(tokens, [*tokens[1:], ""]) if (token, after) != (SPACE, _HIDDEN)]
        return [self.mask_id if token.lstrip(SPACE) == _HIDDEN else self._look_up(token) for token in tokens]

    def _check_has_mask(self) -> None:
        if self.mask_id is None:
            raise ConfigError(f"the vocabulary has no {MASK_TOKEN}; expected that of a masked language model.")

    def _look_up(self, token: str) -> int:
        """Return the id of a token; an unknown token is counted, and its id is UNK."""
        if token not in self._ids:
            self.unknown[token.replace(SPACE, "")] += 1
        return self._ids.get(token, UNK)

    def _split(self, text: str) -> list[str]:
        """Split a text into its language token, if it begins with one, and pieces."""
        language = _LANGUAGE.match(text)
        if language is None:
            return self._pieces.encode(text, out_type=str)
        return [language[0], *self._pieces.encode(text[language.end() :], out_type=str)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens other than UNK."""
        special = {PAD, BOS, EOS, self.mask_id}
        text = "".join(self.tokens[index] for index in ids if index not in special)
        return text.replace(SPACE, " ").strip()

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        """Return each token as text: with SPACE where a word begins, special tokens by their names."""
        return [self.tokens[index] for index in ids]

    def to_json(self) -> str:
        """Return everything that `from_json` needs, without the counts of unknown tokens."""
        content = {"format": VOCABULARY_FORMAT, "kind": self.kind, "lowercase": self.lowercase}
        if self._pieces is None or self._has_own_ids:
            content["tokens"] = self.tokens
        if self._pieces is not None:
            model = self.pieces_model
            content |= {"model": base64.b64encode(model).decode("ascii"), "sha256": hashlib.sha256(model).hexdigest()}
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """Rebuild a vocabulary from `to_json`.

        Raises:
            CheckpointError: the text is not a result of `to_json`, or needs a package that is not installed.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != VOCABULARY_FORMAT:
                raise ValueError("another format")
            if not isinstance(content.get("lowercase", False), bool):
                raise ValueError("lowercase is neither true nor false")
            checksum = content.pop("sha256", None)  # earlier versions wrote none
            if "model" in content:
                content["model"] = base64.b64decode(content["model"], validate=True)
                if checksum not in (None, hashlib.sha256(content["model"]).hexdigest()):
                    raise ValueError("the checksum of its model is wrong")
            kind = content.pop("kind")
            if kind == "tokenizer":
                return TokenizerVocabulary(**content)
            return cls(kind, **content)
        except CheckpointError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"vocabulary: not one that vitkit saved ({error!r:.300}). Take the JSON of Vocabulary.to_json()."
            ) from error


def has_tokenizers() -> bool:
    """Whether the `tokenizers` library is installed."""
    return find_spec("tokenizers") is not None


_PROBES = ("Hello, world! 12", "\u0378 \u4e2d\u6587 e\u0301\ufdfa \U0001f600", "x" * 300, "")
"""Texts that a tokenizer splits when it is loaded: words, a character that no vocabulary has, a long word, nothing."""
_LENGTHENING = {"NFD": 4, "NFC": 3, "NFKD": 18, "NFKC": 18, "Lowercase": 2, "ByteLevel": 2, "BertNormalizer": 12}
"""How many times as long each step of a tokenizer may make a text (https://unicode.org/faq/normalization.html)."""
_MAX_LENGTHENING = 10_000


def _check_lengthening(tokenizer: str) -> None:
    """Check that a tokenizer's steps do not make texts so long that the library would end the process, as it does when
    memory runs out: each of 60 steps may double them; raise a ValueError if they may, or it is not JSON."""
    try:
        content = json.loads(tokenizer)
    except RecursionError as error:
        raise ValueError("tokenizer: nested too deeply.") from error
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer: got {type(content).__name__}; expected a dict.")
    for key in ("normalizer", "decoder"):
        steps, lengthening, num_maps = [content.get(key)], 1.0, 0
        while steps:
            step = steps.pop()
            if isinstance(step, list):
                steps += step
            elif isinstance(step, dict):
                steps += step.values()
                num_maps += step.get("type") == "Precompiled"
                lengthening *= _lengthening(step)
        if lengthening > _MAX_LENGTHENING or num_maps > 1:
            raise ValueError(f"tokenizer: its {key} may make a text more than {_MAX_LENGTHENING} times as long.")


def _lengthening(step: Mapping[str, Any]) -> float:
    """Return how many times as long a step may make a text."""
    if step.get("type") != "Replace":
        return _LENGTHENING.get(step.get("type"), 1)
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression, or an empty text, may match between any two characters.
    return max(1, len(step["content"]) / len(replaced)) if replaced else 1 + len(step["content"])


@contextmanager
def _tokenizers_errors() -> Iterator[None]:
    """Convert the errors of the `tokenizers` library to a DataError; a panic of Rust is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, VitkitError):
        raise
    except BaseException as error:
        raise DataError(f"the tokenizers library fails: {error!s:.200}") from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what libraries write to standard error, as Rust does when it panics."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class TokenizerVocabulary(Vocabulary):
    """The tokens of a `tokenizer.json`, with vitkit's special tokens first and the others in their order.

    The `tokenizers` library splits the texts, for example by WordPiece (BERT) or byte-level BPE (GPT-2).

    Texts are first normalized as for every vocabulary (`normalize_text`), so line breaks become spaces.

    Args:
        tokenizer: the content of the file.
        special: its numbers of SPECIAL_TOKENS and, if there is one, of MASK_TOKEN; a token may stand for several, as
            GPT-2's end of text does.

    Raises:
        CheckpointError: the `tokenizers` library is not installed.
        ValueError: the file is damaged, or has no token with a number in `special`.
    """

    def __init__(self, tokenizer: str, special: Sequence[int]):
        if not has_tokenizers():
            raise CheckpointError("the model's vocabulary needs the package tokenizers: pip install 'vitkit[text]'.")
        from tokenizers import Tokenizer

        _check_lengthening(tokenizer)
        try:
            with _tokenizers_errors(), _without_stderr():
                self._tokenizer = Tokenizer.from_str(tokenizer)
                self._tokenizer.no_padding()
                self._tokenizer.no_truncation()
                if getattr(self._tokenizer.model, "dropout", None):
                    self._tokenizer.model.dropout = None  # it splits at random, for training
                numbers = self._tokenizer.get_vocab()
                self._tokenizer.encode_batch(_PROBES, add_special_tokens=False)
                self._join(list(numbers))
        except DataError as error:
            raise ValueError(f"tokenizer: not the content of a tokenizer.json that works ({error!s:.100}).") from error
        by_number = {number: token for token, number in numbers.items()}
        if len(by_number) < len(numbers):  # the library would take either token, another one in each process
            twice = min(n for n, count in Counter(numbers.values()).items() if count > 1)
            same = sorted(token for token, number in numbers.items() if number == twice)
            raise ValueError(f"tokenizer: the tokens {', '.join(map(repr, same[:4]))} have the same number {twice}.")
        names = [*SPECIAL_TOKENS, MASK_TOKEN][: len(special)]
        missing = [f"{name} ({number})" for name, number in zip(names, special) if number not in by_number]
        if missing or len(special) not in (len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 1):
            raise ValueError(f"tokenizer: has no token for {', '.join(missing) or 'all special tokens'}.")
        others = [n for n in sorted(by_number) if n not in special and by_number[n] not in names]
        self.special = list(special)
        self._set_tokens("tokenizer", [*names, *(by_number[number] for number in others)])
        self.numbers = [*special, *others]

    @cached_property
    def _word_prefix(self) -> str | None:
        """The beginning of tokens that continue a word, for WordPiece; None where tokens contain their spaces."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        return decoder.get("prefix") if decoder.get("type") == "WordPiece" else None

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        texts = [normalize_text(text) for text in texts]
        encoded = []
        with _tokenizers_errors():
            results = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, result in zip(texts, results):
            ids = [self._ids.get(token, UNK) for token in result.tokens]
            self.unknown.update(text[slice(*span)] for index, span in zip(ids, result.offsets) if index == UNK)
            encoded.append(ids)
        return encoded

    def token_spans(self, text: str) -> list[tuple[int, int]]:
        with _tokenizers_errors():
            return self._tokenizer.encode(normalize_text(text), add_special_tokens=False).offsets

    def encode_masked(self, text: str) -> list[int]:
        """Encode a text in which MASK_TOKEN stands for each hidden token; ConfigError without a mask token."""
        self._check_has_mask()
        first, *others = self.encode_all(text.split(MASK_TOKEN))
        return [*first, *(index for ids in others for index in (self.mask_id, *ids))]

    def decode(self, ids: Iterable[int]) -> str:
        special = {PAD, BOS, EOS, self.mask_id}
        return self._join([self.tokens[index] for index in ids if index not in special]).strip()

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        num_special = len(self.special)
        return [self.tokens[index] if index < num_special else self._text(self.tokens[index]) for index in ids]

    def _text(self, token: str) -> str:
        if self._word_prefix is None:
            return self._join([token]).replace(" ", SPACE)
        return token.removeprefix(self._word_prefix) if token.startswith(self._word_prefix) else SPACE + token

    def _join(self, tokens: list[str]) -> str:
        decoder = self._tokenizer.decoder
        with _tokenizers_errors():
            return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    @property
    def content(self) -> str:
        """The content of the `tokenizer.json`."""
        return self._tokenizer.to_str()

    def to_json(self) -> str:
        """Return everything that `Vocabulary.from_json` needs."""
        content = {"format": VOCABULARY_FORMAT, "kind": self.kind, "special": self.special, "tokenizer": self.content}
        return json.dumps(content, ensure_ascii=False)


def vocabularies_of(dataset: Any) -> dict[str, Vocabulary]:
    """Return the vocabularies of a text dataset, "source" and "target"; empty for other datasets."""
    by_side = {"source": dataset.source_vocabulary, "target": dataset.target_vocabulary}
    return {side: vocabulary for side, vocabulary in by_side.items() if vocabulary is not None}


def set_vocabularies(dataset: Any, vocabularies: Mapping[str, Vocabulary]) -> None:
    """Set the vocabularies of a text dataset, for example to those of a checkpoint."""
    for side, vocabulary in vocabularies.items():
        setattr(dataset, f"{side}_vocabulary", vocabulary)


def vocabularies_from_json(saved: Mapping[str, str] | None, name: str = "checkpoint") -> dict[str, Vocabulary]:
    """Load the vocabularies that a checkpoint has under "vocabularies"; empty for None. Equal ones share one object.

    Args:
        name: name of the checkpoint, for errors.
    Raises:
        CheckpointError: the checkpoint has something else under that name.
    """
    if saved is None:
        return {}
    if not isinstance(saved, Mapping) or not all(isinstance(text, str) for text in saved.values()):
        raise CheckpointError(f"{name}: vocabularies: got {saved!r:.100}; expected a vocabulary's JSON by its side.")
    try:
        by_text = {text: Vocabulary.from_json(text) for text in set(saved.values())}
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return {side: by_text[text] for side, text in saved.items()}


def _check_kind(kind: str) -> None:
    if kind not in get_args(VocabularyKind):
        raise ConfigError(f"vocabulary: got {kind!r}; expected one of {', '.join(get_args(VocabularyKind))}.")


def _check_not_empty(tokens: Sequence | Counter) -> None:
    if not tokens:
        raise DataError("vocabulary: the training text is empty, so there are no tokens to learn.")


def _prepare(text: str, lowercase: bool) -> str:
    text = normalize_text(text)
    return text.lower() if lowercase else text


def _words(text: str) -> list[str]:
    return re.findall(_WORDS, SPACE + text.replace(" ", SPACE)) if text else []


def _characters(text: str) -> list[str]:
    return list(text.replace(" ", SPACE))


def _train_subwords(kind: str, texts: Iterable[str], special: list[str], size: int, min_count: int) -> bytes:
    """Train subwords; return sentencepiece's serialized model."""
    lines = list(texts)
    counts = Counter(character for text in lines for character in _characters(text))
    _check_not_empty(counts)
    frequent = {character for character, count in counts.items() if count >= min_count and character not in _RESERVED}
    if not frequent:
        raise ConfigError(f"vocabulary.min_count={min_count}: nothing in the text occurs that often.")
    min_size = len(frequent) + len(special) + (SPACE not in frequent)
    if size < min_size:
        raise ConfigError(
            f"vocabulary.size={size}: the text has {len(frequent)} different characters that occur {min_count} times "
            f"or more, and there are {len(special)} special tokens; expected at least {min_size}."
        )
    replacements = {ord(character): " " for character in counts.keys() - frequent}
    # Rare characters are replaced with spaces, since sentencepiece itself leaves out at most 2 % of a text.
    translated = (line.translate(replacements) for line in lines)
    parts = (part for line in translated for part in _TRAINED_AT_ONCE.findall(line))
    model = io.BytesIO()
    try:
        _run_sentencepiece(kind, parts, model, special, size)
    except RuntimeError as error:
        raise DataError(f"vocabulary: sentencepiece cannot learn {kind!r} tokens from this text ({error}).") from error
    return model.getvalue()


def _run_sentencepiece(kind: str, texts: Iterable[str], model: io.BytesIO, special: list[str], size: int) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        character_coverage=1.0,
        hard_vocab_limit=False,
        max_sentence_length=4 * _MAX_TRAINED_LENGTH,  # bytes; longer lines would be left out
        normalization_rule_name="identity",
        pad_id=PAD,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_piece=special[PAD],
        unk_piece=special[UNK],
        bos_piece=special[BOS],
        eos_piece=special[EOS],
        control_symbols=special[4:],
        num_threads=1,
        minloglevel=2,
    )
