"""The options of all commands: one word for one thing."""

import re
from collections import defaultdict
from collections.abc import Iterable

import pytest
from helpers.command_options import options_of

cli = pytest.importorskip("vitkit.tools.cli", reason="vitkit is not installed (pip install -e .)")

COMMANDS = list(cli.list_commands())
VALUES = {"positive": "int", "fraction": "float", "_device": "str", "parse": "str", "an_input": "str"}
"""Function of tools/common.py -> the type of what it parses: a command may allow more numbers than another one."""
FILLERS = {"all", "and", "for", "from", "instead", "than", "that", "the", "this", "which", "with"}
"""Words by which unlike descriptions may agree."""


def meaning(text: str) -> str:
    """Return a help text without what stands in parentheses, such as the default."""
    return re.sub(r"\s*\(.*?\)", "", text)


def unrelated(texts: Iterable[str]) -> list[list[str]]:
    """Group texts so that each shares the start of a word with another one of its group, and none with other groups."""
    groups: list[tuple[set[str], list[str]]] = []
    for text in texts:
        words = {word[:5] for word in re.findall(r"[a-z]{3,}", text.lower()) if word not in FILLERS}
        alike = [group for group in groups if group[0] & words]
        groups = [group for group in groups if not group[0] & words]
        groups.append((words.union(*(group[0] for group in alike)), [text, *(t for group in alike for t in group[1])]))
    return [texts for _, texts in groups]


def test_an_option_takes_the_same_values_in_all_commands():
    ways = defaultdict(lambda: defaultdict(list))
    for command in COMMANDS:
        for name, action in options_of(command).items():
            parse = getattr(action.type, "__name__", "str")
            way = (type(action).__name__, action.nargs, action.metavar, VALUES.get(parse, parse))
            ways[name][way].append(command)
    del ways["--format"]  # of exported files, and of annotations
    assert {*ways.pop("--text")} == {("_StoreAction", None, "TEXT", "str"), ("_StoreAction", "+", "PHRASE", "str")}
    # A folder, and with reproduce, which has no folder but data.root, a number.
    assert {way[-1] for way in ways.pop("--images")} == {"a_path", "int"}
    types = {way[-1] for way in ways.pop("--threshold")}  # of predictions, it may differ by class
    assert types == {"float", "threshold"}
    assert not {name: dict(of) for name, of in ways.items() if len(of) > 1}


def test_help_texts_of_an_option_describe_the_same_thing_in_all_commands():
    meanings = defaultdict(set)
    for command in COMMANDS:
        for name, action in options_of(command).items():
            meanings[name].add(meaning(action.help))
    del meanings["--format"]  # of exported files, and of annotations
    groups = {name: unrelated(sorted(texts)) for name, texts in meanings.items()}
    assert not {name: texts for name, texts in groups.items() if len(texts) > 1}


def test_options_with_the_same_help_text_have_the_same_name():
    names = defaultdict(set)
    for command in COMMANDS:
        for name, action in options_of(command).items():
            names[meaning(action.help)].add(name)
    assert not {text: of for text, of in names.items() if len(of) > 1}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command):
    assert not [name for name, action in options_of(command).items() if not action.help]


@pytest.mark.parametrize(
    "args", [["predict", "shapes_dino", "--input", ""], ["train", "quickstart/dino", "--run-dir", ""]]
)
def test_an_empty_path_is_an_error(args, capsys):
    with pytest.raises(SystemExit):
        cli.main(args)
    assert "it is empty, as a variable that is not set is; expected a path" in capsys.readouterr().err
