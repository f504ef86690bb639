"""The pages of the documentation's site (.ci/site/pages.py), which `mkdocs build --strict` checks as a whole."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from helpers.documents import ROOT

for package in ("mkdocs", "jupytext", "nbconvert", "latex2mathml"):
    pytest.importorskip(package, reason="the site needs the extra docs")
REPOSITORY = "https://github.com/someone/vitkit"
FILE = ROOT / ".ci" / "site" / "pages.py"


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SiteFiles:
    def get_file_from_path(self, path):
        return path if path.endswith((".md", ".jpg")) else None


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        ("../../data/README.md#formats", "vitkit/apps/report/README.md", "../../data/README.md#formats"),
        ("configs/README.md#parts-of-your-own", "README.md", "configs/README.md#parts-of-your-own"),
        ("1_attention.py", "model_zoo/notebooks/README.md", "1_attention.md"),
        ("../nn/attention.py", "vitkit/backbones/README.md", f"{REPOSITORY}/blob/main/vitkit/nn/attention.py"),
        ("examples/gated_detr", "configs/README.md", f"{REPOSITORY}/tree/main/configs/examples/gated_detr"),
        ("#what-is-verified", "model_zoo/README.md", "#what-is-verified"),
        ("https://arxiv.org/abs/2005.12872", "README.md", "https://arxiv.org/abs/2005.12872"),
        ("no_such_file.py", "README.md", "no_such_file.py"),  # mkdocs reports it
        ("../no_such_file.md", "vitkit/README.md", "../no_such_file.md"),
    ],
)
def test_link_leads_to_a_page_or_to_the_repository(pages, target, source, expected):
    assert pages.link(target, source, REPOSITORY, SiteFiles()) == expected
    # Without an address of the repository, only links to files of the site and to other sites remain.
    assert pages.link(target, source, None, SiteFiles()) == (None if expected.startswith(REPOSITORY) else expected)


def test_link_to_a_file_that_is_nowhere_becomes_its_text(pages):
    text = "[the *core*](../nn/attention.py), ![a [1]](a.jpg), [`train[0]`](../README.md#a)"
    page = SimpleNamespace(is_homepage=False, file=SimpleNamespace(src_uri="vitkit/backbones/README.md"))
    written = pages.on_page_markdown(text, page, SimpleNamespace(repo_url=None), SiteFiles())
    assert written == "the *core*, ![a [1]](a.jpg), [`train[0]`](../README.md#a)"


def test_links_in_code_stay_as_they_are(pages):
    text = "[a](1_attention.py)\n\n```python\nlist[0](1_attention.py)\n```\n"
    page = SimpleNamespace(is_homepage=False, file=SimpleNamespace(src_uri="model_zoo/notebooks/README.md"))
    config = SimpleNamespace(repo_url=REPOSITORY)
    assert pages.on_page_markdown(text, page, config, SiteFiles()) == text.replace(
        "1_attention.py", "1_attention.md", 1
    )


def test_formula_is_drawn_by_the_browser(pages, caplog):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    drawn = pages.on_page_content(r'<p><span class="arithmatex">\(a &lt; b\)</span></p>', page)
    assert not caplog.messages
    pages.on_page_content(r'<p><span class="arithmatex">\(\arg x\)</span></p>', page)
    assert caplog.messages == [r"a.md: the formula \arg x has unknown commands: ['\\arg']"]
    assert "<math" in drawn and "<mo>&#x0003C;</mo>" in drawn and "arithmatex" not in drawn


def test_notebook_becomes_a_page_and_a_file_that_installs_the_package(pages):
    path = ROOT / "model_zoo/notebooks/6_masks.py"
    files = pages.render_notebook(path, REPOSITORY)
    assert set(files) == {"6_masks.md", "6_masks.ipynb"}
    page, notebook = files["6_masks.md"], json.loads(files["6_masks.ipynb"])
    assert (
        page.startswith("# From per-pixel classification")
        and "github/someone/vitkit/blob/gh-pages/model_zoo/notebooks/6_masks.ipynb" in page
    )
    code = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "".join(code[0]) == f"%pip install --quiet git+{REPOSITORY}"
    without = pages.render_notebook(path, None)
    assert "%pip" not in without["6_masks.ipynb"] and "Colab" not in without["6_masks.md"]


def test_reference_has_every_public_name(pages):
    import vitkit

    text = "\n".join(pages.reference_pages().values())
    registries = {name for name in vitkit.__all__ if name.isupper()}
    on_own_page = {
        n
        for n in {*vitkit.__all__} - registries - {"__version__"}
        if f"::: {getattr(vitkit, n).__module__}\n" in f"{text}\n"
    }
    assert on_own_page == {"AttentionRecorder", "Criterion", "Dataset", "Evaluator", "Matcher", "Model"}
    named = {*vitkit.__all__} - registries - on_own_page - {"__version__"}
    assert not [n for n in named if f".{n}\n" not in f"{text}\n"] and "::: vitkit.registry" in text


def test_folders_stand_for_their_pages_in_the_navigation(pages):
    names = ["a/README.md", "a/b.md", "a/c/d.md"]
    assert pages.expand([{"A": "a/*"}, "x.md"], names) == [{"A": ["a/README.md", "a/b.md"]}, "x.md"]
