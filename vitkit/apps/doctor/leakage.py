"""Finds images that are used for both training and evaluation."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitkit.apps.datasets.image_groups import frame_number, photo_names, series_of, similar_pairs
from vitkit.apps.doctor.images import ImageScan
from vitkit.apps.doctor.issues import Issue, enumerate_items, percent
from vitkit.apps.doctor.statistics import DatasetStatistics
from vitkit.text_format import pluralize


def leakage_issues(
    train: DatasetStatistics, held_out: DatasetStatistics, train_scan: ImageScan, scan: ImageScan
) -> Iterator[Issue]:
    """Compare the files, pixels, appearance and names of training images and evaluation images."""
    name, where = held_out.where.removeprefix("data."), f"{train.where}, {held_out.where}"
    if train.files is not None and held_out.files is not None:
        shared = sorted({str(p.resolve()) for p in train.files} & {str(p.resolve()) for p in held_out.files})
        if shared:
            names = enumerate_items([Path(path).name for path in shared])
            fraction = percent(len(shared), len(held_out.files))
            message = f"{pluralize(len(shared), 'files', 'are')} in both ({fraction} of {name}): {names}"
            yield Issue("leakage", "fail", message, where, {"files": len(shared)})
    train_index = dict(zip(train_scan.checksums, train_scan.readable))
    matches = zip(scan.checksums, scan.readable)
    same = [(train_index[checksum], k) for checksum, k in matches if checksum in train_index]
    if same:
        pairs = enumerate_items([f"{train.image_ids[a]} = {held_out.image_ids[b]}" for a, b in same])
        message = f"{pluralize(len(same), f'{name} images', 'have')} the pixels of one of train: {pairs}"
        yield Issue("leakage", "fail", message, where, {"pixels": len(same)})
    else:
        message = f"no image of {name} has the pixels of one of train{train_scan.extent or scan.extent}"
        yield Issue("leakage", "ok", message, where, {"pixels": 0})
    identical = {b for _, b in same}
    nearest: dict[int, int] = {}
    for a, b in _similar_pairs(train_scan, scan):
        nearest.setdefault(b, a)
    similar = [(a, b) for b, a in nearest.items() if b not in identical]
    if similar:
        pairs = enumerate_items([f"{train.image_ids[a]} ~ {held_out.image_ids[b]}" for a, b in similar])
        message = f"{pluralize(len(similar), f'{name} images', 'look')} like one of train, "
        message += f"saved again or the next frame: {pairs}"
        yield Issue("near leakage", "warn", message, where, {"images": len(similar)})
    if train.files is not None and held_out.files is not None:
        yield from _shared_recordings(train.files, held_out.files, name, where, looks_alike=bool(similar or identical))


def _similar_pairs(train: ImageScan, val: ImageScan) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices whose thumbnails hardly differ."""
    if train.thumbnails and val.thumbnails:
        for a, b in similar_pairs(np.stack(train.thumbnails), np.stack(val.thumbnails)):
            yield train.readable[a], val.readable[b]


def _shared_recordings(
    train: list[Path], val: list[Path], name: str, where: str, *, looks_alike: bool
) -> Iterator[Issue]:
    """Report names such as RECORDING_FRAME by which both datasets may have frames of the same recording.

    Args:
        looks_alike: whether an image looks like one of train. Neighboring frames do; photos that are numbered do not.
    """
    stems = [Path(path.stem) for path in [*train, *val]]  # names of the datasets' folders are not recordings
    photos = photo_names(stems)
    cut = {photo for photo, stem in zip(photos, stems) if photo != stem}
    if both := sorted(map(str, cut & {*photos[: len(train)]} & {*photos[len(train) :]})):
        message = f"tiles of {pluralize(len(both), 'photos', 'are')} in both, by their names: {enumerate_items(both)}. "
        message += "They overlap or adjoin: keep a photo's tiles together, as `vitkit data split` does"
        yield Issue("leakage", "warn", message, where, {"photos": both})
    series = series_of(stems)
    if series is None:
        return
    of_train, of_val = series[: len(train)], series[len(train) :]
    in_train, in_val = Counter(of_train), Counter(of_val)
    shared = sorted(in_train.keys() & in_val.keys())
    if not shared:
        yield Issue("leakage", "ok", f"none of the {len(set(series))} series of file names is in both", where)
        return
    frames: dict[str, list[int]] = {key: [] for key in shared}
    for recording, path in zip(of_train, train):
        if recording in frames:
            frames[recording].append(frame_number(path) or 0)
    gaps = [
        min(abs((frame_number(path) or 0) - frame) for frame in frames[recording])
        for recording, path in zip(of_val, val)
        if recording in frames
    ]
    names = enumerate_items([f"{key}* ({in_train[key]} and {pluralize(in_val[key], 'images')})" for key in shared])
    low, high = min(gaps), max(gaps)
    distance = pluralize(low, "frames") if low == high else f"{low} to {high} frames, median {np.median(gaps):g},"
    alike = "" if looks_alike else "none of them looks like one of train, so they may be numbered photos; if not, "
    message = (
        f"{len(shared)} of {pluralize(len(set(series)), 'recordings')}, by their file names, are in both: {names}. "
        f"{len(gaps)} of {pluralize(len(val), 'images')} of {name} lie {distance} from one of train: {alike}"
        "neighboring frames may be nearly alike, and the score too good. Hold recordings out, by `names=` of the "
        "datasets or `vitkit data split`"
    )
    details = {"series": shared, "images": len(gaps), "frames": [low, high]}
    yield Issue("leakage", "warn", message, where, details)
