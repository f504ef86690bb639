"""Formats text for messages: printable characters, numbers with their nouns, unique names; checks names."""

import re
from typing import Any

MAX_NAME = 1024
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, which a terminal would obey, ends of lines, and halves of characters, which JSON can hold."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
_CONTROL |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}
"""Control characters other than tabs and ends of lines, and Unicode's own ends of lines."""


def printable(text: str) -> str:
    """Return a text whose control characters, which a terminal would obey, are escape sequences."""
    return text.translate(_CONTROL)


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a class or a file: a text of 1 to 1024 characters that can be printed in one
    line."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and not _UNPRINTABLE.search(value)


def is_url(path: str) -> bool:
    """Whether a path has a protocol, such as "https://" or "s3://"."""
    return "://" in path


def shorten(text: str, most: int = 2000) -> str:
    """Return a text of at most about `most` characters: a longer one without its middle, as errors end with a remedy.

    Each line is shortened to that length, and all lines to ten times as much.
    """
    lines = "\n".join(_without_middle(line, most) for line in text.split("\n"))
    return _without_middle(lines, 10 * most)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} … ({len(text)} characters) … {text[-most // 4 :]}"


def pluralize(number: int, plural: str, verb: str = "", *, of: int | None = None) -> str:
    """Return a number with its noun, for messages: "2 classes", "1 class", "1 of 3 boxes has".

    Args:
        plural: the noun, in the plural.
        verb: a verb that follows, in the plural; "" for none.
        of: the number of all, of which `number` is a part.
    """
    if plural.endswith("ies"):
        singular = plural.removesuffix("ies") + "y"
    else:
        singular = plural.removesuffix("es") if plural.endswith(("sses", "xes")) else plural.removesuffix("s")
    noun = singular if (number if of is None else of) == 1 else plural
    verbs = {"": "", "are": " is", "have": " has"}
    text = f"{number} {noun}" if of is None else f"{number} of {of} {noun}"
    return text + (verbs.get(verb, f" {verb}s") if number == 1 else f" {verb}" if verb else "")
