"""One pass over a dataset's images: what can be read, what shows twice, what the maps hold."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from vitkit.doctor.findings import Finding, percent, some
from vitkit.doctor.surveys import Survey
from vitkit.errors import DataError
from vitkit.ops.label_maps import count_values
from vitkit.ops.masks import boxes_around_masks
from vitkit.structures import IGNORED

_THUMB = 16  # pixels
_NEARLY = 2.0
"""Mean difference of two thumbnails, of 255, below which images are taken for one picture that was saved twice."""
_EXIF_ORIENTATION = 0x0112


@dataclass
class Pictures:
    """What a pass over images found."""

    looked_at: list[int] = field(default_factory=list)
    """Positions of the images."""
    total: int = 0
    faults: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(height, width) of those that can be read, as are all lists below."""
    readable: list[int] = field(default_factory=list)
    """Their positions."""
    pixels: list[bytes] = field(default_factory=list)
    """A checksum of each one's pixels."""
    thumbs: np.ndarray = field(default_factory=lambda: np.zeros((0, _THUMB * _THUMB), np.float32))
    modes: Counter[str] = field(default_factory=Counter)
    """Pillow's names of the colour formats."""
    turned: int = 0
    """How many are rotated by their EXIF tag."""
    label_pixels: Counter[int] = field(default_factory=Counter)
    """Label -> pixels of the maps; 255 for none."""
    label_images: Counter[int] = field(default_factory=Counter)
    """Label -> images that show it."""
    map_faults: list[str] = field(default_factory=list)

    @property
    def all_of_them(self) -> str:
        """For messages: "" if every image was looked at."""
        return (
            "" if len(self.looked_at) == self.total else f" (of {len(self.looked_at)} looked at, {self.total} in all)"
        )


def look_at(survey: Survey, most: int) -> Pictures:
    """Loads images, evenly spread over the dataset.

    Args:
        most: how many.
    """
    found = Pictures(total=len(survey.image_ids))
    if not survey.has_images:
        return found
    found.looked_at = np.unique(np.linspace(0, found.total - 1, min(most, found.total)).astype(int)).tolist()
    thumbs = []
    for index in found.looked_at:
        try:
            image = survey.dataset.load_image(index)
        except DataError as error:
            found.faults.append(str(error))
            continue
        found.readable.append(index)
        found.sizes.append(image.shape[:2])
        found.pixels.append(hashlib.blake2b(image.tobytes(), digest_size=16).digest() + repr(image.shape).encode())
        grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        thumbs.append(cv2.resize(grey, (_THUMB, _THUMB), interpolation=cv2.INTER_AREA).ravel())
        if survey.files is not None:
            _look_at_file(survey.files[index], found)
        if survey.kind in ("semantic", "panoptic", "instance") and hasattr(survey.dataset, "load_panoptic"):
            _look_at_panoptic(survey, index, found)
        elif survey.kind == "semantic":
            _look_at_semantic(survey, index, found)
    if thumbs:
        found.thumbs = np.stack(thumbs).astype(np.float32)
    return found


def _look_at_file(path: Path, found: Pictures) -> None:
    try:
        with Image.open(path) as picture:
            found.modes[picture.mode] += 1
            found.turned += picture.getexif().get(_EXIF_ORIENTATION, 1) != 1
    except (OSError, SyntaxError, ValueError):
        found.modes["unknown"] += 1


def _look_at_semantic(survey: Survey, index: int, found: Pictures) -> None:
    try:
        labels = survey.dataset.load_semantic(index)
    except DataError as error:
        found.map_faults.append(str(error))
        return
    for value, pixels in zip(*(column.tolist() for column in count_values(labels))):
        found.label_pixels[value] += pixels
        found.label_images[value] += 1
    (height, width), (image_height, image_width) = labels.shape, found.sizes[-1]
    if labels.shape != found.sizes[-1]:
        found.map_faults.append(
            f"image {survey.image_ids[index]} is {image_width}x{image_height} pixels (width x height), its label "
            f"picture {width}x{height}"
        )


def _look_at_panoptic(survey: Survey, index: int, found: Pictures) -> None:
    dataset = survey.dataset
    try:
        ids, segments = dataset.load_panoptic(index)
    except DataError as error:
        found.map_faults.append(str(error))
        return
    labels = {segment["id"]: segment["label"] for segment in segments}
    found_ids, pixels = (column.tolist() for column in count_values(ids))
    seen = Counter({labels.get(value, IGNORED): 0 for value in found_ids})
    for value, count in zip(found_ids, pixels):
        seen[labels.get(value, IGNORED)] += count
    found.label_pixels.update(seen)
    found.label_images.update(dict.fromkeys(seen, 1))
    areas = dict(zip(found_ids, pixels))
    for listed in survey.listed[index] if survey.listed else ():
        found.map_faults += _disagreements(listed, ids, areas, survey.image_ids[index])


def _disagreements(listed: Mapping[str, Any], ids: np.ndarray, areas: dict[int, int], image_id: Any) -> list[str]:
    """Where area or box of a segment in the JSON are not those of the map."""
    if listed["id"] not in areas:
        return []
    where, faults = f"image {image_id}: segment {listed['id']}", []
    if listed.get("area", areas[listed["id"]]) != areas[listed["id"]]:
        faults.append(f"{where} has area {listed['area']} in the JSON and {areas[listed['id']]} pixels in the map")
    if "bbox" in listed:
        x0, y0, x1, y1 = boxes_around_masks(torch.from_numpy(ids == listed["id"])[None])[0].tolist()
        if [x0, y0, x1 - x0, y1 - y0] != listed["bbox"]:
            faults.append(f"{where} has bbox {listed['bbox']} in the JSON and {[x0, y0, x1 - x0, y1 - y0]} in the map")
    return faults


def image_findings(survey: Survey, pictures: Pictures) -> Iterator[Finding]:
    """What can be read, which formats and sizes there are."""
    where = survey.where
    if pictures.faults:
        message = f"{len(pictures.faults)} of {len(pictures.looked_at)} images cannot be read: {pictures.faults[0]}"
        yield Finding("images", "fail", message, where, {"images": len(pictures.faults)})
    if not pictures.readable:
        return
    heights, widths = np.array(pictures.sizes).T
    message = f"{len(pictures.readable)} images read{pictures.all_of_them}: "
    message += f"{widths.min()}x{heights.min()} to {widths.max()}x{heights.max()} pixels (width x height)"
    if len(set(pictures.sizes)) > 1:
        longer = np.maximum(heights, widths)
        message += f", longer side {np.median(longer):g} in the middle"
    details = {"images": len(pictures.readable), "sizes": len(set(pictures.sizes))}
    yield Finding("images", "ok", message, where, details)
    other = {mode: count for mode, count in pictures.modes.items() if mode != "RGB"}
    if other:
        names = {"L": "grey", "P": "palette", "RGBA": "with alpha", "CMYK": "CMYK"}
        text = ", ".join(f"{count} {names.get(mode, mode)}" for mode, count in other.items())
        positions = [survey.files[k].name for k in pictures.readable if _mode(survey.files[k]) in other]
        message = f"{text}: read as RGB ({some(positions, 3)})"
        yield Finding("colour formats", "note", message, where, other)
    if pictures.turned:
        message = f"{pictures.turned} images are rotated by their EXIF tag and are read upright"
        yield Finding("rotated images", "note", message, where, {"images": pictures.turned})
    yield from _repeated(survey, pictures)


def _mode(path: Path) -> str:
    try:
        with Image.open(path) as picture:
            return picture.mode
    except (OSError, SyntaxError, ValueError):
        return "unknown"


def _repeated(survey: Survey, pictures: Pictures) -> Iterator[Finding]:
    counts = Counter(pictures.pixels)
    copies = [k for k, pixels in zip(pictures.readable, pictures.pixels) if counts[pixels] > 1]
    if copies:
        names = some([survey.image_ids[k] for k in copies])
        message = f"{len(copies)} images have the pixels of another one: {names}"
        yield Finding("repeated images", "warn", message, survey.where, {"images": len(copies)})


def map_findings(survey: Survey, pictures: Pictures) -> Iterator[Finding]:
    """How the pixels of label maps are shared out, and whether maps and lists agree."""
    if pictures.map_faults:
        message = f"{len(pictures.map_faults)} maps are wrong: {pictures.map_faults[0]}"
        yield Finding("maps", "fail", message, survey.where, {"maps": len(pictures.map_faults)})
    total = sum(pictures.label_pixels.values())
    if not total:
        return
    if not pictures.map_faults:
        message = "every map fits its image and its list of segments" if survey.kind != "semantic" else (
            "every label picture fits its image and holds known values only"
        )  # fmt: skip
        yield Finding("maps", "ok", message + pictures.all_of_them, survey.where)
    void = pictures.label_pixels[IGNORED]
    if survey.kind != "instance":
        message = f"{percent(void, total)} of the pixels are of no class and ignored"
        yield Finding("void", "warn" if void > 0.5 * total else "note", message, survey.where, {"part": void / total})
        shares = sorted(((pictures.label_pixels[k], name) for k, name in enumerate(survey.classes)), reverse=True)
        seen = [(pixels, name) for pixels, name in shares if pixels]
        listed = seen if len(seen) <= 16 else [*seen[:8], *seen[-4:]]
        text = ", ".join(f"{name} {percent(pixels, total)}" for pixels, name in listed)
        message = f"pixels of {len(seen)} of {len(survey.classes)} classes: {text}"
        message += "" if listed is seen else " (largest and smallest)"
        details = {name: pixels / total for pixels, name in shares}
        verdict = "note" if seen[-1][0] < 0.01 * total else "ok"
        yield Finding("pixels of classes", verdict, message, survey.where, details)


def leakage(train: Survey, val: Survey, of_train: Pictures, of_val: Pictures) -> Iterator[Finding]:
    """Images that are trained on and evaluated on."""
    check, where = "leakage", "data.train, data.val"
    if train.files is not None and val.files is not None:
        shared = sorted({str(p.resolve()) for p in train.files} & {str(p.resolve()) for p in val.files})
        if shared:
            part = percent(len(shared), len(val.files))
            message = f"{len(shared)} files ({part} of val) are in both: {some([Path(p).name for p in shared])}"
            yield Finding(check, "fail", message, where, {"files": len(shared)})
    first = dict(zip(of_train.pixels, of_train.readable))
    same = [(first[pixels], k) for pixels, k in zip(of_val.pixels, of_val.readable) if pixels in first]
    pairs = [f"{train.image_ids[a]} = {val.image_ids[b]}" for a, b in same]
    if same:
        message = f"{len(same)} images of val have the pixels of one of train: {some(pairs)}"
        yield Finding(check, "fail", message, where, {"pixels": len(same)})
    else:
        looked = of_train.all_of_them or of_val.all_of_them
        yield Finding(check, "ok", f"no image of val has the pixels of one of train{looked}", where, {"pixels": 0})
    known = {b for _, b in same}
    near = [(a, b) for a, b in _nearly_same(of_train, of_val) if b not in known]
    if near:
        pairs = some([f"{train.image_ids[a]} ~ {val.image_ids[b]}" for a, b in near])
        message = f"{len(near)} images of val look like one of train, saved anew or the next frame: {pairs}"
        yield Finding("near leakage", "warn", message, where, {"images": len(near)})
    yield from _shared_recordings(train, val)


def _nearly_same(of_train: Pictures, of_val: Pictures) -> list[tuple[int, int]]:
    """Pairs of positions whose thumbnails hardly differ, and are not of one plain colour."""
    pairs = []
    for k, thumb in zip(of_val.readable, of_val.thumbs):
        if not len(of_train.thumbs) or thumb.std() < _NEARLY:
            continue
        distance = np.abs(of_train.thumbs - thumb).mean(axis=1)
        if distance.min() < _NEARLY:
            pairs.append((of_train.readable[int(distance.argmin())], k))
    return pairs


def _shared_recordings(train: Survey, val: Survey) -> Iterator[Finding]:
    """Names such as SEQUENCE_FRAME that say that both have frames of one recording."""
    if train.files is None or val.files is None:
        return
    ours, theirs = (Counter(re.sub(r"\d+$", "", path.stem) for path in s.files) for s in (train, val))
    groups = {prefix for prefix in ours.keys() | theirs.keys() if prefix.strip("_-. ")}
    # One prefix is a dataset's name, and as many as images tell nothing.
    if not 2 <= len(groups) <= (len(train.files) + len(val.files)) / 5 or groups != ours.keys() | theirs.keys():
        return
    shared = sorted(ours.keys() & theirs.keys())
    if shared:
        texts = [f"{prefix}* ({ours[prefix]} and {theirs[prefix]} images)" for prefix in shared]
        message = f"{len(shared)} of {len(groups)} series of file names are in both: {some(texts)}. If they are "
        message += "recordings, neighbouring frames are in train and val, and the score is too good"
        yield Finding("leakage", "warn", message, "data.train, data.val", {"series": shared})
    else:
        message = f"none of the {len(groups)} series of file names is in both"
        yield Finding("leakage", "ok", message, "data.train, data.val")
