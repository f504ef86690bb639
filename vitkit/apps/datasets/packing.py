"""Writes packs: a folder of data as tar files, with an index of their images (`vitkit.io.packs` reads it)."""

import hashlib
import io
import json
import logging
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vitkit.errors import DataError
from vitkit.io.atomic import TEMPORARY_SUFFIX
from vitkit.io.folders import IMAGE_SUFFIXES, data_files, is_hidden
from vitkit.io.image_files import open_regular
from vitkit.io.local_cache import PACK
from vitkit.io.packs import FILES, MEMBER, MEMBERS, NAMES, VERSION, encode_name
from vitkit.io.video_files import VIDEO_EXTENSIONS

logger = logging.getLogger("vitkit")

SHARD_BYTES = 1 << 30
_MAX_PADDING = 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE
"""Bytes at the end of a tar file, at most."""
_PACKED = {*IMAGE_SUFFIXES, ".npy"}


class Packed(NamedTuple):
    """Counts of a pack's contents."""

    num_images: int
    num_files: int
    """Annotations and other files."""
    num_shards: int
    num_bytes: int


def write_pack(
    folder: Path,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    labels: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Packed:
    """Pack a folder of data; the same folder always gives the same bytes.

    The images are in the order of their names. Hidden files are left out, and links are followed.

    Args:
        out: a new folder, which is there when it is complete.
        shard_bytes: size of a tar file, which only one with a single larger image exceeds.
        labels: image name -> what a file of JSON beside it is to contain, for readers of tar files; vitkit reads the
            annotations of the folder.
        overwrite: replace a pack that is there already.
    Raises:
        DataError: there is no image, or a file that a pack cannot have; a name of `labels` is not an image; or `out`
            is within the folder, or exists and is not to be replaced.
    """
    if not folder.is_dir():
        raise DataError(f"no folder '{folder}'. Give the folder of the data, which data.root names.")
    if out.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"OUT '{out}' is within '{folder}', which is to be packed. Choose another folder.")
    if out.exists() and not (overwrite and (out / PACK).is_file()):
        reason, remedy = ("is not a pack", "") if overwrite else ("exists already", ", or add --overwrite")
        raise DataError(f"OUT '{out}' {reason}, and is not replaced. Choose another name{remedy}.")
    out = out.resolve()  # a link, or ".", can neither be removed nor be renamed
    names = {path.relative_to(folder).as_posix(): path for path in data_files(folder)}
    images = sorted((n for n, path in names.items() if path.suffix.lower() in _PACKED), key=encode_name)
    _check(folder, names, images, labels or {})
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{out.name[:50]}.", suffix=TEMPORARY_SUFFIX, dir=out.parent))
    try:
        members, shards = _write_shards(made, names, images, shard_bytes, labels or {})
        others = sorted(names.keys() - {*images})
        folders = _folders(folder, names)
        _warn_of_links(folder, folders)
        index = [_write_files(made / FILES, names, others, folders)]
        for file, array in ((NAMES, np.array(list(map(encode_name, images)))), (MEMBERS, np.array(members, MEMBER))):
            with _open_hashed(made / file) as (content, entry):
                np.save(content, array, allow_pickle=False)
            index.append(entry)
        description = {"vitkit_pack": VERSION, "images": len(images), "shards": shards}
        description["files"] = {entry.pop("name"): entry for entry in index}
        (made / PACK).write_text(json.dumps(description, indent=1), encoding="utf-8")
        made.chmod(0o755)  # temporary folders are only for their owner
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return Packed(len(images), len(others), len(shards), sum(shard["size"] for shard in shards))


def _folders(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the subfolders, also those without files: each may stand for a class."""
    listed = {Path(parent, name).relative_to(folder) for parent, inside, _ in os.walk(folder) for name in inside}
    listed |= {parent for name in names for parent in Path(name).parents}
    return sorted(path.as_posix() for path in listed if path.parts and not is_hidden(path))


def _warn_of_links(folder: Path, folders: Iterable[str]) -> None:
    """Log which folders are links to others of the data, under whose names the images are not found in the pack."""
    root = folder.resolve()
    for name in folders:
        if (folder / name).is_symlink() and root in (target := (folder / name).resolve()).parents:
            logger.warning(
                "'%s' is a link to '%s', whose images are packed only once: they are not found in '%s'. Name the other "
                "folder in the config, or put a copy in place of the link.",
                name, target.relative_to(root), name,
            )  # fmt: skip


def _check(folder: Path, names: Mapping[str, Path], images: Sequence[str], labels: Mapping[str, Any]) -> None:
    named_so = (Path(name) for name in names if name.endswith(PACK))
    packs = (path for path in named_so if path.name == PACK and path.with_name(MEMBERS).as_posix() in names)
    if pack := next(packs, None):
        raise DataError(f"'{(folder / pack).parent}' is a pack. Give the folder that it was made of, or move it.")
    if not images:
        raise DataError(f"'{folder}' contains no image. Give the folder of the data, which data.root names.")
    if video := next((name for name in names if name.lower().endswith(VIDEO_EXTENSIONS)), None):
        raise DataError(f"'{folder / video}' is a video; only images are read from packs. Keep videos as files.")
    if unknown := labels.keys() - {*images}:
        raise DataError(f"the annotations list '{min(unknown)}', which is not in '{folder}'.")
    files: dict[str, str] = {}
    for name in labels:
        if (other := files.setdefault(_label_name(name), name)) != name:
            raise DataError(f"'{other}' and '{name}' would both have the annotations {_label_name(name)}. Rename one.")


def _label_name(image: str) -> str:
    return image[: len(image) - len(Path(image).suffix)] + ".json"


def _write_shards(
    made: Path, names: Mapping[str, Path], images: Sequence[str], shard_bytes: int, labels: Mapping[str, Any]
) -> tuple[list[tuple[int, ...]], list[dict[str, Any]]]:
    """Write the tar files of images; return the rows of the index, and the entries of the shards in pack.json."""
    members: list[tuple[int, ...]] = []
    shards: list[dict[str, Any]] = []
    rest = iter(images)
    name = next(rest, None)
    while name is not None:
        with _tar(made / f"shard-{len(shards):05d}.tar") as (tar, entry):
            while name is not None:
                with open_regular(names[name], "images") as file:
                    content = file.read()
                files = {name: content}
                if name in labels:
                    files[_label_name(name)] = json.dumps(labels[name]).encode()
                if tar.offset and tar.offset + sum(map(_packed_size, files.items())) + _MAX_PADDING > shard_bytes:
                    break
                start, *_ = [_add(tar, *file) for file in files.items()]
                members.append((len(shards), start, len(content), zlib.crc32(content)))
                name = next(rest, None)
        shards.append(entry)
    return members, shards


def _write_files(
    path: Path, names: Mapping[str, Path], others: Sequence[str], folders: Sequence[str]
) -> dict[str, Any]:
    """Write the tar file of the folders and of all files that are not images; return its entry in pack.json."""
    with _tar(path) as (tar, entry):
        for folder in folders:
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name in others:
            with open_regular(names[name], "files") as file:
                info = tarfile.TarInfo(name)
                info.size = os.fstat(file.fileno()).st_size
                tar.addfile(info, file)
    return entry


def _packed_size(file: tuple[str, bytes]) -> int:
    """Return the bytes that a file takes in a tar file, at most: those of its header and its content."""
    name, content = file
    return len(tarfile.TarInfo(name).tobuf(tarfile.PAX_FORMAT)) + len(content) + tarfile.BLOCKSIZE


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> int:
    """Add a file; return where its content begins."""
    info = tarfile.TarInfo(name)  # with a time of 0 and no owner
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
    return tar.offset - -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


@contextmanager
def _tar(path: Path) -> Iterator[tuple[tarfile.TarFile, dict[str, Any]]]:
    """Open a tar file for writing, as a stream; when it is closed, its entry in pack.json is complete."""
    with _open_hashed(path) as (file, entry), tarfile.open(fileobj=file, mode="w|", bufsize=1 << 20) as tar:
        yield tar, entry


class _Hashed(io.RawIOBase):
    """Writes to a file, and computes its checksum."""

    def __init__(self, file: BinaryIO):
        self.file, self.checksum = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.checksum.update(data)
        return self.file.write(data)

    def writable(self) -> bool:
        return True


@contextmanager
def _open_hashed(path: Path) -> Iterator[tuple[BinaryIO, dict[str, Any]]]:
    """Open a file for writing; when it is closed, its entry in pack.json is complete."""
    entry: dict[str, Any] = {"name": path.name}
    with path.open("xb") as file:
        hashed = _Hashed(file)
        yield hashed, entry
        entry |= {"size": file.tell(), "sha256": hashed.checksum.hexdigest()}
