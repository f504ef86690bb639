"""A person's pictures and annotations as training and validation data, for `vitkit start`."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.image_folder import ImageFolder
from vitkit.data.datasets.panoptic import read_panoptic_file
from vitkit.data.datasets.semantic import paired_names
from vitkit.data.formats import FORMAT_NAMES, AnnotatedImages, read_annotations
from vitkit.data.formats.annotated import IMAGE_SUFFIXES
from vitkit.data.formats.class_files import class_file_near, read_class_file
from vitkit.data.formats.writing import place_picture, write_coco
from vitkit.errors import DataError
from vitkit.ops.image_files import read_label_map, upright_size

NAMES_OF_NO_CLASS = {"void", "ignore", "ignored", "unlabelled", "unlabeled"}
"""Classes of label maps that are neither trained nor evaluated."""
MAX_VALUES = 256
QUERIES_PER_OBJECT = 2.5
"""Queries of a detector for each object of the fullest image: DETR has 100 for COCO's 63 at most, DINO 900."""


@dataclass(frozen=True)
class OwnData:
    """Data that is split, and how a config of configs/start names it."""

    summary: str
    num_train: int
    num_val: int
    short_side: int
    """Median of the images, pixels."""
    config_lines: list[str]
    """Python that sets `cfg`."""


Split = dict[str, list[int]]
"""Positions of the images in "train" and "val"."""


def read_own_data(task: str, images: Path, annotations: Path | None, *, share: float, out: Path) -> OwnData:
    """Read annotations and split their images.

    Args:
        task: a key of READERS.
        images: folder of the pictures; without `annotations`, what tells where they are.
        annotations: a file or a folder.
        share: of the images that validate, unless the data is split already.
        out: folder for what has to be written.
    Raises:
        DataError: they cannot be read, or are too few to split.
    """
    if not images.exists():
        raise DataError(f"no file or folder '{images}'. Give the folder of the pictures, then their annotations.")
    return READERS[task](images, annotations, share, out)


def read_detection(images: Path, annotations: Path | None, share: float, out: Path, masks: bool = False) -> OwnData:
    """Read boxes, or masks of objects, in any format that `read_annotations` knows; write COCO's files."""
    folder = images if annotations is not None else None
    data = read_annotations(annotations or images, folder)
    if masks and not all(annotation.get("segmentation") for annotation in data.annotations):
        raise DataError(f"'{data.source}' has objects without a mask; --task detection learns their boxes.")
    classes = {annotation_id: set() for annotation_id in (image["id"] for image in data.images)}
    for annotation in data.annotations:
        classes[annotation["image_id"]].add(annotation["category_id"])
    files = [data.folder / image["file_name"] for image in data.images]
    if {"train", "val"} <= data.splits.keys():
        ids = {name: data.splits[name] for name in ("train", "val")}
    else:
        split = split_images(files, [classes[image["id"]] for image in data.images], share)
        ids = {name: [data.images[k]["id"] for k in positions] for name, positions in split.items()}
    lines = [f'cfg["model"]["num_queries"] = {num_queries(data)}  # the fullest image has {fullest(data)} objects']
    for name, image_ids in ids.items():
        part = data.selected(image_ids)
        write_coco(part, out / f"{name}.json", {})
        lines.append(_update(name, images=data.folder, annotations=out / f"{name}.json"))
    sides = [min(image["width"], image["height"]) for image in data.images]
    return OwnData(
        _summary(f"{FORMAT_NAMES[data.format]}: {data.summary()}", ids),
        len(ids["train"]), len(ids["val"]), round(statistics.median(sides)), lines,
    )  # fmt: skip


def fullest(data: AnnotatedImages) -> int:
    """Return the number of objects of the image that has most."""
    return max(Counter(annotation["image_id"] for annotation in data.annotations).values(), default=0)


def num_queries(data: AnnotatedImages) -> int:
    """Return how many queries are enough for the fullest image, from 50 up in tens."""
    return max(50, 10 * round(QUERIES_PER_OBJECT * fullest(data) / 10))


def read_instance(images: Path, annotations: Path | None, share: float, out: Path) -> OwnData:
    """Read masks of objects; see `read_detection`."""
    return read_detection(images, annotations, share, out, masks=True)


def read_semantic(images: Path, labels: Path | None, share: float, out: Path) -> OwnData:
    """Read pictures and label maps of the same names; link them into folders of the splits.

    The classes are those of classes.txt or classes.json beside the label maps; without it, the values of the pixels.
    """
    if labels is None:
        raise DataError(f"'{images}': give the folder of the label pictures, too.")
    image_suffix, label_suffix = _suffix_in(images), _suffix_in(labels)
    names = paired_names(images, labels, image_suffix=image_suffix, label_suffix=label_suffix)
    values = [set(np.unique(read_label_map(labels / f"{name}{label_suffix}")).tolist()) for name in names]
    found = set().union(*values) - {255}
    class_file = class_file_near(labels)
    if class_file is None and len(found) > MAX_VALUES:
        raise DataError(
            f"'{labels}': the label pictures hold {len(found)} different values, so that they are no classes. Give "
            "pictures of class numbers, or name the classes in classes.txt beside them, a line each."
        )
    named = read_class_file(class_file) if class_file else {value: f"class {value}" for value in sorted(found)}
    classes = {value: name for value, name in named.items() if name.lower() not in NAMES_OF_NO_CLASS}
    ignored = sorted(({255} | found) - classes.keys())
    files = [images / f"{name}{image_suffix}" for name in names]
    split = split_by_folder(names) or split_images(files, [there & classes.keys() for there in values], share)
    lines = [f"classes = dict(classes={list(classes.values())!r}, values={list(classes)!r}, ignore={ignored!r})"]
    for part, positions in split.items():
        for name in (names[k] for k in positions):
            flat = name.replace("/", "_")
            place_picture(images / f"{name}{image_suffix}", out / part / "images" / f"{flat}{image_suffix}")
            place_picture(labels / f"{name}{label_suffix}", out / part / "labels" / f"{flat}{label_suffix}")
        suffixes = dict(image_suffix=image_suffix, label_suffix=label_suffix)
        lines.append(_update(part, "**classes", images=out / part / "images", labels=out / part / "labels", **suffixes))
    summary = f"{len(names)} images with label pictures of {len(classes)} classes"
    return OwnData(_summary(summary, split), len(split["train"]), len(split["val"]), _short_side(files), lines)


def read_panoptic(images: Path, annotations: Path | None, share: float, out: Path) -> OwnData:
    """Read COCO's panoptic file, whose maps lie in a folder of its name; write a file for each split."""
    if annotations is None:
        raise DataError(f"'{images}': give the panoptic JSON, too; its maps lie in a folder of its name.")
    content, maps = read_panoptic_file(annotations), annotations.with_suffix("")
    by_id = {image["id"]: image for image in content["images"]}
    entries = content["annotations"]
    files = [images / by_id[entry["image_id"]]["file_name"] for entry in entries]
    classes = [{segment["category_id"] for segment in entry["segments_info"]} for entry in entries]
    split = split_images(files, classes, share)
    lines = []
    for name, positions in split.items():
        chosen = [entries[k] for k in positions]
        part = {**content, "images": [by_id[entry["image_id"]] for entry in chosen], "annotations": chosen}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(part), encoding="utf-8")
        lines.append(_update(name, images=images, maps=maps, annotations=out / f"{name}.json"))
    summary = f"{len(entries)} images with panoptic maps of {len(content['categories'])} classes"
    return OwnData(_summary(summary, split), len(split["train"]), len(split["val"]), _short_side(files), lines)


def read_classification(images: Path, annotations: Path | None, share: float, out: Path) -> OwnData:
    """Read folders of classes; link their pictures into folders of the splits unless they are split already."""
    if annotations is not None:
        raise DataError(
            f"'{annotations}': --task classification reads folders of classes alone, '{images}/CLASS/*.jpg'."
        )
    parts = {name: images / name for name in ("train", "val")}
    if not all(folder.is_dir() for folder in parts.values()):
        data = ImageFolder(images)
        files = [data.image_path(k) for k in range(len(data))]
        names = [Path(data.image_ids[k]).parts[0] for k in range(len(data))]
        for part, positions in split_images(files, [{name} for name in names], share).items():
            parts[part] = out / part
            for k in positions:
                place_picture(files[k], out / part / names[k] / files[k].name)
    datasets = {part: ImageFolder(folder) for part, folder in parts.items()}
    train, val = datasets["train"], datasets["val"]
    files = [train.image_path(k) for k in range(len(train))]
    lines = [_update(part, folder=folder) for part, folder in parts.items()]
    summary = f"{len(train) + len(val)} images of {len(train.classes)} classes"
    ids = {name: range(len(data)) for name, data in datasets.items()}
    return OwnData(_summary(summary, ids), len(train), len(val), _short_side(files), lines)


def split_by_folder(names: Sequence[str]) -> Split | None:
    """Return the split that the folders train and val make; None if there are none."""
    split = {part: [k for k, name in enumerate(names) if name.split("/")[0] == part] for part in ("train", "val")}
    return split if all(split.values()) else None


READERS: dict[str, Callable[..., OwnData]] = {
    "detection": read_detection,
    "instance": read_instance,
    "semantic": read_semantic,
    "panoptic": read_panoptic,
    "classification": read_classification,
}


def _update(part: str, *starred: str, **values: Any) -> str:
    """Write the line that sets keys of a split's dataset, with absolute paths."""
    texts = [f"{key}={(str(v.resolve()) if isinstance(v, Path) else v)!r}" for key, v in values.items()]
    return f'cfg["data"]["{part}"].update({", ".join([*starred, *texts])})'


def _summary(text: str, split: Mapping[str, Sequence[int]]) -> str:
    return f"{text}: {len(split['train'])} to train, {len(split['val'])} to validate"


def _suffix_in(folder: Path) -> str:
    """Return the most frequent ending of the pictures in a folder."""
    endings = Counter(path.suffix for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not endings:
        raise DataError(
            f"'{folder}' holds no pictures. Give the folder of the pictures, then that of the label pictures."
        )
    return endings.most_common(1)[0][0]


def _short_side(files: Sequence[Path]) -> int:
    return round(statistics.median(min(upright_size(path)) for path in files[:200]))
