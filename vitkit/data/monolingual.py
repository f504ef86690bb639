"""Text for language models."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from vitkit.data.text import TextDataset, TextLines, UnfitLines, VocabularySettings, pad_tokens
from vitkit.errors import ConfigError
from vitkit.registry import DATASETS
from vitkit.structures import BOS, PAD, Batch
from vitkit.vocabulary import MASK_TOKEN, Vocabulary


@DATASETS.register
class MonolingualText(TextDataset):
    """The lines of a text file, plain or gzip, to predict tokens of. A sample has

        tokens: (T,) int64, what the model sees,
        target: a dict of tokens (T,) int64, what belongs at each place, text, the line, and index, its number from 0.

    Args:
        file: of a sentence per line.
        objective: "causal": the model sees BOS and the text, and is to predict the next token at each place, EOS at the
            last. "masked": it sees text and EOS, of which it hides some itself; the vocabulary has MASK_TOKEN.
        vocabulary, max_length, unfit_lines: see TextDataset.
    Raises:
        ConfigError: the objective is none of the two.
        DataError: see TextLines.
    """

    source_vocabulary = None

    def __init__(
        self,
        file: str,
        *,
        objective: Literal["causal", "masked"] = "causal",
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        max_length: int = 256,
        unfit_lines: UnfitLines | None = None,
    ):
        if objective not in ("causal", "masked"):
            raise ConfigError(f"objective: got {objective!r}; expected 'causal' or 'masked'.")
        self.objective = objective
        super().__init__(
            [TextLines(file)], vocabulary, max_length=max_length, unfit_lines=unfit_lines, mask=objective == "masked"
        )

    @property
    def target_vocabulary(self) -> Vocabulary:
        return self.vocabularies[0]

    @target_vocabulary.setter
    def target_vocabulary(self, vocabulary: Vocabulary) -> None:
        if self.objective == "masked" and vocabulary.mask_id is None:
            raise ConfigError(f"objective='masked': the vocabulary has no {MASK_TOKEN}; train one with this dataset.")
        self.vocabularies = [vocabulary]

    def __getitem__(self, index: int | tuple[int, int]) -> dict[str, Any]:
        """
        Args:
            index: position in the dataset; or (position, seed), of which the seed changes nothing here.
        """
        index = index[0] if isinstance(index, tuple) else index
        line, expected = self.line(index), self.tokens(0, index)
        seen = expected
        if self.objective == "causal":
            seen = torch.cat([torch.tensor([BOS]), expected[:-1]])
        return {"tokens": seen, "target": {"tokens": expected, "text": self.sides[0][line], "index": line}}

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]], *, size_divisor: int = 1) -> Batch:
        """Pads tokens (B, T); padding_mask (B, T) is True on the padding."""
        tokens = pad_tokens([sample["tokens"] for sample in samples])
        inputs = {"tokens": tokens, "padding_mask": tokens == PAD}
        return Batch(inputs=inputs, targets=[sample["target"] for sample in samples])
