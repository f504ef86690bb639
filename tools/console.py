"""Standard output of the commands: any text can be printed, and a closed pipe is not an error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from vitkit.text_format import printable


class _AnyText:
    """A text stream on which names from others' files can be printed.

    Control characters, which a terminal would obey, and letters that its encoding lacks are written as escape
    sequences.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        text = printable(text)
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printing() -> Iterator[None]:
    """Let a tool print, and write everything out at its end.

    Raises:
        BrokenPipeError: the reader of the output, such as `head`, has closed the pipe.
        OSError: the output cannot be written, such as to a full disk.
    """
    stream = sys.stdout
    if stream is None:  # it was closed before the program began
        yield
        return
    try:
        with redirect_stdout(_AnyText(stream)):
            yield
        stream.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename is None:
            # Flushing the rest of the buffer must not fail again when the interpreter ends.
            discard(stream)
        raise


def discard(stream: TextIO) -> None:
    """Send the rest of a stream nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):  # not a file, as in tests
        return
