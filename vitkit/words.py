"""Texts for people: what a terminal can show, and counted things."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}
"""Control characters other than tabs and ends of lines."""


def printable(text: str) -> str:
    """Return a text whose control characters, which a terminal would obey, are escape sequences."""
    return text.translate(_CONTROL)


def counted(number: int, plural: str) -> str:
    """Return a number with its noun, for messages: "2 classes", "1 class", "1 bad box"."""
    singular = plural.removesuffix("es") if plural.endswith(("sses", "xes")) else plural.removesuffix("s")
    return f"{number} {singular if number == 1 else plural}"
