"""Base classes of image datasets: indexing, transforms, defaults, and building detection samples."""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.datasets.annotation_table import AnnotationTable, ImageTable
from vitkit.data.transforms.annotated_image import (
    AnnotatedImage,
    ImageSource,
    MixesImages,
    Transforms,
    build_transforms,
)
from vitkit.data.transforms.by_epoch import TransformsByEpoch
from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import one_form
from vitkit.io.image_files import MAX_PIXELS, ImageStore, read_image, to_tensor
from vitkit.io.shared_memory import text_at
from vitkit.ops.boxes import xyxy_to_cxcywh
from vitkit.protocols.dataset import Dataset
from vitkit.registry import Spec
from vitkit.structures import OBJECT_FIELDS, Sample


class BaseImageDataset(Dataset):
    """Base of datasets of images. A subclass sets `image_ids` and implements `image_size`, `load_sample`, and either
    sets `store` and implements `file_name`, or implements `image_path` or `load_image`.

    Args:
        transforms: spec of the transforms (see vitkit.data.transforms.pipelines); None leaves the images unchanged.
    Raises:
        ConfigError: the transforms need several images with boxes, and this dataset is not an `ImageSource`.
    """

    image_ids: Sequence[Any]
    has_images = True
    store: ImageStore | None = None
    """Where the files of the images are, if they are in one folder."""
    max_image_pixels: int = MAX_PIXELS
    """Largest width x height of an image file that is decoded; `build_dataset` sets it."""
    channels: int | None = None
    """Number of channels that images are read with, see `DataSettings`; `build_dataset` sets it."""
    chosen_indices: Sequence[int] | None = None
    """Indices of the images that are trained on; `DataSettings.dataset` sets them for a `fraction`. None: all."""

    transforms_by_epoch: TransformsByEpoch | None = None
    """The transforms of all epochs, if they differ; `transforms` are then those of one epoch."""
    num_epochs: int | None = None
    """Number of epochs of the run, see `set_num_epochs`."""

    def __init__(self, transforms: Spec | Transforms | None):
        self.transforms = build_transforms(transforms)
        stages = [self.transforms]
        if isinstance(self.transforms, TransformsByEpoch):
            self.transforms_by_epoch, stages = self.transforms, self.transforms.stages
            self.set_epoch(0)
        for stage in stages:
            if isinstance(stage, MixesImages):
                if not isinstance(self, ImageSource):
                    raise ConfigError(
                        f"dataset {type(self).__name__}: {type(stage).__name__} needs images with boxes, "
                        "such as those of CocoDetection. Leave it out, and set only its `transforms`."
                    )
                stage.check_source(self)

    def set_num_epochs(self, num_epochs: int) -> None:
        self.num_epochs = num_epochs

    def set_epoch(self, epoch: int) -> None:
        if self.transforms_by_epoch is not None:
            self.transforms = self.transforms_by_epoch.at(epoch, self.num_epochs)

    def __len__(self) -> int:
        return len(self.image_ids)

    def training_indices(self) -> Sequence[int]:
        """Return the indices of the training images."""
        return range(len(self)) if self.chosen_indices is None else self.chosen_indices

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """Load one transformed image with its target.

        Args:
            index: index into the dataset; or (index, seed), with everything random drawn from that seed only.
        Raises:
            DataError: a file of the image is missing, damaged or invalid.
        """
        index, seed = index if isinstance(index, tuple) else (index, None)
        return self.load_sample(range(len(self))[index], seed)

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load the sample at an index in 0..len(self)-1."""
        raise NotImplementedError

    def file_name(self, index: int) -> str:
        """Return the path of an image's file in the folder of `store`."""
        raise NotImplementedError

    def image_path(self, index: int) -> Path | None:
        return None if self.store is None else self.store.folder / self.file_name(index)

    def load_image(self, index: int) -> np.ndarray:
        """Load an image before any transform, see `read_image`; by default its file is read."""
        return self.read_image(self.image_path(index))

    def read_image(self, path: str | Path) -> np.ndarray:
        """Read an image file as (H, W, 3) uint8 RGB, upright, or with `channels` as (H, W, channels) uint16, unless it
        has more than `max_image_pixels`."""
        if self.channels is not None:
            from vitkit.io.channel_files import read_channels  # few images have other channels than RGB

            return read_channels(path, self.channels, max_pixels=self.max_image_pixels)
        return read_image(path, max_pixels=self.max_image_pixels)

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image before any transform, without loading it."""
        raise NotImplementedError

    def aspect_ratios(self) -> np.ndarray:
        """Return width / height of every image, float64 (len(self),)."""
        return np.array([width / height for height, width in map(self.image_size, range(len(self)))])

    def image_blocks(self) -> np.ndarray | None:
        """Return the number of the block of a pack that holds each image, (len(self),) int64; None: they are files."""
        return None if self.store is None else self.store.blocks(map(self.file_name, range(len(self))))

    def transform(self, sample: AnnotatedImage, seed: int | None) -> AnnotatedImage:
        """Apply the dataset's transforms, if it has any."""
        if isinstance(self.transforms, MixesImages):
            return self.transforms.mix(sample, self, seed=seed)
        return sample if self.transforms is None else self.transforms(sample, seed=seed)


class ListedImages(BaseImageDataset):
    """Base of datasets whose images are listed with their sizes in an annotation file; a subclass sets the table."""

    table: ImageTable
    """The images, with what the file says of them."""

    @property
    def image_ids(self) -> np.ndarray:
        return self.table.image_ids

    def index_parts(self) -> Iterator[Any]:
        yield from super().index_parts()
        # Without encoded masks: their bytes differ between versions of Python.
        yield from (part for name, part in vars(self.table).items() if not name.startswith("segmentation"))

    def file_name(self, index: int) -> str:
        return text_at(self.table.file_names, self.table.name_offsets, index)

    def image_size(self, index: int) -> tuple[int, int]:
        height, width = self.table.sizes[index].tolist()
        return height, width


class DetectionDataset(BaseImageDataset):
    """Base of datasets of images with boxes, and masks if `masks` is set. A subclass implements `load_annotated`."""

    annotations = ("objects",)
    masks: bool

    def load_annotated(self, index: int) -> AnnotatedImage:
        """Load an image with its objects before any transform; see `ImageSource`."""
        raise NotImplementedError

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load an image with its objects, without those whose mask is empty after the transforms."""
        original = self.load_annotated(index)
        if self.square is None:
            transformed = annotated = self.transform(original, seed)
        else:
            from vitkit.data.transforms.lazy_image import make_lazy, render  # few models are trained on squares

            transformed = self.transform(make_lazy(original, self.transforms), seed)
            annotated = render(transformed, (self.square, self.square))
        height, width = transformed.image.shape[:2]
        boxes_xyxy = torch.as_tensor(transformed.boxes_xyxy, dtype=torch.float32)
        target = {
            "labels": torch.from_numpy(annotated.labels.astype(np.int64)),
            "boxes_cxcywh": xyxy_to_cxcywh(boxes_xyxy) / torch.tensor([width, height, width, height]),
            "image_id": int(self.image_ids[index]),
            "image_size": annotated.image.shape[:2],
            "original_size": original.image.shape[:2],
        }
        if annotated.keypoints is not None:
            target["keypoints"] = torch.from_numpy(annotated.keypoints.astype(np.float32))
            target["areas"] = torch.from_numpy(annotated.areas.astype(np.float32))
        if annotated.masks is not None:
            from vitkit.ops.packed_masks import PackedMasks  # boxes need none

            target["masks"] = PackedMasks.pack(annotated.masks, annotated.masks.shape[1:])
            visible = ~target["masks"].is_empty()
            target |= {name: target[name][visible] for name in target.keys() & OBJECT_FIELDS}
        return Sample(image=to_tensor(annotated.image), target=target)


class ListedObjects(ListedImages, DetectionDataset):
    """Base of datasets whose images are listed with their objects in an annotation file."""

    table: AnnotationTable

    @property
    def classes(self) -> Sequence[str] | None:
        return self.table.classes or None

    @property
    def category_ids(self) -> Sequence[int] | None:
        return self.table.category_ids or None

    @property
    def num_objects(self) -> int:
        return len(self.table.labels)

    @property
    def num_crowds(self) -> int:
        return self.table.num_crowds

    def objects_per_image(self) -> np.ndarray:
        return np.diff(self.table.offsets)

    def check_first_image(self) -> None:
        """Raise DataError if the first listed image is not in the folder."""
        if not self.store.has(self.file_name(0)):
            raise DataError(
                f"images: '{self.annotation_file}' lists '{self.file_name(0)}', which is not in '{self.store.folder}'. "
                "Give the folder that belongs to these annotations."
            )

    def load_image(self, index: int) -> np.ndarray:
        """See `BaseImageDataset`.

        Raises:
            DataError: the file is missing or damaged, or its size differs from the annotated one.
        """
        image = super().load_image(index)
        size, annotated = image.shape[:2], self.image_size(index)
        if size != annotated:
            path = self.image_path(index)
            raise DataError(
                f"{self.annotation_file.name}: image '{path}' is {size[1]}x{size[0]} pixels (width x height, upright) "
                f"and annotated as {annotated[1]}x{annotated[0]}. {self.size_remedy(path, size, annotated)}"
            )
        return image

    def size_remedy(self, path: Path, size: tuple[int, int], annotated: tuple[int, int]) -> str:
        """Return advice about an image whose file has another (height, width) than annotated."""
        return "Give the images that were annotated, as they were."


def new_labels(old: Sequence[str], new: Sequence[str]) -> np.ndarray:
    """Return the (len(old),) int64 label of each class among new names, -1 for those that are not among them."""
    label_of = {one_form(name): label for label, name in enumerate(new)}
    return np.array([label_of.get(one_form(name), -1) for name in old], np.int64)


def fill_ids(labels: Sequence[int], category_ids: Sequence[int], num_classes: int) -> list[int]:
    """Return the id of each of `num_classes` labels: those of classes, by their labels, and unused ones for others."""
    id_of, unused = dict(zip(labels, category_ids)), count(max(category_ids) + 1)
    return [id_of[label] if label in id_of else next(unused) for label in range(num_classes)]


def require_folders(**folders: str | Path) -> None:
    """Raise a DataError if one of a dataset's folders does not exist.

    Args:
        folders: each folder by the name of the dataset's argument that gives it.
    """
    for name, folder in folders.items():
        if not Path(folder).is_dir():
            raise DataError(
                f"{name}: no folder '{folder}'. Download the dataset (see vitkit/data/README.md), "
                f"or correct data.root or the `{name}` of this dataset."
            )
