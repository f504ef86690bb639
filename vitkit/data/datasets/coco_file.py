"""Reads and checks COCO detection files, and files of other formats as if they were COCO's."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.data.formats import AnnotatedImages, detect_format, read_annotations
from vitkit.data.formats.annotated import UNREADABLE, matches_any
from vitkit.data.formats.exporters import explain_issues, find_listed_files, read_exporters_fields
from vitkit.data.formats.sizes import fit_sizes
from vitkit.errors import ConfigError, DataError
from vitkit.io.coco_schema import FileIssue, bad_box_issues, detection_issues, raise_issues, segmentation_issues
from vitkit.io.json_files import read_json

logger = logging.getLogger("vitkit")


@dataclass(frozen=True)
class AnnotationSource:
    """Where annotations are stored, and which of them are used."""

    annotations: Path
    """A file in COCO's format; or a file or folder in another one, see vitkit.data.formats."""
    images: Path | None = None
    """Folder of the images; None: the format's default location."""
    format: str | None = None
    """A key of vitkit.data.formats.FORMATS; None: detected from the files."""
    split: str | None = None
    """One of the splits that the format names; None: all images, if the format names no splits."""
    names: Sequence[str] | None = None
    """Use only images whose file names match one of these patterns; None: all."""
    first: int | None = None
    """Use only this many images, from the start of the file; None: all."""

    def is_json(self) -> bool:
        """Whether the annotations are one JSON file in COCO's format."""
        is_json = self.annotations.suffix.lower() == ".json" and self.annotations.is_file()
        return is_json and self.format in (None, "coco") and self.images is not None and self.split in (None, "all")

    def format_name(self) -> str:
        """Return the name of the format; the files must have been read by `read_unchecked`."""
        is_json = self.annotations.suffix.lower() == ".json" and self.annotations.is_file()
        return self.format or ("coco" if is_json else detect_format(self.annotations, self.images))

    def read_unchecked(self, *, log: bool = True) -> "Unchecked":
        """Read the content without checking COCO's fields; `choose` then selects what is used.

        Args:
            log: whether to log what was assumed and left out.
        Raises:
            DataError: there is no such file, or a file of another format is invalid.
        """
        if self.format in (None, "coco") and self.annotations.suffix.lower() == ".json":
            content = read_json(self.annotations)
            is_labelme = isinstance(content, dict) and "shapes" in content
            if self.images is not None and self.split in (None, "all") and not is_labelme:
                notes = [*read_exporters_fields(content), *find_listed_files(content, self.images)]
                if isinstance(content, dict) and {*map(type, map(content.get, ("images", "annotations")))} == {list}:
                    notes += fit_sizes(content, self.images, measure_all=False, strict=False).notes
                for note in notes if log else ():
                    logger.warning("%s: %s", self.annotations, note)
                return Unchecked(content, self.images, notes)
        data = read_annotations(
            self.annotations,
            self.images,
            format=self.format,
            check_segmentations=False,
            check_sizes=False,
            measure_all=False,
            allow_outside=True,
        )
        notes = data.notes
        _report(data, log=log)  # before the split, which does not keep what was left out
        if self.split is not None or self.names is None:
            data = data.split(self.split)
        return Unchecked(data.content, data.folder, notes)

    def choose(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the images that are used, with their annotations.

        Raises:
            ConfigError, DataError: there is no such image.
        """
        if self.names is not None:
            images = [image for image in content["images"] if matches_any(image["file_name"], self.names)]
            if not images:
                raise DataError(f"{self.annotations.name}: no image's name matches any of names={list(self.names)}.")
            content = _with_images(content, images)
        return keep_first_images(content, self.first)


class Unchecked(NamedTuple):
    """The content of annotations before COCO's fields are checked."""

    content: Any
    """For COCO the JSON as it is, apart from what `notes` say; of other formats `images`, `annotations` and
    `categories`."""
    folder: Path
    """Folder of the images."""
    notes: list[str]
    """What was assumed, and read in another form than COCO's."""


def _report(data: AnnotatedImages, *, log: bool) -> None:
    """Log what was assumed and left out in reading; raise a DataError if images cannot be read."""
    for note in data.notes if log else ():
        logger.info("%s: %s", data.source, note)
    for reason, names in data.left_out.items():
        if reason == UNREADABLE:
            raise DataError(
                f"{names[0]} {len(names)} of the images in '{data.source}' cannot be read; `vitkit data convert` "
                "leaves them out."
            )
        if log:
            logger.warning("%s: left out %d %s, such as %s", data.source, len(names), reason, names[0])


class DetectionFile(NamedTuple):
    """The content of a detection file without its unusable annotations."""

    content: dict[str, Any]
    """`images`, `annotations` and `categories` as in the file."""
    folder: Path
    """Folder of the images."""
    num_dropped: int
    """Number of annotations left out because their boxes are empty or outside their images."""
    wrong_segmentations: list[FileIssue]
    """The invalid segmentations, which were removed from their annotations."""
    notes: list[str]
    """What was assumed in reading."""


def read_coco_file(
    source: AnnotationSource, *, masks: bool = True, drop_bad_boxes: bool = False, log: bool = True
) -> DetectionFile:
    """Read a detection file and check everything in it that is used.

    Args:
        masks: every annotation needs a valid segmentation; otherwise invalid ones are removed.
        drop_bad_boxes: leave out annotations whose box is empty or outside its image, in place of an error.
        log: see `AnnotationSource.read_unchecked`.
    Raises:
        DataError: no such file, not JSON, or its content is invalid.
    """
    name = source.annotations.name
    content, folder, notes = source.read_unchecked(log=log)
    if issues := detection_issues(content):
        explain_issues(issues, content, name)
        raise_issues(issues, name)
    content = source.choose(content)
    bad_boxes = bad_box_issues(content)
    if bad_boxes and not drop_bad_boxes:
        raise_issues(bad_boxes, name)
    dropped = {issue.position for issue in bad_boxes}
    if dropped:
        usable = [entry for position, entry in enumerate(content["annotations"]) if position not in dropped]
        content = {**content, "annotations": usable}
    wrong = segmentation_issues(content, required=masks)
    if masks:
        raise_issues(wrong, name)
    for issue in wrong:
        del content["annotations"][issue.position]["segmentation"]
    return DetectionFile(content, folder, len(dropped), wrong, notes)


def keep_first_images(content: dict[str, Any], count: int | None) -> dict[str, Any]:
    """Return the content of an annotation file with only its first `count` images and their annotations; None: all.

    Raises:
        ConfigError: count is below 1.
    """
    if count is None:
        return content
    if count < 1:
        raise ConfigError(f"first: got {count}; expected at least 1, or none for all images.")
    return _with_images(content, content["images"][:count])


def _with_images(content: dict[str, Any], images: list[dict[str, Any]]) -> dict[str, Any]:
    image_ids = {image["id"] for image in images}
    annotations = [annotation for annotation in content["annotations"] if annotation["image_id"] in image_ids]
    return {**content, "images": images, "annotations": annotations}
