"""Check images before training on them: which are readable, large enough and different."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.unlabeled_images import UnlabeledImages
from vitkit.errors import DataError
from vitkit.io.image_files import read_header, upright_size
from vitkit.io.output import write_text
from vitkit.registry import Spec
from vitkit.text_format import pluralize

MIN_SIDE = 32
"""Short side, in pixels, below which an image is left out: a crop of it would be a few pixels, enlarged."""
MAX_DECODED = 2000
"""Number of images, spread over all, that are decoded; of the others only the header is read."""
MIN_IMAGES = 2
IMAGES, SHOWN = "images.txt", "shown.txt"
"""Files in the run's folder that list what is trained on, and what of it is shown in the report."""
NUM_SHOWN = 200
"""Number of images whose features are measured without labels, and shown."""


@dataclass(frozen=True)
class Photos:
    """The usable images."""

    source: Any
    """What the config names: a list of the files, or the dataset's spec if they are not files."""
    shown: Any
    """The same for some images, spread over all, whose features are measured and shown."""
    count: int
    short_side: int
    """The median, in pixels."""
    notes: Sequence[str]
    """What was left out or is peculiar, a sentence each."""

    @property
    def summary(self) -> str:
        """The images in words."""
        return f"{pluralize(self.count, 'images')}, {self.short_side} pixels at the short side (median)"


def check_photos(source: Path | Sequence[str | Path] | Spec, folder: Path) -> Photos:
    """Look at all images of a source, and list the usable ones in the run's folder.

    Args:
        source: see `UnlabeledImages`.
    Raises:
        DataError: there are fewer than two usable ones.
    """
    dataset = UnlabeledImages(source)
    step = max(1, len(dataset) // MAX_DECODED)
    unreadable: list[str] = []
    unlisted: list[str] = []
    tiny: list[str] = []
    copies: list[str] = []
    deep: list[str] = []
    usable: list[int] = []
    sides: list[int] = []
    seen: dict[bytes, int] = {}
    for index in range(len(dataset)):
        path = dataset.image_path(index)
        name = path.name if path is not None else f"image {dataset.image_ids[index]}"
        if path is not None and not _fits_in_line(path):
            unlisted.append(ascii(name))
            continue
        try:
            if index % step == 0 or path is None:
                image = dataset.load_image(index)
                side = min(image.shape[:2])
                checksum = hashlib.blake2b(image.tobytes() + repr(image.shape).encode(), digest_size=16).digest()
            else:
                side, checksum = min(upright_size(path)), None
            if path is not None and read_header(path).mode.startswith("I"):
                deep.append(name)
        except DataError as error:
            unreadable.append(f"{name}: {error}")
            continue
        if side < MIN_SIDE:
            tiny.append(name)
        elif checksum is not None and checksum in seen:
            copies.append(name)
        else:
            usable.append(index)
            sides.append(side)
            if checksum is not None:
                seen[checksum] = index
    notes = [
        f"{text}{', such as' if len(names) > 1 else ':'} {names[0]}"
        for names, text in (
            (unreadable, f"{pluralize(len(unreadable), 'unreadable files')} left out"),
            (unlisted, f"{pluralize(len(unlisted), 'images')} left out, whose name no line of UTF-8 text can have"),
            (tiny, f"{pluralize(len(tiny), 'images')} below {MIN_SIDE} pixels left out"),
            (copies, f"{pluralize(len(copies), 'copies')} of other images left out"),
            (deep, f"{pluralize(len(deep), 'images')} of 16 bits, of which the upper 8 are used"),
        )
        if names
    ]
    if len(usable) < MIN_IMAGES:
        raise DataError(
            f"{_describe(source)}: {pluralize(len(usable), 'images')} to learn from, of {len(dataset)}; expected at "
            f"least {MIN_IMAGES}. Add some. {'; '.join(notes)}".rstrip()
        )
    listed, shown = _list_files([dataset.image_path(index) for index in usable], folder) or (source, source)
    return Photos(listed, shown, len(usable), int(np.median(sides)), notes)


def _list_files(paths: Sequence[Path | None], folder: Path) -> tuple[str, str] | None:
    """Write the list of the usable images, and that of those to show; None if they are not files."""
    if None in paths:
        return None
    names = [f"{os.path.abspath(path)}\n" for path in paths]
    for file, some in ((IMAGES, names), (SHOWN, names[:: -(-len(names) // NUM_SHOWN)])):
        write_text(folder / file, "".join(some))
    return os.path.abspath(folder / IMAGES), os.path.abspath(folder / SHOWN)


def leave_out_lost(photos: Photos) -> None:
    """Remove images that can no longer be read from the list of those shown, as their evaluation would fail.

    Training replaces such images itself.

    Raises:
        DataError: fewer than two are left.
    """
    if not isinstance(photos.shown, str):
        return
    shown = UnlabeledImages(photos.shown)
    usable: list[str] = []
    error = ""
    for index, name in enumerate(shown.image_ids):
        try:
            shown.load_image(index)
            usable.append(f"{name}\n")
        except DataError as unreadable:
            error = str(unreadable)
    if len(usable) < MIN_IMAGES:
        raise DataError(
            f"{photos.shown}: of {pluralize(len(shown), 'images')} that the run was started with, {len(usable)} can "
            f"still be read. Put them back where they were, or start a new run. {error}"
        )
    if len(usable) < len(shown):
        print(f"photos    {pluralize(len(shown) - len(usable), 'images', 'are')} no longer readable, and not shown")
        write_text(Path(photos.shown), "".join(usable))


def _fits_in_line(path: Path) -> bool:
    """Whether a name can stand in a line of a UTF-8 file."""
    name = os.path.abspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.splitlines() == [name.strip()]


def _describe(source: Path | Sequence | Spec) -> str:
    return f"'{source}'" if isinstance(source, str | Path) else f"a {type(source).__name__} of images"
