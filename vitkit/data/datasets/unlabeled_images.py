"""Images without annotations, for pretraining."""

import glob
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.datasets.base import BaseImageDataset
from vitkit.data.datasets.image_features import FeatureFile
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.data.transforms.multi_crop import MakesViews, collate_views
from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import IMAGE_SUFFIXES, find_paths_like, image_files, log_unread
from vitkit.io.image_files import FORMATS, ImageStore, to_tensor, upright_size
from vitkit.io.shared_memory import join_texts, text_at
from vitkit.io.text_files import read_lines
from vitkit.registry import DATASETS, Spec
from vitkit.structures import Batch, Sample

_REMEDY = "Give a folder, a pattern such as 'photos/*.jpg', a list of files, a text file of names, or a dataset's spec."


@DATASETS.register
class UnlabeledImages(BaseImageDataset):
    """Images from anywhere, without annotations.

    A sample's target holds
        image_id: the file's path relative to the folder, or as it was listed; or the id of the image in its dataset,
        image_size, original_size: (height, width) after and before the transforms.

    Args:
        source: a folder, whose subfolders are included; a pattern such as "photos/**/*.jpg"; a list of files; a text
            file with one name in each line, relative to its own folder; or the spec of any dataset of images, whose
            targets and transforms are left out.
        repeats: how often each image occurs in an epoch, which otherwise takes seconds with few images; below 1, an
            epoch has this fraction of them, drawn anew each time.
        transforms: see `BaseImageDataset`; or `MultiCrop`, whose views are in the sample's `views`.
        features: file of a teacher's features that `data.cache_features` wrote for this dataset.
    Raises:
        DataError: there is no such folder or file, or it has no image.
        ConfigError: it is the spec of a dataset without images, or `repeats` is not above 0.
    """

    def __init__(
        self,
        source: Path | Sequence[str | Path] | Spec,
        *,
        repeats: float = 1,
        transforms: Spec | Transforms | None = None,
        features: str | Path | None = None,
    ):
        super().__init__(transforms)
        if not repeats > 0:
            raise ConfigError(f"repeats={repeats}: expected above 0.")
        if isinstance(self.transforms, MakesViews):
            self.collate = collate_views
        self.dataset: BaseImageDataset | None = None
        if isinstance(source, Mapping):
            self.dataset = _build_without_targets(source)
        else:
            folder, names = _list_files(source)
            self.store = ImageStore(folder)
            self._file_names, self._name_offsets = join_texts(names)
        if not len(self):
            name = f"'{source}'" if isinstance(source, str | Path) else f"a {type(source).__name__}"
            raise DataError(f"source: {name} has no image ({', '.join(FORMATS)}). {_REMEDY}")
        self.repeats = repeats
        self.transforms_key = json.dumps(transforms, sort_keys=True, default=lambda built: type(built).__name__)
        self.features = None if features is None else FeatureFile(features, self.images_key(), self.transforms_key)

    @property
    def image_ids(self) -> Sequence[Any]:
        """Names of the files, relative to the folder, or the ids of the dataset."""
        return [*map(self.file_name, range(len(self)))] if self.dataset is None else self.dataset.image_ids

    @property
    def features(self) -> FeatureFile | None:
        """A teacher's features, which samples then have; see `vitkit.engine.feature_cache`."""
        return self._features

    @features.setter
    def features(self, features: FeatureFile | None) -> None:
        self._features = features
        if features is not None:
            self.collate = collate_features

    def images_key(self) -> str:
        listed = "\n".join(map(str, self.image_ids))
        return f"{len(self)} images {hashlib.sha256(listed.encode(errors='surrogatepass')).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self._name_offsets) - 1 if self.dataset is None else len(self.dataset)

    def file_name(self, index: int) -> str:
        return text_at(self._file_names, self._name_offsets, index)

    def image_path(self, index: int) -> Path | None:
        return super().image_path(index) if self.dataset is None else self.dataset.image_path(index)

    def image_blocks(self) -> np.ndarray | None:
        return super().image_blocks() if self.dataset is None else self.dataset.image_blocks()

    def image_size(self, index: int) -> tuple[int, int]:
        if self.dataset is not None:
            return self.dataset.image_size(index)
        width, height = upright_size(self.image_path(index), max_pixels=self.max_image_pixels)
        return height, width

    def aspect_ratios(self) -> None:
        """Return None: crops have one size, so batches need no grouping, for which every file would be opened."""

    def sample_weights(self) -> np.ndarray | None:
        return None if self.repeats == 1 else np.full(len(self), float(self.repeats))

    def load_image(self, index: int) -> np.ndarray:
        if self.dataset is None:
            return super().load_image(index)
        self.dataset.max_image_pixels, self.dataset.channels = self.max_image_pixels, self.channels
        return self.dataset.load_image(index)

    def load_sample(self, index: int, seed: int | None) -> Any:
        """Load an image; see `BaseImageDataset`."""
        original = self.load_image(index)
        if isinstance(self.transforms, MakesViews):
            views = self.transforms.views(original, seed=seed)
        else:
            views = [self.transform(AnnotatedImage(original), seed).image]
        target = {
            "image_id": self.file_name(index) if self.dataset is None else self.dataset.image_ids[index],
            "image_size": views[0].shape[:2],
            "original_size": original.shape[:2],
        }
        tensors = [to_tensor(view) for view in views]
        if self.features is not None:
            key = self.features.weights_key
            return {"image": tensors[0], "target": target, "features": self.features[index], "features_key": key}
        if len(tensors) == 1:
            return Sample(image=tensors[0], target=target)
        return Sample(image=tensors[0], views=tensors, target=target)


def collate_features(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Join images with a teacher's features of them: `inputs` also holds features (B, ...) and features_key."""
    batch = Batch.collate(samples)
    batch.inputs["features"] = torch.stack([sample["features"] for sample in samples])
    batch.inputs["features_key"] = torch.tensor(samples[0]["features_key"])
    return batch


def _build_without_targets(spec: Mapping[str, Any]) -> BaseImageDataset:
    dataset = DATASETS.build({name: value for name, value in spec.items() if name != "transforms"})
    if not isinstance(dataset, BaseImageDataset) or dataset.is_video:
        raise ConfigError(f"source: {type(dataset).__name__} is not a dataset of images. {_REMEDY}")
    return dataset


def _list_files(source: str | Path | Sequence[str | Path]) -> tuple[Path, list[str]]:
    """Return a folder and the names of the images in it; names that are absolute may lie elsewhere."""
    if not isinstance(source, str | Path):
        files = [Path(name) for name in source]
        log_unread(Path("list of files"), [], files)
        return Path(), [str(file) for file in files]
    path = Path(source)
    if path.suffix.lower() == ".txt" and path.is_file():
        names = [name for _, name in read_lines(path, "source", remedy=_REMEDY)]
        log_unread(path, [], [path.parent / name for name in names])
        return path.parent, names
    if glob.has_magic(str(source)) and not path.exists():
        files = find_paths_like(str(source), folders=False)
        images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        log_unread(path, {*files} - {*images}, images)
        return Path(), [str(file) for file in images]
    if not ImageStore(path).is_folder():
        raise DataError(f"source: '{source}' is neither a folder nor a text file of names. {_REMEDY}")
    start = len(path.parts)
    return path, [os.sep.join(file.parts[start:]) for file in image_files(path)]
