"""What there is to know of a dataset without loading its images: classes, objects, files, faults of the annotations.

A survey is made even where the dataset itself cannot be built, so that all that is wrong comes to light at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.captions import CaptionDataset, CocoCaptions
from vitkit.data.coco import CocoDetection
from vitkit.data.coco_file import first_images, read_json
from vitkit.data.image_folder import ClassificationDataset, ImageFolder
from vitkit.data.loader import build_dataset
from vitkit.data.panoptic import CocoPanoptic
from vitkit.data.segments import SegmentationDataset
from vitkit.data.semantic import SemanticFolder
from vitkit.data.shapes import ShapesDetection
from vitkit.data.text import TextDataset
from vitkit.doctor.annotations import detection_findings, panoptic_findings
from vitkit.doctor.findings import Finding
from vitkit.errors import VitkitError
from vitkit.registry import DATASETS, Spec


@dataclass
class Survey:
    """One dataset. Objects are boxes, segments, or a classified image's class; crowds are none of them."""

    where: str
    """The config's key, such as "data.train"."""
    kind: str
    """"detection", "panoptic", "instance", "semantic", "classification", "captions", "text" or "other"."""
    dataset: Any = None
    """The built dataset; None if it cannot be built."""
    classes: list[str] = field(default_factory=list)
    category_ids: list[Any] = field(default_factory=list)
    image_ids: list[Any] = field(default_factory=list)
    files: list[Path] | None = None
    """Of the images; None where they are drawn, or there are none."""
    owners: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(M,) position of each object's image."""
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(M,) position of each object's class."""
    listed: list[list[dict]] | None = None
    """The segments of each image as a panoptic file lists them."""
    findings: list[Finding] = field(default_factory=list)
    """What the annotations say of themselves."""

    @property
    def has_images(self) -> bool:
        return hasattr(self.dataset, "load_image")

    def objects_per_image(self) -> np.ndarray:
        return np.bincount(self.owners, minlength=len(self.image_ids))

    def objects_per_class(self) -> dict[str, int]:
        counts = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, counts))


def survey(spec: Spec, root: str, where: str) -> Survey:
    """
    Args:
        spec: of a dataset.
        root: see `build_dataset`.
        where: the spec's config key.
    """
    found = Survey(where, "other")
    try:
        found.dataset = build_dataset(spec, root, where=where)
    except VitkitError as error:
        message = str(error).removeprefix(f"{where}: ")
        found.findings.append(Finding("builds", "fail", message, where))
    try:
        constructor, given = DATASETS.resolve(spec, where)
        given = {k: v.replace("{root}", root) if isinstance(v, str) else v for k, v in given.items()}
        if found.dataset is not None:
            found.classes = list(getattr(found.dataset, "classes", ()))
            found.category_ids = list(getattr(found.dataset, "category_ids", ()))
            found.image_ids = list(getattr(found.dataset, "image_ids", range(len(found.dataset))))
        _reader(constructor)(found, given)
    except VitkitError as error:
        if found.dataset is not None:  # else it is the error of building, once more
            found.findings.append(Finding("annotations", "fail", str(error), where))
    return found


def _reader(constructor: type) -> Callable[[Survey, Mapping[str, Any]], None]:
    readers = {
        CocoDetection: _read_detection, CocoPanoptic: _read_panoptic, CocoCaptions: _read_captions,
        ImageFolder: _read_folder, ClassificationDataset: _read_classes, SemanticFolder: _read_semantic,
        ShapesDetection: _read_truth, SegmentationDataset: _read_segments, CaptionDataset: _read_captions,
        TextDataset: _read_text,
    }  # fmt: skip
    return next((read for kind, read in readers.items() if issubclass(constructor, kind)), lambda found, given: None)


def _read_detection(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = "instance" if given.get("masks") else "detection"
    path = Path(given["annotations"])
    content = read_json(path)
    if not isinstance(content, dict):
        return
    parts = {part: _entries(content.get(part)) for part in ("images", "annotations", "categories")}
    if all("id" in image for image in parts["images"]) and found.dataset is not None:
        parts = first_images(parts, given.get("first"))
    categories = {c.get("id"): str(c.get("name")) for c in sorted(parts["categories"], key=lambda c: str(c.get("id")))}
    if found.dataset is None:
        found.category_ids, found.classes = list(categories), list(categories.values())
        found.image_ids = [image.get("id") for image in parts["images"]]
    found.files = [Path(given["images"]) / str(image.get("file_name")) for image in parts["images"]]
    found.findings += detection_findings(
        parts, path.name, found.where, masks=bool(given.get("masks")), drop=given.get("bad_boxes") == "drop"
    )
    image_of, label_of = _positions(found.image_ids), _positions(found.category_ids)
    pairs = [
        (image_of[a["image_id"]], label_of[a["category_id"]])
        for a in parts["annotations"]
        if not a.get("iscrowd")
        and isinstance(a.get("image_id"), int) and a["image_id"] in image_of
        and isinstance(a.get("category_id"), int) and a["category_id"] in label_of
    ]  # fmt: skip
    _set_objects(found, pairs)


def _entries(value: Any) -> list[dict]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _positions(values: list[Any]) -> dict[Any, int]:
    return {value.item() if isinstance(value, np.generic) else value: k for k, value in enumerate(values)}


def _set_objects(found: Survey, pairs: list[tuple[int, int]]) -> None:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    found.owners, found.labels = table[:, 0], table[:, 1]


def _read_panoptic(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = given.get("task", "panoptic")
    path = Path(given["annotations"])
    content = read_json(path)
    if found.dataset is None or not isinstance(content, dict):
        return
    images = {image["id"]: image for image in content["images"]}
    known = [images[int(image_id)] for image_id in found.image_ids]
    found.files = [Path(given["images"]) / str(image["file_name"]) for image in known]
    entries = {entry["image_id"]: entry for entry in content["annotations"]}
    ordered = [entries[image["id"]] for image in known]
    found.findings += panoptic_findings(found.dataset, ordered, content["categories"], path.name, found.where)
    found.listed = [entry["segments_info"] for entry in ordered]
    label_of = _positions(found.category_ids)
    _set_objects(
        found,
        [
            (position, label_of[segment["category_id"]])
            for position, entry in enumerate(ordered)
            for segment in entry["segments_info"]
            if segment["category_id"] in label_of and not (segment.get("iscrowd") and found.kind != "semantic")
        ],
    )


def _read_semantic(found: Survey, given: Mapping[str, Any]) -> None:
    """Which classes an image shows only its label picture says: they are read with the images."""
    found.kind = "semantic"
    if found.dataset is not None:
        suffix = given.get("image_suffix", ".jpg")
        found.files = [Path(given["images"]) / f"{image_id}{suffix}" for image_id in found.image_ids]


def _read_folder(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = "classification"
    if found.dataset is not None:
        found.files = [Path(given["folder"]) / image_id for image_id in found.image_ids]
        label_of = _positions(found.classes)
        _set_objects(found, [(k, label_of[Path(name).parts[0]]) for k, name in enumerate(found.image_ids)])


def _read_classes(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = "classification"
    if found.dataset is not None:
        some = range(min(len(found.image_ids), _MOST_DRAWN))
        _set_objects(found, [(k, int(found.dataset.load_labelled(k)[1])) for k in some])


_MOST_DRAWN = 500  # images of the synthetic world, whose objects are known once they are drawn


def _read_truth(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = "instance" if given.get("masks") else "detection"
    if found.dataset is not None:
        some = range(min(len(found.image_ids), _MOST_DRAWN))
        targets = [found.dataset[(k, k)]["target"]["labels"].tolist() for k in some]
        _set_objects(found, [(k, label) for k, labels in zip(some, targets) for label in labels])


def _read_segments(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = given.get("task", "panoptic")
    if found.dataset is not None:
        pairs = []
        for k in range(min(len(found.image_ids), _MOST_DRAWN)):
            segments = found.dataset.load_panoptic(k).segments_info
            pairs += [(k, segment["label"]) for segment in segments]
        _set_objects(found, pairs)


def _read_captions(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = "captions"
    if found.dataset is not None and "annotations" in given:
        names = {image["id"]: image["file_name"] for image in read_json(Path(given["annotations"]))["images"]}
        found.files = [Path(given["images"]) / names[int(image_id)] for image_id in found.image_ids]


def _read_text(found: Survey, given: Mapping[str, Any]) -> None:
    found.kind = "text"
