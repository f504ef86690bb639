"""Panoptic data in COCO's format (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868): PNG maps and a JSON."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.annotation_table import ImageTable, image_columns
from vitkit.data.datasets.base import ListedImages, require_folders
from vitkit.data.datasets.coco_file import first_images
from vitkit.data.datasets.panoptic_segments import SegmentationDataset, Task, keep_segments
from vitkit.data.formats.exporters import find_listed_files
from vitkit.data.transforms.annotated_image import Transforms
from vitkit.errors import DataError
from vitkit.io.coco_schema import panoptic_issues, raise_issues
from vitkit.io.image_files import ImageStore, check_inside, read_label_colors
from vitkit.io.json_files import read_json
from vitkit.io.shared_memory import join_texts, text_at
from vitkit.ops.label_maps import colors_to_ids, count_values
from vitkit.registry import DATASETS, Spec
from vitkit.structures import PanopticMap, SegmentInfo
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentTable(ImageTable):
    """Images with a map and M segments, which lie in the order of their images."""

    map_names: np.ndarray
    """(bytes,) uint8, the names of the maps, as `file_names` has those of the images."""
    map_offsets: np.ndarray
    """(N + 1,) int64, as `name_offsets`."""
    offsets: np.ndarray
    """(N + 1,) int64; the segments of image i are the rows offsets[i] to offsets[i + 1]."""
    segment_ids: np.ndarray
    """(M,) int32, the values in the maps."""
    category_ids: np.ndarray
    """(M,) int64, those of their classes in the file."""
    is_crowd: np.ndarray
    """(M,) bool, whether a segment is a region of many objects."""


@DATASETS.register
class CocoPanoptic(ListedImages, SegmentationDataset):
    """Images with one segment map each, from folders and a COCO panoptic file.

    Images and maps are matched by the image's id. The maps stay on disk until an image is loaded; the segments are kept
    in a few flat arrays, which all workers share.

    Args:
        images: folder of the images.
        maps: folder of the maps, PNG files whose colors are segment ids (R + 256 G + 65536 B), 0 being void.
        annotations: the JSON file.
        task, transforms: see `SegmentationDataset`.
        first: use only the first `first` images of the file, for instance to check that a model can overfit them.
        allow_outside: also read files that lie outside their folder, by an absolute `file_name` or one with "..".
    Raises:
        DataError: a folder or file is missing, or the annotations are invalid.
    """

    file_kind = "panoptic"
    table: SegmentTable

    def __init__(
        self,
        images: str | Path,
        maps: str | Path,
        annotations: str | Path,
        *,
        task: Task = "panoptic",
        transforms: Spec | Transforms | None = None,
        first: int | None = None,
        allow_outside: bool = False,
    ):
        self.map_folder, self.annotation_file = Path(maps), Path(annotations)
        require_folders(images=images, maps=maps)
        content = read_panoptic_file(self.annotation_file)
        content["images"] = first_images(content["images"], first)
        find_listed_files(content, Path(images))
        categories = sorted(content["categories"], key=lambda category: category["id"])
        SegmentationDataset.__init__(self, categories, task=task, transforms=transforms)
        entry_of = {entry["image_id"]: entry for entry in content["annotations"]}
        entries = [entry_of[image["id"]] for image in content["images"]]
        for folder, listed in ((images, content["images"]), (maps, entries)):
            names = (entry["file_name"] for entry in listed)
            check_inside(folder, names, self.annotation_file.name, allow_outside=allow_outside)
        self.store = ImageStore(images)
        self.table = self._make_table(content["images"], entries).share()
        is_crowd, usable = self.table.is_crowd, np.isin(self.table.category_ids, self.category_ids)
        usable &= ~is_crowd | (task == "semantic")
        self.num_objects = int(usable.sum())
        image_indices = np.repeat(np.arange(len(entries)), np.diff(self.table.offsets))
        num_empty = len(entries) - len(np.unique(image_indices[usable]))
        logger.info(
            f"{self.annotation_file.name}: {pluralize(len(self), 'images')}, "
            f"{pluralize(self.num_objects, 'segments')} of {pluralize(len(self.classes), 'classes')} "
            f"for task '{task}'; {pluralize(int(is_crowd.sum()), 'crowd segments')}, "
            f"{pluralize(num_empty, 'images')} without a segment"
        )

    def _make_table(self, images: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Any]]) -> "SegmentTable":
        """Make the table of images and their annotations, which are in the same order."""
        map_names, map_offsets = join_texts(entry["file_name"] for entry in entries)
        segments = [segment for entry in entries for segment in entry["segments_info"]]
        return SegmentTable(
            **image_columns(images),
            map_names=map_names,
            map_offsets=map_offsets,
            offsets=np.cumsum([0, *(len(entry["segments_info"]) for entry in entries)]),
            segment_ids=np.array([segment["id"] for segment in segments], np.int32),
            category_ids=np.array([segment["category_id"] for segment in segments], np.int64),
            is_crowd=np.array([bool(segment.get("iscrowd", 0)) for segment in segments], bool),
        )

    def load_image(self, index: int) -> np.ndarray:
        """See `BaseImageDataset`.

        Raises:
            DataError: the file is missing or damaged, or its size differs from the annotated one.
        """
        image = super().load_image(index)
        self._check_size(image, index, f"image '{self.image_path(index)}'")
        return image

    def load_panoptic(self, index: int) -> PanopticMap:
        """See `SegmentationDataset`.

        Raises:
            DataError: the map is missing or damaged, differs in size from its image, or does not contain the segments
                that the JSON lists.
        """
        table = self.table
        path = self.map_folder / text_at(table.map_names, table.map_offsets, index)
        colors = read_label_colors(path, "maps", max_pixels=self.max_image_pixels)
        self._check_size(colors, index, f"map '{path}'")
        ids = colors_to_ids(colors)
        rows = slice(table.offsets[index], table.offsets[index + 1])
        segment_ids, category_ids = table.segment_ids[rows].tolist(), table.category_ids[rows].tolist()
        check_segment_ids(ids, segment_ids, f"map '{path}'", f"'{self.annotation_file.name}'")
        segments = [
            SegmentInfo(id=segment_id, label=self.label_of[category_id], iscrowd=crowd)
            for segment_id, category_id, crowd in zip(segment_ids, category_ids, table.is_crowd[rows].tolist())
            if category_id in self.label_of
        ]
        if len(segments) < len(segment_ids):
            ids = keep_segments(ids, segments)
        return PanopticMap(ids, segments)

    def _check_size(self, image: np.ndarray, index: int, name: str) -> None:
        height, width = self.image_size(index)
        if image.shape[:2] != (height, width):
            raise DataError(
                f"{self.annotation_file.name}: {name} is {image.shape[1]}x{image.shape[0]} pixels (width x height) "
                f"and image {self.image_ids[index]} is annotated as {width}x{height}. Image, map and annotation must "
                "have one size: save the file again in the size that was annotated."
            )


def read_panoptic_file(path: str | Path) -> dict[str, Any]:
    """Read and check a panoptic annotation file.

    Raises:
        DataError: no such file, not JSON, or its content is invalid.
    """
    path = Path(path)
    content = read_json(path)
    raise_issues(panoptic_issues(content), path.name)
    return content


def check_segment_ids(ids: np.ndarray, listed_ids: list[int], map_name: str, list_name: str) -> None:
    """Check that a map contains exactly the segments that the annotation file lists.

    Args:
        ids: (H, W) segment ids.
    Raises:
        DataError: a segment is in the map only, or in the list only.
    """
    pixels = dict(zip(*(column.tolist() for column in count_values(ids))))
    unlisted, missing = sorted(pixels.keys() - {0, *listed_ids}), sorted(set(listed_ids) - pixels.keys())
    if unlisted:
        raise DataError(
            f"{map_name}: segment id {unlisted[0]} ({pixels[unlisted[0]]} pixels) is not in {list_name}"
            f"{_and_others(unlisted)}. The map belongs to another file, or was saved with other colors (such as JPEG "
            "or a palette)."
        )
    if missing:
        raise DataError(
            f"{map_name}: no pixel has segment id {missing[0]}, which {list_name} lists for it{_and_others(missing)}. "
            "Remove the segment from the list, or give the map that belongs to it."
        )


def _and_others(ids: list[int]) -> str:
    return f", and {len(ids) - 1} more such ids" if len(ids) > 1 else ""
