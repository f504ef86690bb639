"""Panoptic data in COCO's format (Kirillov et al. 2019, https://arxiv.org/abs/1801.00868): maps as PNG, and a JSON."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.coco_file import check_file_name, check_image_entries, first_images, read_json, unique_ids
from vitkit.data.images import read_image
from vitkit.data.segments import SegmentationDataset, Task
from vitkit.data.transforms import Transforms
from vitkit.errors import DataError
from vitkit.ops.label_maps import count_values, replace_values
from vitkit.registry import DATASETS, Spec
from vitkit.structures import PanopticMap, SegmentInfo

logger = logging.getLogger("vitkit")

_REQUIRED = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "file_name", "segments_info"),
    "categories": ("id", "name", "isthing"),
}
_MOST_IDS = 1 << 24  # of three bytes


@DATASETS.register
class CocoPanoptic(SegmentationDataset):
    """Images with a map of segments each, from folders and a COCO panoptic file.

    Images and maps belong together by the image's id. The maps stay on disk until an image is loaded; of the segments
    a few flat arrays are kept, which forked workers share.

    Args:
        images: folder with the pictures.
        maps: folder with the maps, PNG whose colours are segment ids (R + 256 G + 65536 B), 0 being void.
        annotations: the JSON file.
        task, transforms: see `SegmentationDataset`.
        first: only as many of the file's images, in its order, such as to see that a model can learn them by heart.
    Raises:
        DataError: a folder or file is missing, or the annotations are wrong.
    """

    def __init__(
        self,
        images: str,
        maps: str,
        annotations: str,
        *,
        task: Task = "panoptic",
        transforms: Spec | Transforms | None = None,
        first: int | None = None,
    ):
        self.folder, self.map_folder, self.annotation_file = Path(images), Path(maps), Path(annotations)
        for name, folder in (("images", self.folder), ("maps", self.map_folder)):
            if not folder.is_dir():
                raise DataError(
                    f"{name}: no folder '{folder}'. Download the dataset (see README, \"Data\"), "
                    f"or correct data.root or the `{name}` of this dataset."
                )
        content = first_images(read_panoptic_file(self.annotation_file), first)
        categories = sorted(content["categories"], key=lambda category: category["id"])
        super().__init__(categories, task=task, transforms=transforms)
        entry_of = {entry["image_id"]: entry for entry in content["annotations"]}
        entries = [entry_of[image["id"]] for image in content["images"]]
        self.image_ids = np.array([image["id"] for image in content["images"]], np.int64)
        self._file_names = np.array([str(image["file_name"]) for image in content["images"]])
        self._map_names = np.array([str(entry["file_name"]) for entry in entries])
        self._sizes = np.array([(image["height"], image["width"]) for image in content["images"]], np.int64)
        # Segments of image i are the rows offsets[i] to offsets[i + 1].
        self._offsets = np.cumsum([0, *(len(entry["segments_info"]) for entry in entries)])
        segments = [segment for entry in entries for segment in entry["segments_info"]]
        self._segment_ids = np.array([segment["id"] for segment in segments], np.int32)
        self._labels = np.array([self.label_of.get(segment["category_id"], -1) for segment in segments], np.int64)
        self._crowd = np.array([bool(segment.get("iscrowd", 0)) for segment in segments], bool)
        usable = self._labels >= 0 if task == "semantic" else (self._labels >= 0) & ~self._crowd
        self.num_objects = int(usable.sum())
        owners = np.repeat(np.arange(len(entries)), np.diff(self._offsets))
        num_empty = len(entries) - len(np.unique(owners[usable]))
        logger.info(
            f"{self.annotation_file.name}: {len(self)} images, {self.num_objects} segments of {len(self.classes)} "
            f"classes for task '{task}'; {int(self._crowd.sum())} crowd segments, {num_empty} images without a segment"
        )

    def load_image(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8 RGB, before any transform.

        Raises:
            DataError: the file is missing, damaged, or of another size than annotated.
        """
        path = self.folder / str(self._file_names[index])
        image = read_image(path)
        self._check_size(image, index, f"image '{path}'")
        return image

    def load_panoptic(self, index: int) -> PanopticMap:
        """
        Raises:
            DataError: the map is missing or damaged, has another size than its image, or does not hold the segments
                that the JSON lists.
        """
        path = self.map_folder / str(self._map_names[index])
        colors = read_image(path)
        self._check_size(colors, index, f"map '{path}'")
        ids = colors_to_ids(colors)
        rows = slice(self._offsets[index], self._offsets[index + 1])
        segment_ids, labels = self._segment_ids[rows].tolist(), self._labels[rows].tolist()
        check_segment_ids(ids, segment_ids, f"map '{path}'", f"'{self.annotation_file.name}'")
        segments = [
            SegmentInfo(id=segment_id, label=label, iscrowd=crowd)
            for segment_id, label, crowd in zip(segment_ids, labels, self._crowd[rows].tolist())
            if label >= 0
        ]
        if len(segments) < len(segment_ids):
            kept = {segment["id"]: segment["id"] for segment in segments}
            ids = replace_values(ids, kept, dtype=np.int32)
        return PanopticMap(ids, segments)

    def _check_size(self, picture: np.ndarray, index: int, name: str) -> None:
        height, width = self.image_size(index)
        if picture.shape[:2] != (height, width):
            raise DataError(
                f"{self.annotation_file.name}: {name} is {picture.shape[1]}x{picture.shape[0]} pixels (width x height) "
                f"and image {self.image_ids[index]} is annotated as {width}x{height}. Image, map and annotation must "
                "have one size: save the file anew in the size that was annotated."
            )

    def image_size(self, index: int) -> tuple[int, int]:
        height, width = self._sizes[index].tolist()
        return height, width

    def aspect_ratios(self) -> np.ndarray:
        """Width / height of every image, float64 (len(self),)."""
        return self._sizes[:, 1] / self._sizes[:, 0]


def read_panoptic_file(path: str | Path) -> dict[str, Any]:
    """The content of a panoptic annotation file, with every reference between its parts checked.

    Raises:
        DataError: no such file, not JSON, a missing part or key, an id twice or unknown, an image without annotation.
    """
    path = Path(path)
    content = read_json(path)
    missing = [part for part in _REQUIRED if not isinstance(content, dict) or not isinstance(content.get(part), list)]
    if missing:
        raise DataError(
            f"{path.name}: no list {' and no list '.join(map(repr, missing))} at the top level of '{path}'. "
            "Expected a COCO panoptic file: {'images': [...], 'annotations': [...], 'categories': [...]}."
        )
    for part, keys in _REQUIRED.items():
        for position, entry in enumerate(content[part]):
            for key in keys:
                if not isinstance(entry, dict) or key not in entry:
                    hint = " Is it a file of boxes (instances_*.json)?" if key in ("segments_info", "isthing") else ""
                    raise DataError(f"{path.name}: entry {position} of '{part}' has no {key!r}.{hint}")
    for part in ("images", "categories"):
        if not content[part]:
            raise DataError(f"{path.name}: the list '{part}' in '{path}' is empty; expected at least one entry.")
    image_ids = unique_ids(content["images"], "image", path.name)
    category_ids = unique_ids(content["categories"], "category", path.name)
    check_image_entries(content["images"], path.name)
    annotated = set()
    for annotation in content["annotations"]:
        image_id = annotation["image_id"]
        check_file_name(annotation, f"{path.name}: annotation of image {image_id!r}")
        if not isinstance(image_id, int) or image_id not in image_ids or image_id in annotated:
            twice = isinstance(image_id, int) and image_id in annotated
            why = "is there twice" if twice else "is not among the ids in 'images'"
            raise DataError(f"{path.name}: image_id {image_id!r} of an annotation {why}. Remove that annotation.")
        annotated.add(image_id)
        _check_segments(annotation, category_ids, path.name)
    if len(annotated) < len(image_ids):
        first = min(image_ids - annotated)
        raise DataError(
            f"{path.name}: {len(image_ids) - len(annotated)} of {len(image_ids)} images have no annotation, such as "
            f"image {first}. Add one with its map and segments (an empty list, if all is void), or remove the images."
        )
    return content


def _check_segments(annotation: Mapping[str, Any], category_ids: set[int], file_name: str) -> None:
    where = f"{file_name}: image {annotation['image_id']}"
    if not isinstance(annotation["segments_info"], list):
        raise DataError(f"{where} has segments_info {annotation['segments_info']!r:.120}; expected a list.")
    seen = set()
    for segment in annotation["segments_info"]:
        if not isinstance(segment, dict) or not {"id", "category_id"} <= segment.keys():
            raise DataError(f"{where} has a segment without 'id' or 'category_id': {segment!r:.120}.")
        if not isinstance(segment["id"], int) or not 0 < segment["id"] < _MOST_IDS:
            raise DataError(f"{where} has a segment of id {segment['id']!r}; expected 1 to {_MOST_IDS - 1}.")
        if segment["id"] in seen:
            raise DataError(f"{where} has two segments of id {segment['id']}; ids must be unique in an image.")
        if not isinstance(segment["category_id"], int) or segment["category_id"] not in category_ids:
            raise DataError(
                f"{where}: segment {segment['id']} has category_id {segment['category_id']!r}, which is not among the "
                f"{len(category_ids)} ids in 'categories'."
            )
        seen.add(segment["id"])


def colors_to_ids(colors: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 RGB of a panoptic PNG -> (H, W) int32 segment ids."""
    red, green, blue = (colors[:, :, channel].astype(np.int32) for channel in range(3))
    return red | green << 8 | blue << 16


def check_segment_ids(ids: np.ndarray, listed: list[int], map_name: str, list_name: str) -> None:
    """
    Args:
        ids: (H, W) segment ids.
        listed: the ids that it should hold.
    Raises:
        DataError: a segment is in the map only, or in the list only.
    """
    found, counts = count_values(ids)
    pixels = {value: count for value, count in zip(found.tolist(), counts.tolist()) if value}
    unlisted, unseen = sorted(pixels.keys() - set(listed)), sorted(set(listed) - pixels.keys())
    if unlisted:
        raise DataError(
            f"{map_name}: segment id {unlisted[0]} ({pixels[unlisted[0]]} pixels) is not in {list_name}"
            f"{_and_others(unlisted)}. The map belongs to another file, or was saved with other colours (such as JPEG "
            "or a palette)."
        )
    if unseen:
        raise DataError(
            f"{map_name}: no pixel has segment id {unseen[0]}, which {list_name} lists for it{_and_others(unseen)}. "
            "Remove the segment from the list, or give the map that belongs to it."
        )


def _and_others(ids: list[int]) -> str:
    return f", and {len(ids) - 1} more ids likewise" if len(ids) > 1 else ""
