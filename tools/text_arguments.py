"""Shared parts of the commands for text: lines in, lines out, and the options of decoding."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from vitkit.errors import ConfigError, DataError
from vitkit.tools.common import MODEL_HELP, a_path, split_weights

if TYPE_CHECKING:
    from vitkit.text.vocabulary import Vocabulary

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "seed")


def add_text(parser: argparse.ArgumentParser, text: str) -> None:
    """Add MODEL, its weights if MODEL is a config, TEXT, --input and --out; `model_and_text` reads the words."""
    parser.add_argument("model", help=f"{MODEL_HELP}; the weights of a config follow it")
    parser.add_argument("text", nargs="*", metavar="TEXT", help=text)
    text = "files to read, with one text per line, plain or gzip"
    parser.add_argument("--input", nargs="+", metavar="INPUT", help=text)
    parser.add_argument("--out", type=a_path, help="file to write (default: standard output)")


def model_and_text(model: str, words: Sequence[str], *, has_input: bool) -> tuple[str | None, list[str]]:
    """Split the words after MODEL into the weights of a config, None for other models, and texts.

    Raises:
        ConfigError: there are texts, and --input as well.
    """
    from vitkit.apps.inference import is_config_only

    weights, texts = split_weights(words) if is_config_only(model) else (None, list(words))
    if texts and has_input:
        raise ConfigError("give either TEXT or --input FILE.")
    return weights, texts


def add_beams(parser: argparse.ArgumentParser) -> None:
    """Add the options of beam search and of the output's length."""
    parser.add_argument("--beams", type=int, metavar="N", help="beam search with N beams (1: greedy)")
    parser.add_argument("--max-length", type=int, metavar="T", help="maximum number of tokens to write")


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


def read_lines(texts: Sequence[str], files: Sequence[str] | None) -> Sequence[str]:
    """Return the texts, the lines of the files, or those of standard input.

    Raises:
        ConfigError: there is nothing to read.
        DataError: the text is not UTF-8.
    """
    from vitkit.data.text.datasets import TextLines

    if texts:
        for number, text in enumerate(texts, start=1):
            if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that Python could not decode
                raise DataError(f"TEXT {number}: is not UTF-8.")
        return texts
    if files:
        return TextLines(files[0]) if len(files) == 1 else [line for file in files for line in TextLines(file)]
    if sys.stdin.isatty():
        raise ConfigError("no text: give TEXT or --input FILE, or send the text by a pipe.")
    lines = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            lines.append(line.decode("utf-8").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: is not UTF-8 ({error.reason}).") from error
    return lines


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """Open a file for writing text, and make its folder; None: standard output."""
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        yield file


def report_unknown(vocabulary: Vocabulary) -> None:
    """Print words or characters that are not in the vocabulary to standard error."""
    if line := vocabulary.describe_unknown():
        print(line, file=sys.stderr)
