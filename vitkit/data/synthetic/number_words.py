"""Numbers in English and German words: a translation task with a computable answer, and counting for language models.

German writes a number as one word with units before tens ("einundzwanzig"), so words must be split, reordered and
joined.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from vitkit.data.text.datasets import VocabularySettings
from vitkit.data.text.monolingual import Objective, Sentences
from vitkit.data.text.pairs import SentencePairs
from vitkit.errors import ConfigError
from vitkit.registry import DATASETS

NUMBERS_END = 10**6
_ENGLISH, _ENGLISH_TENS, _GERMAN, _GERMAN_TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
        "- - twenty thirty forty fifty sixty seventy eighty ninety",
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
        "siebzehn achtzehn neunzehn",
        "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    )
)


def english_number(number: int, *, compound: bool = True) -> str:
    """Write a number in 0..999 999 in English: "one hundred twenty-three thousand four".

    Args:
        compound: join tens and units with a hyphen, as English does; otherwise they are two words.
    """
    _check_number(number)
    thousands, rest = divmod(number, 1000)
    parts = [*_english_below_1000(thousands), "thousand"] if thousands else []
    words = " ".join(parts + _english_below_1000(rest)) or _ENGLISH[0]
    return words if compound else words.replace("-", " ")


def _english_below_1000(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    parts = [_ENGLISH[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, units = divmod(rest, 10)
        return [*parts, _ENGLISH_TENS[tens] + (f"-{_ENGLISH[units]}" if units else "")]
    return parts + ([_ENGLISH[rest]] if rest else [])


def german_number(number: int, *, compound: bool = True) -> str:
    """Write a number in 0..999 999 in German: "einhundertdreiundzwanzigtausendvier".

    Args:
        compound: write it as one word, as German does; otherwise its parts as words: "ein hundert drei und zwanzig".
    """
    _check_number(number)
    thousands, rest = divmod(number, 1000)
    # "eins" only occurs at the end of a number.
    parts = [*_german_below_1000(thousands, one="ein"), "tausend"] if thousands else []
    return ("" if compound else " ").join(parts + _german_below_1000(rest)) or _GERMAN[0]


def _german_below_1000(number: int, *, one: str = _GERMAN[1]) -> list[str]:
    hundreds, rest = divmod(number, 100)
    parts = [_german_unit(hundreds, "ein"), "hundert"] if hundreds else []
    if rest >= 20:
        tens, units = divmod(rest, 10)
        return [*parts, *([_german_unit(units, "ein"), "und"] if units else []), _GERMAN_TENS[tens]]
    return parts + ([_german_unit(rest, one)] if rest else [])


def _german_unit(number: int, one: str) -> str:
    return one if number == 1 else _GERMAN[number]


def _check_number(number: int) -> None:
    if not 0 <= number < NUMBERS_END:
        raise ValueError(f"number: got {number}; expected 0 to {NUMBERS_END - 1}.")


def is_training_number(number: int) -> bool:
    """Return whether a number is in the training split: nine of ten, and all below 100, whose words form the others."""
    # Knuth's multiplicative hash spreads consecutive numbers without storing a split.
    return number < 100 or (number * 2654435761 % 2**32) % 10 != 0


@DATASETS.register
class NumberWords(SentencePairs):
    """Pairs of numbers in 0..999 999 in words; all lengths from one to six digits are equally likely, and the pairs
    fixed.

    Args:
        num_pairs: number of pairs.
        split: "train" or "val", which draws numbers that "train" never has, each once.
        compound: False writes the parts of compounds as words, so that each word has a counterpart to align with:
            "twenty three" and "drei und zwanzig".
        vocabulary, max_length: see TextDataset.
    Raises:
        ConfigError: num_pairs is out of range, or the split is unknown.
    """

    noun = "numbers"

    def __init__(
        self,
        num_pairs: int,
        *,
        split: Literal["train", "val"] = "train",
        compound: bool = True,
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        max_length: int = 256,
    ):
        self.numbers, self.compound = _draw(num_pairs, split), compound
        pairs = [self._pair(index, number) for index, number in enumerate(self.numbers.tolist())]
        super().__init__(*zip(*pairs), vocabulary, max_length=max_length)

    def _pair(self, index: int, number: int) -> tuple[str, str]:
        """Return the source and the target of a number."""
        return english_number(number, compound=self.compound), german_number(number, compound=self.compound)


@DATASETS.register
class NumberTasks(NumberWords):
    """Numbers in words as text-to-text tasks: a source begins with its task in words (Raffel et al. 2020, section 2.4).

    A sample is "translate English to German: twenty-one" and "einundzwanzig"; the next one goes in the other direction.

    Args:
        num_pairs, split, compound, vocabulary, max_length: see NumberWords.
    Raises:
        ConfigError: num_pairs is out of range, or the split is unknown.
    """

    noun = "tasks"

    def _pair(self, index: int, number: int) -> tuple[str, str]:
        english, german = super()._pair(index, number)
        if index % 2:
            return f"translate German to English: {german}", english
        return f"translate English to German: {english}", german


@DATASETS.register
class Counting(Sentences):
    """Three numbers in succession in English words, for language models: "nine, ten, eleven". The first number is that
    of a NumberWords pair; the others follow from it.

    Args:
        num_lines, split: see `num_pairs` and `split` of NumberWords.
        objective: see Sentences.
        vocabulary, max_length: see TextDataset.
    Raises:
        ConfigError: num_lines is out of range, or the split or the objective is unknown.
    """

    noun = "lines"

    def __init__(
        self,
        num_lines: int,
        *,
        split: Literal["train", "val"] = "train",
        objective: Objective = "causal",
        vocabulary: Mapping[str, Any] | VocabularySettings | None = None,
        max_length: int = 256,
    ):
        self.numbers = np.minimum(_draw(num_lines, split, name="num_lines"), NUMBERS_END - 3)
        lines = [", ".join(map(english_number, range(first, first + 3))) for first in self.numbers.tolist()]
        super().__init__(lines, objective=objective, vocabulary=vocabulary, max_length=max_length)


def _draw(count: int, split: str, *, name: str = "num_pairs") -> np.ndarray:
    if not 1 <= count <= NUMBERS_END // 20:
        raise ConfigError(f"{name}: got {count}; expected 1 to {NUMBERS_END // 20}.")
    if split not in ("train", "val"):
        raise ConfigError(f"split: got {split!r}; expected 'train' or 'val'.")
    training = split == "train"
    random = np.random.default_rng(0 if training else 1)
    numbers: list[int] = []
    drawn: set[int] = set()
    while len(numbers) < count:
        number = int(random.integers(10 ** random.integers(1, 7)))
        if is_training_number(number) is training and (training or number not in drawn):
            drawn.add(number)
            numbers.append(number)
    return np.array(numbers)
