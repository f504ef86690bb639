"""Checks of the data; each takes a case and yields issues."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from vitkit.apps.datasets.mirroring import UNPAIRED, find_mirrored_texts, has_unpaired_points
from vitkit.apps.doctor.doctor_input import DoctorCase
from vitkit.apps.doctor.images import image_issues, map_issues
from vitkit.apps.doctor.issues import Issue, enumerate_items
from vitkit.apps.doctor.leakage import leakage_issues
from vitkit.apps.doctor.statistics import DatasetStatistics
from vitkit.apps.doctor.videos import video_issues
from vitkit.data.datasets.video import ClipDataset
from vitkit.data.text.datasets import TextLines
from vitkit.registry import CRITERIA, parameters_of
from vitkit.text_format import pluralize

_RARE = 10
"""Number of objects below which a class can hardly be learned."""
_UNBALANCED = 10.0
"""Ratio of the most frequent class to the rarest above which the classes are unbalanced."""
_REPEATED = 1.2
"""How often an image of the rarest class has to be repeated for a sampler to be worth a mention."""


def annotations(case: DoctorCase) -> Iterator[Issue]:
    """Report issues from building the datasets: unknown categories, invalid boxes and masks, ids."""
    for statistics in case.statistics.values():
        yield from statistics.issues


def images(case: DoctorCase) -> Iterator[Issue]:
    """Report missing or damaged files, color formats, sizes, repeated images, and the maps and their classes.

    For videos, report lengths and frame rates.
    """
    for where, statistics in case.statistics.items():
        if isinstance(statistics.dataset, ClipDataset):
            yield from video_issues(statistics, case.options.max_images)
        elif statistics.has_images:
            yield from image_issues(statistics, case.scan(where))
            yield from map_issues(statistics, case.scan(where))


def same_classes(case: DoctorCase) -> Iterator[Issue]:
    """Check that train and val have the same classes under the same ids."""
    if not case.train or not case.val or not (case.train.classes and case.val.classes):
        return
    train, val = (dict(zip(s.category_ids, s.classes)) for s in (case.train, case.val))
    where = "data.train, data.val"
    if train == val:
        yield Issue("same classes", "ok", f"both have the same {pluralize(len(train), 'classes')}", where)
        return
    if case.data.prompts is not None:
        new = [name for name in case.val.classes if name not in case.train.classes]
        message = f"data.train has all {pluralize(len(val), 'classes')} of data.val"
        if new:
            message = f"{pluralize(len(new), 'classes')} of data.val are found by phrases only: {enumerate_items(new)}"
        yield Issue("same classes", "note" if new else "ok", message, where, {"classes": new})
        return
    different = [key for key in {**train, **val} if train.get(key) != val.get(key)]
    pairs = enumerate_items([f"{key}: {train.get(key)!r} and {val.get(key)!r}" for key in different])
    message = f"{len(train)} and {pluralize(len(val), 'classes')}, "
    message += f"{pluralize(len(different), 'ids', 'differ')} ({pairs}): training would end with an error"
    yield Issue("same classes", "fail", message, where, {"ids": len(different)})


def class_balance(case: DoctorCase) -> Iterator[Issue]:
    """Report classes without objects or with few, and how unbalanced the classes are."""
    for where, statistics in case.statistics.items():
        if not len(statistics.labels):
            continue
        counts = statistics.objects_per_class()
        present = sorted(((count, name) for name, count in counts.items() if count), reverse=True)
        shown = present if len(present) <= 12 else [*present[:6], *present[-3:]]
        message = f"{pluralize(len(present), 'classes', 'occur', of=len(counts))}: "
        message += ", ".join(f"{name} {count:,}" for count, name in shown)
        message += "" if shown is present else " (most and fewest)"
        ratio = present[0][0] / present[-1][0]
        if ratio > _UNBALANCED:
            message += f"; the most frequent is {ratio:.0f} times as frequent as the rarest"
            if where == "data.train":
                message += _remedies(case, statistics, present[-1][1], ratio)
        yield Issue("class balance", "note" if ratio > _UNBALANCED else "ok", message, where, counts)
        if where != "data.train":
            continue
        absent = [name for name, count in counts.items() if not count]
        if absent:
            message = f"{pluralize(len(absent), 'classes', 'have')} no object to learn from: {enumerate_items(absent)}"
            yield Issue("absent classes", "warn", message, where, {"classes": absent})
        rare = [name for name, count in counts.items() if 0 < count < _RARE]
        if rare:
            message = f"{pluralize(len(rare), 'classes', 'have')} fewer than {_RARE} objects: {enumerate_items(rare)}"
            yield Issue("rare classes", "warn", message, where, {"classes": rare})
    if case.train and case.val and len(case.train.labels) and len(case.val.labels):
        train_counts = case.train.objects_per_class()
        val_counts = case.val.objects_per_class()
        untrained = [name for name, count in val_counts.items() if count and not train_counts.get(name)]
        if untrained:
            names = enumerate_items(untrained)
            message = f"{pluralize(len(untrained), 'classes', 'are')} evaluated but never trained: {names}"
            verdict = "warn" if case.data.prompts is None else "note"
            yield Issue("absent classes", verdict, message, "data.val", {"classes": untrained})


def _remedies(case: DoctorCase, statistics: DatasetStatistics, rarest: str, ratio: float) -> str:
    """Return the overrides that repeat the images of rare classes and weight the rarest class in the loss."""
    pairs = np.unique(np.stack([statistics.labels, statistics.image_indices], axis=1), axis=0)
    num_images = len(np.unique(pairs[:, 1])) if statistics.sampled else len(statistics.image_ids)
    fractions = np.bincount(pairs[:, 0], minlength=len(statistics.classes)) / num_images
    of_rarest = fractions[statistics.classes.index(rarest)]
    threshold = round(float(np.median(fractions[fractions > 0])), 4)
    repeats, remedies = np.sqrt(threshold / of_rarest), []
    if case.data.sampler is None and repeats >= _REPEATED:
        remedies.append(
            f"data.sampler=repeat_factor data.repeat_threshold={threshold:g} shows images of {rarest} {repeats:.1f} "
            "times in an epoch"
        )
    spec = case.config.get("criterion")
    if spec is None or "class_weights" in parameters_of(CRITERIA.resolve(spec)[0]):
        weights = {rarest: round(float(np.sqrt(ratio)), 1)}
        remedies.append(f'criterion.class_weights="{weights}" raises its weight in the loss')
    return "; " * bool(remedies) + ", ".join(remedies)


def empty_images(case: DoctorCase) -> Iterator[Issue]:
    """Report images without annotations."""
    for where, statistics in case.statistics.items():
        detects = statistics.kind in ("detection", "instance", "panoptic")
        if not detects or statistics.sampled or not len(statistics.image_ids):
            continue
        counts = statistics.objects_per_image()
        empty = [str(statistics.image_ids[k]) for k in np.flatnonzero(counts == 0)]
        message = f"{pluralize(len(empty), 'images', 'have', of=len(counts))} no object"
        message += f": {enumerate_items(empty)}" if empty else ""
        verdict = "ok" if not empty else "warn" if len(empty) > 0.5 * len(counts) else "note"
        yield Issue("empty images", verdict, message, where, {"images": empty})


def train_val_leakage(case: DoctorCase) -> Iterator[Issue]:
    """Report the same file, the same pixels or similar images in train and val or test; for text, the same lines."""
    test = case.statistics.get("data.test")
    if case.train and test and case.train.has_images and test.has_images:
        yield from leakage_issues(case.train, test, case.scan("data.train"), case.scan("data.test"))
    if not case.train or not case.val or case.train.dataset is None or case.val.dataset is None:
        return
    if case.train.has_images and case.val.has_images:
        yield from leakage_issues(case.train, case.val, case.scan("data.train"), case.scan("data.val"))
    elif case.train.dataset.sides and case.val.dataset.sides:
        train_rows = set(zip(*case.train.dataset.sides))
        val_rows = list(zip(*case.val.dataset.sides))
        lines = [number for number, row in enumerate(val_rows, start=1) if row in train_rows]
        message = f"{pluralize(len(lines), 'val lines', 'are', of=len(val_rows))} also in train"
        message += f": {enumerate_items(lines)}" if lines else ""
        verdict = "fail" if len(lines) > 0.01 * len(val_rows) else "warn" if lines else "ok"
        yield Issue("leakage", verdict, message, "data.train, data.val", {"lines": len(lines)})


def flips(case: DoctorCase) -> Iterator[Issue]:
    """Report keypoints that mirrored images leave in place."""
    for where, statistics in case.statistics.items():
        if statistics.dataset is not None and has_unpaired_points(statistics.dataset):
            yield Issue("keypoints without pairs", "warn", UNPAIRED, where)


def text(case: DoctorCase) -> Iterator[Issue]:
    """Report the number and length of sentences and captions, empty or repeated ones, and invisible characters."""
    for where, statistics in case.statistics.items():
        dataset = statistics.dataset
        if dataset is not None and dataset.sides:
            for number, side in enumerate(dataset.sides, start=1):
                name = side.path.name if isinstance(side, TextLines) else f"side {number}"
                yield from _line_issues(side, name, where)
        elif dataset is not None and "captions" in dataset.annotations:
            captions = [dataset.references(k) for k in range(len(dataset))]
            per_image = Counter(map(len, captions))
            fractions = ", ".join(
                f"{pluralize(count, 'images', 'have')} {number}" for number, count in per_image.most_common(4)
            )
            yield Issue("captions per image", "ok" if len(per_image) == 1 else "note", fractions, where)
            yield from _line_issues([caption for references in captions for caption in references], "captions", where)
        if dataset is not None and (mirrored := find_mirrored_texts(dataset)):
            message = f"the transforms flip images, which makes {' and '.join(map(repr, mirrored))} wrong: set "
            message += "flip_probability=0.0, or leave HorizontalFlip out"
            yield Issue("mirrored texts", "warn", message, where, {"texts": mirrored})


def _line_issues(lines: Sequence[str], name: str, where: str) -> Iterator[Issue]:
    lengths = np.array([len(line.split()) for line in lines])
    message = f"{name}: {len(lines):,} lines, {lengths.mean():.1f} words on average, at most {lengths.max()}"
    details = {"lines": len(lines), "mean": float(lengths.mean()), "longest": int(lengths.max())}
    yield Issue("text", "ok", message, where, details)
    num_empty, num_repeated = int((lengths == 0).sum()), len(lines) - len(set(lines))
    counts = {
        "are empty": num_empty,
        "occur more than once": num_repeated,
        "begin or end with blanks": sum(line != line.strip() for line in lines),
        # They are invisible, and not every tokenizer splits at them.
        "no-break spaces": sum(line.count("\u00a0") for line in lines),
    }
    issues = [f"{count} {noun}" for noun, count in counts.items() if count]
    if issues:
        verdict = "warn" if num_empty or num_repeated > 0.05 * len(lines) else "note"
        yield Issue("text", verdict, f"{name}: {', '.join(issues)}", where, counts)
