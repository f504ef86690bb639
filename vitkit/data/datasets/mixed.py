"""Several datasets as one, each with a weight."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.errors import ConfigError
from vitkit.registry import DATASETS, Spec
from vitkit.structures import Sample

_SHARED = ("max_image_pixels", "channels", "square")
"""What `build_dataset` and loaders set, and each of the datasets needs to know."""


@DATASETS.register
class MixedDataset(BaseImageDataset):
    """The images of several datasets with boxes, to train on together; each has its own transforms.

    Classes of the same name are one class. An image is annotated only for the classes of its own dataset, so a prompt
    of `data.prompts` has no others (`negative_labels`).

    Args:
        datasets: their specs.
        weights: how often each dataset's images occur in an epoch on average: 2, twice; 0.1, a tenth of them, others in
            every epoch. None: once.
    Raises:
        ConfigError: there is no dataset, or not one positive weight for each.
    """

    def __init__(self, *, datasets: Sequence[Spec], weights: Sequence[float] | None = None):
        super().__init__(None)
        weights = [1.0] * len(datasets) if weights is None else list(weights)
        if not datasets or len(weights) != len(datasets) or not all(weight > 0 for weight in weights):
            raise ConfigError(
                f"MixedDataset: got {len(datasets)} datasets and weights {weights}; expected at least one dataset, and "
                "a positive weight for each."
            )
        self.datasets: list[BaseImageDataset] = [DATASETS.build(spec) for spec in datasets]
        for dataset in self.datasets:
            if not isinstance(dataset, BaseImageDataset) or dataset.is_video:
                raise ConfigError(f"MixedDataset: {type(dataset).__name__} has no images with boxes. Leave it out.")
        self.weights = weights
        self.annotations = tuple(dict.fromkeys(chain.from_iterable(d.annotations for d in self.datasets)))
        self.annotation_file = self.datasets[0].annotation_file
        self._starts = np.cumsum([0, *map(len, self.datasets)])
        self.image_ids = range(1, int(self._starts[-1]) + 1)
        self.num_objects = sum(dataset.num_objects or 0 for dataset in self.datasets)
        self.num_crowds = sum(dataset.num_crowds for dataset in self.datasets)
        self._join_keypoints()
        names = dict.fromkeys(chain.from_iterable(dataset.classes or () for dataset in self.datasets))
        label_of = {name: label for label, name in enumerate(names)}
        self.classes = list(label_of) or None
        self.category_ids = list(range(1, len(label_of) + 1)) or None
        self._labels_of = [np.array([label_of[n] for n in d.classes or ()], np.int64) for d in self.datasets]

    def _join_keypoints(self) -> None:
        """Put the keypoints of all datasets in the order of the first; raise a ConfigError if only some have keypoints,
        or they have others."""
        names = [() if dataset.keypoints is None else dataset.keypoints.names for dataset in self.datasets]
        if len({frozenset(each) for each in names}) > 1:
            shown = " and ".join(", ".join(each)[:100] or "none" for each in dict.fromkeys(names))
            raise ConfigError(
                f"MixedDataset: its datasets have the keypoints {shown}. Load the same in all, or in none."
            )
        self.keypoints = self.datasets[0].keypoints
        for dataset in self.datasets[1:]:
            if dataset.keypoints is not None and dataset.keypoints.names != names[0]:
                dataset.use_keypoints(names[0])

    def use_keypoints(self, names: Sequence[str]) -> None:
        for dataset in self.datasets:
            dataset.use_keypoints(names)
        self.keypoints = self.datasets[0].keypoints

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for dataset in vars(self).get("datasets", ()) if name in _SHARED else ():
            setattr(dataset, name, value)

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the dataset that has an image, and the image's index there."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _ask(self, index: int, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the dataset that an image belongs to."""
        number, position = self._find(index)
        return getattr(self.datasets[number], method.__name__)(position, *arguments)

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load a sample of one of the datasets, with the labels of all."""
        number, position = self._find(index)
        sample = self.datasets[number].load_sample(position, seed)
        target = sample["target"]
        target["image_id"] = self.image_ids[index]
        if "phrases" not in target:
            labels = self._labels_of[number]
            target["labels"] = torch.from_numpy(labels[target["labels"].numpy()])
            possible = target.get("negative_labels")
            target["negative_labels"] = labels if possible is None else labels[np.asarray(possible, np.int64)]
        return sample

    def load_image(self, index: int) -> np.ndarray:
        return self._ask(index, BaseImageDataset.load_image)

    def image_path(self, index: int) -> Path | None:
        return self._ask(index, BaseImageDataset.image_path)

    def image_size(self, index: int) -> tuple[int, int]:
        return self._ask(index, BaseImageDataset.image_size)

    def aspect_ratios(self) -> np.ndarray:
        return np.concatenate([dataset.aspect_ratios() for dataset in self.datasets])

    def index_parts(self) -> Iterator[Any]:
        return chain.from_iterable(dataset.index_parts() for dataset in self.datasets)

    def image_blocks(self) -> np.ndarray | None:
        parts, count = [], 0
        for dataset in self.datasets:
            if (blocks := dataset.image_blocks()) is None:
                return None
            parts.append(blocks + count)
            count += int(blocks.max(initial=-1)) + 1
        return np.concatenate(parts)

    def set_num_epochs(self, num_epochs: int) -> None:
        for dataset in self.datasets:
            dataset.set_num_epochs(num_epochs)

    def set_epoch(self, epoch: int) -> None:
        for dataset in self.datasets:
            dataset.set_epoch(epoch)

    def sample_weights(self) -> np.ndarray:
        return np.repeat(np.array(self.weights, np.float64), np.diff(self._starts))

    def image_classes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """See `Dataset`; images of datasets without classes show none."""
        none = (np.zeros(0, np.int64),) * 2
        parts = zip((dataset.image_classes() or none for dataset in self.datasets), self._starts, self._labels_of)
        pairs = [(images + start, labels_of[labels]) for (images, labels), start, labels_of in parts]
        images, labels = (np.concatenate(column) for column in zip(*pairs))
        return None if self.classes is None else (images, labels)

    def phrases(self) -> Iterator[str] | None:
        parts = [part for part in (dataset.phrases() for dataset in self.datasets) if part is not None]
        return chain(*parts) if parts else None
