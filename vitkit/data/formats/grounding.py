"""Reads images with texts grounded in boxes: ODVG, MDETR's JSON, Flickr30k Entities and RefCOCO.

A text is a caption, of which each region names the characters [begin, end): a phrase is never searched in it, since
"dog" is also in "hot dog". Lines of ODVG may have classes in place of a caption.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.errors import DataError
from vitkit.io.coco_schema import detection_issues, raise_issues
from vitkit.io.json_files import read_json, read_json_lines
from vitkit.io.parsing import check_count, check_distinct, class_name, coordinate, read_xml
from vitkit.io.pickle_files import read_plain_pickle
from vitkit.io.segmentations import is_side
from vitkit.io.text_files import read_lines
from vitkit.text_format import is_name, pluralize

logger = logging.getLogger("vitkit")

Span = tuple[int, int]
"""Characters [begin, end) of a caption."""
_ENTITY = re.compile(r"\[/EN#(\d+)((?:/[\w-]+)+) ([^\[\]]*)\]")
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_UNIT = "expected characters [begin, end) of the caption, neither tokens nor bytes"


class Region(NamedTuple):
    """The boxes in an image that a phrase of a caption, or a class, names."""

    boxes_xyxy: list[list[float]]
    """One or more, in pixels."""
    name: str
    """The phrase, or the name of the class."""
    spans: tuple[Span, ...] = ()
    """The characters of the caption that name it; none for a class."""
    label: int = -1
    """The number of the class; -1 for a phrase."""


class GroundedImage(NamedTuple):
    """An image with one caption, or with classes."""

    file_name: str
    width: int
    height: int
    caption: str | None
    """None: its regions are of classes."""
    regions: list[Region]
    where: str
    """The file and the line or the entry that it is from, for messages."""


def read_odvg(path: Path, label_map: Mapping[int, str] | None = None) -> Iterator[GroundedImage]:
    """Yield the images of a file of ODVG's JSON lines, https://github.com/longzw1997/Open-GroundingDino.

    A line has a `detection` with `instances` of classes, or a `grounding` with a `caption` and `regions`. If no region
    of a line has `tokens_positive`, nothing tells where in the caption its phrases are, and the caption is made of the
    phrases.

    Args:
        label_map: the name of each label; None: instances have their `category`.
    Raises:
        DataError: a line is invalid, or most spans do not agree with their phrases.
    """
    differences: Counter[str] = Counter()
    for number, line in read_json_lines(path):
        where = f"{path.name} line {number}"
        if not isinstance(line, dict):
            raise DataError(f"{where}: is {line!r:.80}; expected an object with filename, height, width and more.")
        name, height, width = (line.get(field) for field in ("filename", "height", "width"))
        if not is_name(name) or not is_side(height) or not is_side(width):
            raise DataError(
                f"{where}: has filename {name!r:.80}, height {height!r:.20} and width {width!r:.20}; expected the name "
                "of a file and whole numbers of pixels. Correct it."
            )
        kinds = [kind for kind in ("detection", "grounding") if isinstance(line.get(kind), dict)]
        if len(kinds) != 1:
            got = " and ".join(kinds) or "neither detection nor grounding"
            raise DataError(f"{where}: has {got}; expected one of detection and grounding, an object. Correct it.")
        entry = line[kinds[0]]
        part = "instances" if kinds == ["detection"] else "regions"
        parts = entry.get(part, [])
        if not isinstance(parts, list) or not all(isinstance(value, dict) for value in parts):
            raise DataError(f"{where}: {part} is {parts!r:.80}; expected a list of objects. Correct it.")
        check_count(len(parts), where)
        if kinds == ["detection"]:
            caption, regions = None, [_instance(value, label_map, where) for value in parts]
        else:
            caption, regions = _read_caption(entry.get("caption"), parts, differences, where)
        yield GroundedImage(name, width, height, caption, regions, where)
    _check_agreement(differences)


def _instance(entry: Mapping[str, Any], label_map: Mapping[int, str] | None, where: str) -> Region:
    label, category = entry.get("label"), entry.get("category")
    if type(label) is not int or label < 0:
        raise DataError(f"{where}: label is {label!r:.80}; expected a whole number from 0. Correct it.")
    if label_map is None:
        name = class_name(category, f"{where}: category")
    elif label not in label_map:
        raise DataError(f"{where}: label {label} is not one of the {len(label_map)} of the label map. Correct either.")
    else:
        name = label_map[label]
        if category is not None and category != name:
            raise DataError(
                f"{where}: label {label} is {category!r:.80}, and {name!r} in the label map. Give the map of this file."
            )
    return Region([_corners(entry.get("bbox"), where)], name, label=label)


def _read_caption(
    caption: Any, entries: list[Mapping[str, Any]], differences: Counter[str], where: str
) -> tuple[str, list[Region]]:
    """Return the caption and regions of a line of ODVG; count those unlike their phrase by the first, others by ""."""
    check_caption(caption, where)
    without = [entry for entry in entries if entry.get("tokens_positive") is None]
    if without and len(without) < len(entries):
        raise DataError(f"{where}: a region has no tokens_positive, and others have. Give all of them theirs, or none.")
    regions = []
    for entry in entries:
        phrase = entry.get("phrase")
        if not isinstance(phrase, str) or not re.sub(r"[\s.?]", "", phrase):
            raise DataError(f"{where}: a region's phrase is {phrase!r:.80}; expected a text. Correct it.")
        boxes = entry.get("bbox")
        several = isinstance(boxes, list) and boxes and isinstance(boxes[0], list)
        boxes = [_corners(box, where) for box in (boxes if several else [boxes])]
        spans = () if without else check_spans(entry["tokens_positive"], caption, where)
        regions.append(Region(boxes, phrase, spans))
        if spans:
            text = " ".join(caption[begin:end] for begin, end in spans)
            difference = f"{where}: tokens_positive stand for {text!r:.60}, the phrase is {phrase!r:.60}"
            differences["" if _letters(text) == _letters(phrase) else next(filter(None, differences), difference)] += 1
    return _of_phrases(regions) if without else (caption, regions)


def _of_phrases(regions: list[Region]) -> tuple[str, list[Region]]:
    """Return a caption made of the phrases of regions, each once, and the regions with their characters in it."""
    spans: dict[str, Span] = {}
    caption = ""
    # A dot within a phrase would end it.
    phrases = [" ".join(re.sub(r"[.?]", " ", region.name).split()) for region in regions]
    for phrase in phrases:
        if phrase.lower() not in spans:
            spans[phrase.lower()] = (len(caption), len(caption) + len(phrase))
            caption += f"{phrase} . "
    return caption.strip(), [r._replace(spans=(spans[phrase.lower()],)) for r, phrase in zip(regions, phrases)]


def read_label_map(path: Path) -> dict[int, str]:
    """Return the name of each label from the JSON file that is beside ODVG's: {"0": "person", ...}; raise a DataError
    if it is not such a file, or two labels have one name."""
    content = read_json(path, key="label_map", remedy="Correct label_map.")
    if not isinstance(content, dict) or not content or not all(map(_NUMBER.fullmatch, content)):
        raise DataError(
            f'{path.name}: is {content!r:.80}; expected a label map: {{"0": "person", "1": "bicycle", ...}}.'
        )
    names = {int(key): class_name(name, f"{path.name}: the name of label {key}") for key, name in content.items()}
    check_distinct(names.values(), path.name)
    return dict(sorted(names.items()))


def read_mdetr(path: Path) -> Iterator[GroundedImage]:
    """Yield the images of MDETR's JSON (https://github.com/ashkamath/mdetr): COCO's fields, a `caption` for each image,
    and `tokens_positive` for each annotation; without these, the whole caption names it, as in RefCOCO.

    Raises:
        DataError: the file is invalid.
    """
    content = read_json(path)
    raise_issues(detection_issues(content), path.name)
    objects: dict[int, dict[tuple[Span, ...], list[list[float]]]] = {image["id"]: {} for image in content["images"]}
    captions = {image["id"]: image.get("caption") for image in content["images"]}
    for image in content["images"]:
        check_caption(image.get("caption"), f"{path.name}: image {image['id']}")
    for annotation in content["annotations"]:
        where = f"{path.name}: annotation {annotation.get('id')} (image {annotation['image_id']})"
        caption = captions[annotation["image_id"]]
        spans = annotation.get("tokens_positive")
        spans = ((0, len(caption)),) if spans is None else check_spans(spans, caption, where)
        x, y, width, height = annotation["bbox"]
        objects[annotation["image_id"]].setdefault(spans, []).append([x, y, x + width, y + height])
    for image in content["images"]:
        regions = [
            Region(boxes, " ".join(image["caption"][begin:end] for begin, end in spans), spans)
            for spans, boxes in objects[image["id"]].items()
        ]
        size = image["width"], image["height"]
        yield GroundedImage(image["file_name"], *size, image["caption"], regions, f"{path.name}: image {image['id']}")


def read_flickr30k(folder: Path, split: str | None = None) -> Iterator[GroundedImage]:
    """Yield each sentence of Flickr30k Entities (Plummer et al. 2015, https://arxiv.org/abs/1505.04870) with its image.

    Args:
        folder: contains `Annotations`, `Sentences`, and the lists train.txt, val.txt and test.txt.
        split: the name of a list; None: all.
    Raises:
        DataError: a file is missing or invalid.
    """
    for part in ("Annotations", "Sentences"):
        if not (folder / part).is_dir():
            raise DataError(f"annotations: no folder '{folder / part}'. Give the folder of Flickr30k Entities.")
    names = sorted(path.stem for path in (folder / "Sentences").glob("*.txt"))
    if split is not None:
        names = [name for _, name in read_lines(folder / f"{split}.txt", "annotations", remedy="Correct the path.")]
    for name in names:
        if not is_name(name) or "/" in name:
            raise DataError(f"{split}.txt: has {name!r:.80}; expected the number of an image. Correct it.")
        file_name, width, height, boxes = _flickr_boxes(folder / "Annotations" / f"{name}.xml")
        path = folder / "Sentences" / f"{name}.txt"
        for number, line in read_lines(path, "annotations", remedy="Download it again."):
            where = f"{path.name} line {number}"
            caption, mentions = _flickr_sentence(line, where)
            check_caption(caption, where)
            regions = [
                Region(boxes[entity], caption[begin:end], ((begin, end),))
                for entity, begin, end in mentions
                if entity in boxes
            ]
            yield GroundedImage(file_name, width, height, caption, regions, where)


def _flickr_boxes(path: Path) -> tuple[str, int, int, dict[str, list[list[float]]]]:
    """Return the name and the size of an image, and the boxes of each entity."""
    root = read_xml(path)
    name, size = root.findtext("filename"), [root.findtext(f"size/{side}") for side in ("width", "height")]
    width, height = (int(text) if text and text.isascii() and text.isdecimal() else 0 for text in size)
    if not is_name(name) or not is_side(width) or not is_side(height):
        raise DataError(f"{path.name}: has filename {name!r:.80} and size {size!r:.60}; expected a name and pixels.")
    boxes: dict[str, list[list[float]]] = {}
    for element in root.iter("object"):
        corners = [element.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
        if element.find("bndbox") is None:  # a scene, or something that is not visible
            continue
        # Their tools subtract 1 from all four, as pixels are counted from 1.
        box = [coordinate(text, f"{path.name}: {element.findtext('name')!r:.60}: bndbox") - 1 for text in corners]
        for entity in element.findall("name"):
            boxes.setdefault(str(entity.text), []).append(_corners(box, path.name))
    check_count(sum(map(len, boxes.values())), path.name)
    return name, width, height, boxes


def _flickr_sentence(line: str, where: str) -> tuple[str, list[tuple[str, int, int]]]:
    """Return the plain text of a sentence with marked phrases, and the entity and the characters of each."""
    caption, mentions, position = "", [], 0
    for match in _ENTITY.finditer(line):
        caption += line[position : match.start()]
        mentions.append((match[1], len(caption), len(caption) + len(match[3])))
        if not match[3].strip():
            raise DataError(f"{where}: the phrase of entity {match[1]} is empty. Correct it.")
        caption, position = caption + match[3], match.end()
    caption += line[position:]
    if "[/EN#" in caption:
        raise DataError(f"{where}: has a phrase that does not end: {line[line.index('[/EN#') :]!r:.80}. Correct it.")
    return caption, mentions


def read_refcoco(path: Path, split: str | None = None) -> Iterator[GroundedImage]:
    """Yield each expression of RefCOCO, RefCOCO+ or RefCOCOg (Yu et al. 2016, https://arxiv.org/abs/1608.00272).

    Args:
        path: the pickle, such as refs(unc).p, beside which instances.json lies; it is read without running its code.
        split: "train", "val", "testA", "testB" or "test"; None: all.
    Raises:
        DataError: a file is missing or invalid, or has no such split.
    """
    refs, file = read_plain_pickle(path), path.parent / "instances.json"
    content = read_json(file, remedy="It belongs beside RefCOCO's pickle.")
    raise_issues(detection_issues(content), file.name)
    if not isinstance(refs, list) or not all(isinstance(ref, dict) for ref in refs):
        raise DataError(f"{path.name}: is {refs!r:.80}; expected a list of RefCOCO's references. Download it again.")
    boxes = {annotation.get("id"): annotation["bbox"] for annotation in content["annotations"]}
    images = {image["id"]: image for image in content["images"]}
    splits = {ref.get("split") for ref in refs if isinstance(ref.get("split"), str)}
    if split is not None and split not in splits:
        raise DataError(f"{path.name}: has no split {split!r}; it has {', '.join(sorted(splits))}. Correct split=.")
    for number, ref in enumerate(refs):
        where = f"{path.name}: reference {number}"
        if split is not None and ref.get("split") != split:
            continue
        annotation_id, image_id, sentences = (ref.get(field) for field in ("ann_id", "image_id", "sentences"))
        if type(annotation_id) is not int or type(image_id) is not int or not isinstance(sentences, list):
            raise DataError(f"{where}: is {ref!r:.80}; expected numbers ann_id and image_id, and a list of sentences.")
        if annotation_id not in boxes or image_id not in images:
            raise DataError(f"{where}: {file.name} has no annotation {annotation_id} with image {image_id}.")
        image, (x, y, width, height) = images[image_id], boxes[annotation_id]
        for sentence in sentences:
            text = sentence.get("raw") or sentence.get("sent") if isinstance(sentence, dict) else None
            check_caption(text, where)
            region = Region([[x, y, x + width, y + height]], text, ((0, len(text)),))
            yield GroundedImage(image["file_name"], image["width"], image["height"], text, [region], where)


def check_caption(caption: Any, where: str) -> None:
    """Raise DataError unless a value is a text with a word."""
    if not isinstance(caption, str) or not re.search(r"[^\W_]", caption):
        raise DataError(f"{where}: the caption is {caption!r:.80}; expected a text with a word. Correct it.")
    if any("\ud800" <= letter <= "\udfff" for letter in caption):
        raise DataError(f"{where}: the caption {caption!r:.80} has half a character. Correct it.")


def check_spans(value: Any, caption: str, where: str) -> tuple[Span, ...]:
    """Return `tokens_positive` of a region; raise a DataError if they are not characters of the caption, or name no
    word."""
    pairs = value if isinstance(value, list) else None
    if not pairs or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(offset) is int for offset in pair) for pair in pairs
    ):
        raise DataError(f"{where}: tokens_positive is {value!r:.80}; expected a list of [begin, end]. Correct it.")
    for begin, end in pairs:
        if not 0 <= begin < end <= len(caption):
            raise DataError(
                f"{where}: tokens_positive has [{begin}, {end}], and the caption {len(caption)} characters; {_UNIT}."
            )
    if not re.sub(r"[\s.?]", "", "".join(caption[begin:end] for begin, end in pairs)):
        raise DataError(
            f"{where}: tokens_positive {value!r:.80} name no word of the caption {caption!r:.80}. Correct it."
        )
    return tuple((begin, end) for begin, end in pairs)


def _check_agreement(differences: Counter[str]) -> None:
    """Raise DataError if the characters of most regions differ from their phrases, and log if those of a few do."""
    for example in filter(None, differences):
        count = f"{differences[example]} of {pluralize(differences.total(), 'regions')}"
        if 2 * differences[example] > differences.total():
            raise DataError(f"{example}, and likewise in {count}; {_UNIT}. Convert them.")
        logger.warning(f"{example}; so in {count}, of which tokens_positive are used.")


def _letters(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _corners(box: Any, where: str) -> list[float]:
    if not isinstance(box, list) or len(box) != 4:
        raise DataError(f"{where}: bbox is {box!r:.80}; expected [x0, y0, x1, y1] in pixels. Correct it.")
    x0, y0, x1, y1 = (coordinate(value, f"{where}: a coordinate of bbox") for value in box)
    if x1 < x0 or y1 < y0:
        raise DataError(f"{where}: bbox is {box!r:.80}; expected corners [x0, y0, x1, y1], not a width and height.")
    return [x0, y0, x1, y1]


class GroundingFormat(NamedTuple):
    """A format of texts with located phrases, a row of `GROUNDING_FORMATS`."""

    text: str
    """What messages call it."""
    read: Callable[..., Iterator[GroundedImage]]
    """Takes the file or folder and, if it has several, the split."""
    has_splits: bool = False


GROUNDING_FORMATS = {
    "odvg": GroundingFormat("ODVG's JSON lines", read_odvg),
    "mdetr": GroundingFormat("MDETR's JSON", read_mdetr),
    "flickr30k": GroundingFormat("Flickr30k Entities, a folder", read_flickr30k, has_splits=True),
    "refcoco": GroundingFormat("RefCOCO's pickle", read_refcoco, has_splits=True),
}
"""The formats by the names that `format=` takes."""
_SUFFIXES = {".jsonl": "odvg", ".json": "mdetr", ".p": "refcoco", ".pkl": "refcoco"}


def detect_grounding_format(path: Path) -> str:
    """Return the format of a file or folder; raise a DataError if there is none, or it is in none of the formats."""
    name = "flickr30k" if path.is_dir() else _SUFFIXES.get(path.suffix.lower())
    if not path.exists() or name is None:
        what = "is in none of the formats" if path.exists() else "does not exist; expected one of"
        texts = "; ".join(f"{name}: {form.text}" for name, form in GROUNDING_FORMATS.items())
        raise DataError(f"annotations: '{path}' {what} ({texts}). Correct the path.")
    return name


def read_grounded(path: Path, format: str, split: str | None = None) -> Iterator[GroundedImage]:
    """Yield the images of a file or folder; raise a DataError if it is invalid, or a split is chosen of a format
    without them."""
    form = GROUNDING_FORMATS[format]
    if split is not None and not form.has_splits:
        raise DataError(f"split={split!r}: {form.text} has one split in each file. Leave it out.")
    return form.read(path, split) if form.has_splits else form.read(path)
