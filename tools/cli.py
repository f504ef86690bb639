"""The `vitkit` command: `vitkit train CONFIG …` is `python tools/train.py CONFIG …`."""

import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vitkit import __version__
from vitkit.errors import VitkitError
from vitkit.registry import nearest
from vitkit.tools.console import printing


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool that the first argument names, with the remaining arguments.

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


def run(argv: Sequence[str] | None) -> int:
    """Run the tool; see `main`."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(f"vitkit {__version__}")
        return 0
    tools = list_tools()
    if name in ("-h", "--help"):
        width = max(map(len, tools))
        lines = [f"  {tool:<{width}}  {summary}" for tool, summary in tools.items()]
        print("\n".join(["usage: vitkit TOOL [ARGUMENTS]", "", *lines, "", "vitkit TOOL --help lists its arguments."]))
        return 0
    name = name.replace("-", "_")
    if name not in tools:
        print(f"vitkit: no tool {name!r}. {nearest(name, tools)}", file=sys.stderr)
        return 2
    sys.argv[0] = f"vitkit {name}"  # what argparse calls the program in its usage
    try:
        folder = Path(__file__).parent / name
        module = f"vitkit.tools.{name}.__main__" if folder.is_dir() else f"vitkit.tools.{name}"
        return importlib.import_module(module).main(rest) or 0
    except VitkitError as error:
        print(f"vitkit {name}: {error}", file=sys.stderr)
        return 1


def list_tools() -> dict[str, str]:
    """Return name -> first docstring line of the modules in this folder that have a `main`, without importing them."""
    folder = Path(__file__).parent
    tools = {}
    for module in pkgutil.iter_modules([str(folder)]):
        if module.name == Path(__file__).stem:
            continue
        file = folder / module.name / "__main__.py" if module.ispkg else folder / f"{module.name}.py"
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            tools[module.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return tools


if __name__ == "__main__":
    sys.exit(main())
