"""Reads annotations of boxes and masks in the formats of other tools into the fields of COCO's format.

`read_annotations` detects which format a file or folder has; `CocoDetection` reads all of them through it, and `vitkit
convert` writes most of them.
"""

from collections import Counter
from itertools import combinations
from pathlib import Path

from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.data.formats.detecting import FORMATS, detect_format
from vitkit.data.formats.exporters import IGNORED, is_ignored
from vitkit.data.formats.sizes import fit_images
from vitkit.errors import ConfigError, DataError
from vitkit.io.coco_schema import detection_issues, raise_issues, segmentation_issues
from vitkit.io.folders import is_hidden, split_folders, split_of
from vitkit.io.image_files import MAX_PIXELS, check_inside
from vitkit.io.parsing import check_count
from vitkit.registry import nearest
from vitkit.text_format import pluralize

_PARTS = ("images", "labels", "annotations", "jpegimages")
"""Folders of a dataset's parts."""


def read_annotations(
    annotations: str | Path,
    images: str | Path | None = None,
    *,
    format: str | None = None,
    check_segmentations: bool = True,
    check_sizes: bool = True,
    measure_all: bool = True,
    allow_outside: bool = False,
) -> AnnotatedImages:
    """Read annotations of any format, and check every object.

    Args:
        annotations: a file, or a folder of files.
        images: folder of the images; None: the format's default location.
        format: one of FORMATS; None: detected from the files.
        check_segmentations: False if the caller checks them, because it can do without them or changes sizes first.
        check_sizes: whether an image whose file has another shape than annotated is an error; those of another scale
            are always scaled, see `fit_images`.
        measure_all: whether the size of every file is read, or only of some if there are many.
        allow_outside: whether file names may lead out of the folder of the images.
    Raises:
        DataError: there is no such file, its format is unknown or ambiguous, or its content is invalid.
        ConfigError: there is no such format.
    """
    annotations, images = Path(annotations), None if images is None else Path(images)
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format: no {format!r}. {nearest(format, FORMATS)}")
    if images is None:
        annotations = _inside_archive(annotations)
    format = format or detect_format(annotations, images)
    data = FORMATS[format].read(annotations, images)
    if not data.splits and format != "coco":
        _add_splits_of_folders(data)
    if not data.images:
        reasons = (f"left out {len(names)} {reason}, such as {names[0]}" for reason, names in data.left_out.items())
        where = f"'{annotations}' has no usable image below '{data.folder}'"
        raise DataError(f"annotations: {where}: {'; '.join(reasons) or 'it names none'}. Give the images' folder.")
    if data.categories:
        raise_issues(detection_issues(data.content), annotations.name)
    check_inside(data.folder, (i["file_name"] for i in data.images), annotations.name, allow_outside=allow_outside)
    counts = Counter(annotation["image_id"] for annotation in data.annotations)
    check_count(max(counts.values(), default=0), f"'{annotations}'")
    scaling = fit_images(
        data.images, data.folder, lambda: data.annotations, measure_all=measure_all, strict=check_sizes
    )
    scaling.apply(data.annotations)
    data.notes += scaling.notes
    data.changed.update(scaling.sizes)
    if check_segmentations:
        raise_issues(segmentation_issues(data.content, required=False), annotations.name)
        _check_run_lengths(data)
    names = Counter(category["name"] for category in data.categories)
    if repeated := [name for name, count in names.items() if count > 1]:
        data.notes.append(f"several classes are called {repeated[0]!r}; `--fix classes` makes them one")
    if data.annotations and all(annotation.get("iscrowd") for annotation in data.annotations):
        data.notes.append(
            f"all {len(data.annotations)} objects are crowd regions (iscrowd: 1), which are not trained on; "
            "`--fix crowds` makes them objects"
        )
    if data.format != "coco" and (num_ignored := sum(map(is_ignored, data.annotations))):
        data.notes.append(f"{IGNORED}: {num_ignored}")
    data.notes += _describe_splits(data)
    if outside := data.outside():
        count = len(outside)
        lie = "1 object lies outside its image:" if count == 1 else f"{count} objects lie outside their images, such as"
        data.notes.append(f"{lie} {outside[0]}")
    return data


def _inside_archive(folder: Path) -> Path:
    """Return the folder that an archive has put around its content, if a folder has nothing else."""
    while folder.is_dir():
        entries = [path for path in folder.iterdir() if not is_hidden(path.name)]
        names = [path.name for path in entries if path.is_dir() and not split_of(path.name)]
        if len(entries) != 1 or not names or names[0].lower() in _PARTS:
            break
        folder = entries[0]
    return folder


def _add_splits_of_folders(data: AnnotatedImages) -> None:
    """Put images into the splits that are the names of their first folders."""
    tops = {image["id"]: image["file_name"].partition("/")[0] for image in data.images if "/" in image["file_name"]}
    splits = split_folders({*tops.values()})
    if len({*splits.values()}) < 2 and len(tops) < len(data.images):  # images beside a folder, say, of tests
        return
    for image_id, top in tops.items():
        if top in splits:
            data.add_to_split(image_id, splits[top])


def _describe_splits(data: AnnotatedImages) -> list[str]:
    """Describe splits without objects, images that are in two splits, and files that stand for several images."""
    notes = []
    names = {image["id"]: image["file_name"] for image in data.images}
    annotated = {annotation["image_id"] for annotation in data.annotations}
    without = [name for name, ids in data.splits.items() if name != "test" and annotated.isdisjoint(ids)]
    notes += [f"no image of {name} has an object" for name in without if annotated]
    for (a, ids), (b, others) in combinations(data.splits.items(), 2):
        if shared := {*map(names.get, ids)} & {*map(names.get, others)}:
            notes.append(f"{pluralize(len(shared), 'images', 'are')} in both {a} and {b}, such as {min(shared)}")
    counts = Counter(names.values())
    if repeated := [name for name, count in counts.items() if count > 1]:
        number = sum(counts[name] for name in repeated)
        notes.append(
            f"{pluralize(len(repeated), 'files', 'stand')} for {number} images, such as {repeated[0]}: their objects "
            "are of different images, or of one that is listed several times"
        )
    return notes


def _check_run_lengths(data: AnnotatedImages) -> None:
    """Raise DataError for run lengths of huge images: they are decoded to a size that nothing but the file claims."""
    images = {image["id"]: image for image in data.images if image["width"] * image["height"] > MAX_PIXELS}
    for annotation in data.annotations if images else ():
        image = images.get(annotation["image_id"])
        if image and isinstance(annotation.get("segmentation"), dict):
            raise DataError(
                f"{data.source.name}: image {image['file_name']!r} is {image['width']}x{image['height']} pixels and "
                f"has run lengths; expected at most {MAX_PIXELS} pixels. Correct the size, or cut it into tiles."
            )


__all__ = ["FORMATS", "AnnotatedImages", "detect_format", "read_annotations"]
