"""What the documents say: links lead somewhere, commands are accepted, the README is short."""

import importlib
import re
from pathlib import Path

import pytest
from helpers.documents import DOCUMENTS, ROOT, command_in, name_of

from vitkit import load_config
from vitkit.config import config_names
from vitkit.tools.cli import REPLACED

TEXTS = DOCUMENTS + sorted(
    path for folder in ("vitkit", "configs", "tools", "model_zoo") for path in (ROOT / folder).rglob("*.py")
)
"""Documents, and the sources, whose docstrings and messages name commands."""


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


COMMANDS = [
    (name_of(path), line)
    for path in DOCUMENTS
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if command_in(line)
]


@pytest.mark.parametrize(("document", "line"), COMMANDS)
def test_command_is_accepted_and_its_configs_exist(document, line):
    pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
    module, arguments = command_in(line)
    args = importlib.import_module(module).parse_args(arguments)
    for word in arguments:
        if word.startswith("configs/"):
            assert word.removeprefix("configs/").removesuffix(".py") in config_names()
    if module == "vitkit.tools.train" and args.config and not re.search(r"…|\$|my\w*\.py", line):
        load_config(args.config.removeprefix("configs/").removesuffix(".py"), args.overrides)


@pytest.mark.parametrize("command", sorted(REPLACED))
def test_no_text_names_a_former_command(command):
    pattern = re.compile(rf"vitkit {command.replace('-', '[-_]')}\b|tools/{command.replace('-', '_')}\.py")
    for path in TEXTS:
        assert not pattern.search(path.read_text(encoding="utf-8")), f"{name_of(path)} names {command}"


def test_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
