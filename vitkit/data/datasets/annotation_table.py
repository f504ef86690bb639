"""Annotations as flat arrays: readers return them, a cache stores them, worker processes share them.

A list of objects in their place would be copied into every worker, page by page, as reference counts change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from vitkit.io.shared_memory import join_texts, share, text_at

Table = TypeVar("Table", bound="ImageTable")


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageTable:
    """The N images that an annotation file lists; subclasses add their annotations."""

    image_ids: np.ndarray
    """(N,) int64, the ids in the file."""
    file_names: np.ndarray
    """(bytes,) uint8, the names of the files, relative to the folder, in UTF-8, one after the other."""
    name_offsets: np.ndarray
    """(N + 1,) int64; name i is the bytes name_offsets[i] to name_offsets[i + 1] of `file_names`."""
    sizes: np.ndarray
    """(N, 2) int64, height and width in pixels."""

    def share(self: Table) -> Table:
        """Return the table with its arrays in memory that processes share; those that already are stay as they are."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **{name: share(array) for name, array in arrays.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, arrays and values of JSON, as `load_or_build_arrays` and the constructor take them."""
        return {**vars(self)}


@dataclass(frozen=True, eq=False, kw_only=True)
class AnnotationTable(ImageTable):
    """Images with M objects, which lie in the order of their images."""

    classes: Sequence[str]
    """Names of the classes, in the order of the labels."""
    category_ids: Sequence[int]
    """The id of each class."""
    offsets: np.ndarray
    """(N + 1,) int64; the objects of image i are the rows offsets[i] to offsets[i + 1]."""
    labels: np.ndarray
    """(M,) int64, positions in `classes`."""
    boxes_xyxy: np.ndarray
    """(M, 4) float32, in pixels, inside the image."""
    num_crowds: int = 0
    """Number of regions of many objects, which have no row."""
    segmentations: np.ndarray | None = None
    """(bytes,) uint8, marshalled polygons or run lengths in COCO's format, in the order of the file; None: no masks."""
    segmentation_spans: np.ndarray | None = None
    """(M, 2) int64, where each object's segmentation begins and ends in `segmentations`."""
    keypoints: np.ndarray | None = None
    """(M, K, 3) float32: x, y in pixels and visibility, see `DetectionTarget`; None: no keypoints."""
    areas: np.ndarray | None = None
    """(M,) float32 area of each object in pixels, as annotated; only with keypoints."""

    def with_classes(
        self, classes: Sequence[str], category_ids: Sequence[int], labels: np.ndarray
    ) -> "AnnotationTable":
        """Return the table with other classes, without the objects that have none of them.

        Args:
            labels: the new label of each class of this table, (C,) int64; -1: its objects are left out.
        """
        new = labels[self.labels]
        is_kept = new >= 0
        return replace(
            self,
            classes=list(classes),
            category_ids=list(category_ids),
            offsets=np.concatenate([[0], np.cumsum(is_kept)])[self.offsets],
            **self._objects(is_kept, new),
        )

    def take_images(self, indices: np.ndarray) -> "AnnotationTable":
        """Return the table of some of its images, (n,) int64 in ascending order, and of their objects."""
        file_names, name_offsets = join_texts(text_at(self.file_names, self.name_offsets, k) for k in indices.tolist())
        return replace(
            self,
            image_ids=self.image_ids[indices],
            file_names=file_names,
            name_offsets=name_offsets,
            sizes=self.sizes[indices],
            offsets=np.concatenate([[0], np.cumsum(np.diff(self.offsets)[indices])]),
            **self._objects(np.isin(self.image_indices(), indices), self.labels),
        )

    def _objects(self, is_kept: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray | None]:
        """Return the fields of the objects that are kept, (M,) bool, with these labels in place of the table's."""
        fields = {name: vars(self)[name] for name in ("boxes_xyxy", "segmentation_spans", "keypoints", "areas")}
        fields["labels"] = labels
        return {name: None if rows is None else rows[is_kept] for name, rows in fields.items()}

    def image_indices(self) -> np.ndarray:
        """Return the index of each object's image, (M,) int64."""
        return np.repeat(np.arange(len(self.image_ids)), np.diff(self.offsets))

    def image_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the (P,) int64 indices of images and labels of the classes that each image shows, each pair once."""
        pairs = np.unique(np.stack([self.image_indices(), self.labels], axis=1), axis=0)
        return pairs[:, 0], pairs[:, 1]


def image_columns(entries: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return the fields of `ImageTable` of the entries of `images` in an annotation file."""
    file_names, name_offsets = join_texts(entry["file_name"] for entry in entries)
    return {
        "image_ids": np.array([entry["id"] for entry in entries], np.int64),
        "file_names": file_names,
        "name_offsets": name_offsets,
        "sizes": np.array([(entry["height"], entry["width"]) for entry in entries], np.int64),
    }
