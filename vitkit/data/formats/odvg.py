"""ODVG's JSON lines of classes as annotations (https://github.com/longzw1997/Open-GroundingDino); those with captions
are read by `vitkit.data.formats.grounding`."""

from dataclasses import replace
from pathlib import Path

from vitkit.data.formats.annotated import AnnotatedImages, read_head
from vitkit.data.formats.grounding import read_label_map, read_odvg
from vitkit.errors import DataError
from vitkit.io.folders import is_hidden

LABEL_MAP = "label_map.json"
"""The file beside ODVG's lines that names the classes, in the order of their labels."""


def is_odvg_file(path: Path) -> bool:
    """Whether a file looks like ODVG's JSON lines."""
    head = read_head(path)
    return b'"filename"' in head and (b'"detection"' in head or b'"grounding"' in head)


def read_odvg_classes(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read ODVG's lines of classes, with the names in label_map.json beside them, or else in their `category`.

    Args:
        annotations: a file, or a folder with a file for each split.
        images: folder of the images; None: `images` beside the file, or the file's folder.
    Raises:
        DataError: a line is invalid, or has a caption.
    """
    paths, folder = [annotations], annotations.parent
    if annotations.is_dir():
        folder = annotations
        paths = sorted(path for path in annotations.glob("*.jsonl") if not is_hidden(path.name))
    names = read_label_map(folder / LABEL_MAP) if (folder / LABEL_MAP).is_file() else None
    beside = folder / "images"
    data = AnnotatedImages("odvg", annotations, images or (beside if beside.is_dir() else folder))
    classes = dict(names or {})
    for path in paths:
        for image in read_odvg(path, names):
            if image.caption is not None:
                raise DataError(
                    f"{image.where}: has a caption, which only dict(type='GroundingDataset', images=DIR, "
                    f"annotations='{path}') reads. Give lines with a detection."
                )
            split = path.stem if annotations.is_dir() and len(paths) > 1 else None
            image_id = data.add_image(image.file_name, image.width, image.height, split)
            for region in image.regions:
                if classes.setdefault(region.label, region.name) != region.name:
                    raise DataError(
                        f"{image.where}: label {region.label} is {region.name!r:.80}, and "
                        f"{classes[region.label]!r:.80} before. Give each label one name."
                    )
                for x0, y0, x1, y1 in region.boxes_xyxy:
                    data.add_object(image_id, region.label, [x0, y0, x1 - x0, y1 - y0])
    data.categories[:] = [{"id": label, "name": name} for label, name in sorted(classes.items())]
    return replace(data)  # which indexes the classes
