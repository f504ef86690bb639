"""The options of all commands: each has one meaning, which stands in option_vocabulary.py."""

from collections import defaultdict

import pytest
from helpers.command_options import options_of
from helpers.option_vocabulary import OPTIONS

cli = pytest.importorskip("vitkit.tools.cli", reason="vitkit is not installed (pip install -e .)")

COMMANDS = list(cli.list_commands())
VALUES = {"positive": "int", "fraction": "float", "_device": "str", "parse": "str"}
"""Function of tools/common.py -> the type of what it parses: a command may allow more numbers than another one."""


def test_the_vocabulary_has_the_options_of_all_commands_and_no_others():
    assert {name for command in COMMANDS for name in options_of(command)} == set(OPTIONS)


def test_an_option_takes_the_same_values_in_all_commands():
    ways = defaultdict(lambda: defaultdict(list))
    for command in COMMANDS:
        for name, action in options_of(command).items():
            parse = getattr(action.type, "__name__", "str")
            way = (type(action).__name__, action.nargs, action.metavar, VALUES.get(parse, parse))
            ways[name][way].append(command)
    assert not {name: dict(of) for name, of in ways.items() if len(of) > 1}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command):
    assert not [name for name, action in options_of(command).items() if not action.help]
