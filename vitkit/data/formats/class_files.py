"""Files that name the classes of label pictures, once for all splits."""

import json
from pathlib import Path
from typing import Any

from vitkit.errors import DataError
from vitkit.ops.json_files import read_json

CLASS_FILES = ("classes.txt", "classes.json", "labels.txt")


def read_class_file(path: str | Path) -> dict[int, str]:
    """Read the names of classes by the pixel value, or number, of each.

    Args:
        path: a text file with a name in each line, the first for 0; or JSON: a list of names, a list of objects with
            `name` and `id` (or `index`, `value`), or an object of numbers and names; any of these may be in an object
            under `classes`, beside it `ignore_index`, which is left out.
    Raises:
        DataError: no such file, or it names no classes.
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"classes: cannot read '{path}' ({error}). Give a file with a name in each line."
            ) from error
        ignored, names = None, [line.strip() for line in lines if line.strip()]
    else:
        names = read_json(path, key="classes", remedy="Give a file with the names of the classes.")
        ignored = names.get("ignore_index") if isinstance(names, dict) else None
        if isinstance(names, dict) and isinstance(names.get("classes"), list | dict):
            names = names["classes"]
    try:
        numbered = {number: name for number, name in sorted(_numbered(names)) if number != ignored}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"classes: '{path}' holds {json.dumps(names)[:80]} ({type(error).__name__}: {error}); expected names: "
            '["sky", "road"], [{"id": 0, "name": "sky"}] or {"0": "sky"}.'
        ) from error
    if not numbered:
        raise DataError(f"classes: '{path}' names no class. Write a name in each line.")
    return numbered


def class_file_near(folder: Path) -> Path | None:
    """Return the file of class names in a folder or up to two above it; None if there is none."""
    places = (folder, folder.parent, folder.parent.parent)
    return next((place / name for place in places for name in CLASS_FILES if (place / name).is_file()), None)


def _numbered(names: Any) -> list[tuple[int, str]]:
    if isinstance(names, dict):
        return [(int(number), str(name)) for number, name in names.items()]
    if all(isinstance(name, str) for name in names):
        return list(enumerate(names))
    return [(_number(entry), entry["name"]) for entry in names]


def _number(entry: dict[str, Any]) -> int:
    key = next((key for key in ("id", "index", "value") if key in entry), "id")
    return int(entry[key])
