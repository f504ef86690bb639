"""Finds labels that a detector contradicts: missing and superfluous boxes, wrong classes, badly placed boxes.

The kinds are those of ObjectLab (Tkachenko et al. 2023, https://arxiv.org/abs/2309.00832), plus superfluous boxes; the
scores of suspicion are our own. Each is 0 to 1 and based only on the model's evidence, so that one list can rank all
kinds. A model's evidence is best on images that it was not trained on.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitkit.apps.report.matching import compute_overlaps
from vitkit.evaluation.coco import image_sides

KINDS = ("missing", "extra", "class", "box")
"""No box where the model detects an object; a box where it detects none; another class; another location."""
_SAME, _NEAR = 0.5, 0.1
"""IoU from which a box counts as being on an object, and from which it may be meant for that object."""
_FAR = 0.3
"""IoU below which a box counts as completely misplaced."""
_NUM_BINS = 20
_SUPERFLUOUS = 0.1
"""Assumed ratio of superfluous labels to correct ones; it keeps boxes that a weak detector misses low in the list."""


class LabelError(NamedTuple):
    """A label that is probably wrong."""

    kind: str
    suspicion: float
    image_id: Any
    annotation: int
    """Index among the annotations; -1 if the annotation is missing."""
    prediction: int
    """Index, among the results, of what the model detects instead; -1 if it detects nothing."""


def find_label_errors(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], category_ids: Sequence[int]
) -> list[LabelError]:
    """Compare labels with predictions; return the labels that are probably wrong, the most probable first.

    Args:
        truth: annotations in COCO's format; crowds are ignored.
        results: predictions in COCO's result format, with their boxes, of all scores.
        category_ids: raw category ids of the classes.
    """
    images = _images_of(truth, results)
    evidence = _Evidence(images, category_ids)
    errors = [error for image in images for error in _errors_in(image, evidence)]
    return sorted(errors, key=lambda error: -error.suspicion)


def detected_fraction(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], category_ids: Sequence[int]
) -> float:
    """Return the fraction of labels that the model detects, 0 to 1, each counted by how often its scores are correct.

    Arguments as in `find_label_errors`.
    """
    images = _images_of(truth, results)
    evidence = _Evidence(images, category_ids)
    supports = np.concatenate([np.zeros(0), *(evidence.support(image) for image in images)])
    return float(supports.mean()) if len(supports) else 0.0


def _images_of(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list["_Image"]:
    objects, predictions = defaultdict(list), defaultdict(list)
    for number, annotation in enumerate(truth["annotations"]):
        objects[annotation["image_id"]].append(number)
    for number, result in enumerate(results):
        predictions[result["image_id"]].append(number)
    return [
        _Image(image["id"], objects[image["id"]], predictions[image["id"]], truth["annotations"], results)
        for image in truth["images"]
    ]


class _Image:
    """The M objects and N predictions of an image."""

    def __init__(
        self,
        image_id: Any,
        objects: Sequence[int],
        predictions: Sequence[int],
        annotations: Sequence[Mapping[str, Any]],
        results: Sequence[Mapping[str, Any]],
    ):
        self.image_id = image_id
        ours, theirs = [results[k] for k in predictions], [annotations[k] for k in objects]
        overlaps, crowd = compute_overlaps(ours, theirs, "bbox", (0, 0))
        self.on_crowd = (overlaps[:, crowd] >= _SAME).any(axis=1)
        self.objects, self.predictions = np.array(objects, int)[~crowd], np.array(predictions, int)
        self.overlaps = overlaps[:, ~crowd]
        self.scores = np.array([result["score"] for result in ours], np.float64)
        self.labels = np.array([result["category_id"] for result in ours], int)
        self.true = np.array([annotation["category_id"] for annotation in theirs], int)[~crowd]
        self.same = self.labels[:, None] == self.true
        self.among, _ = compute_overlaps(ours, [{**result, "iscrowd": 0} for result in ours], "bbox", (0, 0))

    def correct(self) -> np.ndarray:
        """Return (N,) bool, whether each prediction is the best of its class on a labeled object."""
        candidates = np.where(self.same & (self.overlaps >= _SAME), self.scores[:, None], -1.0)
        correct = np.zeros(len(self.scores), bool)
        if candidates.size:
            best = candidates.argmax(axis=0)
            correct[best[candidates.max(axis=0) >= 0]] = True
        return correct


class _Evidence:
    """Statistics of the model over all images: how often a score is correct, its median IoU, what it misses."""

    def __init__(self, images: Sequence[_Image], category_ids: Sequence[int]):
        scores = np.concatenate([np.zeros(0), *(image.scores for image in images)])
        correct = np.concatenate([np.zeros(0, bool), *(image.correct() for image in images)])
        self._levels, self._parts = _reliability(scores, correct)
        overlaps = [image.overlaps[image.correct()].max(axis=1) for image in images if image.correct().any()]
        self.median_iou = float(np.median(np.concatenate(overlaps))) if overlaps else 0.8
        self.seen = {}
        for category_id in category_ids:
            supports = [self.support(image)[image.true == category_id] for image in images]
            support = np.concatenate([np.zeros(0), *supports])
            self.seen[category_id] = float(support.mean()) if len(support) else 0.0

    def probability(self, scores: np.ndarray) -> np.ndarray:
        """Return how often predictions with these scores are correct."""
        return np.interp(scores, self._levels, self._parts)

    def support(self, image: _Image) -> np.ndarray:
        """Return (M,) the probability that each label has an object of its class, judged by the predictions on it."""
        if not image.overlaps.size:
            return np.zeros(len(image.true))
        on_it = np.clip((image.overlaps - _NEAR) / (_SAME - _NEAR), 0, 1)
        return (self.probability(image.scores)[:, None] * on_it * image.same).max(axis=0)


def _reliability(scores: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scores in ascending order, and the fraction of correct predictions at each, which never decreases."""
    if not len(scores):
        return np.array([0.0, 1.0]), np.zeros(2)
    order = np.argsort(scores, kind="stable")
    # Most predictions have scores near zero, so each bin holds an equal fraction of the correct ones.
    bins = np.floor(_NUM_BINS * correct[order].cumsum() / max(correct.sum(), 1)).clip(max=_NUM_BINS - 1).astype(int)
    count = np.bincount(bins, minlength=_NUM_BINS)
    used = count > 0
    levels = (np.bincount(bins, scores[order], _NUM_BINS) / np.maximum(count, 1))[used]
    parts = (np.bincount(bins, correct[order], _NUM_BINS) / np.maximum(count, 1))[used]
    return np.r_[0.0, levels], np.r_[0.0, np.maximum.accumulate(parts)]


def _errors_in(image: _Image, evidence: _Evidence) -> list[LabelError]:
    probability = evidence.probability(image.scores)
    errors, explained, blamed = [], image.on_crowd.copy(), set()

    def best_of(values: np.ndarray) -> tuple[int, float]:
        k = int(values.argmax()) if len(values) else -1
        return k, float(values[k]) if k >= 0 else 0.0

    nearest = image.overlaps.argmax(axis=1) if image.overlaps.size else np.full(len(image.scores), -1)
    of_own_class = np.where(image.same, image.overlaps, 0.0).max(axis=1, initial=0.0)
    for j, number in enumerate(image.objects.tolist()):
        overlap, same, mine = image.overlaps[:, j], image.same[:, j], nearest == j
        # A prediction of another class on the same object, which no label of that class explains.
        other = probability * (mine & ~same & (overlap >= _SAME) & (of_own_class < _SAME))
        k, of_other = best_of(other)
        _, of_same = best_of(probability * (same & (overlap >= _SAME)))
        wrong_class = of_other * (1 - of_same)
        # A prediction of the correct class nearby, and no label that is better placed.
        near = probability * (same & (overlap >= _NEAR) & (of_own_class <= overlap + 1e-9) & ~image.on_crowd)
        i, of_near = best_of(near)
        iou = float(overlap[i]) if i >= 0 else 0.0
        _, of_better = best_of(probability * (same & (overlap > (iou + evidence.median_iou) / 2)))
        slack = max(evidence.median_iou - _FAR, 0.1)
        misplaced = of_near * (1 - of_better) * float(np.clip((evidence.median_iou - iou) / slack, 0, 1))
        support = float(evidence.support(image)[j])
        seen = evidence.seen.get(int(image.true[j]), 0.0)
        # By Bayes' rule: a label without a detection is superfluous, or one of those that the model misses. A model
        # that detects nothing of a class says nothing about its labels.
        superfluous = (1 - support) * _SUPERFLUOUS / (_SUPERFLUOUS + 1 - seen) if seen else 0.0
        suspicion, kind, against = max((wrong_class, "class", k), (misplaced, "box", i), (superfluous, "extra", -1))
        if suspicion > 0:
            prediction = int(image.predictions[against]) if against >= 0 else -1
            errors.append(LabelError(kind, suspicion, image.image_id, number, prediction))
        if kind == "box" and against >= 0:
            explained[against] = True
            blamed.add(against)
    # Only the best of predictions that overlap each other is considered.
    overlap = image.overlaps.max(axis=1, initial=0.0)
    for i in np.argsort(-image.scores, kind="stable").tolist():
        rivals = (image.among[i] >= _SAME) & (
            (image.scores > image.scores[i]) | np.isin(np.arange(len(overlap)), list(blamed))
        )
        suspicion = float(probability[i] * (1 - min(overlap[i] / _SAME, 1.0)))
        if not explained[i] and suspicion > 0 and not rivals.any():
            errors.append(LabelError("missing", suspicion, image.image_id, -1, int(image.predictions[i])))
    return errors


def corrections(
    errors: Sequence[LabelError], truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the corrections that would fix the labels, in the form that `vitkit data convert --fix` reads.

    Args:
        truth: annotations; they have `file_id`, their id in the file, if it differs from `id`.
    """
    images = {image["id"]: image for image in truth["images"]}
    names = {category["id"]: category["name"] for category in truth["categories"]}
    entries = []
    for error in errors:
        # Panoptic data and some datasets of users' own name no files.
        image_name = str(images[error.image_id].get("file_name", error.image_id))
        entry: dict[str, Any] = {"image": image_name, "action": _ACTIONS[error.kind]}
        annotation = truth["annotations"][error.annotation] if error.annotation >= 0 else {}
        result = results[error.prediction] if error.prediction >= 0 else {}
        box = inside(result["bbox"], images[error.image_id]) if error.kind in ("missing", "box") else None
        name = names[result["category_id"]] if error.kind in ("missing", "class") else None
        entry |= {"annotation_id": annotation.get("file_id", annotation.get("id")), "bbox": box, "category": name}
        if annotation:  # by which it is found in the file that these data are a copy of
            entry["was"] = {"bbox": annotation["bbox"], "category": names[annotation["category_id"]]}
        entries.append(entry)
    return entries


def inside(bbox: Sequence[float], image: Mapping[str, Any]) -> list[float]:
    """Return the part of a box [x, y, width, height] inside its image, rounded to hundredths of a pixel."""
    (x, y, width, height), (image_width, image_height) = bbox, image_sides(image)
    x0, y0 = max(0.0, x), max(0.0, y)
    x1, y1 = min(float(image_width), x + width), min(float(image_height), y + height)
    return [round(float(value), 2) for value in (x0, y0, max(x1 - x0, 0.0), max(y1 - y0, 0.0))]


_ACTIONS = {"missing": "add", "extra": "remove", "class": "change", "box": "change"}
