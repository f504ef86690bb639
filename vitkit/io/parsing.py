"""Parses and checks values in users' files: numbers, names, YAML and XML."""

import math
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

import yaml

from vitkit.errors import DataError
from vitkit.io.folders import one_form
from vitkit.text_format import MAX_NAME, is_name

MAX_COORDINATE = 2**31
"""Largest coordinate in pixels, of either sign, that is read."""
MAX_OBJECTS = 20_000
"""Maximum number of objects per image that are read."""
_MAX_YAML = 1 << 20
_MAX_XML = 1 << 29
_MAX_DEPTH = 100
_EMPTY = frozenset(("", "~", "null", "Null", "NULL"))
"""What YAML calls nothing."""


def coordinate(value: Any, context: str) -> float:
    """Return a number, or the number in a text.

    Args:
        context: beginning of the error message: the file, and what the value is.
    Raises:
        DataError: it is not a finite number within `MAX_COORDINATE`.
    """
    try:
        # float() reads "1_0" as 10; in a file it is a mistake.
        is_wrong = isinstance(value, bool) or (isinstance(value, str) and "_" in value)
        number = math.nan if is_wrong else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < MAX_COORDINATE:
        raise DataError(f"{context} is {reprlib.repr(value)}; expected a finite number below 2^31. Correct it.")
    return number


def class_name(value: Any, context: str) -> str:
    """Return the name of a class, in the composed Unicode form.

    Raises:
        DataError: it cannot be a name.
    """
    if not is_name(value) or value.isspace():
        expected = f"a text of 1 to {MAX_NAME} characters in one line"
        raise DataError(f"{context} is {reprlib.repr(value)}; expected the name of a class, {expected}. Correct it.")
    return one_form(value)


def class_number(value: Any, context: str) -> int:
    """Return the number of a class, or the number in a text.

    Raises:
        DataError: it is not a whole number from 0.
    """
    number = coordinate(value, context)
    if number < 0 or not number.is_integer():
        raise DataError(f"{context} is {reprlib.repr(value)}; expected a whole number from 0. Correct it.")
    return int(number)


def check_distinct(names: Iterable[str], context: str) -> None:
    """Raise DataError if two classes have the same name."""
    seen = set()
    for name in names:
        if name in seen:
            raise DataError(f"{context}: two classes are called {name!r}. Give each class a unique name.")
        seen.add(name)


def check_count(count: int, context: str) -> None:
    """Raise DataError if an image has more than `MAX_OBJECTS` objects."""
    if count > MAX_OBJECTS:
        raise DataError(
            f"{context}: {count} objects in one image; expected at most {MAX_OBJECTS}. Is the file damaged?"
        )


def read_yaml(path: Path) -> Any:
    """Read a YAML file of texts: nothing is taken for a number, a date or a truth value.

    Returns:
        text, or list or dict of texts; None for an empty value or null.
    Raises:
        DataError: it cannot be read, is larger than a megabyte, has aliases or repeated keys, or is nested too
            deeply.
    """
    # A class may be called "no", "1.50" or "2001-01-01"; the other loaders would change these names.
    loader = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader
    try:
        if path.stat().st_size > _MAX_YAML:
            raise DataError(f"annotations: '{path}' has more than {_MAX_YAML} bytes; expected a small YAML file.")
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):  # a few of them can stand for gigabytes
                raise DataError(f"annotations: '{path}' has aliases (*{event.anchor}). Write the values out.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise DataError(f"annotations: '{path}' is nested more than {_MAX_DEPTH} levels deep. Correct it.")
        _check_keys(yaml.compose(text, Loader=loader), path)
        return _with_none(yaml.load(text, Loader=loader))
    except DataError:
        raise
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"annotations: cannot read '{path}' as YAML: {reason}. Correct it.") from error


def _check_keys(node: yaml.Node | None, path: Path) -> None:
    """Raise DataError if a mapping has a key twice, of which a reader would take only the last."""
    keys = set()
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = part if isinstance(part, tuple) else (None, part)
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                line = key.start_mark.line + 1
                raise DataError(
                    f"annotations: '{path}' line {line}: the key {key.value!r:.100} occurs twice. Keep one."
                )
            keys.add(key.value)
        _check_keys(value, path)


def _with_none(value: Any) -> Any:
    """Return a value of YAML with None for its empty texts, at any depth."""
    if isinstance(value, dict):
        return {name: _with_none(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_none(inner) for inner in value]
    return None if value in _EMPTY else value


def read_xml(path: Path) -> ElementTree.Element:
    """Read an XML file without a document type, whose entities could exhaust the memory.

    Raises:
        DataError: it cannot be read, is not XML, declares a document type, or is nested too deeply.
    """
    builder, parser, depth = ElementTree.TreeBuilder(), expat.ParserCreate(), 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise DataError(f"annotations: '{path}' is nested more than {_MAX_DEPTH} levels deep. Export it again.")
        builder.start(name, attributes)

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(name)

    def refuse(*_: Any) -> None:
        raise DataError(f"annotations: '{path}' declares a document type, which is not supported. Remove it.")

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = builder.data, refuse
    try:
        if path.stat().st_size > _MAX_XML:
            raise DataError(f"annotations: '{path}' has more than {_MAX_XML} bytes. Split it into several files.")
        parser.Parse(path.read_bytes(), True)
        return builder.close()
    except (OSError, expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"annotations: cannot read '{path}' as XML: {error}. Export it again.") from error
