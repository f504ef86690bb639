"""Lists the files of a folder that are data: which endings are images, and what is debris.

Every reader of a folder asks here, so that what one reads another does not leave out.
"""

import glob
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePath
from unicodedata import normalize

from PIL import Image

from vitkit.errors import DataError
from vitkit.io.image_files import FORMATS, TIFF_STARTS, decoding, open_regular, read_tiff_pages
from vitkit.io.packs import packed_files
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")

_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "BMP": (".bmp", ".dib"),
    "GIF": (".gif",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif", ".avifs"),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "HEIF": (".heic", ".heif", ".hif"),
}
IMAGE_SUFFIXES = frozenset(suffix for format in FORMATS for suffix in _SUFFIXES[format])
"""Endings of the images that can be read here, in lower case."""
_UNREAD_IMAGES = {suffix for suffixes in _SUFFIXES.values() for suffix in suffixes} - IMAGE_SUFFIXES | {
    *(".arw", ".cr2", ".cr3", ".dcm", ".dng", ".exr", ".hdr", ".ico", ".jxl", ".jxr", ".nef", ".orf", ".pcx", ".pfm"),
    *(".psd", ".raf", ".raw", ".rw2", ".sgi", ".svg", ".tga", ".xcf"),
}
"""Endings of pictures that cannot be read."""
_WITH_FRAMES = (".gif", ".webp", ".tif", ".tiff")
_MAX_OPENED = 2000
"""Number of files of these endings that are opened to count their pages and frames, which takes a second."""
_REDUCED, _MASK = 1, 4
"""Bits of a TIFF's `NewSubfileType` that mark a page as a thumbnail or a mask of another one."""
_SUBFILE_TYPE = 254


def is_hidden(name: str | PurePath) -> bool:
    """Whether a file, or a folder on the way to it, has a name that begins with a dot.

    Such files are not data: notebooks keep copies in .ipynb_checkpoints, and macOS writes a ._NAME beside each file.

    Args:
        name: relative to the folder that was given, whose own name does not count.
    """
    return any(part.startswith(".") and part not in (".", "..") for part in PurePath(name).parts)


def one_form(name: str) -> str:
    """Return a name in the composed Unicode form: macOS writes "ü" as two characters, other systems as one."""
    return name if name.isascii() else normalize("NFC", name)


def data_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted, without hidden ones; links to folders are followed.

    Images of a mounted pack are among them, and broken links and devices, so that whoever reads them names them.
    """
    files = [*_walk(folder), *packed_files(folder)]
    return sorted(files, key=lambda path: path.parts)  # comparing paths takes five times as long


def _walk(folder: Path) -> Iterator[Path]:
    root = _with_separator(folder)
    for parent, folders, names in os.walk(folder, onerror=_warn_of, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "." and not _is_known(os.path.join(parent, name), root)]
        yield from (Path(parent, name) for name in names if name[0] != ".")


def _warn_of(error: OSError) -> None:
    logger.warning("'%s': left out, as it cannot be read (%s)", error.filename, error.strerror)


def _is_known(path: str, root: str) -> bool:
    """Whether a folder is a link to one that is listed anyway, or that contains the link, which would never end."""
    if not os.path.islink(path):
        return False
    target = _with_separator(path)
    return target.startswith(root) or _with_separator(os.path.dirname(path)).startswith(target)


def _with_separator(path: str | Path) -> str:
    """Return a folder's path without links, with a separator at its end."""
    return os.path.join(os.path.realpath(path), "")


def image_files(folder: Path, *, also: Collection[str] = ()) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted; log how many other files it has, by ending.

    Args:
        also: further endings of files to return.
    """
    images, others = [], []
    for path in data_files(folder):
        suffix = path.suffix.lower()
        (images if suffix in IMAGE_SUFFIXES or suffix in also else others).append(path)
    log_unread(folder, others, images)
    return images


def find_paths_like(pattern: str, *, folders: bool = True) -> list[Path]:
    """Return the files that match a pattern, and the folders if these are wanted, sorted.

    Raises:
        DataError: there are none.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if folders or os.path.isfile(name)]
    if not paths:
        raise DataError(f"'{pattern}': no such file or folder, and no file matches it as a pattern.")
    return paths


def log_unread(folder: Path, others: Iterable[Path], images: Iterable[Path]) -> None:
    """Log what of a folder is not read: files of other endings, and all but the first page or frame of images."""
    if counts := count_endings(others):
        logger.warning("'%s': left out files that are not read as images: %s", folder, counts)
    candidates = [path for path in images if path.suffix.lower() in _WITH_FRAMES and path.exists()][:_MAX_OPENED]
    if several := [path for path in candidates if _has_frames(path)]:
        count = pluralize(len(several), "images", "have")
        least = "at least " if len(candidates) == _MAX_OPENED else ""
        logger.warning(
            "'%s': %s%s several pages or frames, such as '%s': the first is read (pages may be read by data.channels)",
            folder,
            least,
            count,
            several[0].name,
        )


def count_endings(paths: Iterable[Path]) -> str:
    """Count files by ending: "3 .txt, 1 .json, 1 without an ending"; "" for none."""
    counts = Counter(path.suffix.lower() or "without an ending" for path in paths)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair)))


def unread_images(files: Iterable[Path]) -> list[Path]:
    """Return the files whose ending is that of a picture that cannot be read."""
    return [path for path in files if path.suffix.lower() in _UNREAD_IMAGES]


def _has_frames(path: Path) -> bool:
    """Whether a TIFF, GIF or WebP has several pages or frames, thumbnails and masks aside."""
    try:
        with open_regular(path, "images") as file, decoding(path, "images", 0):
            if file.read(4) in TIFF_STARTS:
                return sum(not tags.get(_SUBFILE_TYPE, 0) & (_REDUCED | _MASK) for tags in read_tiff_pages(file)) > 1
            with Image.open(file, formats=FORMATS) as image:
                return getattr(image, "is_animated", False)
    except DataError:
        return False  # whoever reads the file says what is wrong with it
