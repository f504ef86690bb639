"""The pages of the site: the repository's own documents, its notebooks, and a reference from docstrings.

`mkdocs` calls the functions that begin with `on_` (mkdocs.yml). A page has the path of its document, so links between
documents work as they do in the repository; links to other files lead to the repository if it has an
address (`repo_url`).
"""

import ast
import base64
import html
import logging
import os
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

logger = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("vitkit", "configs", "tools", "model_zoo")
NOTEBOOKS = "model_zoo/notebooks"
LINK = r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)"
"""A link or an image: its text, which may have brackets, and its target."""
BRANCH = "gh-pages"
"""The branch to which `mkdocs gh-deploy` writes the site, with the notebooks that Colab opens."""
REFERENCE = {
    "Results": (
        "vitkit.apps.inference.predictor.Predictor",
        "vitkit.apps.inference.prediction.Prediction",
        "vitkit.apps.training.api.Run",
        "vitkit.apps.training.testing.Evaluation",
        "vitkit.apps.export_writing.export.Export",
        "vitkit.apps.conversion.convert.Converted",
        "vitkit.apps.reproduction.records.Record",
    ),
    "What passes between parts": ("vitkit.structures",),
    "Registries": ("vitkit.registry",),
    **{
        title: tuple(
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for path in sorted((ROOT / "vitkit" / folder).glob("*.py"))
            if path.name != "__init__.py"
        )
        for title, folder in (
            ("Base classes", "protocols"),
            ("Attention and layers", "nn"),
            ("Backbones", "backbones"),
            ("Necks", "necks"),
            ("Heads", "heads"),
            ("Matchers", "matchers"),
            ("Losses", "losses"),
            ("Models", "models"),
            ("Operations", "ops"),
            ("Metrics", "evaluation"),
            ("Hooks", "engine/hooks"),
            ("Transforms", "data/transforms"),
            ("Datasets", "data/datasets"),
        )
    },
}
"""Title of a page of the reference -> what it documents."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's documents and their images, the notebooks and the reference."""
    documents = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    images = [path for ending in ("png", "jpg") for path in (ROOT / "model_zoo").rglob(f"*.{ending}")]
    for path in sorted(documents + images):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.py")):
        for name, content in render_notebook(path, config.repo_url).items():
            files.append(File.generated(config, f"{NOTEBOOKS}/{name}", content=content))
    for name, text in reference_pages().items():
        files.append(File.generated(config, name, content=text))
    config.nav = expand(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the site's own pages, or to the repository for files that are not part of the site."""

    def replaced(match: re.Match[str]) -> str:
        target = link(match[2], page.file.src_uri, config.repo_url, files)
        return match[1] if target is None else f"[{match[1]}]({target})"

    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it would have one entry
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else re.sub(LINK, replaced, part) for part in parts)


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Write formulas as MathML, which browsers draw by themselves."""

    def drawn(match: re.Match[str]) -> str:
        drawn = convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")
        if unknown := re.findall(r">(\\[a-zA-Z]+)<", drawn):
            logger.warning("%s: the formula %s has unknown commands: %s", page.file.src_uri, match[2], unknown)
        return drawn

    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', drawn, content, flags=re.DOTALL)


def expand(entry: Any, pages: list[str]) -> Any:
    """Replace FOLDER/* in the navigation by the folder's pages, its README first."""
    if isinstance(entry, dict):
        return {title: expand(value, pages) for title, value in entry.items()}
    if isinstance(entry, list):
        return [expand(value, pages) for value in entry]
    folder, star, _ = entry.partition("*")
    return [page for page in pages if page.rpartition("/")[0] + "/" == folder] if star else entry


def link(target: str, source: str, repository: str | None, files: Files) -> str | None:
    """Return the target of a link on a page of the site; None for other files of a repository without an address.

    Args:
        target: the target in the repository's document: a path relative to it, or an address of another site.
        source: the document's path.
        repository: the repository's address, if it has one.
        files: the files of the site.
    """
    file, hash_sign, heading = target.partition("#")
    if "://" in file or not file:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
    if path.startswith(f"{NOTEBOOKS}/") and path.endswith(".py"):
        path = path.removesuffix(".py") + ".md"
    if files.get_file_from_path(path) is not None or not (ROOT / path).exists():  # mkdocs reports what does not exist
        return posixpath.relpath(path, posixpath.dirname(source) or ".") + hash_sign + heading
    if repository is None:
        return None
    return f"{repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{hash_sign}{heading}"


def render_notebook(path: Path, repository: str | None) -> dict[str, str | bytes]:
    """Return a notebook as a page and an .ipynb file, by name; with `RUN_NOTEBOOKS=1` it is run and has its figures.

    If the repository has an address, the file installs the package from there first, and the page opens it in Colab.
    """
    notebook = jupytext.read(path)
    buttons = f"[Download]({path.stem}.ipynb){{ .md-button }}"
    if repository:
        install = nbformat.v4.new_code_cell(f"%pip install --quiet git+{repository}", id="install")
        notebook.cells.insert(1, install)
        opened = repository.replace("https://github.com/", "https://colab.research.google.com/github/")
        opened += f"/blob/{BRANCH}/{NOTEBOOKS}/{path.stem}.ipynb"
        buttons = f"[Open in Colab]({opened}){{ .md-button }} {buttons}"
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["language_info"] = {"name": "python"}
    if os.environ.get("RUN_NOTEBOOKS") == "1":
        from nbclient import NotebookClient

        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":  # warnings name paths of this machine
                is_install = cell.source.startswith("%pip")
                cell.outputs = [each for each in cell.outputs if not is_install and each.get("name") != "stderr"]
    file, animations = nbformat.writes(notebook), {}
    outputs = [
        each for cell in notebook.cells for each in cell.get("outputs", ()) if "image/gif" in each.get("data", ())
    ]
    for number, output in enumerate(outputs):  # which the exporter leaves out
        name = f"{path.stem}_files/animation_{number}.gif"
        animations[name] = base64.b64decode(output.data["image/gif"])
        output.data = {"text/markdown": f"![animation]({name})"}
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    body, resources = MarkdownExporter().from_notebook_node(notebook, resources=resources)
    title, _, rest = body.lstrip().partition("\n")
    page = f"{title}\n\n{buttons}\n{rest}"
    return {f"{path.stem}.md": page, f"{path.stem}.ipynb": file, **resources["outputs"], **animations}


def reference_pages() -> dict[str, str]:
    """Return the pages of the reference, by path."""
    tree = ast.parse((ROOT / "vitkit" / "__init__.py").read_text(encoding="utf-8"))
    imports = (
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("vitkit.")
    )
    public = sorted((alias.name, f"{node.module}.{alias.name}") for node in imports for alias in node.names)
    # Registries and base classes have pages of their own.
    own_pages = {module for modules in REFERENCE.values() for module in modules}
    named = [where for name, where in public if not name.isupper() and where.rpartition(".")[0] not in own_pages]
    functions_first = sorted(named, key=lambda where: not where.rpartition(".")[2].islower())
    pages = {}
    for title, names in {"vitkit": functions_first, **REFERENCE}.items():
        path = "README" if title == "vitkit" else title.lower().replace(" ", "_")
        pages[f"reference/{path}.md"] = "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)])
    return pages
