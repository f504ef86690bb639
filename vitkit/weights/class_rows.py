"""Takes the rows of class heads from a checkpoint of other classes, by the classes' names."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.io.folders import fold_name
from vitkit.model_zoo.converters import ranks_by_first_row
from vitkit.registry import nearest


class ClassRows(NamedTuple):
    """Which classes of a checkpoint each class of a model takes its rows from."""

    theirs: Sequence[str]
    """The checkpoint's classes."""
    ours: Sequence[str]
    """The model's."""
    sources: Sequence[Sequence[int]]
    """For each of the model's classes the checkpoint's, of whose rows it gets the mean; none: it is new."""

    @property
    def new(self) -> list[str]:
        """The model's classes that the checkpoint does not have."""
        return [name for name, rows in zip(self.ours, self.sources) if not rows]

    def __str__(self) -> str:
        """Return a table: the classes whose rows are kept, new and dropped."""
        used = {row for rows in self.sources for row in rows}
        kept = [
            name if [self.theirs[row] for row in rows] == [name] else f"{name} ({_join(self.theirs, rows)})"
            for name, rows in zip(self.ours, self.sources)
            if rows
        ]
        dropped = [name for row, name in enumerate(self.theirs) if row not in used]
        lines = [("kept", kept), ("new", self.new), ("dropped", dropped)]
        return "\n".join(f"  {kind:8}{len(names):5}  {_shorten(names)}".rstrip() for kind, names in lines)

    def take(self, key: str, stored: Tensor, fresh: Tensor, names: Mapping[str, Tensor]) -> Tensor | None:
        """Return an entry of a class head for the model's classes; new ones have the rows of the model's fresh head.

        Args:
            key: the entry's name.
            stored, fresh: the checkpoint's entry and the model's, whose rows after those of the classes, such as the
                one for "no object", are as many.
            names: the model's entries.
        Returns:
            the entry; None if the rows are not those of classes, or no class has any.
        """
        extra = len(stored) - len(self.theirs)
        # Integers say something of the model's own classes, such as which of them have keypoints.
        fits = extra >= 0 and extra == len(fresh) - len(self.ours) and stored.shape[1:] == fresh.shape[1:]
        if not fits or not stored.is_floating_point() or not any(self.sources):
            return None
        taken = fresh.clone()
        for row, sources in enumerate(self.sources):
            if sources:
                taken[row] = torch.stack([stored[source].to(fresh) for source in sources]).mean(0)
        if extra:
            taken[-extra:] = stored[-extra:].to(fresh)
        if ranks_by_first_row(key, names):
            taken[0] = stored[0].to(fresh)
        return taken


def match_class_rows(
    theirs: Sequence[str], ours: Sequence[str], class_map: Mapping[str, str] | None = None
) -> ClassRows:
    """Match a model's classes with a checkpoint's by their names, whatever their case, blanks, hyphens and underscores.

    Args:
        class_map: the new name of each class of the checkpoint that got another; several may become one.
    Raises:
        ConfigError: `class_map` names a class that there is not, or names differ in nothing but case, blanks, hyphens
            and underscores, so that it is unclear which one is meant.
    """
    renamed = {
        _find(old, theirs, "the checkpoint"): _find(new, ours, "the data") for old, new in (class_map or {}).items()
    }
    sources: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(theirs):
        new = renamed[name] if name in renamed else _same_name(name, ours)
        # Of two names of the checkpoint that are alike, an exact one is meant.
        if new is not None and (name in renamed or _same_name(new, theirs) == name):
            sources[new].append(row)
    return ClassRows(list(theirs), list(ours), [sources[name] for name in ours])


def _same_name(name: str, names: Sequence[str]) -> str | None:
    """Return the name that is the same but for its spelling, or None; raise a ConfigError if there are several."""
    if name in names:
        return name
    same = [other for other in names if fold_name(other) == fold_name(name)]
    if len(same) > 1:
        raise ConfigError(
            f"class {name!r}: {' and '.join(map(repr, same))} differ only in case, blanks, hyphens or underscores: "
            f"which is meant is unclear. Rename one, or say so: --class-map {name!r}={same[0]!r}."
        )
    return same[0] if same else None


def _find(name: str, names: Sequence[str], where: str) -> str:
    found = _same_name(name, names)
    if found is None:
        raise ConfigError(f"class_map: {where} has no class {name!r}. {nearest(name, names)}")
    return found


def _join(names: Sequence[str], rows: Sequence[int]) -> str:
    mean = "the mean of " if len(rows) > 1 else "from "
    return mean + " and ".join(names[row] for row in rows)


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
