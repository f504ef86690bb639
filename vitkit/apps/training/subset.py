"""A fixed part of a dataset, for evaluation."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from vitkit.data.loading.splits import choose_fraction
from vitkit.data.text.datasets import TextDataset
from vitkit.errors import ConfigError
from vitkit.protocols.dataset import Dataset

_SHARED = (
    *("noun", "annotations", "annotation_file", "classes", "category_ids", "file_ids", "things", "keypoints", "task"),
    *("has_images", "is_video", "has_vocabularies", "prompts", "source_vocabulary", "max_image_pixels", "collate"),
    *("num_objects", "num_crowds", "batch_transforms"),
)
"""Attributes of a dataset that hold for a part of it."""


def choose_samples(dataset: Dataset, count: int) -> Dataset:
    """Return a part of a dataset: always the same samples, and those of a smaller number are among them.

    Args:
        count: number of images or sentences.
    Raises:
        ConfigError: there are not more than that, or fewer than one is asked for.
    """
    if not 0 < count < len(dataset):
        raise ConfigError(f"{count} {dataset.noun}: expected at least 1, fewer than the data have ({len(dataset)}).")
    indices = choose_fraction(len(dataset), count / len(dataset))
    if isinstance(dataset, TextDataset):
        dataset.choose(indices)
        return dataset
    return ChosenSamples(dataset, indices)


def _of_sample(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of this name of the whole dataset, with its own index."""

    def call(self: "ChosenSamples", index: int, *others: Any) -> Any:
        return getattr(self.dataset, name)(int(self.indices[index]), *others)

    return call


class ChosenSamples(Dataset):
    """Some samples of a dataset of images, to evaluate; for training see `fraction` of `DataSettings`.

    Args:
        dataset: the whole dataset, with its classes and vocabularies as they remain.
        indices: (N,) int64, ascending.
    """

    def __init__(self, dataset: Dataset, indices: np.ndarray):
        self.dataset, self.indices = dataset, indices
        for name in _SHARED:
            setattr(self, name, attrgetter(name)(dataset))
        if dataset.has_vocabularies:
            self.target_vocabulary = dataset.target_vocabulary
        self.image_ids = None if dataset.image_ids is None else [dataset.image_ids[k] for k in indices.tolist()]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        if isinstance(index, tuple):
            return self.dataset[int(self.indices[index[0]]), index[1]]
        return self.dataset[int(self.indices[index])]

    def index_parts(self) -> Iterator[Any]:
        yield from self.dataset.index_parts()
        yield self.indices

    def ground_truth(self) -> dict[str, Any]:
        whole, chosen = self.dataset.ground_truth(), {*self.image_ids}
        images = [image for image in whole["images"] if image["id"] in chosen]
        annotations = [entry for entry in whole["annotations"] if entry["image_id"] in chosen]
        return {**whole, "images": images, "annotations": annotations}

    def phrases(self) -> Sequence[str] | None:
        return self.dataset.phrases()

    image_path = _of_sample("image_path")
    load_image = _of_sample("load_image")
    load_frames = _of_sample("load_frames")
    load_panoptic = _of_sample("load_panoptic")
    load_semantic = _of_sample("load_semantic")
    located = _of_sample("located")
    references = _of_sample("references")
