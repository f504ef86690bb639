"""Reads a large JSON file a part at a time, in a fraction of the memory that its objects would take together."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO

from vitkit.io.json_files import RepeatedKey, explain_errors, pause_gc, read_json, to_object

_READ = 1 << 20
"""Number of bytes that are read at once, at least."""
_ENTRIES = 4000
"""Number of entries of a list that are passed on together."""
_MARGIN = 16
"""A value that ends so many letters before the end of what was read does not depend on what follows: longer than the
ends of numbers."""
_find_letter = re.compile(r"[ \t\n\r]*").match


def read_json_parts(path: Path, part: str, take: Callable[[list[Any]], None]) -> Any:
    """Read a JSON file as `read_json` does, but pass on the entries of one list, some thousand at a time.

    Args:
        part: key of the list in the file's outermost object; in what is returned the list is empty.
        take: receives the entries.
    Raises:
        DataError: the same as by `read_json`; entries before the error may have been passed on.
    """
    with explain_errors(path), pause_gc(), path.open("rb") as file:
        text = _Text(file)
        try:
            return _read_parts(text, part, take) if text.letter() == "{" else read_json(path)
        except (ValueError, RecursionError):
            # Given the whole text, Python's parser says what is wrong with it, and where; no object is kept.
            json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: to_object(pairs) and None)
            raise


def _read_parts(text: "_Text", part: str, take: Callable[[list[Any]], None]) -> dict[str, Any]:
    names: list[str] = []
    content: dict[str, Any] = {}
    for name in text.names():
        names.append(name)
        if text.letter() == "[":
            content[name] = []
            for entries in text.entries():
                (take if name == part else content[name].extend)(entries)
        else:
            content[name] = text.value()
    to_object([(name, None) for name in names])  # raises an error for repeated names
    if text.letter():
        raise ValueError("text after the object")
    return content


class _Text:
    """The text of a file, of which only the part that is being parsed is in memory.

    Python's own scanner parses the values; the methods raise ValueError for what is not JSON.
    """

    def __init__(self, file: BinaryIO):
        start = file.read(4)
        file.seek(0)
        self._file = file
        # As in json.loads.
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(start))("surrogatepass")
        self._scan = json.JSONDecoder(object_pairs_hook=_with_interned_keys).scan_once
        self._text, self._position, self._is_whole = "", 0, False

    def _read_on(self) -> bool:
        """Drop what was parsed, and read more; return whether the file had not ended yet."""
        if self._is_whole:
            return False
        rest = self._text[self._position :]
        data = self._file.read(max(_READ, len(rest)))  # so that a long value is parsed again only a few times
        self._is_whole = not data
        self._text, self._position = rest + self._decoder.decode(data, final=not data), 0
        return True

    def letter(self) -> str:
        """Go to the next letter that is not a space, and return it; "" at the end of the file."""
        while True:
            self._position = _find_letter(self._text, self._position).end()
            if self._position < len(self._text) or not self._read_on():
                return self._text[self._position : self._position + 1]

    def _pass(self, *expected: str) -> str:
        """Pass the next letter, which is one of those expected, and return it."""
        if (letter := self.letter()) not in expected:
            raise ValueError(f"{letter!r} in place of {expected}")
        self._position += 1
        return letter

    def names(self) -> Iterator[str]:
        """Yield the names in the object that begins here; the caller reads the value of each."""
        self._pass("{")
        goes_on = self.letter() != "}"
        if not goes_on:
            self._pass("}")
        while goes_on:
            if self.letter() != '"':
                raise ValueError("no name")
            name = self.value()
            self._pass(":")
            yield name
            goes_on = self._pass(",", "}") == ","

    def entries(self) -> Iterator[list[Any]]:
        """Yield the entries of the list that begins here, some at a time."""
        self._pass("[")
        entries: list[Any] = []
        goes_on = self.letter() != "]"
        if not goes_on:
            self._pass("]")
        while goes_on:
            entries.append(self.value())
            goes_on = self._pass(",", "]") == ","
            if len(entries) == _ENTRIES or not goes_on:
                yield entries
                entries = []

    def value(self) -> Any:
        """Return the value that begins here."""
        self.letter()
        while True:
            try:
                value, end = self._scan(self._text, self._position)
            except RepeatedKey:
                raise
            except (StopIteration, ValueError) as error:  # also of a text that ends within the value
                if not self._read_on():
                    raise ValueError("no value") from error
                continue
            if end + _MARGIN < len(self._text) or not self._read_on():
                self._position = end
                return value


def _with_interned_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the file; objects that are parsed one by one share the texts of their keys nevertheless."""
    content = {intern(key): value for key, value in pairs}
    return content if len(content) == len(pairs) else to_object(pairs)
