"""Lists the data files of a folder, without debris, and knows which endings are images.

Every reader of a folder asks here, so that what one reads another does not leave out. What vitkit has drawn or written
as a run is not data: `declare_output` lists it in a hidden file of its folder, and readers pass it over.
"""

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from unicodedata import normalize

from PIL import Image

from vitkit.errors import DataError
from vitkit.io.image_files import (
    FORMATS,
    TIFF_STARTS,
    ImageStore,
    decoding,
    open_regular,
    read_tiff_pages,
    upright_size,
)
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
SPLITS = ("train", "val", "test")
_WORDS_OF_SPLITS = {
    "train": ("train", "training", "minitrain"),
    "val": ("val", "valid", "validation", "dev", "minival", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS_OF_SPLITS.items() for word in words}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_BESIDE_SPLIT = ("", "set", "data", "images", "imgs", "image", "img", "labels", "split")
"""What may stand beside the word in the name of a split, apart from digits and separators."""
_MAX_FOLDERS = 16
"""How many of the last folders of a name are compared."""
_WITH_FRAMES = (".gif", ".webp", ".tif", ".tiff")
_MAX_OPENED = 2000
"""Number of files of these endings that are opened to count their pages and frames, which takes a second."""
_REDUCED, _MASK = 1, 4
"""Bits of a TIFF's `NewSubfileType` that mark a page as a thumbnail or a mask of another one."""
_SUBFILE_TYPE = 254
OUTPUT_LIST = ".vitkit-output"
"""File that lists what vitkit has written into its folder and is not data, a name a line."""
WHOLE_FOLDER = "*"
"""Line of the list of a folder that vitkit has made."""


def declare_output(*paths: Path) -> None:
    """Record that vitkit writes these files or folders, so that nobody reads them as data; parent folders are made.

    A folder is recorded if it has no data yet: readers of a folder around it leave it out, but it can be read itself,
    without the recorded files.
    """
    lines: dict[Path, dict[str, None]] = {}
    for path in paths:
        if not path.is_dir():
            lines.setdefault(path.parent, {})[path.name] = None
        elif next(_walk(path), None) is None:
            lines.setdefault(path, {})[WHOLE_FOLDER] = None
    for folder, names in lines.items():
        if new := names.keys() - listed_output(folder):
            with suppress(OSError):  # whoever writes the files says what is wrong with the folder
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / OUTPUT_LIST, "a", encoding="utf-8", errors="surrogateescape") as file:
                    file.write("".join(f"{name}\n" for name in sorted(new)))


def is_output(path: Path) -> bool:
    """Whether vitkit has written a file, or has made a folder or all that is in it, see `declare_output`."""
    if path.name in listed_output(path.parent) or WHOLE_FOLDER in listed_output(path):
        return True
    left_out: list[str] = []
    return path.is_dir() and next(_walk(path, left_out), None) is None and bool(left_out)


def listed_output(folder: str | Path) -> Set[str]:
    """Return the lines of a folder's list of what vitkit has written into it, empty if there is none."""
    try:
        with open(os.path.join(folder, OUTPUT_LIST), encoding="utf-8", errors="surrogateescape") as file:
            return set(file.read().split("\n"))
    except OSError:
        return frozenset()


@cache
def _warn_of_output(folder: Path, left_out: tuple[str, ...]) -> None:
    """Log what is left out of a folder because vitkit has written it, once."""
    logger.warning("'%s': left out what vitkit has written: %d, such as '%s'", folder, len(left_out), left_out[0])


def is_hidden(name: str | PurePath) -> bool:
    """Whether a file, or a folder on the way to it, has a name that begins with a dot.

    Such files are not data: notebooks keep copies in .ipynb_checkpoints, and macOS writes a ._NAME beside each file, in
    archives below __MACOSX.

    Args:
        name: relative to the folder that was given, whose own name does not count.
    """
    parts = PurePath(name).parts
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in parts)


def one_form(name: str) -> str:
    """Return a name in the composed Unicode form: macOS writes "ü" as two characters, other systems as one."""
    return name if name.isascii() else normalize("NFC", name)


def fold_name(name: str) -> str:
    """Return a class name without what spellings differ in: case, blanks, hyphens, underscores and Unicode forms."""
    return re.sub(r"[\s_\-]+", "", one_form(name).casefold())


def matches_any(file_name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file name matches a pattern, such as "0001TP_*", with or without folders and ending."""
    path = PurePosixPath(file_name)
    names = {one_form(name) for name in (file_name, str(path.with_suffix("")), path.name, path.stem)}
    return any(fnmatchcase(name, one_form(pattern)) for name in names for pattern in patterns)


def data_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted, without hidden ones; links to folders are followed.

    Images of a mounted pack are among them, and broken links and devices, so that whoever reads them names them.
    """
    left_out: list[str] = []
    files = [*_walk(folder, left_out), *ImageStore(folder).list_packed_files()]
    if left_out:
        _warn_of_output(folder, tuple(left_out))
    return sorted(files, key=lambda path: path.parts)  # comparing paths takes five times as long


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones and those that vitkit has written."""
    paths = (path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))
    return sorted(path.name for path in paths if not is_output(path))


def _walk(folder: Path, left_out: list[str] | None = None) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders; add what vitkit has written to `left_out`."""
    root, top = _with_separator(folder), os.fspath(folder)
    for parent, folders, names in os.walk(folder, onerror=_warn_of, followlinks=True):
        listed = listed_output(parent) if OUTPUT_LIST in names else ()
        is_whole = WHOLE_FOLDER in listed and parent != top
        if left_out is not None:
            left_out += [parent] if is_whole else [os.path.join(parent, name) for name in names if name in listed]
        if is_whole:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and not _is_known(os.path.join(parent, name), root)]
        yield from (Path(parent, name) for name in names if name[0] != "." and name not in listed)


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
    """Return the files that match a pattern, and folders if they are wanted, sorted, without what vitkit has written.

    Raises:
        DataError: there are none.
    """
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if folders or os.path.isfile(name)]
    paths = _without_output(paths, len([*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)]))
    if not paths:
        raise DataError(f"'{pattern}': no such file or folder, and no file matches it as a pattern.")
    return paths


def _without_output(paths: Sequence[Path], num_named: int) -> list[Path]:
    """Return the paths that are not what vitkit has written; their first `num_named` folders were named, so that they
    may be read, as in `data_files`."""
    listed = {folder: listed_output(folder) for path in paths for folder in (path, *path.parents)}
    return [
        path
        for path in paths
        if path.name not in listed[path.parent]
        and not any(WHOLE_FOLDER in listed[Path(*path.parts[:n])] for n in range(num_named + 1, len(path.parts) + 1))
    ]


def log_unread(folder: Path, others: Iterable[Path], images: Iterable[Path]) -> None:
    """Log what is not read in a folder: files of other endings, and all but the first page or frame of images."""
    if counts := count_endings(others):
        logger.warning("'%s': left out files that are not read as images: %s", folder, counts)
    candidates = [path for path in images if path.suffix.lower() in _WITH_FRAMES and path.exists()][:_MAX_OPENED]
    if several := [path for path in candidates if _has_frames(path)]:
        least = "at least " if len(candidates) == _MAX_OPENED else ""
        logger.warning(
            f"'{folder}': {least}{pluralize(len(several), 'images', 'have')} several pages or frames, such as "
            f"'{several[0].name}': the first is read (pages may be read by data.channels)"
        )


def count_endings(paths: Iterable[Path]) -> str:
    """Count files by ending: "3 .txt, 1 .json, 1 without an ending"; "" for none."""
    counts = Counter(path.suffix.lower() or "without an ending" for path in paths)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair)))


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


class ImageFiles:
    """The image files below a folder, to be looked up by the names that annotations use.

    Arrays (.npy), which may be something else than images, are found only if they are named with their ending.

    Args:
        folder: folder of the images.
    Raises:
        DataError: there is no such folder, or it contains no images.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise DataError(f"images: no folder '{folder}'. Give the folder of the images.")
        self.folder = folder
        files = data_files(folder)
        suffixes = {*IMAGE_SUFFIXES, ".npy"}
        names = sorted(path.relative_to(folder).as_posix() for path in files if path.suffix.lower() in suffixes)
        self.arrays = [name for name in names if name.lower().endswith(".npy")]
        self.names = sorted({*names} - {*self.arrays})
        unread = [path for path in files if path.suffix.lower() in _UNREAD_IMAGES]
        log_unread(folder, unread, [folder / name for name in self.names])
        if not names:
            raise DataError(f"images: '{folder}' contains no images ({', '.join(FORMATS)}).")
        self._by_key: dict[str, list[str]] = {}
        for name in (*self.names, *self.arrays):
            path = PurePosixPath(one_form(name))
            stems = () if path.suffix.lower() == ".npy" else (str(path.with_suffix("")), path.stem)
            for key in {str(path), path.name, *stems}:
                self._by_key.setdefault(key, []).append(name)
        folders = {name.rpartition("/")[0] for name in (*self.names, *self.arrays)}
        self.splits = set().union(*(splits_in(f"{folder}/a.jpg") for folder in folders))
        """The splits that have a folder."""
        self._folders = [one_form(part) for part in folder.resolve().parts]
        self._named: dict[tuple[str, str | None], tuple[int, str]] = {}
        """File and split (None: `expect`) -> how many folders of the path that names it are its own, and that path."""
        self._lists_own_folders = False
        """Whether a listed path has all folders of its file: then one with other folders does not name a file."""

    def expect(self, listed: Iterable[Sequence[str]]) -> None:
        """Look at all names that will be asked for, each with its alternatives: of several paths for one file, the one
        whose folders agree with the file's names it, and `find` does not find it by the others."""
        for names in listed:
            if found := self._match(names, None, frozenset()):
                file, agreement, path = found
                self._lists_own_folders |= 0 < file.count("/") <= agreement
                if agreement > self._named.get((file, None), (-1, ""))[0]:
                    self._named[file, None] = agreement, path

    def find(self, *names: str, split: str | None = None, other_splits: Set[str] = frozenset()) -> str | None:
        """Return the image file that the first matching name refers to, or None.

        A name may be a path on another machine, whose last folders and file name are looked for, the longest match
        first, its ending may be missing or another image's, and it may have another Unicode form or case. A name in a
        split's folder, such as "val2017/a.jpg", does not match a file in the folder of another split. Two paths never
        find one file: it belongs to the one that agrees with more of its folders, see `expect`.

        Args:
            split: of several files that match a name, the one in a folder of this split is returned.
            other_splits: names outside the folders of splits do not match files in the folders of these.
        Raises:
            DataError: several images have that name, or another path has found this image.
        """
        found = self._match(names, split, other_splits)
        if found is None:
            return None
        file, agreement, path = found
        if self._lists_own_folders and "/" in path and agreement < file.count("/"):
            return None  # it is in a folder that is not there
        most, other = self._named.setdefault((file, split), (agreement, path))
        # Otherwise it is the photo of another folder, which is not there.
        if agreement < max(most, self._named.get((file, None), (0, ""))[0]):
            return None
        if other != path:
            raise DataError(
                f"'{other}' and '{path}' both name '{self.folder / file}', the only image of that name below "
                f"'{self.folder}'. Add the missing image, or give the folder that contains both of their folders."
            )
        return file

    def matches(self, names: Iterable[str]) -> set[str]:
        """Return the files that these names would find, each for itself, of those that find one."""
        found = set()
        for name in names:
            with suppress(DataError):  # several
                found |= {*(self._match([name], None, frozenset()) or ())[:1]}
        return found

    def _match(self, names: Sequence[str], split: str | None, other_splits: Set[str]) -> tuple[str, int, str] | None:
        """Return the file that the first matching name refers to, how many of its folders agree with the name's, and
        the name as a path; None without a match."""
        for by_key, form in ((self._by_key, str), (self._by_folded_key, str.casefold)):
            for name in names:
                path = PurePosixPath(*one_form(name).replace("\\", "/").split("/")[-_MAX_FOLDERS - 1 :])
                named = splits_in(str(path)) & self.splits
                others = self.splits - named if named else other_splits
                stem = path.with_suffix("") if path.suffix.lower() in IMAGE_SUFFIXES else path
                keys = [form("/".join(p.parts[k:])) for k in range(len(path.parts)) for p in (path, stem)]
                for key in keys:
                    matches = by_key.get(key, ())
                    exact = [match for match in matches if one_form(match) == key]
                    if exact:  # only a folder with both Unicode forms of a name has two of them
                        matches = [name] if name in exact else exact[:1]
                    elif others:
                        matches = [m for m in matches if named & splits_in(m) or not others & splits_in(m)]
                    if matches:
                        file = self._choose(matches, str(path), split)
                        return file, self._agreement(path, file), str(path)
        return None

    def _choose(self, matches: Sequence[str], path: str, split: str | None) -> str:
        """Return the one of the files with a path's key that is in a split; raise a DataError if there are several."""
        if len(matches) > 1 and split is not None:
            matches = [match for match in matches if split in splits_in(match)] or matches
        if len(matches) > 1:
            raise DataError(
                f"'{path}' names {len(matches)} images below '{self.folder}': {matches[0]} and "
                f"{matches[1]}. Give each image a unique name, or read one folder at a time."
            )
        return matches[0]

    @cached_property
    def _by_folded_key(self) -> dict[str, list[str]]:
        """The files by their keys in one case, for names that differ from a file's in case only."""
        by_key: dict[str, dict[str, None]] = {}
        for key, names in self._by_key.items():
            by_key.setdefault(key.casefold(), {}).update(dict.fromkeys(names))
        return {key: [*names] for key, names in by_key.items()}

    def _agreement(self, path: PurePosixPath, file: str) -> int:
        """Return how many of the last folders of a path and of a file are the same."""
        own = [*self._folders, *PurePosixPath(one_form(file)).parts[:-1]]
        pairs = zip(*(map(str.casefold, reversed(parts)) for parts in (path.parts[:-1], own)))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def size(self, name: str) -> tuple[int, int]:
        """Read (width, height) of an image, upright; raises like `read_header`."""
        return upright_size(self.folder / name)


def splits_in(name: str) -> set[str]:
    """Return the splits that the folders of a file stand for: "val" for "val2017/a.jpg"."""
    return {split for part in PurePosixPath(name).parts[:-1] if (split := split_of(part))}


def split_words(name: str) -> list[tuple[str, str]]:
    """Return the split that each word of a name stands for, in any case, and the rest of the name: [("val", "seg")]
    for "seg_Valid2"."""
    words = [match for match in _WORD.finditer(name) if match[0].lower() in _SPLIT_OF_WORD]
    rests = [re.sub(r"[\W\d_]+", "", name[: m.start()] + name[m.end() :]).lower() for m in words]
    return [(_SPLIT_OF_WORD[match[0].lower()], rest) for match, rest in zip(words, rests)]


def split_of(name: str) -> str | None:
    """Return the split, one of SPLITS, that a folder, key or value is the name of: "val" for "Validation" or "val2017".

    Further words, as in "seg_train", may belong to anything else: see `split_folders`.
    """
    name = re.sub(r"(?i)(?<=[a-z])set$", "", name)
    return next((split for split, rest in split_words(name) if rest in _BESIDE_SPLIT), None)


def split_folders(names: Iterable[str]) -> dict[str, str]:
    """Return the split that each of several folders beside each other is the name of, {} if they are something else.

    They are splits if all of them are, or if train is among them and another one that differs only in this word.
    """
    names = list(names)
    if names and all(map(split_of, names)):
        return {name: split_of(name) for name in names}
    rests: dict[str, dict[str, str]] = {}
    for name in names:
        for split, rest in split_words(name):
            rests.setdefault("" if split_of(name) else rest, {})[name] = split
    return next((found for found in rests.values() if "train" in found.values() and len({*found.values()}) > 1), {})
