"""The documents of the repository, and the commands in them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for folder in (".", "vitkit", "configs", "tools", "model_zoo")
    for path in ((ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links_of(path: Path) -> list[str]:
    """Return the targets of a document's links and images; code is left out."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def linked_file(path: Path, target: str) -> Path | None:
    """Return the repository's file that a link leads to; None for other sites.

    Args:
        path: the document that has the link.
        target: the link's target without a heading.
    """
    if "://" in target:
        return None
    return (path.parent / target).resolve() if target else path


def command_in(line: str) -> tuple[str, list[str]] | None:
    """Return the module of the command that a shell line runs, and its arguments; None if it runs none of vitkit's."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["vitkit"]:
        names, words = [word.replace("-", "_") for word in words[1:3]], words[1:]
        names = names if (ROOT / "tools" / names[0] / f"{names[-1]}.py").is_file() else names[:1]
        words = words[len(names) :]
    else:
        scripts = [number for number, word in enumerate(words) if re.fullmatch(r"(.*/)?tools/[\w/]+(\.py)?", word)]
        if not scripts:
            return None
        path = words[scripts[0]].rpartition("tools/")[2].removesuffix(".py")
        names, words = path.split("/"), words[scripts[0] + 1 :]
    if (ROOT / "tools" / Path(*names) / "__main__.py").is_file():
        names = [*names, "__main__"]
    return ".".join(["vitkit.tools", *names]), words
