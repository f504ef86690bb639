"""Text that is learned from: files of lines, their tokens, and batches of them.

A line that is empty or too long is dropped in training; in evaluation, where each line counts, it is kept or an error.
"""

import gzip
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.registry import check_names
from vitkit.structures import EOS, PAD
from vitkit.vocabulary import Vocabulary, VocabularyKind

logger = logging.getLogger("vitkit")

UnfitLines = Literal["drop", "keep", "error"]
_CHUNK = 10_000  # lines that are encoded at once


class TextLines(Sequence[str]):
    """The lines of a UTF-8 text file, plain or gzip, without their line ends (a newline, also after a carriage return).

    Raises:
        DataError: there is no such file, it has no line, is a damaged gzip file or no UTF-8 (naming the line).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # One string of bytes: forked workers share it, and it takes a fraction of the memory of as many strings.
        self._bytes = _read_bytes(self.path)
        _check_utf8(self._bytes, self.path)
        newlines = np.flatnonzero(np.frombuffer(self._bytes, np.uint8) == ord("\n"))
        if self._bytes and not self._bytes.endswith(b"\n"):
            newlines = np.append(newlines, len(self._bytes))
        if not len(newlines):
            raise DataError(f"{self.path}: the file is empty; expected a sentence in each line.")
        self._ends = newlines

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = 0 if index == 0 else self._ends[index - 1] + 1
        return self._bytes[start : self._ends[index]].decode("utf-8").removesuffix("\r")


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"no file '{path}'. Set data.root, or the dataset's own path, to where the text lies.")
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: a damaged gzip file ({error}). Get the file again.") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _check_utf8(content: bytes, path: Path) -> None:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte {content[error.start]:#04x} is no UTF-8 ({error.reason}). Save the text as "
            "UTF-8, such as with iconv."
        ) from error


@dataclass(frozen=True)
class VocabularySettings:
    """How a training dataset's vocabulary is made from its text; see `Vocabulary.train`."""

    kind: VocabularyKind = "bpe"
    size: int | None = None
    shared: bool = True
    """One vocabulary for all sides of the text."""
    min_count: int = 1
    lowercase: bool = False

    @classmethod
    def of(cls, values: "Mapping[str, Any] | VocabularySettings") -> "VocabularySettings":
        """
        Raises:
            ConfigError: an unknown key, or no dict.
        """
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(f"vocabulary: got {values!r}; expected a dict, such as dict(kind='bpe', size=8000).")
        check_names(cls, values, "vocabulary")
        return cls(**values)


class TextDataset:
    """Lines of text with one side or several that belong together. A subclass makes samples and batches of them.

    Args:
        sides: of each side the lines, as many of all.
        vocabulary: VocabularySettings, of a training dataset; None takes another dataset's (`use_vocabularies_of`).
        max_length: tokens of a side at most, EOS included.
        unfit_lines: what becomes of lines with an empty or too long side. "drop": they are left out and counted (in
            training); "keep": too long ones are cut at `max_length` and counted; "error". None: "drop" with a
            `vocabulary`, else "keep".
        mask: the vocabulary has MASK_TOKEN.
    """

    noun = "sentences"
    """What a dataset has, as people are told."""

    def __init__(
        self,
        sides: Sequence[Sequence[str]],
        vocabulary: Mapping[str, Any] | VocabularySettings | None,
        *,
        max_length: int,
        unfit_lines: UnfitLines | None,
        mask: bool = False,
    ):
        if max_length < 2:
            raise ConfigError(
                f"max_length: got {max_length}; expected at least 2, a token and the end of the sentence."
            )
        self.sides = list(sides)
        self.settings = None if vocabulary is None else VocabularySettings.of(vocabulary)
        self.max_length = max_length
        if unfit_lines not in (None, *get_args(UnfitLines)):
            raise ConfigError(f"unfit_lines: got {unfit_lines!r}; expected one of {', '.join(get_args(UnfitLines))}.")
        self.unfit_lines = unfit_lines or ("keep" if vocabulary is None else "drop")
        self.mask = mask
        self._vocabularies: list[Vocabulary] | None = None
        self._tokens: list[_TokenTable] | None = None
        self._lines: np.ndarray | None = None

    @classmethod
    def check_arguments(cls, vocabulary: Any = None, **others: Any) -> None:
        """Of a config: what the signatures do not say."""
        if isinstance(vocabulary, Mapping):
            VocabularySettings.of(vocabulary)

    def where(self, side: int, line: int) -> str:
        """A place in the text, as errors name it."""
        return f"{getattr(self.sides[side], 'path', f'side {side}')}, line {line + 1}"

    # Vocabularies are made, and lines encoded, when they are first asked for: until then others can be set.

    @property
    def vocabularies(self) -> list[Vocabulary]:
        """One for each side; where they are shared, one object.

        Raises:
            DataError: there is none, because this dataset is not trained on.
        """
        if self._vocabularies is None:
            self._vocabularies = self._train_vocabularies()
        return self._vocabularies

    @vocabularies.setter
    def vocabularies(self, vocabularies: Sequence[Vocabulary]) -> None:
        self._vocabularies = list(vocabularies)
        self._tokens = self._lines = None

    def use_vocabularies_of(self, other: "TextDataset") -> None:
        """Takes the training dataset's."""
        self.vocabularies = other.vocabularies

    def _train_vocabularies(self) -> list[Vocabulary]:
        if self.settings is None:
            raise DataError(
                "the dataset has no vocabulary: it takes its training dataset's or a checkpoint's. Call "
                "use_vocabularies_of(training_dataset), or give the dataset settings to make one from: vocabulary=…."
            )
        settings = self.settings
        groups = [self.sides] if settings.shared else [[side] for side in self.sides]
        made = [
            Vocabulary.train(
                settings.kind, (line for side in group for line in side), size=settings.size,
                min_count=settings.min_count, lowercase=settings.lowercase, mask=self.mask,
            )
            for group in groups
        ]  # fmt: skip
        return made * len(self.sides) if settings.shared else made

    def _encode(self) -> None:
        """Encodes every line once: its length decides whether it fits, and with which others it shares a batch."""
        unknown_before = [vocabulary.unknown.copy() for vocabulary in self.vocabularies]
        tables = [_TokenTable.encode(side, vocabulary) for side, vocabulary in zip(self.sides, self.vocabularies)]
        lengths = np.stack([table.lengths for table in tables], axis=1) + 1
        self._report_unknown(unknown_before)
        empty, long = (lengths == 1).any(axis=1), (lengths > self.max_length).any(axis=1)
        unfit = empty | long
        if self.unfit_lines == "error" and unfit.any():
            raise DataError(self._unfit_message(lengths))
        counts = f"{empty.sum()} with an empty side, {long.sum()} of over {self.max_length} tokens"
        self._lines = np.arange(len(lengths))
        if unfit.any() and self.unfit_lines == "drop":
            self._lines = np.flatnonzero(~unfit)
            logger.warning("%d of %d %s left out: %s", unfit.sum(), len(unfit), self.noun, counts)
        elif unfit.any():
            logger.warning("of %d %s there are %s, which are cut", len(unfit), self.noun, counts)
        if not len(self._lines):
            raise DataError(
                f"none of the {len(unfit)} {self.noun} is left: {counts}. Raise max_length, or check the text."
            )
        self._tokens = tables

    def _report_unknown(self, before: Sequence[Mapping[str, int]]) -> None:
        reported = set()
        for vocabulary, counted in zip(self.vocabularies, before):
            new = vocabulary.unknown - counted
            if new and id(vocabulary) not in reported:
                reported.add(id(vocabulary))
                what = "words" if vocabulary.kind == "word" else "characters"
                some = ", ".join(f"{token!r} {count}x" for token, count in new.most_common(5))
                logger.warning("%d %s are not in the vocabulary: %s", new.total(), what, some)

    def _unfit_message(self, lengths: np.ndarray) -> str:
        line, side = np.argwhere((lengths == 1) | (lengths > self.max_length))[0]
        place = self.where(int(side), int(line))
        if lengths[line, side] == 1:
            return f"{place}: the line is empty; expected a sentence, or unfit_lines='keep'."
        return (
            f"{place}: {lengths[line, side]} tokens, the end counted; expected at most max_length={self.max_length}. "
            "Raise max_length, split the line, or let such lines be cut by unfit_lines='keep'."
        )

    def _kept_lines(self) -> np.ndarray:
        if self._lines is None:
            self._encode()
        return self._lines

    def __len__(self) -> int:
        # Only what is dropped needs a vocabulary to know.
        return len(self._kept_lines() if self.unfit_lines == "drop" else self.sides[0])

    def line(self, index: int) -> int:
        """The line, from 0, that a position in the dataset stands for."""
        return int(self._kept_lines()[range(len(self))[index]])

    def tokens(self, side: int, index: int) -> Tensor:
        """(T,) int64 token ids of a side, EOS last, at most `max_length`."""
        line = self.line(index)
        ids = self._tokens[side][line][: self.max_length - 1]
        return torch.from_numpy(np.append(ids, EOS).astype(np.int64))

    def lengths(self) -> np.ndarray:
        """(len(self), sides) int64, the tokens of each side with EOS: what batches are made by."""
        lines = self._kept_lines()
        return np.stack([np.minimum(table.lengths[lines] + 1, self.max_length) for table in self._tokens], axis=1)


class _TokenTable:
    """The token ids of many lines in one array."""

    def __init__(self, ids: np.ndarray, lengths: np.ndarray):
        self.lengths = lengths
        self._ids = ids
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    @classmethod
    def encode(cls, lines: Sequence[str], vocabulary: Vocabulary) -> "_TokenTable":
        parts, lengths = [], []
        for start in range(0, len(lines), _CHUNK):
            encoded = vocabulary.encode_all(lines[index] for index in range(start, min(start + _CHUNK, len(lines))))
            lengths += [len(ids) for ids in encoded]
            parts.append(np.fromiter((index for ids in encoded for index in ids), np.int32))
        return cls(np.concatenate(parts), np.array(lengths, np.int64))

    def __getitem__(self, line: int) -> np.ndarray:
        return self._ids[self._starts[line] : self._starts[line + 1]]


def pad_tokens(rows: Sequence[Tensor]) -> Tensor:
    """(B, longest) int64: rows of token ids, filled up with PAD."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
