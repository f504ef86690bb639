"""MNIST's handwritten digits, and datasets in its format."""

from pathlib import Path
from typing import Literal

import numpy as np
import torchvision.datasets

from vitkit.data.datasets.image_folder import ClassificationDataset
from vitkit.data.transforms.annotated_image import Transforms
from vitkit.errors import DataError
from vitkit.io.channel_files import check_channels
from vitkit.registry import DATASETS, Spec


@DATASETS.register
class MNIST(ClassificationDataset):
    """Gray images of 28 x 28 pixels in ten classes, from IDX files (LeCun et al. 1998); torchvision reads them.

    With `data.channels=1` they have one channel, otherwise three equal ones.

    Args:
        folder: holds NAME/raw/train-images-idx3-ubyte and the other three files, unpacked.
        split: "train" (60,000 images) or "test" (10,000).
        name: "MNIST", or another dataset in this format.
        download: whether to download files that are missing, with their MD5 sums.
        transforms: see `ClassificationDataset`.
    Raises:
        DataError: a file is missing or damaged, or cannot be downloaded.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        split: Literal["train", "test"] = "train",
        name: Literal["MNIST", "FashionMNIST", "KMNIST"] = "MNIST",
        download: bool = False,
        transforms: Spec | Transforms | None = None,
    ):
        try:
            files = getattr(torchvision.datasets, name)(folder, train=split == "train", download=download)
        except (RuntimeError, OSError, ValueError, AssertionError, IndexError) as error:
            raise DataError(
                f"'{Path(folder) / name / 'raw'}' does not hold the IDX files of {name}'s {split} split, unpacked and "
                f"complete ({error or 'damaged'}). Set data.root, or download=true to get them."
            ) from error
        classes = [each.split(" - ")[0] for each in files.classes]
        super().__init__(classes, transforms)
        self._images, self._labels = files.data.numpy(), files.targets.numpy()
        self.image_ids = range(len(self._images))
        in_range = not len(self._labels) or 0 <= self._labels.min() <= self._labels.max() < len(classes)
        if len(self._images) != len(self._labels) or not in_range:
            raise DataError(
                f"'{Path(folder) / name / 'raw'}': {len(self._images)} images and {len(self._labels)} labels; expected "
                f"as many of each, and labels from 0 to {len(classes) - 1}. Get the files again."
            )

    def load_labeled(self, index: int) -> tuple[np.ndarray, int]:
        """Return an image, (28, 28, 3) uint8 or with `channels` (28, 28, 1) uint16, and its label."""
        image, label = self._images[index], int(self._labels[index])
        if self.channels is not None:
            return check_channels(image, self.channels, f"image {index}"), label
        return np.repeat(image[:, :, None], 3, axis=2), label

    def image_size(self, index: int) -> tuple[int, int]:
        return self._images.shape[1:]

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (len(self),) int64 indices of the images and their labels."""
        return np.arange(len(self)), self._labels
