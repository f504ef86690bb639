"""Downloads published files by URL: cached, resumed after an interruption, and checked."""

import errno
import http.client
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.hub import tqdm

from vitkit.errors import CheckpointError
from vitkit.io.atomic import write_atomically
from vitkit.io.local_cache import file_digest, hold_lock

logger = logging.getLogger("vitkit")

CHUNK_BYTES = 1 << 20
RECORD_SUFFIX = ".sha256"
"""Suffix of the file with the checksum recorded at the first download, in the format of `sha256sum -c`."""
VERSION_SUFFIX = ".version"
"""Suffix of the file beside an unfinished download with the server's name for this version of the file."""
_MAX_BYTES = 16 * 2**30
"""The largest file that is downloaded."""
_MIN_RATE, _GRACE = 1000, 60.0
"""Bytes per second below which a download is given up, after this many seconds."""
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


def cache_folder() -> Path:
    """Return the folder of downloaded weights: torch hub's folder (set TORCH_HOME to move it)."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def fetch_file(
    url: str,
    *,
    checksum: str | None = None,
    name: str | None = None,
    folder: Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Return the local copy of `url`, downloading it if needed. An interrupted download is continued.

    Args:
        checksum: algorithm and first hexadecimal digits, such as "md5:3c8ec9"; "": none is published, so the
            first download records the file's SHA-256 beside it, and later ones must match; None: nothing is checked.
        name: name of the local copy; None: the last part of the URL.
        folder: folder to use instead of `cache_folder()`.
        headers: of the request; they are not sent to a host to which it is redirected.
    Raises:
        CheckpointError: the URL cannot be reached, the file's checksum differs, or the cache cannot be
            written.
    """
    path = (folder or cache_folder()) / (name or _name_in(url))
    part = path.with_name(path.name + ".part")
    try:
        if path.is_file():
            _check(path, path, checksum, url)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(part, f"{path}: waiting for another process, which is downloading it"):
            if path.is_file():  # another process has downloaded it in the meantime
                _check(path, path, checksum, url)
                return path
            _fetch(url, part, resumable=bool(checksum), headers=headers or {})
            try:
                _check(part, path, checksum, url)
            except CheckpointError:
                part.unlink()  # Continuing from wrong bytes could never succeed.
                raise
            os.replace(part, path)
    except CheckpointError:
        raise
    except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:  # including network errors
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
            raise CheckpointError(
                f"{error.filename or path}: cannot be written ({error.strerror}). Free some space or fix the "
                "permissions there, or set TORCH_HOME to another folder."
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        kept = f": what has arrived is kept in {part.name}" if part.exists() else ""
        raise CheckpointError(
            f"cannot download {url} ({reason}). Put the file at {path} yourself, or try again{kept}."
        ) from error
    return path


def _name_in(url: str) -> str:
    """Return the last part of a URL's path; raise a CheckpointError if the URL has none."""
    try:
        name = urllib.parse.urlsplit(url).path.rpartition("/")[2]
    except ValueError:
        name = ""
    if name in ("", ".", ".."):
        raise CheckpointError(f"cannot download {url!r}: expected a URL that ends in the name of a file.")
    return name


def _fetch(url: str, part: Path, *, resumable: bool, headers: Mapping[str, str]) -> None:
    """Append the missing part of `url` to `part`, or download it again if what was there belongs to another file; it is
    continued although the server has not named its version if `resumable`, as the complete file is checked."""
    version = part.with_name(part.name + VERSION_SUFFIX)
    start = part.stat().st_size if part.exists() else 0
    known = version.read_text(encoding="utf-8") if version.is_file() else ""
    if start and (known or resumable):
        ranges = {"Range": f"bytes={start}-"} | ({"If-Range": known} if known else {})
        try:
            with _open(url, headers, ranges) as response:
                begins = _range_of(response.headers)[0] if response.status == 206 else 0
                if begins in (0, start) or (begins is None and resumable):
                    _receive(response, part, start if response.status == 206 and begins != 0 else 0)
                    version.unlink(missing_ok=True)
                    return
        except urllib.error.HTTPError as error:
            if error.code != 416:
                raise
            if _range_of(error.headers)[1] == start:  # the file was already complete
                version.unlink(missing_ok=True)
                return
    with _open(url, headers, {}) as response:
        # A weak ETag may be the same for files that differ.
        etag = response.headers.get("ETag", "")
        name = response.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
        version.write_text(name, encoding="utf-8")
        try:
            _receive(response, part, 0)
        finally:
            if not (part.exists() and part.stat().st_size):  # nothing has arrived
                version.unlink(missing_ok=True)
    version.unlink(missing_ok=True)


def _open(url: str, private: Mapping[str, str], headers: dict[str, str]) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers=headers)
    for name, value in private.items():
        request.add_unredirected_header(name, value)
    return urllib.request.urlopen(request, timeout=60)


def _range_of(headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the start of an answer's part and the size of the file, from "bytes 5-9/10" or "bytes */10"."""
    match = re.fullmatch(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)", headers.get("Content-Range", "").strip())
    start, size = match.groups() if match else (None, None)
    return None if start is None else int(start), None if size in (None, "*") else int(size)


def _receive(response: http.client.HTTPResponse, part: Path, done: int) -> None:
    """Write an answer to a file, after its first `done` bytes; raise an OSError if the answer is a web page, its length
    is unknown, too large or not reached, it takes too long, or the disk has less space."""
    first = b"" if done else response.peek(64).lstrip().lower()  # some pages have another Content-Type
    if "text/html" in response.headers.get("Content-Type", "") or first.startswith((b"<!doctype html", b"<html")):
        raise OSError("the URL leads to a web page: open it in a browser, and download the file there")
    length = response.headers.get("Content-Length", "").strip()
    is_chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()  # whose end the client checks
    if not is_chunked and not re.fullmatch(r"\d{1,18}", length):
        raise OSError(f"the server states the length {length!r}; expected a number of bytes")
    start, total = done, None if is_chunked else done + int(length)
    if total is not None and total > _MAX_BYTES:
        raise OSError(f"the file has {total} bytes; expected at most {_MAX_BYTES}")
    if total is not None and total - done > (free := shutil.disk_usage(part.parent).free):
        need = f"needs {(total - done) / 2**30:.2f} GiB more, and {part.parent} has {free / 2**30:.2f} free"
        raise OSError(f"it {need}: free some space, or set TORCH_HOME to another folder")
    began = time.monotonic()
    with part.open("r+b" if done else "wb") as file, tqdm(total=total, unit="B", unit_scale=True) as bar:
        file.seek(done)
        file.truncate()
        bar.update(done)
        # read1 returns what has arrived, so that a slow server is noticed.
        while chunk := response.read1(CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
            done += len(chunk)
            if done > _MAX_BYTES:
                raise OSError(f"the file has more than {_MAX_BYTES} bytes")
            seconds = time.monotonic() - began
            if seconds > _GRACE and done - start < _MIN_RATE * seconds:
                raise OSError(f"only {done - start} bytes arrived in {seconds:.0f} s")
    if not done:
        raise OSError("the server sends an empty file")
    if total is not None and done < total:
        raise OSError(f"the connection broke after {done} of {total} bytes")


def _check(file: Path, path: Path, checksum: str | None, url: str) -> None:
    """Check a file, which is or comes to be at `path`, against a checksum as `fetch_file` has it."""
    if checksum is None:
        return
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    digest = file_digest(file, algorithm)
    if expected:
        if not digest.startswith(expected):
            remedy = "Delete it, and it is downloaded again" if file == path else "It is removed: download it again"
            raise CheckpointError(
                f"{file}: {algorithm} begins {digest[: len(expected)]}, expected {expected}: the file is damaged. "
                f"{remedy} from {url}."
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
    write_atomically(record, lambda file: file.write(f"{digest}  {path.name}\n".encode()), sync=False)
    logger.info("%s: no checksum is published; its sha256 %s is recorded, and later downloads must agree", path, digest)
