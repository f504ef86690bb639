"""Sentences and their translations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.data.text.datasets import TextDataset, TextLines, UnfitLines, VocabularySettings, decoder_inputs, pad_tokens
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS, nearest
from vitkit.structures import PAD, Batch
from vitkit.text.vocabulary import Vocabulary


class SentencePairs(TextDataset):
    """Sentences with one translation each.

    A sample has
        source: (S,) int64, the sentence's tokens and EOS,
        target: a dict of
            tokens: (T,) int64, the translation's tokens and EOS,
            source_text, references: the sentence, and a list with its translation, both as in the data,
            index: the line number, from 0.

    Args:
        sources, targets: sentences and their translations, the same number of each.
        vocabulary, max_length, unfit_lines: see TextDataset.
    """

    def __init__(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        *,
        max_length: int = 256,
        unfit_lines: UnfitLines | None = None,
    ):
        super().__init__([sources, targets], vocabulary, max_length=max_length, unfit_lines=unfit_lines)

    @property
    def source_vocabulary(self) -> Vocabulary:
        """The vocabulary of the sentences."""
        return self.vocabularies[0]

    @source_vocabulary.setter
    def source_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary of the sentences; also that of the translations if there is none yet."""
        self.vocabularies = [vocabulary, self._vocabularies[1] if self._vocabularies else vocabulary]

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The vocabulary of the translations."""
        return self.vocabularies[1]

    @target_vocabulary.setter
    def target_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary of the translations; also that of the sentences if there is none yet."""
        self.vocabularies = [self._vocabularies[0] if self._vocabularies else vocabulary, vocabulary]

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """Return the sample at an index; with (index, seed) the seed is unused."""
        index = index[0] if isinstance(index, tuple) else index
        line = self.line(index)
        target = {
            "tokens": self.tokens(1, index),
            "source_text": self.sides[0][line],
            "references": [self.sides[1][line]],
            "index": line,
        }
        return {"source": self.tokens(0, index), "target": target}

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> Batch:
        """Collate samples into a batch: `inputs` are source and source_padding (B, S), and target_in (B, T)."""
        source = pad_tokens([sample["source"] for sample in samples])
        targets = [sample["target"] for sample in samples]
        inputs = {"source": source, "source_padding": source == PAD, "target_in": decoder_inputs(targets)}
        return Batch(inputs=inputs, targets=targets)


@DATASETS.register
class ParallelText(SentencePairs):
    """Two aligned text files, plain or gzip: line i of one is the translation of line i of the other.

    Args:
        source, target: the files.
        vocabulary, max_length, unfit_lines: see TextDataset.
    Raises:
        DataError: a file is missing, empty, damaged or not UTF-8, or their numbers of lines differ.
    """

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        *,
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        max_length: int = 256,
        unfit_lines: UnfitLines | None = None,
    ):
        self.files = [TextLines(source), TextLines(target)]
        if len(self.files[0]) != len(self.files[1]):
            raise DataError(
                f"{source} has {len(self.files[0])} lines and {target} has {len(self.files[1])}: expected the same "
                "number, since line i of one translates line i of the other. Were lines added, lost, or split?"
            )
        super().__init__(*self.files, vocabulary, max_length=max_length, unfit_lines=unfit_lines)


@DATASETS.register
class SacrebleuText(SentencePairs):
    """A published test set by its name in sacrebleu, which downloads it once into ~/.sacrebleu (or $SACREBLEU).

    Args:
        name: such as "wmt14/full", newstest2014 with all of its 3003 sentences; `sacrebleu --list` shows them all.
        languages: from and to, such as "en-de". If there are several references, the first is used.
        max_length: see TextDataset.
    Raises:
        ConfigError: there is no such test set, or not in these languages.
        DataError: it cannot be downloaded.
    """

    def __init__(self, name: str, languages: str, *, max_length: int = 256):
        from sacrebleu.dataset import DATASETS as TEST_SETS

        if name not in TEST_SETS:
            raise ConfigError(f"name={name!r}: sacrebleu has no such test set. {nearest(name, TEST_SETS)}")
        if languages not in TEST_SETS[name].langpairs:
            pairs = ", ".join(TEST_SETS[name].langpairs)
            raise ConfigError(f"languages={languages!r}: {name} is in {pairs}.")
        try:
            files = TEST_SETS[name].get_source_file(languages), TEST_SETS[name].get_reference_files(languages)[0]
        except (OSError, SystemExit) as error:  # it exits if a checksum is wrong
            raise DataError(
                f"sacrebleu's test set {name!r} cannot be downloaded ({error}). Go online and try again, or use "
                "ParallelText with its two files."
            ) from error
        super().__init__(*map(TextLines, files), max_length=max_length)
