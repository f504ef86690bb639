"""The schema of COCO's files: one description of their fields, used by reading, evaluation and the doctor.

Each check returns all issues of a file. Types are compared exactly: `true` is not a number, and neither is a value
that is not finite or does not fit into 64 bits.
"""

import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from vitkit.errors import DataError
from vitkit.io.segmentations import describe_wrong_run_lengths, describe_wrong_segmentation, is_side, shows_no_pixel
from vitkit.text_format import is_name

MAX_SEGMENT_ID = (1 << 24) - 1
"""Largest segment id: a panoptic PNG has three channels of one byte."""
_NUMBERS = frozenset((int, float))
_BOX_LIMIT = 2**31
MAX_OUTSIDE = 0.5
"""Pixels by which a keypoint may lie outside its image: annotation tools round."""
_NAME_LIMIT = 1024
_NAME_BYTES = 255
"""Longest name of a file or folder, in bytes, on today's file systems."""
ANNOTATED_CLASSES = ("neg_category_ids", "not_exhaustive_category_ids")
"""Lists of category ids that LVIS's images have: those that the image certainly does not show, and those of which not
every object is annotated."""
_ABSENT = object()
_CORRECT = "Correct it."
_REMOVE_FIELD = "Correct it, or remove the field."
_DROP = "Correct it; boxes that are empty or outside their image may also be left out, by bad_boxes='drop'."
_GIVE_LVIS = "Give LVIS's file (lvis_v1_train.json), or read it as CocoDetection."
_OTHER_DATASET = "Give results of the config's data.val."


class FileIssue(NamedTuple):
    """One invalid value in a file."""

    part: str
    """The list that contains the entry, such as "annotations"; "" if a list, or an entry as a whole, is invalid."""
    position: int
    """Index of the entry in that list."""
    entry: str
    """Description of the entry: "annotation 17 (image 'a.jpg')"."""
    field: str
    message: str
    """What was got, what was expected, and the remedy."""
    count: int = 1
    """Number of issues of this kind, of which this is the first; see `IssueCounts`."""
    is_null: bool = False
    """Whether the value is null."""

    def __str__(self) -> str:
        return f"{self.entry} {self.message}"


class Field(NamedTuple):
    """The values that a field of an entry may have."""

    is_right: Callable[[Any], bool]
    expected: str
    remedy: str = _CORRECT
    default: Any = _ABSENT
    """A valid value that an absent field stands for; without one the field is required."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number of at most 64 bits."""
    return type(value) in _NUMBERS and -(2**63) <= value < 2**63


def is_box(box: Any) -> bool:
    """Whether a value is [x, y, width, height], finite numbers with no negative size; the box may be empty."""
    if type(box) is not list or len(box) != 4 or not _NUMBERS.issuperset(map(type, box)):
        return False
    x, y, width, height = box
    in_range = -_BOX_LIMIT < x < _BOX_LIMIT and -_BOX_LIMIT < y < _BOX_LIMIT
    return in_range and 0 <= width < _BOX_LIMIT and 0 <= height < _BOX_LIMIT


def _is_id(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_text(value: Any) -> bool:
    # JSON can hold half a character (a lone surrogate), which can neither be printed nor be part of a path.
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


def _is_file_name(value: Any) -> bool:
    if not is_name(value):
        return False
    parts = value.split("/")
    return parts[-1] not in ("", ".", "..") and all(len(part.encode()) <= _NAME_BYTES for part in parts)


def _one_of(ids: Collection[int | str], what: str, remedy: str) -> Field:
    return Field(lambda value: type(value) in (int, str) and value in ids, f"one of the {len(ids)} {what}", remedy)


def _optional(field: Field, default: Any) -> Field:
    return field._replace(default=default, remedy=_REMOVE_FIELD)


_ID = Field(_is_id, "a whole number of at most 64 bits")
_FILE_NAME = Field(
    _is_file_name, f"the name of a file, a text of 1 to {_NAME_LIMIT} characters, at most {_NAME_BYTES} between slashes"
)
_SIDE = Field(is_side, "a whole number of pixels, 1 to 1048576")
_FLAG = Field(lambda value: type(value) in (int, bool) and value in (0, 1), "0 or 1, a number")
_AREA = Field(lambda value: type(value) in _NUMBERS and 0 <= value < 2**63, "a finite number of at least 0")
_NUMBER = Field(is_number, "a finite number")
_BOX = Field(is_box, "four finite numbers [x, y, width, height] below 2^31, no size negative")
_OPTIONAL_BOX = _optional(_BOX, [0, 0, 0, 0])
_OBJECT = {"area": _optional(_AREA, 0), "iscrowd": _optional(_FLAG, 0)}

IMAGE = {"id": _ID, "file_name": _FILE_NAME, "width": _SIDE, "height": _SIDE}
CAPTIONED_IMAGE = IMAGE | {"width": _optional(_SIDE, 1), "height": _optional(_SIDE, 1)}
CATEGORY = {"id": _ID, "name": Field(is_name, f"a name, a text of 1 to {_NAME_LIMIT} characters in one line")}
PANOPTIC_CATEGORY = CATEGORY | {"isthing": _FLAG}
ANNOTATION = {"id": _optional(_ID, 0), "bbox": _BOX, **_OBJECT}
PANOPTIC_ANNOTATION = {
    "file_name": _FILE_NAME,
    "segments_info": Field(
        lambda value: isinstance(value, list), "a list of segments", "Is it a file of boxes (instances_*.json)?"
    ),
}
SEGMENT = {
    "id": Field(lambda value: type(value) is int and 0 < value <= MAX_SEGMENT_ID, f"1 to {MAX_SEGMENT_ID}"),
    "bbox": _OPTIONAL_BOX,
    "score": _optional(_NUMBER, 0),
    **_OBJECT,
}
CAPTION = {"id": _optional(_ID, 0), "caption": Field(_is_text, "text")}


class Entries(NamedTuple):
    """The entries of one list in a file."""

    part: str
    entries: Sequence[Mapping[str, Any]]
    name: Callable[[int], str]
    """Describes the entry at an index, for messages."""
    start: int = 0
    """Index of the first of these entries in the file's list."""

    def field_issues(self, fields: Mapping[str, Field]) -> Iterator[FileIssue]:
        """Find the invalid values, field by field."""
        for field, (is_right, expected, remedy, default) in fields.items():
            wrong = [k for k, entry in enumerate(self.entries) if not is_right(entry.get(field, default))]
            for position in wrong:
                yield self.issue(position, field, expected, remedy)

    def find_repeated(self, field: str) -> Iterator[FileIssue]:
        """Find entries whose id in a field is the same as that of an earlier entry."""
        seen = set()
        for position, entry in enumerate(self.entries):
            value = entry.get(field)
            if type(value) in (int, str):
                if value in seen:
                    yield self.issue(position, field, "an id that no earlier entry has")
                seen.add(value)

    def issue(self, position: int, field: str, expected: str, remedy: str = _CORRECT) -> FileIssue:
        entry = self.entries[position]
        got = f"has {field} {reprlib.repr(entry[field])}" if field in entry else f"has no {field!r}"
        message = f"{got}; expected {expected}. {remedy}"
        is_null = entry.get(field, _ABSENT) is None
        return FileIssue(self.part, self.start + position, self.name(position), field, message, is_null=is_null)


def detection_issues(content: Any) -> list[FileIssue]:
    """Check a detection file, but not segmentations (`segmentation_issues`) or whether boxes lie in their images."""
    if issues := structure_issues(content):
        return issues
    annotations = AnnotationChecks(content).field_issues(content["annotations"])
    return [*image_and_category_issues(content), *annotations]


def structure_issues(content: Any) -> list[FileIssue]:
    """Check that a detection file has its three lists, that they hold objects only, and that none but the annotations
    is empty."""
    return _structure_issues(content, ("images", "annotations", "categories"), "detection")


def image_and_category_issues(content: Mapping[str, Any]) -> list[FileIssue]:
    """Check the images and categories of a detection file that has no `structure_issues`."""
    return list(_image_and_category_issues(content, IMAGE, CATEGORY))


class AnnotationChecks:
    """The checks of a detection file's annotations, of all of them or of some at a time.

    In each check, `start` is the index of the first of the annotations in the file's list.

    Args:
        content: the file, of which only `images` and `categories` are read.
        fields: what is checked besides images; None: the fields of objects.
    """

    def __init__(self, content: Mapping[str, Any], fields: Mapping[str, Field] | None = None):
        self._images, self._categories = content["images"], content.get("categories", ())
        self.fields = _references(content, image_id="images")
        self.fields |= _references(content, category_id="categories") | ANNOTATION if fields is None else fields

    def field_issues(self, annotations: Sequence[Mapping[str, Any]], start: int = 0) -> list[FileIssue]:
        """Check the fields, but not segmentations or whether boxes lie in their images."""
        return list(self._entries(annotations, start).field_issues(self.fields))

    def bad_box_issues(self, annotations: Sequence[Mapping[str, Any]], start: int = 0) -> list[FileIssue]:
        """Find the boxes without an area inside their image, where there are no `field_issues`."""
        entries = self._entries(annotations, start)
        issues = []
        for position, annotation in enumerate(annotations):
            x, y, width, height = annotation["bbox"]
            image_height, image_width = self._sizes[annotation["image_id"]]
            if width > 0 and height > 0 and x < image_width and y < image_height and x + width > 0 and y + height > 0:
                continue
            expected = f"a box inside the image of {image_width}x{image_height} pixels"
            if width <= 0 or height <= 0:
                expected = f"a {'width' if width <= 0 else 'height'} above 0"
            issues.append(entries.issue(position, "bbox", expected, _DROP))
        return issues

    def segmentation_issues(
        self, annotations: Sequence[Mapping[str, Any]], start: int = 0, *, required: bool
    ) -> list[FileIssue]:
        """Check segmentations, where there are no `field_issues`.

        Args:
            required: every annotation needs one; otherwise it may be absent, null, or an empty list.
        """
        entries = self._entries(annotations, start)
        issues = []
        for position, annotation in enumerate(annotations):
            segmentation = annotation.get("segmentation")
            if segmentation is None or segmentation == []:
                expected = "one, as masks=True needs one" if required else None
            else:
                expected = describe_wrong_segmentation(segmentation, *self._sizes[annotation["image_id"]])
            if expected:
                remedy = "Correct it, or train without masks (masks=False)."
                issues.append(entries.issue(position, "segmentation", expected, remedy))
        return issues

    def empty_mask_issues(self, annotations: Sequence[Mapping[str, Any]], start: int = 0) -> list[FileIssue]:
        """Find the objects whose mask has no pixel, where every annotation has a valid segmentation."""
        entries = self._entries(annotations, start)
        return [
            entries.issue(position, "segmentation", "at least one pixel")
            for position, annotation in enumerate(annotations)
            if not annotation.get("iscrowd") and shows_no_pixel(annotation, *self._sizes[annotation["image_id"]])
        ]

    def keypoint_issues(self, annotations: Sequence[Mapping[str, Any]], start: int = 0) -> list[FileIssue]:
        """Check keypoints, where there are no `field_issues`; an annotation without them is not an issue."""
        entries = self._entries(annotations, start)
        issues = []
        for position, annotation in enumerate(annotations):
            if annotation.get("keypoints") is None:
                continue
            count = self._num_keypoints.get(annotation["category_id"], 0)
            if expected := _describe_wrong_keypoints(annotation, count, *self._sizes[annotation["image_id"]]):
                remedy = "Correct it, or train without keypoints (keypoints=False)."
                issues.append(entries.issue(position, "keypoints", expected, remedy))
        return issues

    @cached_property
    def _num_keypoints(self) -> dict[int, int]:
        return {category["id"]: len(category.get("keypoints") or ()) for category in self._categories}

    @cached_property
    def _sizes(self) -> dict[int, tuple[int, int]]:
        return {image["id"]: (image["height"], image["width"]) for image in self._images}

    @cached_property
    def _file_names(self) -> dict[int, Any]:
        return {image["id"]: image.get("file_name") for image in self._images if _is_id(image.get("id"))}

    def _entries(self, annotations: Sequence[Mapping[str, Any]], start: int) -> Entries:
        """Describe the annotations by their id and image."""

        def name(position: int) -> str:
            annotation = annotations[position]
            image_id = annotation.get("image_id")
            image = self._file_names.get(image_id, image_id) if _is_id(image_id) else image_id
            return f"annotation {_id_or_position(annotation, start + position)} (image {reprlib.repr(image)})"

        return Entries("annotations", annotations, name, start)


def _describe_wrong_keypoints(annotation: Mapping[str, Any], count: int, height: int, width: int) -> str | None:
    """Return what was expected of the keypoints of an annotation, of which there are `count`; None: they are right."""
    keypoints = annotation.get("keypoints")
    if not count:
        return None if not keypoints else "none, as its category names none"
    if not isinstance(keypoints, list) or len(keypoints) != 3 * count:
        got = f"not {len(keypoints)}" if isinstance(keypoints, list) else "in a list"
        return f"3 x {count} numbers, x, y and visibility of each of its category's keypoints, {got}"
    if not all(map(is_number, keypoints)):
        return "finite numbers only"
    if not {0, 1, 2}.issuperset(keypoints[2::3]):
        return "visibilities of 0 (not labeled), 1 (hidden) or 2 (visible)"
    for point, (x, y, seen) in enumerate(zip(keypoints[::3], keypoints[1::3], keypoints[2::3])):
        if seen and not (-MAX_OUTSIDE <= x <= width + MAX_OUTSIDE and -MAX_OUTSIDE <= y <= height + MAX_OUTSIDE):
            return f"points inside the image of {width}x{height} pixels, not {point + 1} at ({x:g}, {y:g})"
    labeled = sum(map(bool, keypoints[2::3]))
    if annotation.get("num_keypoints", labeled) != labeled:
        return f"as many labeled points as its num_keypoints {annotation['num_keypoints']!r}, not {labeled}"
    return None


class IssueCounts:
    """Issues that are found in several steps: the first of each field, and their number.

    Args:
        fields: the fields in the order of the messages.
    """

    def __init__(self, fields: Iterable[str]):
        self._order = {field: number for number, field in enumerate(fields)}
        self._first: dict[tuple[str, bool], FileIssue] = {}

    def add(self, issues: Iterable[FileIssue]) -> None:
        """Add issues of later positions."""
        for issue in issues:
            # null is kept apart, as a file with null everywhere may be that of a known exporter.
            kind = issue.field, issue.is_null
            first = self._first.get(kind)
            self._first[kind] = issue if first is None else first._replace(count=first.count + issue.count)

    def __bool__(self) -> bool:
        return bool(self._first)

    def issues(self) -> list[FileIssue]:
        """Return the first issue of each kind with its number, ordered by field and position."""
        return sorted(self._first.values(), key=lambda issue: (self._order[issue.field], issue.position))


def segmentation_issues(content: Mapping[str, Any], *, required: bool) -> list[FileIssue]:
    """Check the segmentations of a file that has no `detection_issues`; `required` as in `AnnotationChecks`."""
    return AnnotationChecks(content).segmentation_issues(content["annotations"], required=required)


def lvis_issues(content: Mapping[str, Any]) -> list[FileIssue]:
    """Check the fields that LVIS adds, in a file that has no `detection_issues`: which classes each image is annotated
    for, and how frequent each class is."""
    ids = {category["id"] for category in content["categories"]}

    def are_classes(value: Any) -> bool:
        return isinstance(value, list) and all(type(category_id) is int and category_id in ids for category_id in value)

    classes = Field(are_classes, f"a list of the {len(ids)} ids in 'categories'", _GIVE_LVIS)
    frequency = Field(lambda value: value in ("r", "c", "f"), "'r', 'c' or 'f' (rare, common, frequent)", _GIVE_LVIS)
    of_images = dict.fromkeys(ANNOTATED_CLASSES, classes)
    return list(_image_and_category_issues(content, of_images, {"frequency": frequency}))


def panoptic_issues(content: Any) -> list[FileIssue]:
    """Check a panoptic file, except for its maps."""
    if issues := _structure_issues(content, ("images", "annotations", "categories"), "panoptic"):
        return issues
    references = _references(content, image_id="images", category_id="categories")
    issues = [
        *_image_and_category_issues(content, IMAGE, PANOPTIC_CATEGORY),
        *_segment_issues(content["annotations"], references),
    ]
    annotated = {a["image_id"] for a in content["annotations"] if _is_id(a.get("image_id"))}
    missing = [image["id"] for image in content["images"] if _is_id(image.get("id")) and image["id"] not in annotated]
    if missing:
        message = (
            f"lacks an annotation for {len(missing)} of {len(content['images'])} images, such as image {missing[0]}"
        )
        message += "; expected one for each, with its map and segments (an empty list, if all is void). Add them, or "
        issues.append(FileIssue("annotations", 0, "the file", "image_id", message + "remove the images."))
    return issues


def caption_issues(content: Any) -> list[FileIssue]:
    """Check a caption file."""
    if issues := _structure_issues(content, ("images", "annotations"), "caption"):
        return issues
    annotations = AnnotationChecks(content, CAPTION).field_issues(content["annotations"])
    return [*_image_and_category_issues(content, CAPTIONED_IMAGE), *annotations]


def result_issues(
    results: Any,
    image_ids: Collection[int],
    category_ids: Collection[int],
    *,
    masks: bool,
    num_keypoints: int | None = None,
) -> list[FileIssue]:
    """Check predictions in COCO's result format.

    Args:
        image_ids, category_ids: ids of the dataset's images and categories.
        masks: whether predictions need a mask, and may have a box; otherwise they need a box.
        num_keypoints: how many keypoints predictions need, in which case they may have a box; None: none.
    """
    if not isinstance(results, list):
        return [file_issue(results, "a list of predictions in COCO's format")]
    if no_objects := object_issues(results, "results"):
        return no_objects
    entries = Entries("results", results, "entry {}".format)
    fields = _require_known_ids(image_id=image_ids, category_id=category_ids)
    fields |= {"score": _NUMBER, "bbox": _OPTIONAL_BOX if masks or num_keypoints else _BOX}
    if num_keypoints is not None:
        fields["keypoints"] = Field(
            lambda value: isinstance(value, list) and len(value) == 3 * num_keypoints and all(map(is_number, value)),
            f"3 x {num_keypoints} finite numbers, x, y and confidence of each keypoint",
            _OTHER_DATASET,
        )
    issues = [*entries.field_issues(fields)]
    for position, result in enumerate(results if masks else ()):
        if expected := describe_wrong_run_lengths(result.get("segmentation")):
            issues.append(entries.issue(position, "segmentation", expected))
    return issues


def caption_result_issues(results: Any, image_ids: Collection[int]) -> list[FileIssue]:
    """Check predicted captions, at most one for each image, in COCO's result format."""
    if not isinstance(results, list) or not results:
        return [file_issue(results, "a list of captions that is not empty: [{'image_id': number, 'caption': text}]")]
    if no_objects := object_issues(results, "results"):
        return no_objects
    entries = Entries("results", results, "entry {}".format)
    fields = _require_known_ids(image_id=image_ids) | {"caption": CAPTION["caption"]}
    return [*entries.field_issues(fields), *entries.find_repeated("image_id")]


def panoptic_result_issues(
    content: Any, image_ids: Collection[int | str], category_ids: Collection[int]
) -> list[FileIssue]:
    """Check predicted segments, except for their maps, in COCO's result format."""
    if not isinstance(content, dict) or not isinstance(content.get("annotations"), list):
        return [file_issue(content, "panoptic results: {'annotations': [{...}, ...]}")]
    annotations, known = content["annotations"], _require_known_ids(image_id=image_ids, category_id=category_ids)
    return object_issues(annotations, "annotations") or _segment_issues(annotations, known)


def sentence_issues(content: Any, num_sentences: int) -> list[FileIssue]:
    """Check predicted texts with their sources and references, in vitkit's own result format.

    Args:
        num_sentences: number of sentences in the dataset.
    """
    sentences = content.get("sentences") if isinstance(content, dict) else None
    if not isinstance(sentences, list) or not sentences:
        return [file_issue(content, "texts that vitkit test wrote: {'sentences': [{...}, ...]}, not empty")]
    if no_objects := object_issues(sentences, "sentences"):
        return no_objects
    entries = Entries("sentences", sentences, "entry {}".format)
    text = CAPTION["caption"]
    references = Field(lambda value: isinstance(value, list) and value != [] and all(map(_is_text, value)), "texts")
    fields = _require_known_ids(index=range(num_sentences)) | {"text": text, "source": text, "references": references}
    return [*entries.field_issues(fields), *entries.find_repeated("index")]


def raise_issues(issues: Sequence[FileIssue], name: str) -> None:
    """Raise a DataError that describes the first issue and counts the others; do nothing if there is no issue.

    Args:
        name: name of the file.
    """
    if not issues:
        return
    more = ""
    fields = chain.from_iterable(repeat(issue.field, issue.count) for issue in issues)
    if others := Counter(islice(fields, 1, None)):
        counts = ", ".join(f"{count} x {field}" for field, count in others.most_common())
        more = f" And {others.total()} more: {counts}; vitkit doctor lists all issues of datasets."
    raise DataError(f"{name}: {issues[0]}{more}")


def _id_or_position(entry: Mapping[str, Any], position: int) -> str:
    return reprlib.repr(entry["id"]) if "id" in entry else f"at position {position}"


def _structure_issues(content: Any, parts: Sequence[str], kind: str) -> list[FileIssue]:
    """Check that the parts are lists of objects, and that all but the annotations are not empty."""
    lists = content if isinstance(content, dict) else {}
    missing = [part for part in parts if not isinstance(lists.get(part), list)]
    if missing:
        expected = ", ".join(f"'{part}': [...]" for part in parts)
        message = f"has no list {' and no list '.join(map(repr, missing))} at its top level; "
        return [FileIssue("", 0, "the file", missing[0], f"{message}expected a COCO {kind} file: {{{expected}}}.")]
    issues = []
    for part in parts:
        issues += object_issues(lists[part], part)
        if not lists[part] and part != "annotations":
            noun = {"images": "image", "categories": "class"}[part]
            issues.append(FileIssue("", 0, f"the list '{part}'", part, f"is empty; expected at least one {noun}."))
    return issues


def _image_and_category_issues(content: Mapping[str, Any], *fields: Mapping[str, Field]) -> Iterator[FileIssue]:
    """Check the images and, if their fields are passed, the categories."""
    for part, noun, part_fields in zip(("images", "categories"), ("image", "category"), fields):

        def name(position: int, part: str = part, noun: str = noun) -> str:
            entry = content[part][position]
            title = entry.get("file_name" if part == "images" else "name")
            return f"{noun} {_id_or_position(entry, position)}" + (f" ({reprlib.repr(title)})" if title else "")

        entries = Entries(part, content[part], name)
        yield from entries.field_issues(part_fields)
        yield from entries.find_repeated("id")


def _segment_issues(annotations: Sequence[Mapping[str, Any]], references: Mapping[str, Field]) -> list[FileIssue]:
    """Check the annotations of a panoptic file, at most one for each image, and their segments."""

    def image(position: int) -> str:
        return f"image {reprlib.repr(annotations[position].get('image_id'))}"

    entries = Entries("annotations", annotations, lambda position: f"annotation {position} of {image(position)}")
    issues = [*entries.field_issues({"image_id": references["image_id"]} | PANOPTIC_ANNOTATION)]
    issues += entries.find_repeated("image_id")
    listed = [a["segments_info"] if isinstance(a.get("segments_info"), list) else [] for a in annotations]
    all_segments = [(position, segment) for position, segments in enumerate(listed) for segment in segments]
    no_objects = [position for position, segment in all_segments if not isinstance(segment, dict)]
    issues += [entries.issue(k, "segments_info", "only objects, {...}, in it") for k in no_objects]
    if no_objects:
        return issues

    def name(number: int) -> str:
        position, segment = all_segments[number]
        return f"{image(position)}: segment {reprlib.repr(segment.get('id'))}"

    segments = Entries("segments_info", [segment for _, segment in all_segments], name)
    issues += segments.field_issues(SEGMENT | {"category_id": references["category_id"]})
    seen = set()
    for number, (position, segment) in enumerate(all_segments):
        if _is_id(segment.get("id")):
            if (position, segment["id"]) in seen:
                issues.append(segments.issue(number, "id", "an id that no other segment of the image has"))
            seen.add((position, segment["id"]))
    return issues


def _references(content: Mapping[str, Any], **parts: str) -> dict[str, Field]:
    """Return fields whose values must be ids of a part's entries."""
    fields = {}
    for field, part in parts.items():
        ids = {entry["id"] for entry in content[part] if _is_id(entry.get("id"))}
        fields[field] = _one_of(ids, f"ids in '{part}'", "Remove the annotation or add the entry.")
    return fields


def _require_known_ids(**ids: Collection[int | str]) -> dict[str, Field]:
    """Return fields of predictions whose values must be ids of the dataset."""
    return {field: _one_of(values, f"{field}s of the dataset", _OTHER_DATASET) for field, values in ids.items()}


def object_issues(entries: Sequence[Any], part: str, start: int = 0) -> list[FileIssue]:
    """Find the entries that are not objects; `start` is the index of the first entry in the file's list."""
    wrong = [(position, entry) for position, entry in enumerate(entries, start) if not isinstance(entry, dict)]
    message = "is {}; expected an object, {{...}}. Remove it."
    return [FileIssue("", k, f"entry {k} of '{part}'", part, message.format(reprlib.repr(entry))) for k, entry in wrong]


def file_issue(content: Any, expected: str) -> FileIssue:
    return FileIssue("", 0, "the file", "content", f"contains {reprlib.repr(content)}; expected {expected}.")
