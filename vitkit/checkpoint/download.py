"""Published files by address: cached, resumed after a break, and checked."""

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

import torch
from torch.hub import tqdm

from vitkit.errors import CheckpointError

CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """Return where downloaded weights lie: torch hub's folder (set TORCH_HOME to move it)."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def cached_file(url: str, *, sha256_prefix: str = "", folder: Path | None = None) -> Path:
    """Return the local copy of `url`, downloaded unless it exists. A broken download goes on where it stopped.

    Args:
        sha256_prefix: the first hexadecimal digits of the file's checksum.
        folder: instead of `cache_folder()`.
    Raises:
        CheckpointError: the address cannot be reached, or the file's checksum is another one.
    """
    path = (folder or cache_folder()) / url.rsplit("/", 1)[-1]
    if path.is_file():
        _check(path, sha256_prefix, url)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _fetch(url, part)
    except (urllib.error.URLError, OSError) as error:
        raise CheckpointError(
            f"cannot download {url} ({error}). Put the file at {path} yourself, or try again: "
            f"what has arrived is kept in {part.name}."
        ) from error
    try:
        _check(part, sha256_prefix, url)
    except CheckpointError:
        part.unlink()  # Going on from wrong bytes could never end well.
        raise
    os.replace(part, path)
    return path


def _fetch(url: str, part: Path) -> None:
    """Append what is missing of `url` to `part`."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # The range begins at the end: everything had arrived.
            return
        raise
    with response:
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


def _check(path: Path, sha256_prefix: str, url: str) -> None:
    """Check a downloaded file against the expected checksum.

    Raises:
        CheckpointError: the file's checksum begins differently.
    """
    if not sha256_prefix:
        return
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
    digest = sha256.hexdigest()
    if not digest.startswith(sha256_prefix):
        raise CheckpointError(
            f"{path}: sha256 begins {digest[: len(sha256_prefix)]}, expected {sha256_prefix}: the file is damaged. "
            f"Delete it, and it is downloaded again from {url}."
        )
