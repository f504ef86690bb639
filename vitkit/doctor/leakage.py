"""Images that are both trained and evaluated on."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitkit.doctor.images import ImageScan
from vitkit.doctor.issues import Issue, enumerate_items, percent
from vitkit.doctor.statistics import DatasetStatistics

_WHERE = "data.train, data.val"
_MAX_THUMBNAIL_DISTANCE = 2.0
"""Mean difference of two thumbnails, of 255, below which images are probably one image that was saved twice."""


def leakage_issues(
    train: DatasetStatistics, val: DatasetStatistics, train_scan: ImageScan, val_scan: ImageScan
) -> Iterator[Issue]:
    """Compare the files, pixels, looks and names of training and validation images."""
    if train.files is not None and val.files is not None:
        shared = sorted({str(p.resolve()) for p in train.files} & {str(p.resolve()) for p in val.files})
        if shared:
            names = enumerate_items([Path(path).name for path in shared])
            message = f"{len(shared)} files ({percent(len(shared), len(val.files))} of val) are in both: {names}"
            yield Issue("leakage", "fail", message, _WHERE, {"files": len(shared)})
    train_index = dict(zip(train_scan.checksums, train_scan.readable))
    matches = zip(val_scan.checksums, val_scan.readable)
    same = [(train_index[checksum], k) for checksum, k in matches if checksum in train_index]
    if same:
        pairs = enumerate_items([f"{train.image_ids[a]} = {val.image_ids[b]}" for a, b in same])
        message = f"{len(same)} images of val have the pixels of one of train: {pairs}"
        yield Issue("leakage", "fail", message, _WHERE, {"pixels": len(same)})
    else:
        message = f"no image of val has the pixels of one of train{train_scan.extent or val_scan.extent}"
        yield Issue("leakage", "ok", message, _WHERE, {"pixels": 0})
    identical = {b for _, b in same}
    similar = [(a, b) for a, b in _similar_pairs(train_scan, val_scan) if b not in identical]
    if similar:
        pairs = enumerate_items([f"{train.image_ids[a]} ~ {val.image_ids[b]}" for a, b in similar])
        message = f"{len(similar)} images of val look like one of train, saved again or the next frame: {pairs}"
        yield Issue("near leakage", "warn", message, _WHERE, {"images": len(similar)})
    if train.files is not None and val.files is not None:
        yield from _shared_recordings(train.files, val.files)


def _similar_pairs(train: ImageScan, val: ImageScan) -> Iterator[tuple[int, int]]:
    """Find pairs of positions whose thumbnails hardly differ and are not of one plain colour."""
    if not train.thumbnails:
        return
    train_thumbnails = np.stack(train.thumbnails).astype(np.float32)
    for index, thumbnail in zip(val.readable, val.thumbnails):
        distances = np.abs(train_thumbnails - thumbnail).mean(axis=1)
        if thumbnail.std() >= _MAX_THUMBNAIL_DISTANCE > distances.min():
            yield train.readable[int(distances.argmin())], index


def _shared_recordings(train: list[Path], val: list[Path]) -> Iterator[Issue]:
    """Report names such as SEQUENCE_FRAME which tell that both datasets have frames of one recording."""
    in_train, in_val = (Counter(re.sub(r"\d+$", "", path.stem) for path in files) for files in (train, val))
    prefixes = in_train.keys() | in_val.keys()
    # A single prefix is a dataset's name, and almost as many prefixes as images are no recordings.
    if not 2 <= len(prefixes) <= (len(train) + len(val)) / 5 or not all(prefix.strip("_-. ") for prefix in prefixes):
        return
    shared = sorted(in_train.keys() & in_val.keys())
    if shared:
        names = enumerate_items([f"{prefix}* ({in_train[prefix]} and {in_val[prefix]} images)" for prefix in shared])
        message = f"{len(shared)} of {len(prefixes)} series of file names are in both: {names}. If they are "
        message += "recordings, adjacent frames are in train and val, and the score is too good"
        yield Issue("leakage", "warn", message, _WHERE, {"series": shared})
    else:
        message = f"none of the {len(prefixes)} series of file names is in both"
        yield Issue("leakage", "ok", message, _WHERE)
