"""Text for language models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from vitkit.data.text.datasets import TextDataset, TextLines, UnfitLines, VocabularySettings, pad_tokens
from vitkit.errors import ConfigError
from vitkit.registry import DATASETS
from vitkit.structures import BOS, PAD, Batch
from vitkit.text.vocabulary import MASK_TOKEN, Vocabulary

Objective = Literal["causal", "masked"]


class Sentences(TextDataset):
    """Base of datasets of single sentences, for language models.

    A sample has
        tokens: (T,) int64, the input,
        target: a dict of tokens (T,) int64, the token to predict at each position; text, the line; and index, the
            line's number from 0.

    Args:
        lines: the sentences.
        objective: "causal": the input is BOS and the text, and the target at each position is the next token, at the
            last EOS. "masked": the input is the text and EOS; the model masks some of these; the vocabulary has
            MASK_TOKEN.
        vocabulary, max_length, unfit_lines: see TextDataset.
    Raises:
        ConfigError: the objective is unknown.
    """

    source_vocabulary = None

    def __init__(
        self,
        lines: Sequence[str],
        *,
        objective: Objective = "causal",
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        max_length: int = 256,
        unfit_lines: UnfitLines | None = None,
    ):
        if objective not in ("causal", "masked"):
            raise ConfigError(f"objective: got {objective!r}; expected 'causal' or 'masked'.")
        self.objective = objective
        super().__init__(
            [lines], vocabulary, max_length=max_length, unfit_lines=unfit_lines, mask=objective == "masked"
        )

    @property
    def target_vocabulary(self) -> Vocabulary:
        """The vocabulary of the text."""
        return self.vocabularies[0]

    @target_vocabulary.setter
    def target_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary of the text; ConfigError if it lacks the mask token that the objective needs."""
        if self.objective == "masked" and vocabulary.mask_id is None:
            raise ConfigError(f"objective='masked': the vocabulary has no {MASK_TOKEN}; train one with this dataset.")
        self.vocabularies = [vocabulary]

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """Return the sample at an index; with (index, seed) the seed is unused."""
        index = index[0] if isinstance(index, tuple) else index
        line, tokens = self.line(index), self.tokens(0, index)
        inputs = torch.cat([torch.tensor([BOS]), tokens[:-1]]) if self.objective == "causal" else tokens
        return {"tokens": inputs, "target": {"tokens": tokens, "text": self.sides[0][line], "index": line}}

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> Batch:
        """Collate samples into a batch: `inputs` are padded tokens (B, T) and padding_mask (B, T), True = padding."""
        tokens = pad_tokens([sample["tokens"] for sample in samples])
        inputs = {"tokens": tokens, "padding_mask": tokens == PAD}
        return Batch(inputs=inputs, targets=[sample["target"] for sample in samples])


@DATASETS.register
class MonolingualText(Sentences):
    """The lines of a text file, plain or gzip, for language models; samples are those of Sentences.

    Args:
        file: text file with one sentence per line.
        objective: see Sentences.
        vocabulary, max_length, unfit_lines: see TextDataset.
    Raises:
        ConfigError: the objective is unknown.
        DataError: see TextLines.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        objective: Objective = "causal",
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        max_length: int = 256,
        unfit_lines: UnfitLines | None = None,
    ):
        super().__init__(
            TextLines(file), objective=objective, vocabulary=vocabulary, max_length=max_length, unfit_lines=unfit_lines
        )
