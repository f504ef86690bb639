"""What the documents say: links lead somewhere, commands are accepted, figures have sources, the README is short."""

import ast
import configparser
import importlib
import re
from pathlib import Path

import pytest
import yaml
from helpers.documents import DOCUMENTS, ROOT, command_in, linked_file, links_of, name_of

from vitkit import load_config
from vitkit.config import config_names
from vitkit.tools.cli import list_commands

TEXTS = DOCUMENTS + sorted(
    path for folder in ("vitkit", "configs", "tools", "model_zoo") for path in (ROOT / folder).rglob("*.py")
)
"""Documents, and the sources, whose docstrings and messages name commands."""


SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path):
    for target in links_of(path):
        file, _, heading = target.partition("#")
        linked = linked_file(path, file)
        if linked is not None:
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


def test_texts_name_commands_that_there_are():
    first_words = {command.split()[0] for command in list_commands()}
    for path in TEXTS:
        for verb in re.findall(r"`vitkit ([a-z]\S*?)[ `]", path.read_text(encoding="utf-8")):
            assert verb in first_words or "-" in verb, f"{name_of(path)} names vitkit {verb}"


MEASURED = (
    r"\d[\d,]*(\.\d+)? ?(GiB|MiB|GB|MB|ms|s|min|minutes|seconds|hours|images/s|%)(?!\w)",
    r"\d+\.\d+ (to|times|of)\b",
)
"""Numbers with the units of measurements, and ratios."""
SCORE = r"(?:AP\d*|mIoU|PQ|BLEU|CIDEr|accuracy|top-1)"
SCORES = (
    rf"\b{SCORE}\b[^.\n|]{{0,40}}?\d+\.\d",
    rf"\d+\.\d+ ?(?:box |mask )?{SCORE}\b",
    rf"\| *(?:box |mask )?{SCORE}\b",
    r"(?<![\w.−+-])[+−] ?\d*\.\d",
)
"""Scores and their differences."""
SOURCE = (
    r"`(?:vitkit|python|torchrun|pytest|pip|tools/|tests/)|```bash|\w\.py\b|\bpublished\b|\bpapers?\b|measurements\.md"
)
CERTAINTY = (
    r"\binterval|±|\b(?:one|single|a) (?:run|seed)\b|\bseeds?\b|\bone run\b|\bpublished\b|\bpapers?\b|\boriginals?\b"
)


def sections_of(text: str) -> list[tuple[str, str, str]]:
    """Return the heading, the text, and the text with that of the headings around it, of each section."""
    first, *parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    around, sections = [(0, first)], [("", first, first)]
    for heading, body in zip(parts[::2], parts[1::2]):
        level = len(heading.split()[0])
        around = [*(part for part in around if part[0] < level), (level, body)]
        sections.append((heading, body, "\n".join(part for _, part in around)))
    return sections


def unproven(text: str) -> list[str]:
    """Return the sections with figures, of which they and what stands above do not say where these are from."""
    lacking = []
    for heading, body, context in sections_of(text):
        body = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
        for patterns, proof in (((*MEASURED, *SCORES), SOURCE), (SCORES, CERTAINTY)):
            figures = [match[0] for pattern in patterns for match in re.finditer(pattern, body)]
            if figures and not re.search(proof, context):
                lacking.append(f"{heading}: {figures[0]}")
    return lacking


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_figures_have_a_source_and_scores_an_interval_or_their_number_of_runs(path):
    assert unproven(path.read_text(encoding="utf-8")) == []


def test_figures_without_a_source_are_found():
    told = "# A\n\nBy `vitkit test`, one run: AP 0.5.\n\n## B\n\nIt takes 3 s.\n"
    assert unproven(told) == []
    assert unproven(told.replace("`vitkit test`", "us")) == ["# A: AP 0.5", "## B: 3 s"]
    assert unproven(told.replace(", one run", "")) == ["# A: AP 0.5"]
    assert unproven("# A\n\n| | AP |\n|---|---|\n| a | 0.5 |\n") == 2 * ["# A: | AP"]
    assert unproven("# A\n\nBy a.py: +0.01 and 0.7 of the time.\n") == ["# A: +0.0"]


CONFIGS = sorted((ROOT / "configs").rglob("*.py"))


def measured_in(source: str) -> str:
    """Return a config's docstring without its published figures, which the field "Reference:" holds; what its fields
    run and weights name is where its other figures are from."""
    text = ast.get_docstring(ast.parse(source)) or ""
    fields = re.split(r"^(?=[A-Z]\w+:)", text, flags=re.MULTILINE)
    return "".join(field for field in fields if not field.startswith("Reference:")).replace("Run:", "`vitkit")


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_figures_of_configs_have_a_source_and_scores_an_interval_or_their_number_of_runs(path):
    assert unproven(measured_in(path.read_text(encoding="utf-8"))) == []


def test_published_figures_of_configs_are_told_from_measured_ones():
    told = '"""A.\n\nRun: vitkit train a\nReference: AP 0.5,\n  AP50 0.7.\nHere: AP 0.4, one run, 3 min.\n"""\n'
    assert unproven(measured_in(told)) == []
    assert unproven(measured_in(told.replace(", one run", ""))) == [": AP 0.4"]
    assert unproven(measured_in(told.replace("Run: vitkit train a", "B"))) == [": 3 min"]


def test_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_first_link_of_the_readme_is_a_small_image():
    image = linked_file(ROOT / "README.md", links_of(ROOT / "README.md")[0])
    assert image.suffix == ".jpg" and image.stat().st_size < 160_000


def test_readme_lists_every_extra():
    listed = (ROOT / "README.md").read_text(encoding="utf-8").partition("-e '.[…]'` brings ")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(SETTINGS["options.extras_require"])


def test_all_files_name_the_same_repository_or_none():
    address = SETTINGS["metadata"].get("url")
    for file, key in (("CITATION.cff", "repository-code"), ("mkdocs.yml", "repo_url")):
        named = re.search(rf"^{key}: (\S+)$", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert (named and named[1]) == address, file


def test_documents_install_the_package_by_its_name_only_when_it_is_published():
    command = r"pip install (-\S+ )*vitkit\b"
    told = [name_of(path) for path in TEXTS if re.search(command, path.read_text(encoding="utf-8"))]
    with_extra = command.replace("vitkit", "'?vitkit")  # which errors may say
    told += [name_of(path) for path in DOCUMENTS if re.search(with_extra, path.read_text(encoding="utf-8"))]
    assert {*told} == {"CONTRIBUTING.md"} or "url" in SETTINGS["metadata"]


def test_workflow_runs_what_a_contributor_runs():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    steps = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in steps["linux"] and steps["smoke"][-1].partition("  #")[0].endswith("&& pytest -m smoke")
    assert jobs["smoke"]["strategy"]["matrix"]["system"] == ["macos-latest", "windows-latest"]


def test_the_minutes_of_the_tests_add_up():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    total, rest = re.search(r"\(([\d.]+) in all,.*?take ([\d.]+) together", text, flags=re.DOTALL).groups()
    table = text.partition("| minutes |")[2].partition("\n\n")[0]
    parts = re.findall(r"^\| ([\d.]+) \| `tests/", table, flags=re.MULTILINE)
    assert len(parts) == 9 and float(rest) + sum(map(float, parts)) == pytest.approx(float(total))
