"""Checks of files of predictions, like those of annotations in vitkit/io/coco_schema.py: all issues of a file."""

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from vitkit.io.coco_schema import (
    BOX,
    CAPTION,
    NUMBER,
    OPTIONAL_BOX,
    Entries,
    Field,
    FileIssue,
    is_number,
    is_text,
    object_issues,
    one_of,
    segment_issues,
)
from vitkit.io.segmentations import describe_wrong_run_lengths
from vitkit.text_format import is_name

_OTHER_DATASET = "Give results of the config's data.val."


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
        return [_file_issue(results, "a list of predictions in COCO's format")]
    if no_objects := object_issues(results, "results"):
        return no_objects
    entries = Entries("results", results, "entry {}".format)
    fields = _require_known_ids(image_id=image_ids, category_id=category_ids)
    fields |= {"score": NUMBER, "bbox": OPTIONAL_BOX if masks or num_keypoints else BOX}
    if num_keypoints is not None:
        expected = f"3 x {num_keypoints} finite numbers, x, y and confidence of each keypoint"
        fields["keypoints"] = Field(
            lambda value: isinstance(value, list) and len(value) == 3 * num_keypoints and all(map(is_number, value)),
            expected,
            _OTHER_DATASET,
        )
    issues = [*entries.field_issues(fields)]
    for position, result in enumerate(results if masks else ()):
        expected = describe_wrong_run_lengths(result.get("segmentation"))
        if expected:
            issues.append(entries.issue(position, "segmentation", expected))
    return issues


def caption_result_issues(results: Any, image_ids: Collection[int]) -> list[FileIssue]:
    """Check predicted captions, at most one for each image, in COCO's result format."""
    if not isinstance(results, list) or not results:
        return [_file_issue(results, "a list of captions that is not empty: [{'image_id': number, 'caption': text}]")]
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
        return [_file_issue(content, "panoptic results: {'annotations': [{...}, ...]}")]
    no_objects = object_issues(content["annotations"], "annotations")
    return no_objects or segment_issues(
        content["annotations"], _require_known_ids(image_id=image_ids, category_id=category_ids)
    )


def classification_issues(content: Mapping[str, Any]) -> list[FileIssue]:
    """Check predicted classes of images, in vitkit's own result format, before they have a dataset."""
    classes, images = content["classes"], content["images"]
    if not isinstance(classes, list) or not classes or not all(map(is_name, classes)):
        return [_file_issue(classes, "a list of the names of classes under 'classes'")]
    if len(set(classes)) < len(classes):
        return [_file_issue(classes, "different names under 'classes'")]
    if not isinstance(images, list) or not images:
        return [_file_issue(images, "a list of images that is not empty under 'images'")]
    if no_objects := object_issues(images, "images"):
        return no_objects
    entries = Entries("images", images, "entry {}".format)
    image_id = Field(lambda value: type(value) in (int, str), "a number or a text")
    return [*entries.field_issues({"image_id": image_id}), *entries.find_repeated("image_id")]


def sentence_issues(content: Any, num_sentences: int) -> list[FileIssue]:
    """Check predicted texts with their sources and references, in vitkit's own result format.

    Args:
        num_sentences: number of sentences in the dataset.
    """
    sentences = content.get("sentences") if isinstance(content, dict) else None
    if not isinstance(sentences, list) or not sentences:
        return [_file_issue(content, "texts that vitkit test wrote: {'sentences': [{...}, ...]}, not empty")]
    if no_objects := object_issues(sentences, "sentences"):
        return no_objects
    entries = Entries("sentences", sentences, "entry {}".format)
    text = CAPTION["caption"]
    references = Field(lambda value: isinstance(value, list) and value != [] and all(map(is_text, value)), "texts")
    fields = _require_known_ids(index=range(num_sentences)) | {"text": text, "source": text, "references": references}
    return [*entries.field_issues(fields), *entries.find_repeated("index")]


def _require_known_ids(**ids: Collection[int | str]) -> dict[str, Field]:
    """Return fields of predictions whose values must be ids of the dataset."""
    return {field: one_of(values, f"{field}s of the dataset", _OTHER_DATASET) for field, values in ids.items()}


def _file_issue(content: Any, expected: str) -> FileIssue:
    return FileIssue("", 0, "the file", "content", f"contains {reprlib.repr(content)}; expected {expected}.")
