"""The report of an evaluation, for every kind of evaluator."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitkit.data.io.output import write_text
from vitkit.errors import ConfigError
from vitkit.evaluation import (
    CaptionEvaluator,
    ClassificationEvaluator,
    CocoEvaluator,
    LanguageModelEvaluator,
    PanopticEvaluator,
    SemanticEvaluator,
    TextEvaluator,
)
from vitkit.evaluation.report.classification import classification_sections
from vitkit.evaluation.report.detection import detection_sections
from vitkit.evaluation.report.elements import escape
from vitkit.evaluation.report.pictures import PictureBudget
from vitkit.evaluation.report.segmentation import panoptic_sections, semantic_sections
from vitkit.evaluation.report.text import caption_sections, language_model_sections, text_sections
from vitkit.protocols import Evaluator, require_base
from vitkit.visualization.html import html_page
from vitkit.words import counted

PICTURE_BYTES = 6_500_000
"""Total size of all images in a page, so that it stays below 10 MB with its numbers."""
_SECTIONS = {
    CocoEvaluator: detection_sections,
    SemanticEvaluator: semantic_sections,
    PanopticEvaluator: panoptic_sections,
    ClassificationEvaluator: classification_sections,
    CaptionEvaluator: caption_sections,
    TextEvaluator: text_sections,
    LanguageModelEvaluator: language_model_sections,
}


def write_report(evaluator: Evaluator, path: str | Path, *, title: str, facts: Mapping[str, str] | None = None) -> Path:
    """Write the report of an evaluation: a single file below 10 MB that needs no network.

    Args:
        evaluator: the evaluator, after `compute`, on the main process.
        path: path of the HTML file; its folder is created.
        title: title of the page.
        facts: what was evaluated, such as {"model": "runs/a1"}; written below the title.
    Returns:
        the file.
    Raises:
        ConfigError: there is no report for this evaluator.
    """
    require_base("evaluator", type(evaluator), Evaluator)
    parts = evaluator.parts
    unknown = [part for part in parts if type(part) not in _SECTIONS]
    if unknown:
        names = ", ".join(kind.__name__ for kind in _SECTIONS)
        raise ConfigError(f"report: there is none for {type(unknown[0]).__name__}; there are reports for {names}.")
    sections = []
    for part in parts:
        sections += _SECTIONS[type(part)](part, PictureBudget(evaluator.dataset, PICTURE_BYTES // len(parts)))
    return write_page(path, title, sections, {**(facts or {}), "data": describe_data(evaluator)})


def describe_data(evaluator: Evaluator) -> str:
    """Describe the evaluator's dataset: "CocoDetection of instances_val.json, 87 images, 3 classes"."""
    dataset = evaluator.dataset
    file = dataset.annotation_file
    words = [type(dataset).__name__ + (f" of {Path(file).name}" if file else ""), f"{len(dataset)} {dataset.noun}"]
    if dataset.classes is not None:
        words.append(counted(len(dataset.classes), "classes"))
    return ", ".join(words)


def write_page(path: str | Path, title: str, sections: Sequence[str], facts: Mapping[str, str]) -> Path:
    """Write sections as a page with a link to each.

    Returns:
        the file.
    """
    content, numbers = "".join(sections), itertools.count(1)
    titles = re.findall("<section><h2>(.*?)</h2>", content)
    links = "".join(f"<a href='#section-{number}'>{name}</a>" for number, name in enumerate(titles, start=1))
    content = re.sub("<section>", lambda _: f"<section id='section-{next(numbers)}'>", content)
    listed = "; ".join(f"{escape(key)} {escape(value)}" for key, value in facts.items())
    body = f"<h1>{escape(title)}</h1><p class='facts'>{listed}</p><nav aria-label='sections'>{links}</nav>"
    folder = Path(__file__).parent
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    page = html_page(title, f"{body}<main>{content}</main>", style=style, script=script)
    write_text(Path(path), page)
    return Path(path)
