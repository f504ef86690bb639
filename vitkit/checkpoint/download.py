"""Downloads published files by URL: cached, resumed after an interruption, and checked."""

import errno
import hashlib
import logging
import os
import urllib.error
import urllib.request
from pathlib import Path

import torch
from torch.hub import tqdm

from vitkit.errors import CheckpointError

logger = logging.getLogger("vitkit")

CHUNK_BYTES = 1 << 20
RECORD_SUFFIX = ".sha256"
"""Suffix of the file with the checksum recorded at the first download, in the format of `sha256sum -c`."""
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


def cache_folder() -> Path:
    """Return the folder of downloaded weights: torch hub's folder (set TORCH_HOME to move it)."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def cached_file(url: str, *, checksum: str | None = None, name: str | None = None, folder: Path | None = None) -> Path:
    """Return the local copy of `url`, downloading it if needed. An interrupted download is continued.

    Args:
        checksum: algorithm and first hexadecimal digits, such as "md5:3c8ec9"; "": none is published, so the
            first download records the file's SHA-256 beside it, and later ones must match; None: nothing is checked.
        name: name of the local copy; None: the last part of the URL.
        folder: folder to use instead of `cache_folder()`.
    Raises:
        CheckpointError: the URL cannot be reached, the file's checksum differs, or the cache cannot be
            written.
    """
    path = (folder or cache_folder()) / (name or url.rsplit("/", 1)[-1])
    try:
        if path.is_file():
            _check(path, path, checksum, url)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        _fetch(url, part)
        try:
            _check(part, path, checksum, url)
        except CheckpointError:
            part.unlink()  # Continuing from wrong bytes could never succeed.
            raise
        os.replace(part, path)
    except OSError as error:  # including network errors
        if error.errno in _STORAGE_ERRORS:
            raise CheckpointError(
                f"{error.filename or path}: cannot be written ({error.strerror}). Make room or set the rights there, "
                "or set TORCH_HOME to another folder."
            ) from error
        raise CheckpointError(
            f"cannot download {url} ({error}). Put the file at {path} yourself, or try again: "
            f"what has arrived is kept in {path.name}.part."
        ) from error
    return path


def _fetch(url: str, part: Path) -> None:
    """Append the missing part of `url` to `part`."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # The range begins at the end: the file was already complete.
            return
        raise
    with response:
        if "text/html" in response.headers.get("Content-Type", ""):
            raise OSError("the address answers with a web page: open it in a browser, and download the file there")
        resumed = response.status == 206
        done = start if resumed else 0
        total = done + int(response.headers.get("Content-Length") or 0)
        with part.open("ab" if resumed else "wb") as file, tqdm(total=total, unit="B", unit_scale=True) as bar:
            bar.update(done)
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
                done += len(chunk)
    if done < total:
        raise OSError(f"the connection broke after {done} of {total} bytes")


def _check(file: Path, path: Path, checksum: str | None, url: str) -> None:
    """Check a file against the published checksum, or against the one recorded when it was first downloaded.

    Args:
        file: the file to check.
        path: its path, now or once it is complete.
        checksum: see `cached_file`.
    Raises:
        CheckpointError: the checksum differs.
    """
    if checksum is None:
        return
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    digest = _digest(file, algorithm)
    if expected:
        if not digest.startswith(expected):
            raise CheckpointError(
                f"{file}: {algorithm} begins {digest[: len(expected)]}, expected {expected}: the file is damaged. "
                f"Delete it, and it is downloaded again from {url}."
            )
        return
    record = path.with_name(path.name + RECORD_SUFFIX)
    if record.is_file():
        recorded = record.read_text(encoding="utf-8").partition(" ")[0]
        if digest != recorded:
            raise CheckpointError(
                f"{file}: sha256 is {digest}, but {recorded} was recorded at the first download: the file is damaged, "
                f"or {url} gives another one now. Delete {path} to download it again; if the change is right, also "
                f"delete {record.name} beside it."
            )
        return
    temporary = record.with_name(f"{record.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{digest}  {path.name}\n", encoding="utf-8")
    os.replace(temporary, record)
    logger.info("%s: no checksum is published; its sha256 %s is recorded, and later downloads must agree", path, digest)


def _digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
