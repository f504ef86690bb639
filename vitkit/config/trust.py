"""Decides which code may run: files that the user has run or trusted before, identified by their content."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from vitkit.config.local_imports import find_specs
from vitkit.errors import ConfigError
from vitkit.io.atomic import write_atomically
from vitkit.io.local_cache import file_digest, hold_lock

logger = logging.getLogger("vitkit")
_trusted_here: set[str] = set()
"""Checksums of the code that this process has imported, whether or not they could be stored."""
_OWN = "own file "
"""Begins the keys of files that the user has named; all other keys of the list are checksums."""


@dataclass(frozen=True)
class ImportedCode:
    """The code that an item of a config's `imports` refers to."""

    key: str
    """The item's key in the config, such as "imports.0"."""
    name: str
    """Name of a module, or absolute path of a file that ends in .py."""
    file: str
    """Path of the file; "" for a module without one, such as those of Python itself."""
    source: bytes
    """Content of the file, after those of the packages that a module is in, which run before it."""

    @classmethod
    def of_module(cls, key: str, name: str) -> "ImportedCode":
        """Return the code that importing a module would run, as it is found now; nothing is imported."""
        sources = [_source_of(spec) for spec in find_specs(name)]
        file = next((spec.origin for spec in find_specs(name)[-1:] if spec.has_location), None)
        return cls(key, name, file or "", b"\0".join(filter(None, sources)))

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the source."""
        return hashlib.sha256(self.source).hexdigest()

    def __str__(self) -> str:
        at = f" at {self.file}" if self.file not in ("", self.name) else ""
        return f"{self.key}: {self.name}{at} ({len(self.source)} bytes, sha256 {self.checksum[:12]}…)"


def _source_of(spec: ModuleSpec) -> bytes:
    """Return the content of a module's file; for a module of the interpreter its name, as it has none."""
    if spec.has_location:
        return spec.loader.get_data(spec.origin)
    return b"" if spec.origin is None else f"{spec.origin} module {spec.name}".encode()  # None: a folder, nothing runs


@dataclass(frozen=True)
class ProgramCode:
    """A program of torch.export, which is code: reading it evaluates expressions and looks up functions by name."""

    file: str
    """Its path."""

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the file."""
        return file_digest(Path(self.file), "sha256")

    def __str__(self) -> str:
        return f"{self.file} ({os.path.getsize(self.file)} bytes, sha256 {self.checksum[:12]}…)"


def trust_file() -> Path:
    """The user's list of trusted code: vitkit/trusted.json in $XDG_CONFIG_HOME, or in ~/.config."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "vitkit" / "trusted.json"


def require_trust(code: Sequence[ImportedCode | ProgramCode], path: str | Path, *, kind: str = "saved config") -> None:
    """Check that the user has run or trusted all code that a file would run.

    Args:
        path, kind: the file and what it is, for the error.
    Raises:
        ConfigError: code is unknown; all of it is listed.
    """
    trusted = _trusted_here | _remember().keys()
    unknown = [
        item
        for item in code
        if item.checksum not in trusted and not (f"{_OWN}{item.file}" in trusted and _is_mine(Path(item.file), path))
    ]
    if unknown:
        listed = "".join(f"\n  - {item}" for item in unknown)
        raise ConfigError(
            f"{path}: this {kind} would run code that you have neither run nor trusted before:{listed}\n"
            "Read it first. If you trust it, add --trust to the command (in Python: trust=True), which is remembered "
            "until it changes."
        )


def _is_mine(file: Path, saved: str | Path) -> bool:
    """Return whether a file that the user has named before may run although it has changed since.

    It lies below the working directory, but does not come with the saved config: not in its folder, nor below a folder
    of the working directory that contains both, as an unpacked archive would.
    """
    folder, here = Path(saved).resolve().parent, Path.cwd().resolve()
    if folder == here or not file.is_relative_to(here):
        return False
    top, *below = file.relative_to(here).parts
    return not below or not folder.is_relative_to(here / top)


def remember(code: Sequence[ImportedCode | ProgramCode], *, own: Sequence[ImportedCode | ProgramCode] = ()) -> None:
    """Record that the user runs or trusts code, in this process and, if it can be written, in `trust_file`.

    Args:
        own: the code out of it that the user has named, in a config in Python or on the command line. Such a file stays
            trusted when it changes, see `_is_mine`.
    """
    entries = {item.checksum: item.file for item in code}
    here = Path.cwd().resolve()
    entries |= {f"{_OWN}{item.file}": "" for item in own if Path(item.file).is_relative_to(here)}
    _trusted_here.update(entries)
    if entries.keys() <= _remember().keys():
        return
    try:
        file = trust_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(file.with_suffix(".lock")):  # what another command remembers at the same time must stay
            text = json.dumps(_remember() | entries, indent=2) + "\n"
            write_atomically(file, lambda written: written.write(text.encode()), sync=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        where, reason = (error.filename, error.strerror) if isinstance(error, OSError) else ("no home folder", error)
        logger.warning(
            f"the code that this config imports cannot be remembered as trusted ({where}: {reason}): later commands on "
            "the run need --trust. Set XDG_CONFIG_HOME to a folder that can be written."
        )


def _remember() -> dict[str, str]:
    """Return checksum -> file under which it was trusted; empty if the list is missing or invalid."""
    try:
        content = json.loads(trust_file().read_bytes())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: nested too deeply, or no home folder
        return {}
    return content if isinstance(content, dict) else {}
