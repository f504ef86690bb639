"""Read which commit of a git repository is checked out from the repository's files, without running git.

git itself runs programs that a repository's own `.git/config` names, and whoever made a folder may have written that.
"""

import re
from contextlib import suppress
from itertools import chain
from pathlib import Path

from vitkit.errors import DataError
from vitkit.io.image_files import open_regular

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"ref: (refs/(?:heads/)?([^\s/][^\s]*))")
_MOST_BYTES = 16 << 20
"""The most bytes that are read of a file; packed references of 100,000 branches take about 8 MB."""


def read_git_state(folder: Path) -> dict[str, str | None] | None:
    """Return the repository that contains a folder: its root folder, commit and branch; None if there is no repository.

    The commit is None before the first one, and where references are stored in tables; the branch is None where none is
    checked out.
    """
    folder = folder.resolve()
    for top in (folder, *folder.parents):
        git = top / ".git"
        if (link := _read(git)).startswith("gitdir:"):  # of a worktree or a submodule
            git = top / link.removeprefix("gitdir:").strip()
        if head := _read(git / "HEAD"):
            reference = _REF.fullmatch(head)
            commit = head if reference is None else _commit_of(reference[1], git)
            return {
                "folder": str(top),
                "commit": commit if _COMMIT.fullmatch(commit) else None,
                "branch": None if reference is None else reference[2],
            }
    return None


def _commit_of(reference: str, git: Path) -> str:
    """Return the commit of a branch, "" if it has none."""
    if ".." in reference:  # git allows no such name, and another file would be read
        return ""
    common = git / (_read(git / "commondir") or ".")  # a worktree's branches are those of its repository
    loose = (_read(place / reference) for place in (git, common))
    packed = (
        commit
        for line in _read(common / "packed-refs").splitlines()
        for commit, _, name in [line.partition(" ")]
        if name == reference
    )
    return next(filter(None, chain(loose, packed)), "")


def _read(path: Path) -> str:
    """Return the text of a file, "" if it is not a regular file that can be read."""
    with suppress(DataError, OSError), open_regular(path, "git") as file:
        return file.read(_MOST_BYTES).decode(errors="replace").strip()
    return ""
