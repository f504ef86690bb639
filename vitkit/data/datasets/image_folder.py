"""Images with one class each: the base of these datasets, and folders named after classes."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.base import BaseImageDataset, new_labels
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms, TransformsBatches
from vitkit.errors import DataError
from vitkit.io.folders import SPLITS, image_files, split_folders, subfolders
from vitkit.io.image_files import FORMATS, ImageStore, to_tensor
from vitkit.registry import DATASETS, Spec
from vitkit.structures import Sample

logger = logging.getLogger("vitkit")


class ClassificationDataset(BaseImageDataset):
    """Base of datasets of images with one class each. A subclass sets `image_ids` and implements `load_labeled`.

    A sample's target holds
        label: int, index into `classes`,
        image_id: any identifier of the image,
        image_size, original_size: (height, width) after and before the transforms.

    Args:
        classes: names of the classes, in the order of the labels.
        transforms: see `BaseImageDataset`. Transforms of whole batches (such as mixup) become `batch_transforms`.
    """

    recommended_transforms = "ClassificationTrainTransforms or ClassificationEvalTransforms"
    """The transforms to suggest in errors: they give all images one size."""
    annotations = ("label",)

    def __init__(self, classes: Sequence[str], transforms: Spec | Transforms | None):
        super().__init__(transforms)
        self._set_classes(classes)
        self._size: tuple[int, int] | None = None

    def _set_classes(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.category_ids = self.classes  # a class is identified by its name only
        if isinstance(self.transforms, TransformsBatches):
            self.batch_transforms = self.transforms.for_batches(len(self.classes))

    def load_labeled(self, index: int) -> tuple[np.ndarray, int]:
        """Load an image before any transform, (H, W, 3) uint8 RGB, and its label; `index` is in range."""
        raise NotImplementedError

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load an image with its label; see `BaseImageDataset`.

        Raises:
            DataError: the image cannot be read, or has another size than earlier images after the transforms.
        """
        original, label = self.load_labeled(index)
        image = self.transform(AnnotatedImage(original), seed).image
        self._check_size(image.shape[:2], index)
        target = {
            "label": label,
            "image_id": self.image_id(index),
            "image_size": image.shape[:2],
            "original_size": original.shape[:2],
        }
        return Sample(image=to_tensor(image), target=target)

    def _check_size(self, size: tuple[int, int], index: int) -> None:
        """Check that images have one size: predictions would depend on the padding, and so on the other images."""
        if self._size not in (None, size):
            (height, width), (other_height, other_width) = size, self._size
            raise DataError(
                f"image '{self.image_id(index)}' is {width}x{height} pixels (width x height) after the transforms, "
                f"others are {other_width}x{other_height}. A classifier needs images of one size: set `transforms` to "
                f"{self.recommended_transforms}."
            )
        self._size = size

    def image_id(self, index: int) -> Any:
        """Return the id of one image without building the list of all ids."""
        return self.image_ids[index]

    def load_image(self, index: int) -> np.ndarray:
        return self.load_labeled(index)[0]

    def aspect_ratios(self) -> np.ndarray:
        """Return 1 for every image, float64 (len(self),): after the transforms all images have one size."""
        return np.ones(len(self))


class ListedFiles(ClassificationDataset):
    """Base of datasets that list image or video files with their labels. A file's id is its path in a folder."""

    def list_files(self, folder: str | Path, names: Sequence[str], labels: Sequence[int]) -> None:
        """Set the files: their paths relative to a folder, and their labels."""
        self.store = ImageStore(folder)
        # Bytes in one array: workers share it, and it takes a quarter of the memory of strings.
        self._paths = np.array([os.fsencode(name) for name in names])
        self._labels = np.array(labels, np.int64)

    def use_classes(self, classes: Sequence[str], category_ids: Sequence[str] | None = None) -> None:
        """See `Dataset`; files of other classes are left out."""
        labels = new_labels(self.classes, classes)[self._labels]
        self._paths, self._labels = self._paths[labels >= 0], labels[labels >= 0]
        self._set_classes(classes)

    @property
    def image_ids(self) -> list[str]:
        """Paths of the files, relative to the folder."""
        return [os.fsdecode(path) for path in self._paths.tolist()]

    def index_parts(self) -> Iterator[Any]:
        yield from super().index_parts()
        yield self._labels

    def image_id(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def __len__(self) -> int:
        return len(self._paths)

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (len(self),) int64 indices of the files and their labels."""
        return np.arange(len(self)), self._labels

    def label(self, index: int) -> int:
        """Return the class of a file, as an index into `classes`."""
        return int(self._labels[index])

    def file_name(self, index: int) -> str:
        return self.image_id(index)


@DATASETS.register
class ImageFolder(ListedFiles):
    """Images in FOLDER/CLASS/ and its subfolders: the layout of torchvision's ImageFolder and of unpacked ImageNet.

    The classes are the sorted names of the folders. An image's id is its path relative to FOLDER.

    Args:
        folder: folder of one split, such as data/imagenet/train.
        transforms: see `ClassificationDataset`.
    Raises:
        DataError: there is no such folder, or it has no class folders or no image.
    """

    def __init__(self, folder: str | Path, *, transforms: Spec | Transforms | None = None):
        classes = list_class_folders(Path(folder))
        super().__init__(classes, transforms)
        label_of = {name: label for label, name in enumerate(classes)}
        start = len(Path(folder).parts)
        parts = [path.parts[start:] for path in image_files(Path(folder))]
        _check_depth(Path(folder), classes, parts)
        if beside := [p[0] for p in parts if len(p) == 1]:
            logger.warning("'%s': left out images in no class folder: %d, such as '%s'", folder, len(beside), beside[0])
        # Files of a folder come before those of its subfolders.
        parts = sorted((p for p in parts if len(p) > 1), key=lambda p: (p[0], os.sep.join(p[:-1]), p[-1]))
        self.list_files(folder, [os.sep.join(p) for p in parts], [label_of[p[0]] for p in parts])
        empty = [name for name, count in zip(classes, np.bincount(self._labels, minlength=len(classes))) if not count]
        if empty:
            warn_of_empty_classes(self.store.folder, empty, f"images ({', '.join(FORMATS)})", is_error=not len(self))

    def load_labeled(self, index: int) -> tuple[np.ndarray, int]:
        return self.read_image(self.image_path(index)), self.label(index)


def _check_depth(folder: Path, names: Sequence[str], files: Sequence[Sequence[str]]) -> None:
    """Raise a DataError if several folders have no image, but the same folders of images: these are the classes."""
    inside: dict[str, set[str]] = {name: set() for name in names}
    for parts in files:
        if len(parts) == 2:
            return
        if len(parts) > 2:
            inside[parts[0]].add(parts[1])
    common = set.intersection(*inside.values())
    if len(names) > 1 and len(common) > 1:
        raise DataError(
            f"'{folder}': {', '.join(names)} contain only folders, the same in each ({', '.join(sorted(common))}). "
            f"If they are splits, give one of them, '{folder / names[0]}'; if they are classes, put the images of each "
            "into its folder itself."
        )


def warn_of_empty_classes(folder: Path, names: Sequence[str], what: str, *, is_error: bool) -> None:
    """Log the class folders without files, whose classes stay: val may lack some; raise a DataError if `is_error`."""
    more = f", nor do {len(names) - 1} others" if len(names) > 1 else ""
    message = f"class folder '{folder / names[0]}' contains no {what}{more}."
    if is_error:
        raise DataError(f"{message} Add some, or correct the path.")
    logger.warning("%s The class stays; if it should not, remove the folder", message)


def list_class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders in a split's folder; raise a DataError if there is none."""
    if not folder.is_dir():
        raise DataError(
            f"no folder '{folder}'. Set data.root, or the `folder` of this dataset, to where the data lies."
        )
    names = subfolders(folder)
    if splits := split_folders(names):
        first = min(splits, key=lambda name: SPLITS.index(splits[name]))
        raise DataError(f"'{folder}' contains the splits {', '.join(splits)}, not classes. Give '{folder / first}'.")
    if not names:
        raise DataError(
            f"'{folder}' contains no folders. Expected one for each class, with its images or videos: CLASS/*.jpg, "
            "CLASS/*.mp4."
        )
    return names
