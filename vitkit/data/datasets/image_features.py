"""Image features computed once, so that a captioner trains without its backbone, or a student without its teacher."""

import json
import reprlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import DataError
from vitkit.io.atomic import renaming
from vitkit.io.json_files import read_json

_REMEDY = "Leave `features` out of this dataset: data.cache_features=FOLDER computes them before training."


@runtime_checkable
class FeatureSource(Protocol):
    """A dataset whose image features can be stored."""

    image_ids: Sequence[Any]
    transforms_key: str
    """Identifies the transforms."""
    features: "FeatureFile | None"
    """The stored features, which its samples then have."""

    def images_key(self) -> str:
        """Return a string that identifies the images and their order."""

    def __len__(self) -> int: ...


class FeatureFile:
    """Features of every image of a dataset, stored by `write_features` in NAME.npy and described in NAME.json.

    Args:
        path: path of NAME.npy.
        images_key, transforms_key: keys of the dataset that the features have to belong to.
    Raises:
        DataError: there is no such file, or it belongs to other images or transforms.
    """

    def __init__(self, path: str | Path, images_key: str, transforms_key: str):
        self.path = Path(path)
        description_file = self.path.with_suffix(".json")
        if not self.path.is_file() or not description_file.is_file():
            raise DataError(f"features: no file '{self.path}' with '{description_file.name}' beside it. {_REMEDY}")
        description = read_json(description_file, key="features")
        if not isinstance(description, dict) or type(description.get("weights_key")) is not int:
            raise DataError(
                f"features: '{description_file}' contains {reprlib.repr(description)}; expected the "
                f"description that is written with the features. {_REMEDY}"
            )
        if description.get("images") != images_key:
            raise DataError(
                f"features: '{self.path}' belongs to {description.get('images')}; this dataset has {images_key}. "
                f"{_REMEDY}"
            )
        if description.get("transforms") != transforms_key:
            raise DataError(
                f"features: '{self.path}' was computed with the transforms {description.get('transforms')}; this "
                f"dataset has {transforms_key}. {_REMEDY}"
            )
        self._shape, self._checksums = description.get("shape"), description.get("checksums")
        self.weights_key: int = description["weights_key"]
        """Identifies the network that computed the features; a model compares it with its own key."""

    @cached_property
    def array(self) -> np.ndarray:
        """Return the features, (N, ...) float32, memory-mapped; a DataError if the file is not what was written."""
        try:
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
            stored = f"{array.dtype} {list(array.shape)}"
        except Exception as error:  # a damaged file can make numpy raise anything
            reason = str(error) or type(error).__name__
            raise DataError(f"features: cannot read '{self.path}': {reason:.200}. {_REMEDY}") from error
        if stored != f"float32 {self._shape}" or not self._shape[1:]:
            raise DataError(
                f"features: '{self.path}' contains {stored:.200}, and '{self.path.with_suffix('.json').name}' says "
                f"float32 {self._shape}. {_REMEDY}"
            )
        if 0 in array.shape:
            raise DataError(f"features: '{self.path}' is empty, {stored}. {_REMEDY}")
        if not isinstance(self._checksums, list) or len(self._checksums) != len(array):
            raise DataError(f"features: '{self.path.with_suffix('.json').name}' has no checksum of each map. {_REMEDY}")
        return array

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self.array):
            raise DataError(f"features: '{self.path}' has {len(self.array)} maps, none for image {index}. {_REMEDY}")
        features = np.array(self.array[index], order="C")
        if zlib.crc32(features) != self._checksums[index]:
            raise DataError(
                f"features: '{self.path}' is damaged: map {index} is not what was written. Delete the file."
            )
        return torch.from_numpy(features)


def write_features(
    path: str | Path, maps: Iterable[Tensor], dataset: FeatureSource, *, weights_key: int
) -> Mapping[str, Any]:
    """Store the features of all images of a dataset, batch by batch, for `FeatureFile`.

    Args:
        path: path of NAME.npy; earlier features stay until these are complete.
        maps: the features in the order of the images, (B, ...) float32 each.
        weights_key: see `FeatureFile`.
    Returns:
        the content of NAME.json.
    Raises:
        DataError: the maps differ in size.
        OSError: they cannot be written, such as on a full disk.
    """
    path, description_file, shape, checksums = Path(path), Path(path).with_suffix(".json"), (), []
    # Other runs, or machines that share the folder, may write the same features at once; and a run that has
    # memory-mapped the earlier ones would be killed if their file became shorter. The features are renamed first.
    with renaming(description_file, sync=False) as described, renaming(path, sync=False) as temporary:
        # Not memory-mapped: on a full disk that would kill the process without a message.
        with temporary.open("xb") as file:
            for batch in maps:
                if not shape:
                    shape = (len(dataset), *batch.shape[1:])
                    header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                if batch.shape[1:] != shape[1:]:
                    name = dataset.image_ids[len(checksums)]
                    raise DataError(
                        f"features: image {name} has a map of {tuple(batch.shape[1:])}, others of {shape[1:]}. "
                        "Features need images of one size: set `transforms` to ClassificationEvalTransforms."
                    )
                rows = batch.float().cpu().numpy()
                try:
                    file.write(rows.tobytes())
                except OSError as error:
                    error.filename = str(path)  # which a failed write does not name
                    raise
                checksums += [zlib.crc32(np.ascontiguousarray(row)) for row in rows]
        assert len(checksums) == len(dataset)
        description = {
            "images": dataset.images_key(),
            "transforms": dataset.transforms_key,
            "weights_key": weights_key,
            "shape": list(shape),
            "checksums": checksums,
        }
        described.write_text(json.dumps(description), encoding="utf-8")
        # If this is interrupted, the earlier description must not belong to the new file.
        description_file.unlink(missing_ok=True)
    return description
