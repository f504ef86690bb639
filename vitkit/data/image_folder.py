"""Images that belong to one class each: the base of such datasets, and folders that are named after classes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from vitkit.data.images import read_image, to_tensor
from vitkit.data.transforms import Transforms
from vitkit.errors import DataError
from vitkit.registry import DATASETS, TRANSFORMS, Spec
from vitkit.structures import Sample

_SPLITS = {"train", "val", "test"}
_NO_BOXES, _NO_LABELS = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)


class ClassificationDataset:
    """Images with one class each. A subclass answers `__len__`, `image_ids` and `load_labelled`.

    A sample's target holds
        label: int, index into `classes`,
        image_id: what names the image,
        image_size, original_size: (height, width) after the transforms and before.

    Args:
        classes: their names, in the order of the labels.
        transforms: a spec of TRANSFORMS or a built one; None leaves the images as they are. What they have to do with
            whole batches (mixup and the like) becomes `batch_transforms`.
    """

    image_ids: Sequence[Any]

    def __init__(self, classes: Sequence[str], transforms: Spec | Transforms | None):
        self.classes = list(classes)
        self.category_ids = self.classes  # a class is known by its name alone
        self.transforms = None if transforms is None else TRANSFORMS.build(transforms)
        make = getattr(self.transforms, "for_batches", None)
        self.batch_transforms = make(len(self.classes)) if make else None
        """Takes and returns a Batch on the model's device, in training; None if there is nothing to do."""
        self._size: tuple[int, int] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def load_labelled(self, index: int) -> tuple[np.ndarray, int]:
        """The picture before any transform, (H, W, 3) uint8 RGB, and its label; `index` is in range."""
        raise NotImplementedError

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """One transformed image with its label.

        Args:
            index: position in the dataset; or (position, seed), and the transforms are drawn from that seed alone.
        Raises:
            DataError: the image cannot be read, or has another size than the images before.
        """
        index, seed = index if isinstance(index, tuple) else (index, None)
        index = range(len(self))[index]
        image, label = self.load_labelled(index)
        original_size = image.shape[:2]
        if self.transforms is not None:
            image = self.transforms(image, _NO_BOXES, _NO_LABELS, None, seed=seed).image
        self._check_size(image.shape[:2], index)
        target = {
            "label": label,
            "image_id": self.image_id(index),
            "image_size": image.shape[:2],
            "original_size": original_size,
        }
        return Sample(image=to_tensor(image), target=target)

    def _check_size(self, size: tuple[int, int], index: int) -> None:
        """Padding would be classified, too, so that an image's class would depend on its neighbours in the batch."""
        if self._size not in (None, size):
            (height, width), (first_height, first_width) = size, self._size
            raise DataError(
                f"image '{self.image_id(index)}' is {width}x{height} pixels (width x height) after the transforms, "
                f"others are {first_width}x{first_height}. Images that are classified need one size: set `transforms` "
                "to ClassificationTrainTransforms or ClassificationEvalTransforms."
            )
        self._size = size

    def image_id(self, index: int) -> Any:
        """Of one image, without listing all."""
        return self.image_ids[index]

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, before any transform."""
        return self.load_labelled(index)[0]

    def aspect_ratios(self) -> np.ndarray:
        """(len(self),) float64, all 1: after the transforms all images have one size."""
        return np.ones(len(self))


@DATASETS.register
class ImageFolder(ClassificationDataset):
    """Pictures in FOLDER/CLASS/, also deeper: the layout of torchvision's ImageFolder, in which ImageNet is unpacked.

    The classes are the names of the folders, sorted. An image's id is its path in FOLDER.

    Args:
        folder: of one split, such as data/imagenet/train.
        transforms: see `ClassificationDataset`.
    Raises:
        DataError: there is no such folder, it has no folders of classes, or a class has no picture.
    """

    def __init__(self, folder: str, *, transforms: Spec | Transforms | None = None):
        self.folder = Path(folder)
        classes = _class_folders(self.folder)
        super().__init__(classes, transforms)
        labels = {name: label for label, name in enumerate(classes)}
        found = make_dataset(self.folder, labels, extensions=IMG_EXTENSIONS, allow_empty=True)
        self._labels = np.array([label for _, label in found], np.int64)
        empty = [name for name, count in zip(classes, np.bincount(self._labels, minlength=len(classes))) if not count]
        if empty:
            raise DataError(
                f"class folder '{self.folder / empty[0]}' holds no picture ({', '.join(IMG_EXTENSIONS)})"
                f"{f', nor do {len(empty) - 1} others' if len(empty) > 1 else ''}. Add pictures, or remove the folder."
            )
        # Bytes in one array: forked workers share them, and they take a quarter of the memory of text.
        self._paths = np.array([os.path.relpath(path, self.folder).encode() for path, _ in found])

    @property
    def image_ids(self) -> list[str]:
        return [path.decode() for path in self._paths.tolist()]

    def image_id(self, index: int) -> str:
        return self._paths[index].decode()

    def __len__(self) -> int:
        return len(self._paths)

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """For a class-aware order: (len(self),) int64 indices of the images and their labels."""
        return np.arange(len(self)), self._labels

    def load_labelled(self, index: int) -> tuple[np.ndarray, int]:
        return read_image(self.folder / self.image_id(index)), int(self._labels[index])


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(
            f"no folder '{folder}'. Set data.root, or the `folder` of this dataset, to where the images lie."
        )
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if names and set(names) <= _SPLITS:
        raise DataError(f"'{folder}' holds the splits {', '.join(names)}, not classes. Give '{folder / names[0]}'.")
    if not names:
        raise DataError(f"'{folder}' holds no folders. Expected one for each class, with its pictures: CLASS/*.jpg.")
    return names
