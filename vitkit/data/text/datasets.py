"""Files of text lines, and the base of text datasets.

Lines that are empty or too long are dropped in training; in evaluation, where each line counts, they are kept or an
error.
"""

import gzip
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset
from vitkit.registry import check_names
from vitkit.structures import BOS, EOS, PAD
from vitkit.text.vocabulary import Vocabulary, VocabularyKind

logger = logging.getLogger("vitkit")

UnfitLines = Literal["drop", "keep", "error"]
_CHUNK_SIZE = 10_000  # number of lines that are encoded at once


class TextLines(Sequence[str]):
    """The lines of a UTF-8 text file, plain or gzip, without their line ends (LF or CRLF).

    Raises:
        DataError: there is no such file, it has no line, is a damaged gzip file or not UTF-8 (naming the line).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # One bytes object: forked workers share it, and it takes a fraction of the memory of many strings.
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


@dataclass(eq=False, repr=False)
class ChosenLines(Sequence[str]):
    """Some of the lines of a text."""

    lines: Sequence[str]
    """All lines."""
    numbers: np.ndarray
    """The numbers of the chosen ones, from 0."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> str:
        return self.lines[int(self.numbers[index])]


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"no file '{path}'. Correct its path; a dataset's begins at data.root.")
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
            f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8 ({error.reason}). Save the text as "
            "UTF-8, such as with iconv."
        ) from error


@dataclass(frozen=True)
class VocabularySettings:
    """Settings for training a dataset's vocabulary; see `Vocabulary.train`."""

    kind: VocabularyKind = "bpe"
    size: int | None = None
    shared: bool = True
    """Whether all sides of the text share one vocabulary."""
    min_count: int = 1
    lowercase: bool = False

    @classmethod
    def parse(cls, values: "Mapping[str, Any] | VocabularySettings") -> "VocabularySettings":
        """Convert a config's dict to settings.

        Raises:
            ConfigError: there is an unknown key, or `values` is not a dict.
        """
        if isinstance(values, cls):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(f"vocabulary: got {values!r}; expected a dict, such as dict(kind='bpe', size=8000).")
        check_names(cls, values, "vocabulary")
        return cls(**values)


class TextDataset(Dataset):
    """Base of datasets of aligned lines in one or more languages. A subclass makes samples and batches of them.

    Args:
        sides: the lines of each side, the same number for all.
        vocabulary: settings for a training dataset; None: another dataset's vocabulary is used (`use_vocabularies_of`).
        max_length: maximum number of tokens of a side, EOS included.
        unfit_lines: what to do with lines of which a side is empty or too long. "drop": remove and count them (for
            training); "keep": truncate the too long ones to `max_length` and count them; "error". None: "drop" with a
            `vocabulary`, else "keep".
        mask: whether the vocabulary has MASK_TOKEN.
    """

    noun = "sentences"
    has_vocabularies = True

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
        self.settings = None if vocabulary is None else VocabularySettings.parse(vocabulary)
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
        """Check what signatures cannot express about a config's arguments; raises like the constructor."""
        if isinstance(vocabulary, Mapping):
            VocabularySettings.parse(vocabulary)

    def location(self, side: int, line: int) -> str:
        """Describe the location of a line for error messages."""
        lines = self.sides[side]
        if isinstance(lines, ChosenLines):
            lines, line = lines.lines, int(lines.numbers[line])
        return f"{lines.path if isinstance(lines, TextLines) else f'side {side}'}, line {line + 1}"

    def choose(self, numbers: np.ndarray) -> None:
        """Keep only the lines with these numbers, from 0; a vocabulary is also trained on them only."""
        self.sides = [ChosenLines(side, numbers) for side in self.sides]
        self._tokens = self._lines = None

    # Vocabularies are trained, and lines encoded, on first use: until then other vocabularies can be set.

    @property
    def vocabularies(self) -> list[Vocabulary]:
        """The vocabulary of each side; a shared one is the same object for all.

        Raises:
            DataError: none was set, and this is not a training dataset.
        """
        if self._vocabularies is None:
            self._vocabularies = self._train_vocabularies()
        return self._vocabularies

    @vocabularies.setter
    def vocabularies(self, vocabularies: Sequence[Vocabulary]) -> None:
        """Set the vocabulary of each side; texts are then encoded again."""
        self._vocabularies = list(vocabularies)
        self._tokens = self._lines = None

    def use_vocabularies_of(self, other: "TextDataset") -> None:
        self.vocabularies = other.vocabularies

    def _train_vocabularies(self) -> list[Vocabulary]:
        if self.settings is None:
            raise DataError(
                "the dataset has no vocabulary: it takes its training dataset's or a checkpoint's. Call "
                "use_vocabularies_of(training_dataset), or give the dataset settings to make one from: vocabulary=…."
            )
        settings = self.settings
        groups = [self.sides] if settings.shared else [[side] for side in self.sides]
        options = dict(size=settings.size, min_count=settings.min_count, lowercase=settings.lowercase, mask=self.mask)
        trained = [Vocabulary.train(settings.kind, chain.from_iterable(group), **options) for group in groups]
        return trained * len(self.sides) if settings.shared else trained

    def _encode(self) -> None:
        """Encode every line once: its length decides whether it is kept, and which others share a batch with it."""
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

    def _report_unknown(self, counts_before: Sequence[Mapping[str, int]]) -> None:
        reported = set()
        for vocabulary, before in zip(self.vocabularies, counts_before):
            new = vocabulary.unknown - before
            if new and id(vocabulary) not in reported:
                reported.add(id(vocabulary))
                noun = "words" if vocabulary.kind == "word" else "characters"
                examples = ", ".join(f"{token!r} {count}x" for token, count in new.most_common(5))
                logger.warning("%d %s are not in the vocabulary: %s", new.total(), noun, examples)

    def _unfit_message(self, lengths: np.ndarray) -> str:
        line, side = np.argwhere((lengths == 1) | (lengths > self.max_length))[0]
        location = self.location(int(side), int(line))
        if lengths[line, side] == 1:
            return f"{location}: the line is empty; expected a sentence, or unfit_lines='keep'."
        return (
            f"{location}: {lengths[line, side]} tokens, counting the end; expected at most "
            f"max_length={self.max_length}. Raise max_length, split the line, or cut such lines by unfit_lines='keep'."
        )

    def _usable_lines(self) -> np.ndarray:
        if self._lines is None:
            self._encode()
        return self._lines

    def __len__(self) -> int:
        # If no lines are dropped, the length does not depend on the vocabulary.
        return len(self._usable_lines() if self.unfit_lines == "drop" else self.sides[0])

    def line(self, index: int) -> int:
        """Return the line number, from 0, of a sample."""
        return int(self._usable_lines()[range(len(self))[index]])

    def tokens(self, side: int, index: int) -> Tensor:
        """Return the token ids of one side of a sample: (T,) int64, EOS last, at most `max_length`."""
        line = self.line(index)
        ids = self._tokens[side][line][: self.max_length - 1]
        return torch.from_numpy(np.append(ids, EOS).astype(np.int64))

    def lengths(self) -> np.ndarray:
        """Return the number of tokens on each side, EOS included, (len(self), sides) int64."""
        lines = self._usable_lines()
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
        for start in range(0, len(lines), _CHUNK_SIZE):
            chunk = range(start, min(start + _CHUNK_SIZE, len(lines)))
            encoded = vocabulary.encode_all(lines[index] for index in chunk)
            lengths += [len(ids) for ids in encoded]
            parts.append(np.fromiter((index for ids in encoded for index in ids), np.int32))
        return cls(np.concatenate(parts), np.array(lengths, np.int64))

    def __getitem__(self, line: int) -> np.ndarray:
        return self._ids[self._starts[line] : self._starts[line + 1]]


def decoder_inputs(targets: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the decoder's inputs for predicting the targets' `tokens`: BOS and all but the last, (B, T) int64."""
    return pad_tokens([torch.cat([torch.tensor([BOS]), target["tokens"][:-1]]) for target in targets])


def pad_tokens(rows: Sequence[Tensor]) -> Tensor:
    """Pad rows of token ids with PAD: (B, longest) int64."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
