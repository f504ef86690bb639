"""Statistics of a dataset without loading its images: classes, objects, files, annotation issues.

They are collected even if the dataset itself cannot be built, so that all issues are reported at once.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.apps.doctor.annotations import CheckedDetectionFile, describe_issues, describe_panoptic
from vitkit.apps.doctor.issues import Issue, enumerate_items
from vitkit.data.datasets.base import new_labels
from vitkit.data.datasets.coco_file import AnnotationSource
from vitkit.data.formats import AnnotatedImages
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import match_classes
from vitkit.errors import DataError, VitkitError
from vitkit.io.coco_schema import FileIssue, caption_issues, detection_issues, panoptic_issues
from vitkit.io.image_files import find_root
from vitkit.io.json_files import read_json
from vitkit.protocols.dataset import Dataset
from vitkit.registry import DATASETS
from vitkit.text_format import pluralize

_MAX_SAMPLED = 500
"""Maximum number of images to load for their objects, if no annotation file lists them."""
_KINDS = {
    "panoptic": "panoptic",
    "label": "classification",
    "objects": "detection",
    "semantic": "semantic",
    "captions": "captions",
}
"""Annotations -> kind of a dataset that has them, and none of those before."""


@dataclass
class DatasetStatistics:
    """Statistics of a dataset. Objects are boxes, segments, or the class of a classified image, but not crowds."""

    where: str
    """The dataset's key in the config, such as "data.train"."""
    kind: str = "other"
    """"detection", "panoptic", "instance", "semantic", "classification", "captions", "text" or "other"."""
    dataset: Dataset | None = None
    """The built dataset; None if it cannot be built."""
    classes: list[str] = field(default_factory=list)
    category_ids: list[Any] = field(default_factory=list)
    image_ids: list[Any] = field(default_factory=list)
    files: list[Path] | None = None
    """Files of the images; None if they are synthetic, or there are none."""
    image_indices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(M,) index of each object's image."""
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(M,) index of each object's class."""
    sampled: bool = False
    """Whether the objects are only those of the first images."""
    listed_segments: list[list[dict]] | None = None
    """For each image, its segments as listed in a panoptic file."""
    issues: list[Issue] = field(default_factory=list)
    """Issues of the annotations."""

    @property
    def has_images(self) -> bool:
        """Whether images can be loaded."""
        return self.dataset is not None and self.dataset.has_images

    def objects_per_image(self) -> np.ndarray:
        """(images,) number of objects in each image."""
        return np.bincount(self.image_indices, minlength=len(self.image_ids))

    def objects_per_class(self) -> dict[str, int]:
        """Number of objects by class name."""
        return dict(zip(self.classes, np.bincount(self.labels, minlength=len(self.classes)).tolist()))

    def set_objects(self, pairs: list[tuple[int, int]]) -> None:
        """Set the objects from pairs (image index, class index)."""
        self.image_indices, self.labels = np.array(pairs, np.int64).reshape(-1, 2).T


def dataset_statistics(data: DataSettings, split: str, train: Dataset | None = None) -> DatasetStatistics:
    """Build the dataset of a split, which gets the classes of the training data if there is one, and collect its
    statistics."""
    spec, where = getattr(data, split), f"data.{split}"
    statistics = DatasetStatistics(where)
    try:
        statistics.dataset = data.dataset(split)
        if train is not None:
            listed = list(statistics.dataset.classes or ())
            with suppress(DataError):  # the check of the classes reports it
                match_classes(train, statistics.dataset)
            if lacking := [name for name in statistics.dataset.classes or () if name not in listed]:
                message = (
                    f"has nothing of {pluralize(len(lacking), 'classes')} of data.train: {enumerate_items(lacking)}"
                )
                statistics.issues.append(Issue("classes", "note", message, where))
    except VitkitError as error:
        statistics.issues.append(Issue("builds", "fail", str(error).removeprefix(f"{where}: "), where))
    try:
        constructor, arguments = DATASETS.resolve(spec, where)
        if statistics.dataset is not None:
            _read_dataset(statistics)
        root = find_root(data.root)
        arguments = {k: v.replace("{root}", root) if isinstance(v, str) else v for k, v in arguments.items()}
        if "annotations" not in arguments:
            return statistics  # a dataset that needs them could not be built, which is an issue already
        file_kind = getattr(constructor, "file_kind", None)
        if file_kind == "objects":
            _read_detection_file(statistics, arguments)
        elif statistics.dataset is None and file_kind is not None:
            find_issues = panoptic_issues if file_kind == "panoptic" else caption_issues
            statistics.issues += describe_issues(find_issues(read_json(arguments["annotations"])), where)
    except VitkitError as error:
        if statistics.dataset is not None:  # otherwise `statistics` already has the error
            statistics.issues.append(Issue("annotations", "fail", str(error), where))
    return statistics


def _read_dataset(statistics: DatasetStatistics) -> None:
    dataset = statistics.dataset
    statistics.image_ids = list(dataset.sample_ids())
    statistics.classes = list(dataset.classes or ())
    statistics.category_ids = list(() if dataset.category_ids is None else dataset.category_ids)
    if dataset.has_images and not dataset.is_video:
        paths = [dataset.image_path(index) for index in range(len(dataset))]
        statistics.files = None if None in paths else paths
    kinds = [kind for annotations, kind in _KINDS.items() if annotations in dataset.annotations]
    statistics.kind = dataset.task or next(iter(kinds), "text" if dataset.has_vocabularies else "other")
    if dataset.file_kind == "panoptic":
        _read_panoptic_file(statistics)
    elif statistics.kind == "classification" and (shown := dataset.image_classes()) is not None:
        statistics.image_indices, statistics.labels = shown
    elif dataset.file_kind is None:
        _read_samples(statistics)


def _read_samples(statistics: DatasetStatistics) -> None:
    """Count the objects of the first images; the classes of label maps are counted later, with the images."""
    dataset, pairs = statistics.dataset, []
    for index in range(min(len(dataset), _MAX_SAMPLED)):
        if "panoptic" in dataset.annotations:
            pairs += [(index, segment["label"]) for segment in dataset.load_panoptic(index).segments_info]
        elif {"label", "objects"} & set(dataset.annotations):
            target = dataset[(index, index)]["target"]
            if "phrases" in target:  # whose numbers are labels, in place of classes
                continue
            pairs += [(index, int(label)) for label in target.get("labels", [target.get("label")])]
            statistics.kind = "instance" if "masks" in target else statistics.kind
    if pairs:
        statistics.sampled = True
        statistics.set_objects(pairs)


def _read_detection_file(statistics: DatasetStatistics, arguments: Mapping[str, Any]) -> None:
    statistics.kind = "instance" if arguments.get("masks") else "detection"
    path = Path(arguments["annotations"])
    source = AnnotationSource(
        path,
        None if arguments.get("images") is None else Path(arguments["images"]),
        *(arguments.get(name) for name in ("format", "split", "names", "first")),
    )
    form, content, folder, notes, _ = source.read_unchecked(log=False)
    statistics.issues += [Issue("annotations", "note", note, statistics.where) for note in notes()]
    file_issues = detection_issues(content)
    statistics.issues += describe_issues(file_issues, statistics.where)
    if any(not file_issue.part for file_issue in file_issues):
        return
    parts = _without_issues(content, file_issues)
    if statistics.dataset is None:
        categories = sorted(parts["categories"], key=lambda category: category["id"])
        names = {category["id"]: category["name"] for category in categories}
        statistics.category_ids, statistics.classes = list(names), list(names.values())
        statistics.image_ids = [image["id"] for image in parts["images"]]
    else:
        parts["images"] = source.choose_images(parts["images"])
        ids = {image["id"] for image in parts["images"]}
        parts["annotations"] = [annotation for annotation in parts["annotations"] if annotation["image_id"] in ids]
    file = CheckedDetectionFile(
        path.name,
        statistics.where,
        **parts,
        needs_masks=bool(arguments.get("masks")),
        drops_bad_boxes=arguments.get("bad_boxes") == "drop",
        data=AnnotatedImages(form, path, folder, parts),
    )
    statistics.issues += file.issues()
    index_of_image = {image_id: index for index, image_id in enumerate(statistics.image_ids)}
    names = {category["id"]: category["name"] for category in parts["categories"]}
    labels = new_labels(list(names.values()), statistics.classes).tolist()
    label_of_category = dict(zip(names, labels))
    objects = [a for a in parts["annotations"] if not a.get("iscrowd") and label_of_category[a["category_id"]] >= 0]
    statistics.set_objects([(index_of_image[a["image_id"]], label_of_category[a["category_id"]]) for a in objects])


def _without_issues(content: Mapping[str, Any], file_issues: Sequence[FileIssue]) -> dict[str, list[dict]]:
    """Return the lists of a detection file without the entries that have an issue or refer to such an entry."""
    wrong = {(file_issue.part, file_issue.position) for file_issue in file_issues}
    parts = {
        part: [entry for position, entry in enumerate(content[part]) if (part, position) not in wrong]
        for part in ("images", "annotations", "categories")
    }
    image_ids, category_ids = ({entry["id"] for entry in parts[part]} for part in ("images", "categories"))
    parts["annotations"] = [
        a for a in parts["annotations"] if a["image_id"] in image_ids and a["category_id"] in category_ids
    ]
    return parts


def _read_panoptic_file(statistics: DatasetStatistics) -> None:
    dataset = statistics.dataset
    content = read_json(dataset.annotation_file)
    entry_of = {entry["image_id"]: entry for entry in content["annotations"]}
    entries = [entry_of[int(image_id)] for image_id in dataset.image_ids]
    name = dataset.annotation_file.name
    statistics.issues += describe_panoptic(entries, content["categories"], name, statistics.where)
    statistics.listed_segments = [entry["segments_info"] for entry in entries]
    label_of = {category_id: label for label, category_id in enumerate(statistics.category_ids)}
    statistics.set_objects(
        [
            (index, label_of[segment["category_id"]])
            for index, entry in enumerate(entries)
            for segment in entry["segments_info"]
            if segment["category_id"] in label_of and not (segment.get("iscrowd") and dataset.task != "semantic")
        ]
    )
