"""Reads images from packs: tar files on a disk, a web server or an object store, with an index of their images.

A pack holds a folder of data (`vitkit.apps.datasets.packing` writes it):

    pack.json         size and checksum of each other file
    names.npy         (N,) bytes, the sorted names of the images: their paths in the folder
    members.npy       (N,) of `MEMBER`: where each image is
    files.tar         the folder's other files, such as annotations, and its subfolders
    shard-00000.tar   images; further shards follow

`mount` makes a folder that stands for the pack: the other files are in it, and names of images that are not there are
looked up in the index by `vitkit.io.image_files`, so that nobody else need know where images are.
"""

import errno
import hashlib
import json
import os
import posixpath
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from vitkit.errors import DataError
from vitkit.io.atomic import TEMPORARY_SUFFIX
from vitkit.io.local_cache import MOUNTED_PACK, PACK, cache_folder, hold_lock
from vitkit.io.remote_files import ABANDONED_SECONDS, BLOCK_BYTES, BlockCache, read_range
from vitkit.text_format import is_url

NAMES, MEMBERS, FILES = "names.npy", "members.npy", "files.tar"
VERSION = 1
"""Of the format, in pack.json."""
MEMBER = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("crc32", "<u4")])
"""The number of an image's shard, where its content begins there, its bytes and their checksum."""
_MOUNTED, _ORIGIN = os.path.split(MOUNTED_PACK)
_PACK_AGAIN = "Pack the data again by vitkit data pack, or copy the complete pack there."
_NAME_ERRORS = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}
"""What a disk says of a file's name, and not of its own space or rights."""


def mount(root: str) -> str:
    """Return the folder that stands for a root of data: the root itself, unless it is a pack.

    Args:
        root: a folder, or the folder or address of a pack.
    Raises:
        DataError: there is no pack at an address, or it is damaged, incomplete or of another version.
    """
    if not is_url(root):
        has = {name for name in (PACK, NAMES, MEMBERS, FILES) if os.path.isfile(os.path.join(root, name))}
        if PACK not in has or len(has) == 1:  # a file of this name may be something else
            return root
        root = os.path.abspath(root)
    root = root.rstrip("/")
    text = _read(root, PACK)
    description = _parse(text, f"{root}/{PACK}")
    if is_url(root):
        read_range(f"{root}/{PACK}", 0, 1)  # a server without ranges is named now, before it sends a complete shard
    digest = hashlib.sha256(encode_name(root) + b"\n" + text).hexdigest()[:16]
    folder = cache_folder() / "packs" / f"{PurePosixPath(root).name[:50]}-{digest}"
    try:
        if not _is_mounted(folder):  # it is complete, also in a cache that can only be read
            folder.parent.mkdir(parents=True, exist_ok=True)
            waiting = f"{root}: waiting for another process, which opens it"
            with hold_lock(folder.with_name(f"{folder.name}.lock"), waiting):
                if not _is_mounted(folder):
                    _make_mount(folder, root, text, description)
    except OSError as error:
        if not _is_mounted(folder):  # without locks, another process may have made it meanwhile
            raise DataError(
                f"{root}: its annotations cannot be stored in '{folder.parent}' ({error.strerror or error}). Set "
                "VITKIT_CACHE to a folder with space that may be written."
            ) from error
    return str(folder)


def _is_mounted(folder: Path) -> bool:
    """Whether a folder has its index: where files are removed that nobody has used for long, folders stay."""
    return all(os.path.isfile(folder / _MOUNTED / name) for name in (NAMES, MEMBERS, PACK, _ORIGIN))


def _make_mount(folder: Path, root: str, text: bytes, description: dict[str, Any]) -> None:
    for other in folder.parent.glob(f"{folder.name}.*{TEMPORARY_SUFFIX}"):
        with suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > ABANDONED_SECONDS:  # by a killed process
                shutil.rmtree(other, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=TEMPORARY_SUFFIX, dir=folder.parent))
    try:
        index = made / _MOUNTED
        index.mkdir()
        for name in (NAMES, MEMBERS, FILES):
            _copy(root, name, description["files"][name], index / name)
        _check_index(index, root, description["shards"])
        _extract(index / FILES, made, root)
        (index / FILES).unlink()
        (index / PACK).write_bytes(text)
        (index / _ORIGIN).write_bytes(encode_name(root))
        if not _is_mounted(folder):
            shutil.rmtree(folder, ignore_errors=True)  # without its index
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _copy(root: str, name: str, entry: dict[str, Any], target: Path) -> None:
    """Copy a file of a pack to the disk; raise a DataError if it is not the one that pack.json describes."""
    checksum, size = hashlib.sha256(), entry["size"]
    with target.open("xb") as out:
        for start in range(0, size, BLOCK_BYTES):
            block = _read(root, name, start, min(start + BLOCK_BYTES, size))
            checksum.update(block)
            out.write(block)
    if checksum.hexdigest() != entry["sha256"]:
        raise DataError(
            f"'{root}/{name}' has another checksum than {PACK} says: it was changed or damaged. Copy the pack there "
            "again, as a whole."
        )


def _extract(archive: Path, folder: Path, root: str) -> None:
    name, size = "its beginning", archive.stat().st_size
    try:
        with tarfile.open(archive, "r:") as tar:  # not compressed
            for member in tar:
                name = f"'{member.name}'"
                path = PurePosixPath(member.name)
                is_file = member.isreg() and not member.issparse() and member.offset_data + member.size <= size
                if not (is_file or member.isdir()) or path.is_absolute() or {"..", _MOUNTED} & {*path.parts}:
                    raise DataError(
                        f"'{root}/{FILES}' has {name}, which is not a file of a folder of data. {_PACK_AGAIN}"
                    )
                target = folder / path
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("xb") as out:
                        shutil.copyfileobj(tar.extractfile(member), out)
    except DataError:
        raise
    except (OSError, tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _NAME_ERRORS:
            raise
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise DataError(f"'{root}/{FILES}' is damaged at {name} ({reason}). {_PACK_AGAIN}") from error


def _check_index(index: Path, root: str, shards: list[dict[str, Any]]) -> None:
    """Raise a DataError unless each image has a name of its own and a place in a shard."""
    names = _load(index / NAMES, root, np.dtype("S"))
    members = _load(index / MEMBERS, root, MEMBER)
    for number, name in enumerate(names.tolist()):
        try:
            is_path = posixpath.normpath(_text(name)) == _text(name) and b"\0" not in name
        except UnicodeDecodeError:
            is_path = False
        if not is_path or name.startswith((b"/", b"../")) or name in (b"", b".", b".."):
            raise DataError(
                f"'{root}/{NAMES}': entry {number} is {name[:100]!r}; expected a path in a folder. {_PACK_AGAIN}"
            )
    if not (names[:-1] < names[1:]).all():
        number = int((names[:-1] >= names[1:]).argmax()) + 1
        raise DataError(f"'{root}/{NAMES}': entry {number} is not sorted after the one before it. {_PACK_AGAIN}")
    if len(members) != len(names):
        raise DataError(f"'{root}/{MEMBERS}' has {len(members)} entries; expected {len(names)}. {_PACK_AGAIN}")
    sizes = np.array([*(shard["size"] for shard in shards), 0], np.uint64)[members["shard"].clip(max=len(shards))]
    fits = (members["offset"] <= sizes) & (members["length"] <= sizes - members["offset"])
    fits &= members["shard"] < len(shards)
    if not fits.all():
        number = int(fits.argmin())
        shard, start, length, _ = members[number].tolist()
        raise DataError(
            f"'{root}/{MEMBERS}': entry {number}, image '{_text(names[number])}', is {length} bytes at byte {start} of "
            f"shard {shard}, which {PACK} does not have. {_PACK_AGAIN}"
        )


def _load(path: Path, root: str, dtype: np.dtype[Any]) -> np.ndarray:
    """Map an array of the index, (N,), into memory."""
    try:
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except Exception as error:  # NumPy parses the header as Python, which fails in many ways
        raise DataError(f"'{root}/{path.name}' is not a NumPy array ({error}). {_PACK_AGAIN}") from error
    if array.ndim != 1 or not (array.dtype == dtype or (dtype.kind == "S" == array.dtype.kind)):
        got = f"{array.dtype}, shape {array.shape}"
        raise DataError(f"'{root}/{path.name}' has {got}; expected (N,) of {dtype}. {_PACK_AGAIN}")
    return array


def _parse(text: bytes, name: str) -> dict[str, Any]:
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"it is not JSON ({' '.join(str(error).split())})"
    else:
        version = description.get("vitkit_pack") if isinstance(description, dict) else None
        if type(version) is int and version != VERSION:
            raise DataError(
                f"'{name}' has format {version!r}; this vitkit reads {VERSION}. Pack the data again by this version's "
                "vitkit data pack, or use the version that wrote it."
            )
        if type(version) is int and not (reason := _fault_in(description)):
            return description
        reason = reason if type(version) is int else f"vitkit_pack is {version!r}"
    raise DataError(f"'{name}' is not a pack's description, or damaged: {reason[:300]}. {_PACK_AGAIN}")


def _fault_in(description: dict[str, Any]) -> str | None:
    """Return which entry of pack.json is not as it is written; None: all are."""
    files, shards = description.get("files"), description.get("shards")
    if not isinstance(files, dict) or not isinstance(shards, list):
        return "files or shards are missing"
    named = {f"files.{file}": files.get(file) for file in (NAMES, MEMBERS, FILES)}
    for where, entry in (named | {f"shards[{k}]": shard for k, shard in enumerate(shards)}).items():
        if not isinstance(entry, dict):
            return f"{where} is {entry!r}"
        if type(size := entry.get("size")) is not int or not 0 <= size < 2**63:
            return f"{where}.size is {size!r}; expected a number of bytes"
        if not (isinstance(digest := entry.get("sha256"), str) and re.fullmatch("[0-9a-f]{64}", digest)):
            return f"{where}.sha256 is {digest!r}; expected 64 hexadecimal digits"
        name = FILES if where in named else entry.get("name")
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", name)):
            return f"{where}.name is {name!r}; expected the name of a file beside it"
    return None


def _read(root: str, name: str, start: int | None = None, stop: int | None = None) -> bytes:
    """Read a file of a pack, or the bytes `start` to `stop` - 1 of it."""
    if is_url(root):
        return read_range(f"{root}/{name}", start, stop)
    path = os.path.join(root, name)
    try:
        with open(path, "rb") as file:
            file.seek(start or 0)
            data = file.read() if stop is None else file.read(stop - start)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error.strerror}). Copy the complete pack there.") from error
    if stop is not None and len(data) < stop - start:
        raise DataError(f"'{path}' ends before byte {stop}: it is incomplete. Copy the pack there again.")
    return data


def encode_name(name: str) -> bytes:
    """Return a name as the index has it: any name that a file may have, also one that is not Unicode."""
    return name.encode("utf-8", "surrogatepass")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")


class Pack:
    """An opened pack.

    Args:
        folder: the one that `mount` has made.
    """

    def __init__(self, folder: Path):
        index = folder / _MOUNTED
        self.root = _text((index / _ORIGIN).read_bytes())
        text = (index / PACK).read_bytes()
        self.shards = json.loads(text)["shards"]
        # Mapped into memory: all processes of the machine share the pages.
        self.names = np.asarray(np.load(index / NAMES, mmap_mode="r", allow_pickle=False))
        self.members = np.asarray(np.load(index / MEMBERS, mmap_mode="r", allow_pickle=False))
        self._version = hashlib.sha256(text).hexdigest()[:16]
        self._cache = BlockCache() if is_url(self.root) else None

    def number_of(self, name: str) -> int | None:
        """Return the number of an image; None: the pack has none of this name."""
        number = int(self._find([name])[0])
        return None if number < 0 else number

    def _find(self, images: Iterable[str]) -> np.ndarray:
        """Return the numbers of images, (M,) int64, -1 for names that are not in the pack."""
        names = np.array([encode_name(name) for name in images], np.bytes_)
        if not len(self.names):
            return np.full(len(names), -1)
        # A longer name than all in the index would make NumPy copy the index; it cannot be there.
        short = names.astype(self.names.dtype) if names.dtype.itemsize > self.names.dtype.itemsize else names
        positions = np.searchsorted(self.names, short).clip(max=len(self.names) - 1)
        return np.where(self.names[positions] == names, positions, -1)

    def read(self, number: int) -> bytes:
        """Read an image file.

        Raises:
            DataError: its shard is missing, cannot be read, or has other content than when it was packed.
        """
        shard, start, length, checksum = self.members[number].tolist()
        name, size = self.shards[shard]["name"], self.shards[shard]["size"]
        stop = start + length
        if self._cache is None:
            data = _read(self.root, name, start, stop)
        else:
            url, key = f"{self.root}/{name}", f"{self._version}-{shard}"
            data = self._cache.read(url, key, start, stop, size)
            if zlib.crc32(data) != checksum:  # it may be the cache that is damaged
                self._cache.forget(key, start, stop)
                data = read_range(url, start, stop)
        if zlib.crc32(data) != checksum:
            raise DataError(
                f"'{self.root}/{name}': bytes {start} to {stop - 1}, image '{_text(self.names[number])}', have "
                f"another checksum than the index says: the shard was changed or damaged after {PACK} was written. "
                "Copy the pack there again, as a whole."
            )
        return data

    def below(self, folder: str) -> list[str]:
        """Return the names of the images in a folder of the pack and its subfolders; "" is the top."""
        if not folder:
            chosen = self.names
        else:
            prefix = encode_name(folder)
            first, last = np.searchsorted(self.names, [prefix + b"/", prefix + b"0"])  # 0 is the next after the slash
            chosen = self.names[first:last]
        return list(map(_text, chosen.tolist()))

    def blocks_of(self, names: Iterable[str]) -> np.ndarray | None:
        """Return the numbers of the blocks in which images begin, (M,) int64, ascending by shard and position.

        Returns:
            None if the pack lacks one of the images.
        """
        # Annotations may have "./a.jpg" or "a//b.jpg".
        numbers = self._find(posixpath.normpath(name) if "//" in name or "./" in name else name for name in names)
        if numbers.min(initial=0) < 0:
            return None
        starts = np.cumsum([0, *(-(-shard["size"] // BLOCK_BYTES) for shard in self.shards)])
        members = self.members[numbers]
        return starts[members["shard"].astype(np.int64)] + (members["offset"] // BLOCK_BYTES).astype(np.int64)


@cache
def open_pack(folder: str) -> Pack:
    """Open the pack that a folder stands for, once in a process."""
    return Pack(Path(folder))
