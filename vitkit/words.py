"""Texts for people: what a terminal can show, and counted things."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}
"""Control characters other than tabs and ends of lines."""


def printable(text: str) -> str:
    """Return a text whose control characters, which a terminal would obey, are escape sequences."""
    return text.translate(_CONTROL)


def counted(count: int, noun: str) -> str:
    """Return "1 class", "3 classes", "2 images"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
