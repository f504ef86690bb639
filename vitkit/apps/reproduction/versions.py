"""The code that measures a figure: versions of vitkit and of packages, and a checksum of vitkit's sources."""

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import vitkit
from vitkit.io.git_files import read_git_state
from vitkit.io.local_cache import file_digest

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pycocotools", "opencv-python-headless", "pillow", "sacrebleu")
"""Packages whose versions a figure may depend on."""
SOURCES = "sources"
"""The key of the checksum of vitkit's sources among a record's versions; early records have none."""


def versions() -> dict[str, str]:
    """Return the versions of vitkit, with a clone's commit, of Python and of the packages that figures depend on, and
    the checksum of vitkit's sources: a clone may have changes that its commit has not."""
    state = read_git_state(Path(vitkit.__file__).parent)
    commit = f" at commit {state['commit'][:12]}" if state and state["commit"] else ""
    found = {"vitkit": f"{vitkit.__version__}{commit}", SOURCES: source_digest(), "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def source_digest(packages: Mapping[str, Path] | None = None) -> str:
    """Return the SHA-256 of the names and contents of vitkit's Python files, equal in a clone and as installed.

    Args:
        packages: name -> folder; None: vitkit without its tools, its configs and its model zoo.
    """
    if packages is None:
        specs = {name: find_spec(name) for name in ("vitkit", "vitkit.configs", "vitkit.model_zoo")}
        packages = {name: Path(spec.origin).parent for name, spec in specs.items() if spec is not None}
    digest = hashlib.sha256()
    for name, folder in packages.items():
        inside = {path.relative_to(folder) for path in folder.rglob("*.py") if (path.parent / "__init__.py").is_file()}
        # As installed, these lie in the folder of vitkit.
        paths = (path for path in inside if name != "vitkit" or path.parts[0] not in ("configs", "model_zoo", "tools"))
        for path in sorted(paths, key=Path.as_posix):
            digest.update(f"{name}/{path.as_posix()} {file_digest(folder / path, 'sha256')}\n".encode())
    return f"sha256:{digest.hexdigest()}"
