"""What the documents say: links lead somewhere, commands and configs exist, the README is short."""

import re
import shlex
from pathlib import Path

import pytest
from command_options import options_of

from vitkit.config import config_names
from vitkit.tools.cli import REPLACED

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for folder in (".", "vitkit", "configs", "tools", "model_zoo")
    for path in ((ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
)

TEXTS = DOCUMENTS + sorted(
    path for folder in ("vitkit", "configs", "tools", "model_zoo") for path in (ROOT / folder).rglob("*.py")
)
"""Documents, and the sources, whose docstrings and messages name commands."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{name_of(path)}: {target}"
        assert not heading or heading in anchors(linked), f"{name_of(path)}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_and_their_options_and_configs_exist(path):
    cli = pytest.importorskip("vitkit.tools.cli", reason="vitkit is not installed (pip install -e .)")
    commands = cli.list_commands()
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "vitkit" in words[:1]:
                number = 3 if words[1] in cli.GROUPS else 2
                command, words = " ".join(words[1:number]), words[number:]
            elif scripts := [word for word in words if re.fullmatch(r"(.*/)?tools/\w+\.py", word)]:
                command, words = Path(scripts[0]).stem.replace("_", "-"), words[words.index(scripts[0]) + 1 :]
            else:
                continue
            assert command in commands or command in ("--help", "--version"), line
            for word in words:
                if word.startswith("--"):
                    assert word.partition("=")[0] in options_of(command) or word == "--help", line
                if word.startswith("configs/"):
                    assert word.removeprefix("configs/").removesuffix(".py") in config_names(), line


@pytest.mark.parametrize("command", sorted(REPLACED))
def test_no_text_names_a_former_command(command):
    pattern = re.compile(rf"vitkit {command.replace('-', '[-_]')}\b|tools/{command.replace('-', '_')}\.py")
    for path in TEXTS:
        assert not pattern.search(path.read_text(encoding="utf-8")), f"{name_of(path)} names {command}"


def test_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
