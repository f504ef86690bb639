"""The options of vitkit's commands, as argparse knows them."""

import argparse
import importlib
from functools import cache, partialmethod

import pytest


@cache
def options_of(command: str) -> dict[str, argparse.Action]:
    """Return the options of a command, such as "data split": name -> the action of argparse."""
    from vitkit.tools.cli import module_of

    parsers: list[argparse.ArgumentParser] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "print_help", partialmethod(_record, parsers))
        with pytest.raises(SystemExit):
            importlib.import_module(module_of(command)).main(["--help"])
    options = {
        name: action
        for action in parsers[0]._actions
        for name in action.option_strings
        if action.help is not argparse.SUPPRESS
    }
    return {name: action for name, action in options.items() if name not in ("-h", "--help")}


def _record(parser: argparse.ArgumentParser, parsers: list[argparse.ArgumentParser], file: object = None) -> None:
    parsers.append(parser)
