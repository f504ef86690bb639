"""The `vitkit` command: `vitkit train CONFIG …` is `python tools/train.py CONFIG …`."""

import ast
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from vitkit import __version__
from vitkit.errors import VitkitError, lacks_memory
from vitkit.registry import nearest
from vitkit.tools.console import printing

FIRST = ("start", "train", "predict", "test", "doctor")
"""The commands that the help lists first, for a newcomer."""
GROUPS = ("data",)
"""Folders of commands, whose names have two words: tools/data/split.py is `vitkit data split`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first words name, with the remaining arguments.

    Returns:
        the exit status; 141 if the reader of the output has closed the pipe.
    """
    try:
        with printing():
            return run(argv)
    except BrokenPipeError:
        return 141
    except OSError as error:
        if error.filename is not None:
            raise
        print(f"vitkit: standard output: {error.strerror}", file=sys.stderr)
        return 1
    except (ImportError, MemoryError, SystemError) as error:  # while a command is loaded
        if not lacks_memory(error):
            raise
        reason = str(error) or type(error).__name__
        print(f"vitkit: not enough memory to start ({reason}). End other programs.", file=sys.stderr)
        # What libraries do when the program ends would fail in the same way, each with a stack trace.
        sys.stderr.flush()
        os._exit(1)


def run(argv: Sequence[str] | None) -> int:
    """Run the command; see `main`."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(f"vitkit {__version__}")
        return 0
    commands = list_commands()
    if name in ("-h", "--help"):
        print_commands(commands)
        return 0
    if name in GROUPS:
        verb, *rest = rest or ["--help"]
        if verb in ("-h", "--help"):
            print_commands({each: summary for each, summary in commands.items() if each.startswith(f"{name} ")}, name)
            return 0
        name = f"{name} {verb}"
    name = name.replace("_", "-")
    if name not in commands:
        print(f"vitkit: no command {name!r}. {nearest(name, commands)}", file=sys.stderr)
        return 2
    sys.argv[0] = f"vitkit {name}"  # what argparse calls the program in its usage
    try:
        return importlib.import_module(module_of(name)).main(rest) or 0
    except VitkitError as error:
        print(f"vitkit {name}: {error}", file=sys.stderr)
        return 1


def print_commands(commands: dict[str, str], group: str = "") -> None:
    """Print the commands with their summaries."""
    width = max(map(len, commands))
    columns = max(60, shutil.get_terminal_size().columns)
    layout = textwrap.TextWrapper(columns, initial_indent="  ", subsequent_indent=" " * (width + 4))
    first = [name for name in FIRST if name in commands]
    others = [name for name in commands if name not in first]
    sections = {
        "Start here": first,
        "More": [name for name in others if not name.startswith(GROUPS)],
        "Data": [name for name in others if name.startswith(GROUPS)],
    }
    print(f"usage: vitkit {group} VERB [ARGUMENTS]" if group else "usage: vitkit COMMAND [ARGUMENTS]")
    for title, names in sections.items():
        if names:
            print("", f"{title}:", *(layout.fill(f"{name:<{width}}  {commands[name]}") for name in names), sep="\n")
    print("\nvitkit COMMAND --help has examples and lists the arguments.")


def list_commands() -> dict[str, str]:
    """Return command -> first docstring line, for each file that has a `main`, without importing any."""
    folder = Path(__file__).parent
    files = sorted(
        path for pattern in ("*.py", *(f"{group}/*.py" for group in GROUPS)) for path in folder.glob(pattern)
    )
    commands = {}
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file != Path(__file__) and any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body):
            name = " ".join(file.relative_to(folder).with_suffix("").parts).replace("_", "-")
            commands[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return dict(sorted(commands.items(), key=lambda item: (item[0].startswith(GROUPS), item[0])))


def module_of(command: str) -> str:
    """Return the module whose `main` is a command."""
    return ".".join(["vitkit.tools", *command.replace("-", "_").split()])


if __name__ == "__main__":
    sys.exit(main())
