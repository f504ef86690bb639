"""Checks that data are those of a published figure: counts, checksums, that no image is missing, a sample of images."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitkit import model_zoo
from vitkit.data.datasets.base import BaseImageDataset
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import Split
from vitkit.errors import ConfigError, DataError
from vitkit.io.json_stream import read_json_parts
from vitkit.io.local_cache import file_digest
from vitkit.io.shared_memory import text_at
from vitkit.protocols.dataset import Dataset
from vitkit.text_format import pluralize

NUM_OPENED = 20
"""Number of images that are opened, evenly spaced among all."""
_COUNTS = ("images", "annotations", "categories")
_LABEL_FOLDERS = ("labels", "maps")
"""Arguments of datasets that are folders of label images."""


def known_data() -> dict[str, dict[str, Any]]:
    """Return the published data whose content is known: name -> `url`, and the counts, and checksums if known, of its
    annotation `files` by name or of its splits."""
    return json.loads((model_zoo.FOLDER / "datasets.json").read_text(encoding="utf-8"))


def check_data(config: Mapping[str, Any], name: str, split: Split = "val", *, published: bool = True) -> dict[str, Any]:
    """Check the data of a config, and describe them for a record.

    Args:
        config: the checked config; `data.root` is the folder of the data.
        name: the name of the data that the figure is of, such as "COCO 2017".
        split: the split that is evaluated.
        published: whether the names of annotation files tell the data, as for models trained on others.
    Returns:
        `name` and `split`; `checked`, by what they are known to be the published ones: "checksum", "counts" or None, as
        for drawn ones; `counts`; `files`, the SHA-256 of annotation files and of all files in folders of label images,
        by their paths below data.root; `index`, that of the list of samples and classes; `endings` of the names of
        image files, and how many images have each; `opened`, how many images were opened, and the SHA-256 of their
        pixels.
    Raises:
        DataError: a file is missing or damaged, there are other images or annotations than published, or none.
        ConfigError: the config has no such split.
    """
    data = config["data"]
    if data.get(split) is None:
        raise ConfigError(f"data.{split}: the config has none. Choose another split.")
    root = Path(data.get("root", "data"))
    paths = {
        key: Path(value.replace("{root}", str(root)))
        for key, value in (data[split].items() if isinstance(data[split], Mapping) else ())
        if isinstance(value, str) and "{root}" in value
    }
    found, counts, files = _known(paths.get("annotations") if published else None, name, split), {}, {}
    checked, sizes = None, {}
    if "annotations" in paths and paths["annotations"].suffix == ".json" and paths["annotations"].is_file() and found:
        checked, counts = _check_annotations(paths["annotations"], *found)
        sizes = _listed_sizes(paths["annotations"])
    dataset = DataSettings(**data).evaluation_dataset(split)
    if not counts:
        counts = {dataset.noun: len(dataset)} | ({"classes": len(dataset.classes)} if dataset.classes else {})
        checked = _compare_counts(paths, counts, *found) if found else None
    endings = _check_files(dataset, f"{root}", found[0] if found else name)
    for key, path in paths.items():
        if path.is_file():
            files[_below(path, root)] = file_digest(path, "sha256")
        elif key in _LABEL_FOLDERS:
            files[_below(path, root)] = _folder_digest(path)
    return {
        "name": found[0] if found else name,
        "split": split,
        "checked": checked,
        "counts": counts,
        "files": files,
        "index": _index_digest(dataset),
        "endings": endings,
        "opened": _open_some(dataset, sizes, found[0] if found else name),
    }


def _known(annotations: Path | None, name: str, split: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name of published data and what is known of them; None if nothing is."""
    data = known_data()
    for published, entry in data.items():
        if annotations is not None and annotations.name in entry.get("files", {}):
            return published, entry["files"][annotations.name]
    return next(((each, data[each][split]) for each in data if name.startswith(each) and split in data[each]), None)


def _check_annotations(path: Path, name: str, published: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """Compare an annotation file with the published one; return what was compared, and its counts."""
    digest = file_digest(path, "sha256")
    if digest == published.get("sha256"):
        return "checksum", {each: published[each] for each in _COUNTS if each in published}
    counts = count_annotations(path)
    differing = [each for each in _COUNTS if each in published and counts[each] != published[each]]
    url = known_data()[name]["url"]
    if differing:
        expected = ", ".join(f"{published[each]:,} {each}" for each in _COUNTS if each in published)
        same = next(
            (
                f", those of {file} of {other}"
                for other, entry in known_data().items()
                for file, its in entry.get("files", {}).items()
                if all(its.get(each, counts[each]) == counts[each] for each in _COUNTS)
            ),
            "",
        )
        has = ", ".join(f"{counts[each]:,} {each}" for each in _COUNTS)
        raise DataError(f"{path}: has {has}{same}; expected {expected}, those of {name}. Get them from {url}.")
    if "sha256" in published:
        raise DataError(
            f"{path}: has the counts of {name}, but its sha256 begins {digest[:12]}, expected "
            f"{published['sha256'][:12]}: its content was changed. Get the file from {url}."
        )
    return "counts", counts


def count_annotations(path: Path) -> dict[str, int]:
    """Return the number of images, annotations and categories of a file in COCO's format, which is not kept in memory.

    Raises:
        DataError: it is not such a file.
    """
    counts = {"annotations": 0}

    def take(entries: list[Any]) -> None:
        counts["annotations"] += len(entries)

    content = read_json_parts(path, "annotations", take)
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise DataError(f"{path}: has no list of images; expected annotations in COCO's format.")
    return {"images": len(content["images"]), **counts, "categories": len(content.get("categories") or ())}


def _compare_counts(paths: Mapping[str, Path], counts: Mapping[str, int], name: str, published: Mapping) -> str:
    """Compare the counts of a dataset with the published ones; return "counts"."""
    differing = {each: published[each] for each in counts if each in published and published[each] != counts[each]}
    if differing:
        where = next(iter(paths.values()), "the data")
        has = ", ".join(f"{counts[each]:,} {each}" for each in differing)
        expected = ", ".join(f"{number:,} {each}" for each, number in differing.items())
        raise DataError(f"{where}: has {has}; expected {expected}, those of {name}. See {known_data()[name]['url']}.")
    return "counts"


def _listed_sizes(path: Path) -> dict[int, tuple[int, int]]:
    """Return the (height, width) of each image that a file in COCO's format lists, by its id."""
    images = read_json_parts(path, "annotations", lambda entries: None)["images"]
    return {image["id"]: (image["height"], image["width"]) for image in images if "height" in image}


def _check_files(dataset: Dataset, root: str, name: str) -> dict[str, int]:
    """Return how many images of a dataset have each ending; raise a DataError if images or maps are missing."""
    if not dataset.has_images:
        return {}
    store = dataset.store if isinstance(dataset, BaseImageDataset) else None
    endings, missing = Counter(), {"images": [], "maps": []}
    for index in range(len(dataset)):
        path = dataset.image_path(index)
        if path is not None:
            endings[path.suffix.lower()] += 1
            if not (path.is_file() if store is None else store.has(dataset.file_name(index))):
                missing["images"].append(path)
        if isinstance(dataset, CocoPanoptic):
            table = dataset.table
            path = dataset.map_folder / text_at(table.map_names, table.map_offsets, index)
            missing["maps"] += [path] * (not path.is_file())
    for what, paths in missing.items():
        if paths:
            raise DataError(
                f"{root}: {pluralize(len(paths), what, 'are', of=len(dataset))} missing, such as '{paths[0]}': the "
                f"folder is only a part of {name}. Unpack all of it, or set data.root=DIR."
            )
    return dict(sorted(endings.items()))


def _open_some(dataset: Dataset, sizes: Mapping[int, tuple[int, int]], name: str) -> dict[str, Any]:
    """Open some images; return how many, and the checksum of their pixels.

    Args:
        sizes: the published (height, width) of images, by their ids: a dataset scales its objects to the files.
        name: the name of the data.
    Raises:
        DataError: an image cannot be read, or has another size than published.
    """
    if not dataset.has_images:
        return {"images": 0}
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(NUM_OPENED, len(dataset))).round().astype(int)).tolist()
    digest = hashlib.sha256()
    for index in indices:
        image = np.ascontiguousarray(dataset.load_image(index))
        size = sizes.get(dataset.image_ids[index], image.shape[:2]) if sizes else image.shape[:2]
        if size != image.shape[:2]:
            raise DataError(
                f"image '{dataset.image_path(index)}' is {image.shape[1]}x{image.shape[0]} pixels (width x height), "
                f"and {size[1]}x{size[0]} in {name}: it was changed. Get the images from {known_data()[name]['url']}."
            )
        digest.update(f"{image.shape}".encode() + image.tobytes())
    return {"images": len(indices), "sha256": digest.hexdigest()}


def _index_digest(dataset: Dataset) -> str:
    """Return the checksum of the list of a dataset's samples and classes."""
    digest = hashlib.sha256()
    for part in dataset.index_parts():
        is_array = isinstance(part, np.ndarray) and part.dtype != object
        digest.update(np.ascontiguousarray(part) if is_array else f"{part}\n".encode(errors="replace"))
    return digest.hexdigest()


def _folder_digest(folder: Path) -> str:
    """Return the checksum of the names and contents of all images below a folder of label images."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.png")):
        digest.update(f"{path.relative_to(folder).as_posix()} {file_digest(path, 'sha256')}\n".encode())
    return digest.hexdigest()


def _below(path: Path, root: Path) -> str:
    """Return a path below the root of the data, which names nobody's folders; its name if it is elsewhere."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
