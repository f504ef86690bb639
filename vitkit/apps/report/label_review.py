"""A page of suspicious labels to review, which exports the accepted corrections."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.apps.report.images import ImageBudget
from vitkit.apps.report.label_errors import LabelError, corrections, detected_fraction, find_label_errors
from vitkit.apps.report.parts import Review
from vitkit.apps.report.report import describe_data, write_page
from vitkit.apps.report.sections import Alert, Section, Table
from vitkit.evaluation.coco import CocoEvaluator, image_sides
from vitkit.io.output import write_text
from vitkit.text_format import pluralize

IMAGE_BYTES = 8_000_000
_TEXTS = {
    "missing": "no box, but a {predicted} of score {score:.2f}",
    "extra": "a box of {true}, but no detection",
    "class": "labeled {true}, but a {predicted} of score {score:.2f}",
    "box": "{true} badly placed: detected elsewhere, score {score:.2f}",
}
_NOTE = (
    "The most likely errors first. The label is drawn in black and white, the detection in the color of its class, "
    "other labels in thin white. Keys: a accepts the correction, r rejects it, the arrows move on and back. The export "
    "contains the accepted corrections; vitkit data convert --fix applies them."
)
_STRONG = 0.7
"""Fraction of the labels that a detector should find for its other objections to be worth a look."""


def weakness(evaluator: CocoEvaluator) -> str | None:
    """Return a warning that a detector finds too few of the labels to judge them; None if it finds enough."""
    truth = evaluator.dataset.ground_truth()
    fraction = detected_fraction(truth, evaluator.results(), list(evaluator.dataset.category_ids))
    if fraction >= _STRONG:
        return None
    return (
        f"the detector finds {fraction:.0%} of the {pluralize(len(truth['annotations']), 'labels')}, so that many of "
        "the suspicions may be its own errors. Review the first ones only, or train a better detector."
    )


def write_label_errors(
    evaluator: CocoEvaluator,
    path: str | Path,
    *,
    title: str,
    most: int = 200,
    facts: Mapping[str, str] | None = None,
    trained_on: bool = False,
) -> tuple[list[LabelError], Path]:
    """Write the page, and beside it a JSON list of all its corrections, NAME.json for NAME.html.

    Args:
        evaluator: the evaluator, with predictions.
        path: path of the page.
        title: title of the page.
        most: maximum number of errors to list.
        facts: see `write_report`.
        trained_on: whether the model was trained on these labels; if so, the page warns about it.
    Returns:
        the listed errors, the most likely first, and the JSON file.
    """
    truth, results = evaluator.dataset.ground_truth(), evaluator.results()
    errors = find_label_errors(truth, results, list(evaluator.dataset.category_ids))[:most]
    entries = corrections(errors, truth, results)
    list_file = Path(path).with_suffix(".json")
    images = ImageBudget(evaluator.dataset, IMAGE_BYTES)
    parts = _page_parts(evaluator, errors, entries, truth, results, images)
    if weak := weakness(evaluator):
        parts.insert(0, Alert(weak[0].upper() + weak[1:]))
    if trained_on:
        text = "The model was trained on these labels and may have learned their errors: it will find fewer of them."
        parts.insert(0, Alert(text))
    sections = [Section("Suspicious labels", parts, _NOTE)]
    write_page(path, title, [(sections, images)], {**(facts or {}), "data": describe_data(evaluator)})
    write_text(list_file, json.dumps(entries, indent=1, ensure_ascii=False))
    return errors, list_file


def _page_parts(
    evaluator: CocoEvaluator,
    errors: Sequence[LabelError],
    entries: Sequence[Mapping[str, Any]],
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    embedded: ImageBudget,
) -> list[Any]:
    if not errors:
        return [Alert("No label is suspicious." if results else "There is no prediction, so no label can be judged.")]
    label_of = {raw: label for label, raw in enumerate(evaluator.dataset.category_ids)}
    names = list(evaluator.dataset.classes)
    position_of = {int(image_id): k for k, image_id in enumerate(evaluator.dataset.image_ids)}
    urls = embedded.embed_stored(position_of[error.image_id] for error in errors)
    listed = {image["id"]: image for image in truth["images"]}
    images: dict[Any, dict[str, Any]] = {}
    numbers: dict[Any, list[int]] = {}
    shown, kept = [], []
    for error, entry in zip(errors, entries):
        if position_of[error.image_id] not in urls:
            continue
        if error.image_id not in images:
            numbers[error.image_id] = [
                k for k, annotation in enumerate(truth["annotations"]) if annotation["image_id"] == error.image_id
            ]
            annotations = [truth["annotations"][k] for k in numbers[error.image_id]]
            described = _describe_image(listed[error.image_id], annotations, label_of)
            images[error.image_id] = {"url": urls[position_of[error.image_id]], **described}
        image = images[error.image_id]
        words = {"true": "", "predicted": "", "score": 0.0}
        if error.annotation >= 0:
            words["true"] = names[label_of[truth["annotations"][error.annotation]["category_id"]]]
        if error.prediction >= 0:
            result = results[error.prediction]
            words |= {"predicted": names[label_of[result["category_id"]]], "score": result["score"]}
            image["predicted"].append(label_of[result["category_id"]])
            image["scores"].append(round(result["score"], 3))
            image["predicted_boxes"].append([round(float(x), 1) for x in result["bbox"]])
        shown.append(
            {
                "kind": error.kind,
                "image": list(images).index(error.image_id),
                "object": numbers[error.image_id].index(error.annotation) if error.annotation >= 0 else None,
                "predicted": len(image["predicted"]) - 1 if error.prediction >= 0 else None,
                "text": f"{entry['image']}: {_TEXTS[error.kind].format(**words)} (suspicion {error.suspicion:.2f})",
            }
        )
        kept.append(entry)
    counts = Counter(error.kind for error in errors)
    data = {"classes": names, "images": list(images.values()), "errors": shown, "corrections": kept}
    rows = [[kind, count] for kind, count in counts.most_common()]
    alerts = [] if len(shown) == len(errors) else [Alert(f"{len(shown)} of {len(errors)} have room in this page.")]
    return [*alerts, Table(("kind", "listed"), rows), Review(list(counts), data)]


def _describe_image(
    image: Mapping[str, Any], annotations: Sequence[Mapping[str, Any]], label_of: Mapping[int, int]
) -> dict[str, Any]:
    """Return an image's data for the page's script, without predictions."""
    return {
        "size": [*image_sides(image)],
        "labels": [label_of[annotation["category_id"]] for annotation in annotations],
        "boxes": [annotation["bbox"] for annotation in annotations],
        "predicted": [],
        "scores": [],
        "predicted_boxes": [],
    }
