"""Prompts of images for text-prompted detectors: phrases sampled from a dataset's classes, or the samples' own.

One step makes them, when a batch is complete and before it is collated, since augmentation may add and remove objects:

    a sample with classes           `labels` are classes; its phrases are drawn, and labels become their numbers
    a sample with `phrases`         those of its target, as in captions; `labels` already number them
    either                          the input `prompt`, see `PromptTokens`, and `targets["phrases"]`

A dataset of the second kind also implements `Dataset.phrases`, from which a vocabulary may be learned.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import torch

from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset
from vitkit.registry import nearest
from vitkit.structures import OBJECT_FIELDS, Batch, DetectionTarget, PromptTokens, Sample, describe_image
from vitkit.text.prompts import (
    MAX_TOKENS,
    SEPARATOR,
    EncodedPrompt,
    check_different,
    collate_prompts,
    encode_phrases,
    join_prompts,
    spanned_tokens,
    split_phrases,
)
from vitkit.text.vocabulary import Vocabulary, normalize_text

_OF_OBJECTS = (*OBJECT_FIELDS, "positive_map")
"""Fields of a target with a row for each object."""
_REMEDY = "Set data.prompts.phrases={{{name!r}: 'ANOTHER PHRASE'}}."


class PromptOptions(TypedDict, total=False):
    """Options of `Prompts`."""

    negatives: int | None
    max_tokens: int
    phrases: Mapping[str, str]


class Prompts:
    """Settings of prompts that are made from a dataset's classes.

    Args:
        negatives: the largest number of classes in a training prompt that the image does not show; half of the prompts
            have so many, the others a number drawn from 1 to that. None: every prompt has all classes, in their order.
            In evaluation prompts always have.
        max_tokens: the largest number of tokens of a training prompt, its ends included. The image's classes come
            first; objects whose phrases do not fit are left out.
        phrases: class name -> its phrase in prompts; other classes are called by their names, with spaces in place of
            underscores.
    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self, *, negatives: int | None = 85, max_tokens: int = MAX_TOKENS, phrases: Mapping[str, str] | None = None
    ):
        if negatives is not None and negatives < 1:
            raise ConfigError(f"data.prompts.negatives: got {negatives}; expected at least 1, or None for all classes.")
        if max_tokens < 4:
            raise ConfigError(
                f"data.prompts.max_tokens: got {max_tokens}; expected at least 4, for a word, its dot and both ends."
            )
        self.negatives, self.max_tokens, self.phrases = negatives, max_tokens, dict(phrases or {})

    def check_names(self, *datasets: Dataset) -> None:
        """Raise a ConfigError if `phrases` has a name that is a class of none of the datasets."""
        classes = {name: None for dataset in datasets for name in dataset.classes or ()}
        for name in self.phrases:
            if name not in classes:
                raise ConfigError(f"data.prompts.phrases: the data have no class {name!r}. {nearest(name, classes)}")

    def class_phrases(self, classes: Sequence[str]) -> list[str]:
        """Return the phrase of each class.

        Raises:
            DataError: one is empty or ends within itself, or two are equal.
        """
        phrases = [normalize_text(self.phrases.get(name, name.replace("_", " "))) for name in classes]
        class_of: dict[str, str] = {}
        for name, phrase in zip(classes, phrases):
            folded = phrase.lower()
            try:
                split_phrases([phrase])
            except DataError as error:
                raise DataError(f"class {name!r}: {error} {_REMEDY.format(name=name)}") from error
            if folded in class_of:
                raise DataError(
                    f"classes {class_of[folded]!r} and {name!r}: both are {phrase!r} in a prompt, which may have each "
                    f"phrase only once. {_REMEDY.format(name=name)}"
                )
            class_of[folded] = name
        return phrases

    def learn_vocabulary(self, dataset: Dataset) -> Vocabulary:
        """Return a vocabulary of the words of a dataset's classes and phrases, in lower case."""
        texts = [*self.class_phrases(dataset.classes or ()), *(dataset.phrases() or ())]
        return Vocabulary.train("word", (f"{text} {SEPARATOR}" for text in texts), lowercase=True)


class PromptStep:
    """Adds prompts to the samples of a batch.

    Args:
        dataset: the samples' dataset, with its `prompts` and its vocabulary.
        training: whether phrases are sampled, and cut to the largest number of tokens.
    Raises:
        DataError: see `Prompts.class_phrases`; or the vocabulary knows no piece of a phrase, or no difference of two.
        ConfigError: all classes are to be in each prompt, and have too many tokens.
    """

    def __init__(self, dataset: Dataset, *, training: bool):
        self.settings: Prompts = dataset.prompts
        self.vocabulary: Vocabulary = dataset.target_vocabulary
        self.training = training
        classes = list(dataset.classes or ())
        self._class_phrases = self.settings.class_phrases(classes)
        self._class_prompts = []
        for name, phrase in zip(classes, self._class_phrases):
            try:
                self._class_prompts.append(encode_phrases(self.vocabulary, [phrase], max_tokens=None))
            except DataError as error:
                raise DataError(f"class {name!r}: {error} {_REMEDY.format(name=name)}") from error
        check_different(self._class_phrases, (prompt.tokens for prompt in self._class_prompts))
        self._sizes = np.array([len(prompt.tokens) - 2 for prompt in self._class_prompts], np.int64)
        total, limit = int(self._sizes.sum()) + 2, self.settings.max_tokens
        if training and self.settings.negatives is None and total > limit:
            raise ConfigError(
                f"data.prompts.negatives: is None, for all {len(classes)} classes in every prompt, but they have "
                f"{total} tokens together, and max_tokens={limit}. Sample them: data.prompts.negatives=85."
            )

    def check(self, sample: Sample) -> None:
        """Raise a DataError if a sample's own phrases cannot be encoded."""
        if "phrases" in sample["target"]:
            self._of_phrases(sample["target"], describe_image(0, sample["target"]))

    def __call__(self, samples: Sequence[Sample], seeds: Sequence[int]) -> tuple[list[Sample], PromptTokens]:
        """Return the samples with phrases, and the tokens of their prompts.

        Args:
            seeds: the seed of each sample; prompts depend on nothing else that is random.
        Raises:
            DataError: a sample's own phrases cannot be encoded, or have no `labels` that number them.
        """
        prompted, prompts = [], []
        for index, (sample, seed) in enumerate(zip(samples, seeds, strict=True)):
            target, where = sample["target"], describe_image(index, sample["target"])
            if not {"labels", "boxes_cxcywh"} <= target.keys():
                raise ConfigError(
                    f"data.prompts: {where} has {', '.join(target)}; expected labels and boxes_cxcywh. Use prompts "
                    "only with data of boxes."
                )
            if "phrases" in target:
                target, prompt = self._of_phrases(target, where)
            elif self._class_prompts:
                target, prompt = self._of_classes(target, seed)
            else:
                raise DataError(f"{where}: has no phrases, nor has its dataset classes, to make a prompt of.")
            prompted.append({**sample, "target": target})
            prompts.append(prompt)
        return prompted, collate_prompts(prompts)

    def _of_classes(self, target: DetectionTarget, seed: int) -> tuple[DetectionTarget, EncodedPrompt]:
        target, labels = dict(target), target["labels"].numpy()
        possible = target.pop("negative_labels", None)
        chosen = np.arange(len(self._class_prompts))
        if self.training and self.settings.negatives is not None:
            # A random stream of its own: otherwise each prompt would always come with the same crops.
            random = np.random.default_rng((seed, 1))
            chosen = self._sample(labels, chosen if possible is None else np.asarray(possible), random)
        number_of = np.full(len(self._class_prompts), -1)
        number_of[chosen] = np.arange(len(chosen))
        target = _with_labels(target, number_of[labels])
        target["phrases"] = [self._class_phrases[label] for label in chosen]
        return target, join_prompts([self._class_prompts[label] for label in chosen])

    def _sample(self, labels: np.ndarray, possible: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the classes of a training prompt: those of the image, and others that are drawn from `possible`."""
        limit = self.settings.negatives
        count = limit if random.random() < 0.5 else int(random.integers(1, limit, endpoint=True))
        shown = random.permutation(np.unique(labels))
        others = np.setdiff1d(possible, shown)
        if not len(shown) and not len(others):  # an image without a class that it surely shows or lacks
            others = np.arange(len(self._class_prompts))
        others = random.permutation(others)[:count]
        candidates = np.concatenate([shown, others])
        return random.permutation(candidates[choose_fitting(self._sizes[candidates], self.settings.max_tokens - 2)])

    def _of_phrases(self, target: DetectionTarget, where: str) -> tuple[DetectionTarget, EncodedPrompt]:
        target = dict(target)
        spans = target.pop("phrase_spans", None)
        try:
            phrases = split_phrases(target["phrases"])
            prompts = [encode_phrases(self.vocabulary, [phrase], max_tokens=None) for phrase in phrases]
            check_different(phrases, (prompt.tokens for prompt in prompts))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        labels, limit = target["labels"].numpy(), self.settings.max_tokens
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(phrases):
            raise DataError(
                f"{where}: labels {labels.min()} to {labels.max()} for {len(phrases)} phrases; expected their numbers, "
                "counted from 0."
            )
        kept = np.arange(len(phrases))
        if self.training:
            kept = np.flatnonzero(choose_fitting(np.array([len(prompt.tokens) - 2 for prompt in prompts]), limit - 2))
            if not len(kept):
                raise DataError(
                    f"{where}: its phrase {phrases[0]!r:.100} has {len(prompts[0].tokens)} tokens; "
                    f"data.prompts.max_tokens={limit}. Shorten it, or leave the image out."
                )
        prompt = join_prompts([prompts[number] for number in kept])
        number_of = np.full(len(phrases), -1)
        number_of[kept] = np.arange(len(kept))
        if spans is not None:
            target["positive_map"] = self._positive_map(target["phrases"], labels, spans, number_of, prompt, where)
        target = _with_labels(target, number_of[labels])
        target["phrases"] = [phrases[number] for number in kept]
        return target, prompt

    def _positive_map(
        self,
        phrases: Sequence[str],
        labels: np.ndarray,
        spans: Sequence[Sequence[tuple[int, int]]],
        number_of: np.ndarray,
        prompt: EncodedPrompt,
        where: str,
    ) -> torch.Tensor:
        """Return the tokens of each object, (N, T) bool: those that its spans overlap of its phrase's."""
        if len(spans) != len(labels):
            raise DataError(
                f"{where}: phrase_spans of {len(spans)} objects; expected a list for each of {len(labels)}."
            )
        positive = torch.zeros(len(labels), len(prompt.tokens), dtype=torch.bool)
        for row, label, of_object in zip(positive, labels.tolist(), spans):
            if number_of[label] < 0:
                continue  # the object is left out
            named = spanned_tokens(self.vocabulary, phrases[label], of_object)
            if not any(named):
                raise DataError(
                    f"{where}: the spans {list(of_object)} hold no token of the phrase {phrases[label]!r:.100}; "
                    "expected characters [begin, end) in it."
                )
            start = prompt.phrase_ids.index(int(number_of[label]))
            row[start : start + len(named)] = torch.tensor(named)
        return positive


def choose_fitting(sizes: np.ndarray, limit: int) -> np.ndarray:
    """Choose sizes in their order, skipping those with which the sum would exceed the limit: (N,) bool."""
    taken, total = np.zeros(len(sizes), bool), 0
    for index, size in enumerate(sizes.tolist()):
        if total + size <= limit:
            taken[index], total = True, total + size
    return taken


def _with_labels(target: DetectionTarget, labels: np.ndarray) -> DetectionTarget:
    """Return a target with new labels, without the objects whose label is -1."""
    kept = torch.from_numpy(labels >= 0)
    target = {**target, "labels": torch.from_numpy(labels.astype(np.int64))}
    return target if kept.all() else target | {name: target[name][kept] for name in _OF_OBJECTS if name in target}


def collate_prompted(step: PromptStep, samples: Sequence[Sample], seeds: Sequence[int]) -> Batch:
    """Return a batch of samples with prompts."""
    samples, prompt = step(samples, seeds)
    batch = Batch.collate(samples)
    batch.inputs["prompt"] = prompt
    return batch
