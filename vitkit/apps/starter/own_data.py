"""Turn a user's images and annotations into training and validation data, for `vitkit start`."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitkit.apps.datasets.contents import count_classes, summarize
from vitkit.apps.datasets.splitting import split_dataset
from vitkit.apps.datasets.writing import describe_left_out, link_image, write_coco
from vitkit.data.datasets.image_folder import ImageFolder
from vitkit.data.datasets.panoptic import read_panoptic_file
from vitkit.data.datasets.semantic import pair_files
from vitkit.data.formats import FORMATS, AnnotatedImages, read_annotations
from vitkit.data.formats.class_files import (
    ClassFile,
    check_palettes,
    count_pixels,
    describe_255,
    find_class_file,
    is_void,
    parse_class_file,
    read_class_values,
)
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, data_files, split_folders, subfolders
from vitkit.io.image_files import upright_size
from vitkit.io.output import write_text
from vitkit.structures import IGNORE_INDEX
from vitkit.text_format import pluralize

NO_CLASSES = {"void", "ignore", "ignored", "unlabeled", "unlabelled"}
"""Names of classes in label maps that are excluded from training and evaluation."""
MAX_CLASSES = 256


@dataclass(frozen=True)
class OwnData:
    """Data that has been split, and the lines of a config of configs/start that use it."""

    summary: str
    num_train: int
    num_val: int
    short_side: int
    """The median short side of the images in pixels."""
    config_lines: list[str]
    """Lines of Python that set the data in `cfg`."""
    classes: Sequence[str] = ()
    fewest_objects: int = 0
    """The number of training objects of the rarest class that has any; 0 for data without objects."""
    most_objects: int = 0
    """The number of objects of the image with the most; 0 for data without objects."""
    elongation: float = 1.0
    """The long side of the most elongated image over its short side; 1 for data without objects."""
    has_test: bool = False
    """Whether some images are for testing, and neither trained nor validated on."""


def read_own_data(task: str, images: Path, annotations: Path | None, *, fraction: float, out: Path) -> OwnData:
    """Read annotations and split their images, unless they already have the splits train and val.

    Images that look the same, bursts and frames of one recording stay in the same split, see `split_dataset`.

    Args:
        task: a key of READERS.
        images: folder of the images; without `annotations`, a file or folder that leads to images and annotations.
        annotations: a file or a folder.
        fraction: the fraction of the images for validation.
        out: folder for the files that have to be written.
    Raises:
        DataError: the data cannot be read, or has too few images to split.
    """
    if not images.exists():
        raise DataError(f"no file or folder '{images}'. Give the folder of the images, then their annotations.")
    return READERS[task](images, annotations, fraction, out)


def read_detection(
    images: Path,
    annotations: Path | None,
    fraction: float,
    out: Path,
    task: Literal["detection", "instance", "keypoints"] = "detection",
) -> OwnData:
    """Read boxes, masks or keypoints of objects in any format that `read_annotations` takes; write files in COCO's
    format.

    Images that the format marks as test images become `data.test`.
    """
    suffixes = (
        {file.suffix.lower() for file in data_files(images)} if annotations is None and images.is_dir() else set()
    )
    if suffixes and suffixes <= IMAGE_SUFFIXES:
        raise DataError(
            f"'{images}' has only images. Name their annotations after it: vitkit start {images} labels.json. Without "
            f"annotations, a backbone can be trained: vitkit pretrain {images}"
        )
    data = read_annotations(annotations or images, images if annotations is not None else None)
    if data.annotations and all(annotation.get("iscrowd") for annotation in data.annotations):
        raise DataError(
            f"'{data.source}': all {len(data.annotations)} objects are crowd regions (iscrowd: 1), which are not "
            f"trained on. If they are objects: vitkit data convert {data.source} --images {data.folder} --fix crowds "
            "--out NEW.json"
        )
    if task == "instance" and not all(annotation.get("segmentation") for annotation in data.annotations):
        raise DataError(f"'{data.source}' has objects without a mask. Choose --task detection, which learns boxes.")
    labeled = sum(any(annotation.get("keypoints", ())[2::3]) for annotation in data.annotations)
    if task == "keypoints" and not labeled:
        raise DataError(
            f"'{data.source}' has no object with a keypoint. Choose --task detection, which learns boxes, or give the "
            "file that has keypoints after the folder of the images."
        )
    notes, left_out = data.notes, data.left_out
    if task != "keypoints" and labeled:
        notes.append(f"{pluralize(labeled, 'objects', 'have')} keypoints, which --task keypoints learns")
    file_names = {image["id"]: image["file_name"] for image in data.images}
    train, val = ({file_names[number] for number in data.splits.get(name, ())} for name in ("train", "val"))
    if not train and data.splits.get("test"):
        raise DataError(
            f"'{data.source}' has test images ({len(data.splits['test'])}), but none to train on. Give the folder or "
            "file of those to train on, which are then split."
        )
    if train and train == val:  # as in a data.yaml of YOLO without splits, which needs both keys
        notes.append("train and val are the same images, which are therefore split")
    parts = {"test": data.split("test")} if data.splits.get("test") else {}
    if parts and not parts["test"].annotations:
        notes.append(f"{pluralize(len(parts.pop('test').images), 'test images', 'have')} no objects, and are not used")
    if train and (absent := file_names.keys() - set().union(*data.splits.values())):
        left_out["images that are in no split"] = [file_names[number] for number in sorted(absent)]
    if train and (not val or train == val):
        data = data.split("train")
    if not {"train", "val"} <= data.splits.keys():
        split_dataset(data, {"val": fraction})
    print_notes((*notes, *data.notes), left_out | data.left_out)
    most = max(Counter(annotation["image_id"] for annotation in data.annotations).values(), default=0)
    parts = {name: data.split(name) for name in ("train", "val")} | parts
    lines = []
    for name, part in parts.items():
        write_coco(part, out / f"{name}.json", {})
        lines.append(_update(name, images=data.folder, annotations=out / f"{name}.json"))
    sides = [sorted((image["width"], image["height"])) for image in data.images]
    summary = f"{FORMATS[data.format].text}: {summarize(data)}"
    if "test" in parts and "test" not in data.splits:  # they were divided anew without it
        summary += f", and {pluralize(len(parts['test'].images), 'test images')}"
    fewest = min(filter(None, count_classes(parts["train"]).values()), default=0)
    return OwnData(
        summary,
        *_sizes(data.splits),
        round(statistics.median(short for short, _ in sides)),
        lines,
        [category["name"] for category in data.categories],
        fewest_objects=fewest,
        most_objects=most,
        elongation=max(long / short for short, long in sides),
        has_test="test" in parts,
    )


def read_instance(images: Path, annotations: Path | None, fraction: float, out: Path) -> OwnData:
    """Read masks of objects; see `read_detection`."""
    return read_detection(images, annotations, fraction, out, "instance")


def read_keypoints(images: Path, annotations: Path | None, fraction: float, out: Path) -> OwnData:
    """Read keypoints of objects; see `read_detection`."""
    return read_detection(images, annotations, fraction, out, "keypoints")


def read_semantic(images: Path, labels: Path | None, fraction: float, out: Path) -> OwnData:
    """Read images and label maps with the same names; write the names of each split.

    The classes are those of classes.txt, classes.json or labelmap.txt beside the label maps, which may have its colors;
    without such a file, the pixel values.
    """
    if labels is None:
        raise DataError(f"'{images}': also give the folder of the label images.")
    if images.resolve() == labels.resolve():
        raise DataError(
            f"'{images}' is given as the folder of the images and as that of the label images. Move the label images, "
            "such as Roboflow's *_mask.png, to a folder of their own, named like their images."
        )
    suffixes = dict(image_suffix=_suffix_in(images), label_suffix=_suffix_after(images, labels) or _suffix_in(labels))
    pairs = pair_files(images, labels, **suffixes)
    names = list(pairs)
    class_file = find_class_file(labels)
    named, colors, _ = parse_class_file(class_file) if class_file else ClassFile({}, {}, None)
    if not colors:
        check_palettes(labels / pair.labels for pair in pairs.values())
    values = [count_pixels(read_class_values(labels / pair.labels, colors)) for pair in pairs.values()]
    pixels = sum(values, Counter())
    _check_edges(labels, pixels, named)
    every_value = {value for value in pixels if not is_void(value, pixels, named)}
    print_notes([*describe_255(pixels, named), *([f"classes from {class_file}"] if class_file else [])], {})
    if class_file is None and len(every_value) > MAX_CLASSES:
        raise DataError(
            f"'{labels}': the label images have {len(every_value)} different values, so these are not classes. "
            "Give images of class numbers, or name the classes in classes.txt beside them, one per line."
        )
    named = named or {value: f"class {value}" for value in sorted(every_value)}
    classes = {value: name for value, name in named.items() if name.lower() not in NO_CLASSES}
    if len(classes.keys() & every_value) < 2:
        raise DataError(
            f"'{labels}': the label images have the values {', '.join(map(str, sorted(pixels)))}, of which "
            f"fewer than two are classes{f' of {class_file}' if class_file else ''}. Name the classes by their values "
            'in classes.json beside them: {"0": "background", "255": "object"}.'
        )
    ignored = sorted(({IGNORE_INDEX} | every_value) - classes.keys())
    splits = find_split_folders(names)
    if splits is None:
        files = [pair.image for pair in pairs.values()]
        splits = split_images(images, files, [of_image.keys() & classes.keys() for of_image in values], fraction)
    if absent := {*range(len(names))}.difference(*splits.values()):
        print_notes([], {"images that are in no split": [names[k] for k in sorted(absent)]})
    colored = f", colors={str(class_file.resolve())!r}" if colors else ""
    lines = [f"classes = dict(classes={list(classes.values())!r}, values={list(classes)}, ignore={ignored}{colored})"]
    for name, positions in splits.items():
        list_file = out / f"{name}.txt"
        write_text(list_file, "".join(f"{names[k]}\n" for k in positions))
        lines.append(_update(name, "**classes", images=images, labels=labels, names=list_file, **suffixes))
    files = [images / pair.image for pair in pairs.values()]
    summary = f"label images: {_counts(splits)} of {pluralize(len(classes), 'classes')}"
    if unnamed := sorted(every_value - named.keys()):
        summary += f"; not named in {class_file}, and ignored: values {', '.join(map(str, unnamed))}"
    sizes = (*_sizes(splits), _short_side(files))
    return OwnData(summary, *sizes, lines, list(classes.values()), has_test="test" in splits)


def _check_edges(folder: Path, pixels: Mapping[int, int], names: Mapping[int, str]) -> None:
    """Raise DataError if label images seem to be masks of 0 and 255 with smooth edges; see `is_void`."""
    between = sorted(pixels.keys() - {0, IGNORE_INDEX})
    share = (pixels.get(0, 0) + pixels.get(IGNORE_INDEX, 0)) / max(sum(pixels.values()), 1)
    # Numbers of classes hardly reach 128 where most pixels are 0 and 255. Values above 255 are colors.
    is_mask = max(pixels, default=0) == IGNORE_INDEX and share > 0.75
    if not names and is_mask and len(between) >= 5 and between[-1] > IGNORE_INDEX // 2:
        raise DataError(
            f"labels '{folder}': {share:.1%} of the pixels are 0 and 255, the others {len(between)} values between "
            f"({', '.join(map(str, between[:3]))}, …), as at smooth edges after resizing. Save the masks without "
            "interpolation, or name the classes in classes.json beside them."
        )


def read_panoptic(images: Path, annotations: Path | None, fraction: float, out: Path) -> OwnData:
    """Read COCO's panoptic file, whose maps are in a folder of the same name; write a file for each split."""
    if annotations is None:
        raise DataError(f"'{images}': also give the panoptic JSON; its maps are in a folder of the same name.")
    content = read_panoptic_file(annotations)
    by_id = {image["id"]: image for image in content["images"]}
    entries = content["annotations"]
    files = [by_id[entry["image_id"]]["file_name"] for entry in entries]
    classes = [{segment["category_id"] for segment in entry["segments_info"]} for entry in entries]
    splits = split_images(images, files, classes, fraction)
    lines = []
    for name, positions in splits.items():
        chosen = [entries[k] for k in positions]
        part = {**content, "images": [by_id[entry["image_id"]] for entry in chosen], "annotations": chosen}
        write_text(out / f"{name}.json", json.dumps(part))
        lines.append(_update(name, images=images, maps=annotations.with_suffix(""), annotations=out / f"{name}.json"))
    summary = f"panoptic maps: {_counts(splits)} of {pluralize(len(content['categories']), 'classes')}"
    names = [category["name"] for category in content["categories"]]
    return OwnData(summary, *_sizes(splits), _short_side([images / name for name in files]), lines, names)


def read_classification(images: Path, annotations: Path | None, fraction: float, out: Path) -> OwnData:
    """Read a folder for each class; link the images into folders of the splits, unless these already exist."""
    if annotations is not None:
        raise DataError(f"'{annotations}': --task classification reads folders of classes, '{images}/CLASS/*.jpg'.")
    folders = _find_class_folders(images)
    if not {"train", "val"} <= folders.keys():
        images = folders.get("train", folders.get("", images))
        data = ImageFolder(images)
        folders |= {name: out / name for name in ("train", "val")}
        classes = [Path(name).parts[0] for name in data.image_ids]
        splits = split_images(images, data.image_ids, [{name} for name in classes], fraction)
        for name, positions in splits.items():
            if absent := sorted({*data.classes} - {classes[k] for k in positions}):
                raise DataError(
                    f"class folder '{images / absent[0]}' gives no image to {name}: it has too few, or all of them are "
                    "copies, a burst or frames of one recording, which stay together. Add images, or remove the folder."
                )
        for name, positions in splits.items():
            for k in positions:
                link_image(data.image_path(k), folders[name], data.image_ids[k])
    parts = {name: ImageFolder(folders[name]) for name in ("train", "val")}
    if "test" in folders:
        try:
            parts["test"] = ImageFolder(folders["test"])
        except DataError as error:  # such as photos without a class
            print_notes([f"the test images are not used: {error}"], {})
    splits = {name: list(range(len(part))) for name, part in parts.items()}
    lines = [_update(name, folder=folders[name]) for name in parts]
    summary = f"folders of classes: {_counts(splits)} of {pluralize(len(parts['train'].classes), 'classes')}"
    files = [parts["train"].image_path(k) for k in splits["train"]]
    sizes = (*_sizes(splits), _short_side(files))
    return OwnData(summary, *sizes, lines, parts["train"].classes, has_test="test" in parts)


def _find_class_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of the classes of each split, "" for those of a folder without splits.

    Folders with nothing but one folder of folders are entered, as archives put one around their content.

    Raises:
        DataError: two folders are of one split, or only one of several has folders of splits.
    """
    while True:
        names = subfolders(folder)
        if len(names) != 1 or not subfolders(folder / names[0]):
            break
        folder = folder / names[0]
    split_of_folder = split_folders(names)
    inside = {name: split_folders(subfolders(folder / name)) for name in names if not split_of_folder}
    if found := next((name for name in names if "train" in inside.get(name, {}).values()), None):
        others = ", ".join(name for name in names if name != found)
        raise DataError(
            f"'{folder / found}' has the splits {', '.join(inside[found])}, and {others} beside it may not be a class. "
            f"Give '{folder / found}'; or if it is a class, put the splits above the classes: train/{found}."
        )
    folders: dict[str, Path] = {}
    for name, split in split_of_folder.items():
        if split in folders:
            raise DataError(
                f"'{folder}' has two folders of {split}, {folders[split].name} and {name}. Give a folder with one each."
            )
        folders[split] = _find_class_folders(folder / name).get("", folder / name)
    if folders and (others := [name for name in names if name not in split_of_folder]):
        print(f"  left out: {', '.join(others)}, beside the splits {', '.join(split_of_folder)}")
    return folders or {"": folder}


READERS: dict[str, Callable[..., OwnData]] = {
    "detection": read_detection,
    "instance": read_instance,
    "keypoints": read_keypoints,
    "semantic": read_semantic,
    "panoptic": read_panoptic,
    "classification": read_classification,
}


def split_images(
    folder: Path, files: Sequence[str], classes: Sequence[Iterable[int | str]], fraction: float
) -> dict[str, list[int]]:
    """Split images with `split_dataset`.

    Args:
        folder: the folder of the images.
        files: paths relative to the folder.
        classes: the classes of each image.
        fraction: the fraction of the images for validation.
    Returns:
        the indices of the images of "train" and "val".
    """
    data = AnnotatedImages("coco", folder, folder)
    for file, of_image in zip(files, classes):
        image_id = data.add_image(file, 0, 0)
        for name in of_image:
            data.add_object(image_id, str(name), (0, 0, 0, 0))
    split_dataset(data, {"val": fraction})
    print_notes(data.notes, data.left_out)
    return {name: [image_id - 1 for image_id in ids] for name, ids in data.splits.items()}


def print_notes(notes: Iterable[str], left_out: Mapping[str, Sequence[str]]) -> None:
    """Print the notes about the data, and what was left out of them."""
    for note in dict.fromkeys(notes):
        print(f"  note: {note}")
    for line in describe_left_out(left_out):
        print(f"  left out: {line}")


def find_split_folders(names: Sequence[str]) -> dict[str, list[int]] | None:
    """Return the splits given by folders with names such as train, val and test; None without the first two.

    Raises:
        DataError: there is a folder of test images, but not both of the others.
    """
    tops = [name.partition("/")[0] for name in names]
    split_of_top = split_folders({*tops})
    folders = [split_of_top.get(top) for top in tops]
    splits = {part: [k for k, name in enumerate(folders) if name == part] for part in ("train", "val", "test")}
    if not splits["test"]:
        del splits["test"]
    elif not all(splits.values()):
        raise DataError(
            "the folders have test images, but not both train and val: give the folders of the images to train on, "
            "which are then split, such as images/train."
        )
    return splits if all(splits.values()) else None


def _update(part: str, *starred: str, **values: Any) -> str:
    """Write the lines that set keys of a split's dataset, with absolute paths; test is like val in all others."""
    texts = [f"{key}={(str(v.resolve()) if isinstance(v, Path) else v)!r}" for key, v in values.items()]
    copied = ['cfg["data"]["test"] = dict(cfg["data"]["val"])'] * (part == "test")
    updated = [f'cfg["data"]["{part}"].update(', *(f"    {text}," for text in [*starred, *texts]), ")"]
    return "\n".join(copied + updated)


def _sizes(splits: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    return len(splits["train"]), len(splits["val"])


def _counts(splits: Mapping[str, Sequence[int]]) -> str:
    parts = ", ".join(f"{len(positions)} {name}" for name, positions in splits.items())
    return f"{pluralize(sum(map(len, splits.values())), 'images')} ({parts})"


def _suffix_in(folder: Path) -> str | None:
    """Return the ending of the images in a folder; None if they have several."""
    endings = {path.suffix for path in data_files(folder) if path.suffix.lower() in IMAGE_SUFFIXES}
    if not endings:
        raise DataError(f"'{folder}' contains no images. Give the folder of the photos, then that of the label images.")
    return endings.pop() if len(endings) == 1 else None


def _suffix_after(images: Path, labels: Path) -> str | None:
    """Return what all label images add to the name of their image, such as "_mask.png"; None if they add nothing."""
    stems = {path.relative_to(images).with_suffix("").as_posix() for path in data_files(images)}
    files = [path for path in data_files(labels) if path.suffix.lower() in IMAGE_SUFFIXES]
    parts = [path.relative_to(labels).as_posix().rpartition("_") for path in files]
    suffixes = {f"_{end}" for _, _, end in parts}
    return suffixes.pop() if len(suffixes) == 1 and all(stem in stems for stem, _, _ in parts) else None


def _short_side(files: Sequence[Path]) -> int:
    return round(statistics.median(min(upright_size(path)) for path in files[:200]))
