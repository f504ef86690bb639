"""Checks of the data: each takes a case and gives its findings."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from vitkit.data.text import TextDataset
from vitkit.doctor.case import Case
from vitkit.doctor.findings import Finding, some
from vitkit.doctor.pictures import image_findings, leakage, map_findings
from vitkit.doctor.surveys import Survey

_FEW = 10
"""Objects of a class, below which it can hardly be learned."""
_UNBALANCED = 100.0
"""How often the most frequent class may be as frequent as the rarest."""


def annotations(case: Case) -> Iterator[Finding]:
    """What was found when the datasets were built: unknown categories, wrong boxes and masks, ids."""
    for survey in case.surveys.values():
        yield from survey.findings


def images(case: Case) -> Iterator[Finding]:
    """Files that are missing or damaged, colour formats, sizes, images that are there twice; maps and their classes."""
    for where, survey in case.surveys.items():
        if survey.has_images:
            yield from image_findings(survey, case.pictures(where))
            yield from map_findings(survey, case.pictures(where))


def same_classes(case: Case) -> Iterator[Finding]:
    """Train and val have the same classes under the same ids."""
    if not case.train or not case.val or not (case.train.classes and case.val.classes):
        return
    ours, theirs = (dict(zip(s.category_ids, s.classes)) for s in (case.train, case.val))
    where = "data.train, data.val"
    if ours == theirs:
        yield Finding("same classes", "ok", f"both have the same {len(ours)} classes", where)
        return
    different = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    pairs = some([f"{key}: {ours.get(key)!r} and {theirs.get(key)!r}" for key in different])
    message = (
        f"{len(ours)} and {len(theirs)} classes, {len(different)} ids differ ({pairs}): training would refuse them"
    )
    yield Finding("same classes", "fail", message, where, {"ids": len(different)})


def class_balance(case: Case) -> Iterator[Finding]:
    """Classes without objects, or with few, and how unequal they are."""
    for survey in case.surveys.values():
        if not len(survey.labels):
            continue
        counts = survey.objects_per_class()
        ordered = sorted(((count, name) for name, count in counts.items()), reverse=True)
        there = [(count, name) for count, name in ordered if count]
        shown = there if len(there) <= 12 else [*there[:6], *there[-3:]]
        message = f"{len(there)} of {len(counts)} classes are there: "
        message += ", ".join(f"{name} {count:,}" for count, name in shown)
        message += "" if shown is there else " (most and fewest)"
        most, fewest = there[0][0], there[-1][0]
        ratio = most / fewest
        if ratio > _UNBALANCED:
            message += f"; the most frequent is {ratio:.0f} times as frequent as the rarest (see data.sampler)"
        yield Finding("class balance", "note" if ratio > _UNBALANCED else "ok", message, survey.where, counts)
        if survey.where != "data.train":
            continue
        absent = [name for name, count in counts.items() if not count]
        few = [name for name, count in counts.items() if 0 < count < _FEW]
        if absent:
            message = f"{len(absent)} classes have no object to learn from: {some(absent)}"
            yield Finding("absent classes", "warn", message, survey.where, {"classes": absent})
        if few:
            message = f"{len(few)} classes have fewer than {_FEW} objects: {some(few)}"
            yield Finding("rare classes", "warn", message, survey.where, {"classes": few})
    if case.train and case.val and len(case.train.labels) and len(case.val.labels):
        ours, theirs = case.train.objects_per_class(), case.val.objects_per_class()
        only = [name for name, count in theirs.items() if count and not ours.get(name)]
        if only:
            message = f"{len(only)} classes are evaluated but never trained: {some(only)}"
            yield Finding("absent classes", "warn", message, "data.val", {"classes": only})


def empty_images(case: Case) -> Iterator[Finding]:
    """Images without annotations."""
    for survey in case.surveys.values():
        if survey.kind not in ("detection", "instance", "panoptic") or not len(survey.image_ids):
            continue
        if survey.files is None:
            continue  # drawn images are not surveyed all
        counts = survey.objects_per_image()
        empty = [str(survey.image_ids[k]) for k in np.flatnonzero(counts == 0)]
        message = f"{len(empty)} of {len(counts)} images have no object" + (f": {some(empty)}" if empty else "")
        verdict = "ok" if not empty else "warn" if len(empty) > 0.5 * len(counts) else "note"
        yield Finding("empty images", verdict, message, survey.where, {"images": empty})


def train_val_leakage(case: Case) -> Iterator[Finding]:
    """The same file, the same pixels, or nearly the same picture in train and val; for text the same sentence."""
    if not case.train or not case.val or case.train.dataset is None or case.val.dataset is None:
        return
    if case.train.has_images and case.val.has_images:
        yield from leakage(case.train, case.val, case.pictures("data.train"), case.pictures("data.val"))
    elif case.train.kind == case.val.kind == "text":
        ours = {tuple(row) for row in zip(*case.train.dataset.sides)}
        theirs = list(zip(*case.val.dataset.sides))
        same = [k + 1 for k, row in enumerate(theirs) if tuple(row) in ours]
        message = f"{len(same)} of {len(theirs)} lines of val are in train, too" + (f": {some(same)}" if same else "")
        verdict = "fail" if len(same) > 0.01 * len(theirs) else "warn" if same else "ok"
        yield Finding("leakage", verdict, message, "data.train, data.val", {"lines": len(same)})


def text(case: Case) -> Iterator[Finding]:
    """Of sentences and captions: how many, how long, empty or repeated ones, characters that cannot be seen."""
    for survey in case.surveys.values():
        if survey.dataset is None:
            continue
        if isinstance(survey.dataset, TextDataset):
            for number, side in enumerate(survey.dataset.sides):
                name = getattr(side, "path", None)
                yield from _lines(side, name.name if name else f"side {number + 1}", survey)
        elif survey.kind == "captions":
            captions = [survey.dataset.references(k) for k in range(len(survey.dataset))]
            per_image = Counter(map(len, captions))
            shares = ", ".join(f"{count} images have {number}" for number, count in per_image.most_common(4))
            yield Finding("captions per image", "ok" if len(per_image) == 1 else "note", shares, survey.where)
            yield from _lines([caption for of_one in captions for caption in of_one], "captions", survey)


def _lines(lines: Sequence[str], name: str, survey: Survey) -> Iterator[Finding]:
    lengths = np.array([len(line.split()) for line in lines])
    message = f"{name}: {len(lines):,} lines, {lengths.mean():.1f} words on average, at most {lengths.max()}"
    details = {"lines": len(lines), "mean": float(lengths.mean()), "longest": int(lengths.max())}
    yield Finding("text", "ok", message, survey.where, details)
    faults = {
        "are empty": int((lengths == 0).sum()),
        "are there more than once": len(lines) - len(set(lines)),
        "begin or end with blanks": sum(line != line.strip() for line in lines),
    }
    # Not spaces to everyone who reads them.
    hidden = sum(line.count("\u00a0") for line in lines)
    found = [f"{count} {what}" for what, count in faults.items() if count]
    found += [f"{hidden} no-break spaces"] if hidden else []
    if found:
        verdict = "warn" if faults["are empty"] or faults["are there more than once"] > 0.05 * len(lines) else "note"
        yield Finding("text", verdict, f"{name}: {', '.join(found)}", survey.where, {**faults, "no_break": hidden})
