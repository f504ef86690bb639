"""Reads a large JSON file a part at a time, in a fraction of the memory that its objects would take together."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO, NoReturn

from vitkit.io.json_files import RepeatedKey, explain_errors, pause_gc, read_json, to_object

_READ = 1 << 20
"""Number of bytes that are read at once, at least."""
_ENTRIES = 4000
"""Number of entries of a list that are passed on together."""
_MARGIN = 16
"""A value that ends, or is wrong, so many letters before the end of what was read does not depend on what follows:
longer than numbers' ends, constants and escapes. Only texts are longer."""
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
        except (ValueError, RecursionError) as error:
            # json.loads decodes the whole file before it parses any of it.
            if isinstance(error, UnicodeDecodeError) or not text.is_decodable():
                read_json(path)
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
        text.fail("Extra data")
    return content


class _Text:
    """The text of a file, of which only the part that is being parsed is in memory.

    Values are parsed by Python's own scanner, which also words the errors between them: it is given the text from there
    on, after a beginning in which the same is expected.
    """

    def __init__(self, file: BinaryIO):
        start = file.read(4)
        file.seek(0)
        self._file = file
        # As in json.loads.
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(start))("surrogatepass")
        self._scan = json.JSONDecoder(object_pairs_hook=_with_interned_keys).scan_once
        self._text, self._position, self._is_whole = "", 0, False
        self._lines, self._columns = 0, 0
        """Number of line ends before the text, and of letters between the last of them and the text."""

    def _read_on(self) -> bool:
        """Drop what was parsed, and read more; return whether the file had not ended yet."""
        if self._is_whole:
            return False
        dropped, rest = self._text[: self._position], self._text[self._position :]
        if "\n" in dropped:
            self._lines, self._columns = self._lines + dropped.count("\n"), -dropped.rindex("\n") - 1
        self._columns += len(dropped)
        data = self._file.read(max(_READ, len(rest)))  # so that a long value is parsed again only a few times
        self._is_whole = not data
        self._text, self._position = rest + self._decoder.decode(data, final=not data), 0
        return True

    def letter(self, skip: int = 0) -> str:
        """Return the next letter that is not a space, "" at the end of the file.

        Args:
            skip: number of letters to ignore before; 0: spaces are passed.
        """
        while True:
            end = _find_letter(self._text, self._position + skip).end()
            if end < len(self._text) or not self._read_on():
                break
        if not skip:
            self._position = end
        return self._text[end : end + 1]

    def names(self) -> Iterator[str]:
        """Yield the names in the object that begins here; the caller reads the value of each."""
        self._position += 1
        if self.letter() not in ('"', "}"):
            self._fail_after("{")
        goes_on = self.letter() == '"'
        while goes_on:
            name = self.value()
            if self.letter() != ":":
                self._fail_after('{""')
            self._position += 1
            self.letter()
            yield name
            goes_on = self._goes_on("}", '{"":""', '"')
        self._position += 1

    def entries(self) -> Iterator[list[Any]]:
        """Yield the entries of the list that begins here, some at a time."""
        self._position += 1
        entries: list[Any] = []
        goes_on = self.letter() != "]"
        while goes_on:
            entries.append(self.value())
            if len(entries) == _ENTRIES:
                yield entries
                entries = []
            goes_on = self._goes_on("]", '[""')
        self._position += 1
        if entries:
            yield entries

    def _goes_on(self, end: str, before: str, expected: str = "") -> bool:
        """Pass a comma; return False at the end of the list or object."""
        letter = self.letter()
        if letter == end:
            return False
        if letter != "," or (after := self.letter(1)) == end or not after.startswith(expected):
            self._fail_after(before)
        self._position += 1
        self.letter()
        return True

    def value(self) -> Any:
        """Return the value that begins here."""
        wrong = None
        while True:
            try:
                value, end = self._scan(self._text, self._position)
            except StopIteration as stop:
                message, end = "Expecting value", stop.value
            except json.JSONDecodeError as error:
                message, end = error.msg, error.pos
            except RepeatedKey:
                raise
            except ValueError as error:  # a number of too many digits, which the message counts
                if str(error) == wrong or not self._read_on():
                    raise
                wrong = str(error)
                continue
            else:
                message = ""
            is_complete = end + _MARGIN < len(self._text) and not message.startswith("Unterminated string")
            if is_complete or not self._read_on():
                break
        self._position = end
        if message:
            self.fail(message)
        return value

    def _fail_after(self, before: str) -> NoReturn:
        """Raise the error that the scanner has for the text from here on."""
        try:
            self._scan(before + self._text[self._position :], 0)
        except StopIteration as stop:
            self._position += stop.value - len(before)
            self.fail("Expecting value")
        except json.JSONDecodeError as error:
            self._position += error.pos - len(before)
            self.fail(error.msg)
        raise AssertionError("the text is valid")

    def fail(self, message: str) -> NoReturn:
        """Raise an error at this position."""
        error = json.JSONDecodeError(message, self._text, self._position)
        error.colno += self._columns if error.lineno == 1 else 0
        error.lineno += self._lines
        raise error

    def is_decodable(self) -> bool:
        """Whether the rest of the file is text; it is skipped."""
        try:
            while self._read_on():
                self._position = len(self._text)
        except UnicodeDecodeError:
            return False
        return True


def _with_interned_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the file; objects that are parsed one by one share the texts of their keys nevertheless."""
    content = {intern(key): value for key, value in pairs}
    return content if len(content) == len(pairs) else to_object(pairs)
