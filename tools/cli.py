"""The `vitkit` command: `vitkit train CONFIG …` is `python tools/train.py CONFIG …`."""

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vitkit import __version__
from vitkit.errors import VitkitError, lacks_memory
from vitkit.registry import nearest
from vitkit.tools.console import printing

GROUPS = ("data",)
"""Folders of commands, whose names have two words: tools/data/split.py is `vitkit data split`."""
REPLACED = {
    "cache-features": "train CONFIG data.cache_features=FOLDER",
    "caption": "predict MODEL --input INPUT, or vitkit explain MODEL --image IMAGE for what each word looked at",
    "data cache-features": "train CONFIG data.cache_features=FOLDER",
    "compare-layers": "explain; model_zoo/ablations/README.md shows how to score each decoder layer",
    "compare-lengths": "compare RESULTS RESULTS --by-length PNG",
    "label-errors": "data label-errors",
    "make-shapes": "data make-shapes",
    "merge": "data merge",
    "plot-log": "compare RUN [RUN ...] --curves PNG",
    "report": "test --eval-only RESULTS --annotations FILE --report HTML",
    "split": "data split",
    "tile": "data tile",
}
"""Former command -> what does its work now."""


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
        hint = f"Use vitkit {REPLACED[name]}." if name in REPLACED else nearest(name, commands)
        print(f"vitkit: no command {name!r}. {hint}", file=sys.stderr)
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
    lines = [f"  {name:<{width}}  {summary}" for name, summary in commands.items()]
    usage = f"usage: vitkit {group} VERB" if group else "usage: vitkit COMMAND"
    print("\n".join([f"{usage} [ARGUMENTS]", "", *lines, "", "vitkit COMMAND --help lists the arguments."]))


def list_commands() -> dict[str, str]:
    """Return command -> first docstring line, for each file that has a `main`, without importing any."""
    folder = Path(__file__).parent
    files = sorted(
        path
        for pattern in ("*.py", "*/__main__.py", *(f"{group}/*.py" for group in GROUPS))
        for path in folder.glob(pattern)
    )
    commands = {}
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file != Path(__file__) and any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body):
            words = file.relative_to(folder).with_suffix("").parts
            name = " ".join(word for word in words if word != "__main__").replace("_", "-")
            commands[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return dict(sorted(commands.items(), key=lambda item: (item[0].startswith(GROUPS), item[0])))


def module_of(command: str) -> str:
    """Return the module whose `main` is a command."""
    names = command.replace("-", "_").split()
    folder = Path(__file__).parent.joinpath(*names)
    return ".".join(["vitkit.tools", *names, *(["__main__"] if folder.is_dir() else [])])


if __name__ == "__main__":
    sys.exit(main())
