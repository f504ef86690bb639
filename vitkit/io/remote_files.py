"""Reads ranges of files on web servers and object stores, within bounds of time, attempts and disk space."""

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import ConfigError, DataError
from vitkit.io.atomic import TEMPORARY_SUFFIX, write_atomically
from vitkit.io.local_cache import cache_folder, hold_lock

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger("vitkit")

BLOCK_BYTES = 4 << 20
"""What is fetched at once: large enough that the time to the first byte does not count."""
ATTEMPTS, FIRST_WAIT, TIMEOUT = 5, 0.5, 30.0
"""How often a range is asked for, and for how many seconds: the wait before the second attempt, which then doubles,
and an attempt."""
MAX_WHOLE_BYTES = 256 << 20
"""Of a file that is read as a whole."""
_TRANSIENT = (408, 425, 429)
"""Among the statuses 400 to 499 of HTTP, those that another attempt may not have."""
_LOCKS = "locks"
_BLOCKS_BETWEEN_SCANS = 16
ABANDONED_SECONDS = 3600.0
"""Age from which what another process was writing is taken for left over."""


def read_range(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """Read the bytes `start` to `stop` - 1 of a remote file, or all of it.

    Raises:
        DataError: it does not exist, may not be read, lacks these bytes, is larger than `MAX_WHOLE_BYTES` as a whole,
            or could not be read in `ATTEMPTS` attempts.
    """
    system, path = _file_system(url)
    where = f"'{url}'" if start is None else f"'{url}' (bytes {start} to {stop - 1})"
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
        try:
            data = _fetch(system, path, start, stop)
        except FileNotFoundError as error:
            raise DataError(f"no '{url}'. Correct the address, or copy the complete pack there.") from error
        except Exception as error:  # each protocol's library raises errors of its own
            reason, cause = str(error).split("\n")[0] or type(error).__name__, error
            status = getattr(error, "status", 0)
            if isinstance(error, PermissionError) or (400 <= status < 500 and status not in _TRANSIENT):
                state = _state(system, path)
                raise DataError(f"{where} cannot be read: {reason}. {state}Correct the address or rights.") from error
            continue
        if start is None and len(data) > MAX_WHOLE_BYTES:
            raise DataError(f"{where} has more than {MAX_WHOLE_BYTES} bytes. Correct the address.")
        if start is None or len(data) == stop - start:
            return data
        if len(data) > stop - start:
            raise DataError(
                f"{where}: the server sends more bytes: it does not serve ranges. Use one that does (such as nginx, or "
                "an object store), or copy the pack to a disk."
            )
        reason, cause = f"the server sent {len(data)} of {stop - start} bytes", None
    raise DataError(
        f"{where} cannot be read in {ATTEMPTS} attempts: {reason}. {_state(system, path)}Check the network and the "
        "server, and go on with --resume."
    ) from cause


def _fetch(system: "AbstractFileSystem", path: str, start: int | None, stop: int | None) -> bytes:
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError

    if not system.async_impl:
        return system.cat_file(path, start=start, end=stop)
    try:
        if "http" in system.protocol:
            return sync(system.loop, _fetch_http, system, path, start, stop, timeout=TIMEOUT)
        return sync(system.loop, system._cat_file, path, start=start, end=stop, timeout=TIMEOUT)
    except FSTimeoutError as error:
        raise TimeoutError(f"nothing complete arrived within {TIMEOUT:g} seconds") from error


async def _fetch_http(system: Any, path: str, start: int | None, stop: int | None) -> bytes:
    """Read at most one byte more than was asked for; the file system's own `_cat_file` reads all that a server sends.

    Raises:
        FileNotFoundError: the server says so; or aiohttp's error of another status.
    """
    most = (MAX_WHOLE_BYTES if start is None else stop - start) + 1
    ranges = {} if start is None else {"Range": f"bytes={start}-{stop - 1}"}
    options = system.kwargs | {"headers": system.kwargs["headers"] | ranges}
    session = await system.set_session()
    async with session.get(system.encode_url(path), **options) as response:
        if response.status == 404:
            raise FileNotFoundError(path)
        response.raise_for_status()
        data = bytearray()
        while len(data) < most and (part := await response.content.read(most - len(data))):
            data += part
    return bytes(data)


def _file_system(url: str) -> tuple["AbstractFileSystem", str]:
    """Return fsspec's file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    # A compressed answer would have other bytes than the range.
    options = {"headers": {"Accept-Encoding": "identity"}} if protocol in ("http", "https") else {}
    try:
        return url_to_fs(url, **options)
    except ImportError as error:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(protocol, "'vitkit[remote]'")
        raise ConfigError(f"'{url}': {protocol}:// needs another package: pip install {package}") from error
    except ValueError as error:
        raise ConfigError(f"'{url}': {error}. Give an address such as https://, s3:// or gs://.") from error


def _state(system: "AbstractFileSystem", path: str) -> str:
    """Return the size and the time of change of a remote file, for an error message."""
    from fsspec.asyn import sync

    try:
        info = sync(system.loop, system._info, path, timeout=min(TIMEOUT, 10.0)) if system.async_impl else {}
    except Exception:  # the file's own error is reported
        return ""
    known = [f"{name} {info[key]}" for name, key in _FACTS.items() if info.get(key)]
    return f"The server now says: {', '.join(known)}. " if known else ""


_FACTS = {"size": "size", "ETag": "ETag", "changed": "Last-Modified"}


class BlockCache:
    """Blocks of remote files in a folder that all processes of a machine share; those unused for longest are removed.

    Without space or rights on the disk, it reads without storing, and says so once.

    Args:
        folder: None: `blocks` in `cache_folder()`.
        max_bytes: size that it may have, of which processes that write at the same time may exceed some blocks; 0:
            nothing is stored. None: $VITKIT_CACHE_GB gigabytes, by default 20.
    Raises:
        ConfigError: $VITKIT_CACHE_GB is not a number of at least 0.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int | None = None):
        self.folder = folder or cache_folder() / "blocks"
        self.max_bytes = _max_bytes() if max_bytes is None else max_bytes
        self.stores = self.max_bytes > 0
        self._bytes_between_scans = min(_BLOCKS_BETWEEN_SCANS * BLOCK_BYTES, self.max_bytes // 4)
        self._unscanned = self._bytes_between_scans  # the first block that this process stores has others beside it

    def read(self, url: str, key: str, start: int, stop: int, size: int) -> bytes:
        """Read the bytes `start` to `stop` - 1 of a remote file through the cache.

        Args:
            key: name of this version of the file, in the cache.
            size: of the file, in bytes.
        Raises:
            DataError: see `read_range`.
        """
        if self.stores:
            parts = []
            try:
                for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                    low = number * BLOCK_BYTES
                    block = slice(low, min(low + BLOCK_BYTES, size))
                    part = self._part(url, f"{key}-{number}", block, max(start, low), min(stop, low + BLOCK_BYTES))
                    parts.append(part)
                return b"".join(parts)
            except OSError as error:
                self._give_up(error)
        return read_range(url, start, stop) if stop > start else b""

    def forget(self, key: str, start: int, stop: int) -> None:
        """Remove the blocks with these bytes, so that they are fetched again."""
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            with suppress(OSError):
                (self.folder / f"{key}-{number}").unlink()

    def _part(self, url: str, name: str, block: slice, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` - 1 of a file, which lie in one block, from the cache if it is there."""
        path, first, size = self.folder / name, start - block.start, block.stop - block.start
        if (part := _read_part(path, first, stop - start, size)) is not None:
            return part
        lock = self.folder / _LOCKS / hashlib.sha256(name.encode()).hexdigest()[:2]
        lock.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(lock):  # of several processes that need a block, one fetches it
            if (part := _read_part(path, first, stop - start, size)) is not None:
                return part
            content = read_range(url, block.start, block.stop)
            try:
                self._make_room(len(content))
                write_atomically(path, lambda file: file.write(content), sync=False)
            except OSError as error:
                self._give_up(error)
        return content[first : first + stop - start]

    def _give_up(self, error: OSError) -> None:
        if self.stores:
            self.stores = False
            if _is_first_worker():
                logger.warning(
                    f"'{self.folder}': remote files cannot be cached there ({error.strerror or error}), so they are "
                    "read each time. Set VITKIT_CACHE to a folder with space that may be written, or VITKIT_CACHE_GB "
                    "to less than is free."
                )

    def _make_room(self, num_bytes: int) -> None:
        """Remove the blocks unused for longest if, with `num_bytes` more, the cache is larger than it may be."""
        self._unscanned += num_bytes
        if self._unscanned < self._bytes_between_scans:
            return
        self._unscanned = 0
        blocks = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed it
                    stat = entry.stat()
                    is_temporary = entry.name.endswith(TEMPORARY_SUFFIX)
                    if entry.is_file() and not (is_temporary and time.time() - stat.st_mtime < ABANDONED_SECONDS):
                        blocks.append((0.0 if is_temporary else stat.st_mtime, stat.st_size, entry.path))
        excess = sum(size for _, size, _ in blocks) + num_bytes + self._bytes_between_scans - self.max_bytes
        for _, size, path in sorted(blocks):
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            excess -= size


def _read_part(path: Path, start: int, length: int, size: int) -> bytes | None:
    """Read a part of a block, which is then the one used last; None if it is not there or incomplete."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:  # the machine went down while it was written
                return None
            with suppress(OSError):
                os.utime(path)
            file.seek(start)
            return file.read(length)
    except FileNotFoundError:
        return None


def _max_bytes() -> int:
    text = os.environ.get("VITKIT_CACHE_GB", "20")
    try:
        number = float(text)
        if not 0 <= number < float("inf"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"VITKIT_CACHE_GB: got {text!r}; expected a number of gigabytes, 0 for no cache.") from None
    return int(number * 1e9)


def _is_first_worker() -> bool:
    """Whether this is the training process or the first of its loading processes, which say what they all find."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    return worker is None or worker.id == 0
