"""The page for those who come from other toolboxes: each of our commands, keys and names is one that there is."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from helpers.documents import command_in

import vitkit
from vitkit.config import load_config

PAGE = Path(vitkit.__file__).parents[1] / "configs" / "moving_in.md"
if not PAGE.is_file():
    pytest.skip("an installed package has no documents", allow_module_level=True)


def rows_of(heading):
    """Return the cells of the rows of a section's table, without its head."""
    section = re.search(rf"## {heading}\n(.*?)(?=\n## |\Z)", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows[:1] + rows[2:]}) == 1
    return rows[2:]


def code_in(cell):
    return re.findall("`(.+?)`", cell)


COMMANDS = [row[-1] for row in rows_of("Commands")]
KEYS = [row[-1] for heading in ("Config keys", "Data") for row in rows_of(heading)]
NAMES = [row[-1] for row in rows_of("In Python")]


@pytest.mark.parametrize("cell", COMMANDS)
def test_commands_are_accepted(cell):
    (line,) = code_in(cell)
    module, arguments = command_in(line)
    importlib.import_module(module).parse_args(arguments)


def test_keys_are_those_of_configs():
    overrides = [code for cell in KEYS for code in code_in(cell)]
    assert len(overrides) > 25 and all("=" in override for override in overrides)
    for override in overrides:
        load_config("dino_r50_4scale", [override])


@pytest.mark.parametrize("cell", NAMES)
def test_names_are_imported(cell):
    (name,) = code_in(cell)
    assert pkgutil.resolve_name(name) is not None


def test_ways_to_load_weights_are_those_of_the_package():
    for row in rows_of("Your weights"):
        for code in code_in(row[-1]):
            if "=" in code:
                load_config("dino_r50_4scale", [code])
            else:
                assert code.startswith("vitkit.load(")
                config = re.fullmatch(r'vitkit\.load\("([\w:/.-]+)"(?:, "[\w.]+")?\)', code)[1]
                if config.partition("_")[0] in ("detr", "mask2former"):
                    load_config(config)
