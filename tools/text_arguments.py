"""Shared parts of the text tools: lines in, lines out, and the sampling options."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vitkit.data.text.datasets import TextLines
from vitkit.errors import ConfigError, DataError
from vitkit.seq2seq.vocabulary import Vocabulary

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "seed")


def add_lines(parser: argparse.ArgumentParser) -> None:
    """Add --input and --output."""
    parser.add_argument("--input", type=Path, help="a file with one text per line, plain or gzip")
    parser.add_argument("--output", type=Path, help="file to write (default: standard output)")


def check_lines(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if text is given twice."""
    if args.text and args.input:
        parser.error("give either TEXT or --input FILE")


def add_sampling(parser: argparse.ArgumentParser, *, when: str = "") -> None:
    """Add SAMPLING_OPTIONS, whose help begins with `when`."""
    options = (
        ("--temperature", float, "T", "below 1, improbable tokens become rarer"),
        ("--top-k", int, "K", "sample only from the K most probable tokens"),
        ("--top-p", float, "P", "sample only from the most probable tokens that together have probability P"),
        ("--seed", int, "S", "random seed; another seed draws other tokens"),
    )
    for name, type_, metavar, text in options:
        parser.add_argument(name, type=type_, metavar=metavar, help=when + text)


def option_names(names: Iterable[str]) -> str:
    """Return arguments as they are typed: "--top-k, --top-p"."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def read_lines(args: argparse.Namespace) -> Sequence[str]:
    """Return the lines of TEXT, --input or standard input.

    Raises:
        ConfigError: there is nothing to read.
        DataError: the text is not UTF-8.
    """
    if args.text:
        for number, text in enumerate(args.text, start=1):
            if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that Python could not decode
                raise DataError(f"TEXT {number}: no UTF-8.")
        return args.text
    if args.input:
        return TextLines(args.input)
    if sys.stdin.isatty():
        raise ConfigError("no text: give TEXT or --input FILE, or send the text by a pipe.")
    lines = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            lines.append(line.decode("utf-8").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: no UTF-8 ({error.reason}).") from error
    return lines


@contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """Open a file for writing text, and make its folder; None: standard output."""
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        yield file


def report_unknown(vocabulary: Vocabulary) -> None:
    """Report on standard error the words or characters that are not in the vocabulary."""
    if line := vocabulary.describe_unknown():
        print(line, file=sys.stderr)
