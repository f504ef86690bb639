"""The options of all commands: each has one meaning, which stands in tools/vocabulary.py."""

import argparse
import importlib
from collections import defaultdict
from collections.abc import Mapping
from functools import partialmethod

import pytest

cli = pytest.importorskip("vitkit.tools.cli", reason="vitkit is not installed (pip install -e .)")
vocabulary = importlib.import_module("vitkit.tools.vocabulary")

COMMANDS = list(cli.list_commands())
VALUES = {"positive": "int", "fraction": "float", "_device": "str", "parse": "str"}
"""Function of tools/common.py -> the type of what it parses: a command may allow more numbers than another one."""


def record(parser, parsers, file=None):
    parsers.append(parser)


@pytest.fixture(scope="module")
def options():
    """Option -> command -> the action of argparse."""
    found: Mapping[str, dict[str, argparse.Action]] = defaultdict(dict)
    with pytest.MonkeyPatch.context() as patch:
        for command in COMMANDS:
            parsers: list[argparse.ArgumentParser] = []
            patch.setattr(argparse.ArgumentParser, "print_help", partialmethod(record, parsers))
            with pytest.raises(SystemExit):
                importlib.import_module(cli.module_of(command)).main(["--help"])
            for action in parsers[0]._actions:
                for name in action.option_strings:
                    found[name][command] = action
    del found["-h"], found["--help"]
    return found


def test_the_vocabulary_has_the_options_of_all_commands_and_no_others(options):
    assert set(options) == set(vocabulary.OPTIONS)


def test_an_option_takes_the_same_values_in_all_commands(options):
    for name, actions in options.items():
        ways = defaultdict(list)
        for command, action in actions.items():
            parse = getattr(action.type, "__name__", "str")
            ways[type(action).__name__, action.nargs, action.metavar, VALUES.get(parse, parse)].append(command)
        assert len(ways) == 1, f"{name}: {dict(ways)}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(options, command):
    texts = {name: actions[command].help for name, actions in options.items() if command in actions}
    assert all(text and text[0].islower() | text[0].isupper() for text in texts.values()), texts
