"""What the documents say: links lead somewhere, commands and configs exist, the README is short."""

import re
import shlex
from pathlib import Path

import pytest

from vitkit.config import config_names

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for folder in (".", "vitkit", "configs", "tools", "model_zoo")
    for path in ((ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
)

SHARED = ("common.py", "annotations.py", "text_arguments.py")
"""The files of options that several tools have."""


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
    tools = pytest.importorskip("vitkit.tools.cli", reason="vitkit is not installed (pip install -e .)").list_tools()
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "vitkit" in words[:1]:
                tool, words = words[1].replace("-", "_"), words[2:]
            elif scripts := [word for word in words if re.fullmatch(r"(.*/)?tools/\w+\.py", word)]:
                tool, words = Path(scripts[0]).stem, words[words.index(scripts[0]) + 1 :]
            else:
                continue
            assert tool in tools, line
            folder = ROOT / "tools" / tool
            source = (folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text()
            source += "".join((ROOT / "tools" / name).read_text() for name in SHARED)
            for word in words:
                if word.startswith("--"):
                    name = word.partition("=")[0]
                    assert f'"{name}"' in source or f'"{name[2:]}"' in source, line
                if word.startswith("configs/"):
                    assert word.removeprefix("configs/").removesuffix(".py") in config_names(), line


def test_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
