"""Images with captions whose phrases are grounded in boxes, for text-prompted detectors."""

import logging
import marshal
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitkit.data.datasets.annotation_table import AnnotationTable, image_columns
from vitkit.data.datasets.base import ListedObjects, require_folders
from vitkit.data.formats.grounding import (
    GROUNDING_FORMATS,
    GroundedImage,
    Region,
    Span,
    detect_grounding_format,
    read_grounded,
    read_label_map,
    read_odvg,
)
from vitkit.data.transforms.annotated_image import AnnotatedImage, Transforms
from vitkit.errors import ConfigError, DataError
from vitkit.io.image_files import ImageStore, check_inside
from vitkit.registry import DATASETS, Spec, nearest
from vitkit.structures import Sample
from vitkit.text.vocabulary import normalize_text
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

_SENTENCE = re.compile(r"[^\s.?](?:[^.?]*[^\s.?])?")
"""A part of a caption between the marks that end a phrase of a prompt."""


class GroundedObjects(NamedTuple):
    """The objects of an image for evaluation, each of which belongs to a region."""

    boxes_xyxy: np.ndarray
    """(N, 4) float32, in pixels."""
    regions: np.ndarray
    """(N,) int64: objects of one region are named by the same phrase, of which any may be found."""
    is_expression: bool
    """Whether the whole caption names them, as in RefCOCO."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GroundingTable(AnnotationTable):
    """Images with objects that phrases of a text name; their labels are then numbers of phrases."""

    texts: np.ndarray
    """(bytes,) uint8, for each image with a text, marshalled, its phrases, and for each object the spans and the number
    of its region."""
    text_offsets: np.ndarray
    """(N + 1,) int64; the text of image i is the bytes text_offsets[i] to text_offsets[i + 1], none if it has
    classes."""


@DATASETS.register
class GroundingDataset(ListedObjects):
    """Images with classes, or with a caption whose words name regions; for `data.prompts`.

    An image with several captions is several samples. The sentences of a caption are the phrases of its prompt, and
    each object is named by some of the characters of its sentence. Where the whole caption names all objects (RefCOCO),
    it is one phrase. Lines of ODVG with classes get their prompts as the images of other datasets do.

    Args:
        images: folder of the images.
        annotations: ODVG's JSON lines, MDETR's JSON, the folder of Flickr30k Entities, or RefCOCO's pickle.
        transforms: see `BaseImageDataset`; captions that say "left" or "right" must not be flipped.
        format: "odvg", "mdetr", "flickr30k" or "refcoco"; None: by the ending of the file.
        split: for the latter two, a split such as "val" or "testA"; None: all.
        label_map: for classes in ODVG, the JSON file with their names; None: each object has its `category`.
        bad_boxes: what to do with boxes that have no area inside their image: "error", or "drop" to remove and count
            them.
        first: use only this many samples.
        allow_outside: also read files that lie outside the folder.
    Raises:
        DataError: a file or folder is missing, or the annotations are invalid.
        ConfigError: an argument is not one of those above, or is not for this format.
    """

    annotations = ("regions",)
    table: GroundingTable

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        *,
        transforms: Spec | Transforms | None = None,
        format: str | None = None,
        split: str | None = None,
        label_map: str | Path | None = None,
        bad_boxes: str = "error",
        first: int | None = None,
        allow_outside: bool = False,
    ):
        # Without `masks` it is no source for transforms that combine images, whose captions cannot be combined.
        super().__init__(transforms)
        self.masks = False
        if bad_boxes not in ("error", "drop"):
            raise ConfigError(f"dataset GroundingDataset: bad_boxes is {bad_boxes!r}; expected 'error' or 'drop'.")
        if first is not None and first < 1:
            raise ConfigError(f"first: got {first}; expected at least 1, or none for all samples.")
        if format is not None and format not in GROUNDING_FORMATS:
            raise ConfigError(f"format: no {format!r}. {nearest(format, GROUNDING_FORMATS)}")
        require_folders(images=images)
        self.annotation_file = Path(annotations)
        format = format or detect_grounding_format(self.annotation_file)
        if label_map is not None and format != "odvg":
            raise ConfigError(f"label_map: only ODVG has classes, not {GROUNDING_FORMATS[format].text}. Leave it out.")
        names = None if label_map is None else read_label_map(Path(label_map))
        source = (
            read_odvg(self.annotation_file, names)
            if format == "odvg" and split is None
            else read_grounded(self.annotation_file, format, split)
        )
        self.store = ImageStore(images)
        drop = bad_boxes == "drop"
        self.table = self._read_table(source, names, first, drop=drop, allow_outside=allow_outside).share()
        self.check_first_image()

    def _read_table(
        self,
        source: Iterable[GroundedImage],
        names: dict[int, str] | None,
        first: int | None,
        *,
        drop: bool,
        allow_outside: bool,
    ) -> GroundingTable:
        entries, boxes, labels, counts, texts = [], [], [], [], []
        class_of: dict[int, str] = {} if names is None else names
        dropped = 0
        for number, image in enumerate(source, start=1):
            regions = []
            for region in image.regions:
                kept = [box for box in region.boxes_xyxy if _has_area(box, image, drop=drop)]
                dropped += len(region.boxes_xyxy) - len(kept)
                regions += [region._replace(boxes_xyxy=kept)] if kept else []
            of_objects = [index for index, region in enumerate(regions) for _ in region.boxes_xyxy]
            if image.caption is None:
                for region in regions:
                    _check_class(class_of, region, image.where)
                numbers, text = [region.label for region in regions], b""
            else:
                phrases, numbers, spans = _as_phrases(image.caption, regions)
                per_object = None if spans is None else [spans[index] for index in of_objects]
                text = marshal.dumps((phrases, per_object, of_objects))
            entries.append({"id": number, **image._asdict()})
            boxes += [box for region in regions for box in region.boxes_xyxy]
            labels += [numbers[index] for index in of_objects]
            counts.append(len(of_objects))
            texts.append(text)
            if number == first:
                break
        if not entries:
            raise DataError(f"annotations: '{self.annotation_file}' has no image. Correct the path, or the split.")
        listed = (entry["file_name"] for entry in entries)
        check_inside(self.store.folder, listed, self.annotation_file.name, allow_outside=allow_outside)
        columns = image_columns(entries)
        limits = np.repeat(columns["sizes"][:, ::-1], counts, axis=0)
        text_offsets = np.cumsum([0, *map(len, texts)])
        category_ids, numbers = sorted(class_of), np.array(labels, np.int64)
        if class_of:
            shows_classes = np.repeat(np.diff(text_offsets) == 0, counts)
            numbers[shows_classes] = np.searchsorted(category_ids, numbers[shows_classes])
        logger.info(
            f"{self.annotation_file.name}: {pluralize(len(entries), 'samples')}, "
            f"{sum(map(bool, texts))} with a caption; {pluralize(len(labels), 'objects')}, "
            f"{pluralize(dropped, 'bad boxes')} dropped"
        )
        return GroundingTable(
            **columns,
            classes=[class_of[label] for label in category_ids],
            category_ids=category_ids,
            offsets=np.cumsum([0, *counts]),
            labels=numbers,
            boxes_xyxy=np.array(boxes, np.float64).reshape(-1, 4).clip(0, np.tile(limits, 2)).astype(np.float32),
            texts=np.frombuffer(b"".join(texts), np.uint8),
            text_offsets=text_offsets,
        )

    def load_annotated(self, index: int) -> AnnotatedImage:
        """Load an image with its objects, whose labels are their positions among those of the image."""
        rows = slice(self.table.offsets[index], self.table.offsets[index + 1])
        return AnnotatedImage(self.load_image(index), self.table.boxes_xyxy[rows], np.arange(rows.stop - rows.start))

    def load_sample(self, index: int, seed: int | None) -> Sample:
        """Load an image with its objects; that of a caption also has `phrases`, see `DetectionTarget`."""
        sample = super().load_sample(index, seed)
        target = sample["target"]
        positions = target["labels"].numpy()
        target["labels"] = target["labels"].new_tensor(self.table.labels[self.table.offsets[index] :][positions])
        if text := self._text(index):
            phrases, spans, _ = text
            target["phrases"] = phrases
            if spans is not None:
                target["phrase_spans"] = [spans[position] for position in positions]
        return sample

    def _text(self, index: int) -> tuple[list[str], list[list[Span]] | None, list[int]] | None:
        """Return the phrases of an image, and the spans and the region of each object; None if it has classes."""
        start, stop = self.table.text_offsets[index : index + 2]
        return marshal.loads(self.table.texts[start:stop]) if stop > start else None

    def phrases(self) -> Iterator[str] | None:
        if not len(self.table.texts):
            return None
        texts = map(self._text, range(len(self)))
        return (phrase for text in texts if text for phrase in text[0])

    def image_classes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """See `Dataset`; captions show no class."""
        if self.classes is None:
            return None
        images = self.table.image_indices()
        shows_classes = np.diff(self.table.text_offsets)[images] == 0
        pairs = np.unique(np.stack([images, self.table.labels], axis=1)[shows_classes], axis=0)
        return pairs[:, 0], pairs[:, 1]

    def located(self, index: int) -> GroundedObjects:
        """Return the objects of a caption, for `GroundingEvaluator`.

        Raises:
            DataError: the image has classes in place of a caption.
        """
        text = self._text(index)
        if text is None:
            raise DataError(
                f"{self.annotation_file.name}: image {self.image_ids[index]} has classes in place of a caption. "
                "Evaluate by CocoEvaluator, with the dataset CocoDetection, which reads these lines."
            )
        rows = slice(self.table.offsets[index], self.table.offsets[index + 1])
        return GroundedObjects(self.table.boxes_xyxy[rows], np.array(text[2], np.int64), text[1] is None)


def _has_area(box: list[float], image: GroundedImage, *, drop: bool) -> bool:
    x0, y0, x1, y1 = box
    if min(x1, image.width) > max(x0, 0) and min(y1, image.height) > max(y0, 0):
        return True
    if drop:
        return False
    raise DataError(
        f"{image.where}: bbox {box} has no area in its image '{image.file_name}' of {image.width}x{image.height} "
        "pixels. Correct it, or leave such boxes out by bad_boxes='drop'."
    )


def _check_class(class_of: dict[int, str], region: Region, where: str) -> None:
    """Note the name of a class, or raise DataError if its label has another name."""
    if class_of.setdefault(region.label, region.name) != region.name:
        raise DataError(
            f"{where}: label {region.label} is {region.name!r:.80}, and {class_of[region.label]!r:.80} before. Give "
            "each label one name, or a label_map."
        )


def _as_phrases(caption: str, regions: list[Region]) -> tuple[list[str], list[int], list[list[Span]] | None]:
    """Split a caption into sentences, which a prompt has as phrases.

    Returns:
        the phrases; for each region the number of its phrase, and its characters in it, None if all of a phrase names
        each region. A region in several sentences has that in which most of its characters are.
    """
    begin, end = len(caption) - len(caption.lstrip()), len(caption.rstrip(" .?\n\t"))
    if regions and all(len(r.spans) == 1 and r.spans[0][0] <= begin and r.spans[0][1] >= end for r in regions):
        return [normalize_text(re.sub(r"[.?]", " ", caption))], [0] * len(regions), None
    phrases: list[str] = []
    places: list[tuple[int, int, int]] = []  # begin, end and number of each sentence
    number_of: dict[str, int] = {}
    for match in _SENTENCE.finditer(caption):
        # A prompt has each phrase once.
        number = number_of.setdefault(normalize_text(match[0]).lower(), len(phrases))
        if number == len(phrases):
            phrases.append(match[0])
        places.append((match.start(), match.end(), number))
    numbers, spans = [], []
    for region in regions:
        parts = [
            (number, [(max(b, begin) - begin, min(e, end) - begin) for b, e in region.spans if b < end and e > begin])
            for begin, end, number in places
        ]
        number, part = max(parts, key=lambda numbered: sum(e - b for b, e in numbered[1]))
        numbers.append(number)
        # A sentence that is there twice may be written with other blanks.
        spans.append([(b, min(e, len(phrases[number]))) for b, e in part])
    return phrases, numbers, spans
