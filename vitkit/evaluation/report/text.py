"""The reports of captions, of translations, and of language models."""

from vitkit.evaluation.bootstrap import SampleStatistics, Scores, bootstrap_weights
from vitkit.evaluation.captions import CaptionEvaluator
from vitkit.evaluation.report.elements import escape, number, overall_section, section, table, value_rows, warning
from vitkit.evaluation.report.matrix import Picture, gallery, ranked
from vitkit.evaluation.report.pictures import PictureBudget
from vitkit.evaluation.text import LanguageModelEvaluator, TextEvaluator
from vitkit.words import counted

_RANKED = 10
_SIDE = 300


def _scores(statistics: SampleStatistics) -> Scores:
    return statistics.scores(bootstrap_weights(len(statistics.sample_ids)))


def caption_sections(evaluator: CaptionEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report sections for an evaluator after `compute`."""
    dataset, statistics = evaluator.dataset, evaluator.statistics()
    count = len(statistics.sample_ids)
    missing = count - len(evaluator.answers)
    text = f"{counted(missing, 'images', 'have', of=count)} no caption, which counts as an empty one."
    overall = overall_section(_scores(statistics).overall, *([warning(text)] if missing else []))
    metric, values = statistics.sample_scores()
    galleries = []
    for title, indices in zip((f"lowest {metric}", f"highest {metric}"), ranked(values, _RANKED)):
        shown = []
        for k in indices:
            image_id = statistics.sample_ids[k]
            image = pictures.image(k)
            answer, references = evaluator.answers.get(image_id, ""), dataset.references(k)
            lines = "".join(f"<br>{escape(reference.strip())}" for reference in references)
            caption = f"<b>{escape(answer or '(nothing)')}</b> {metric} {number(values[k])}{lines}"
            if image is not None and (url := pictures.embed(image, long_side=_SIDE)):
                shown.append(Picture(url, f"image {image_id}: {answer}", caption))
        galleries.append(gallery(title, shown))
    note = "The caption in bold, the references below it."
    return [overall, section("Images", *galleries, note=note) if any(galleries) else ""]


def text_sections(evaluator: TextEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report sections for an evaluator after `compute`."""
    statistics = evaluator.statistics()
    scores = _scores(statistics)
    metric, values = statistics.sample_scores()
    answers = [evaluator.answers[index] for index in statistics.sample_ids]
    parts = []
    for title, indices in zip((f"lowest {metric}", f"highest {metric}"), ranked(values, _RANKED)):
        rows = [
            (answers[k].source, answers[k].text or "(nothing)", answers[k].references[0], float(values[k]))
            for k in indices
        ]
        parts.append(table(("source", "got", "reference", metric), rows, caption=title, digits=1))
    counts = {name: int(chosen.sum()) for name, chosen in statistics.groups.items()}
    columns = list(statistics.reported)
    lengths = table(("source", "sentences", *columns), value_rows(scores.by_class, columns, counts))
    overall = overall_section(scores.overall, noun="sentences")
    return [overall, section("Length of the source", lengths), section("Sentences", *parts)]


def language_model_sections(evaluator: LanguageModelEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report section for an evaluator after `compute`."""
    return [overall_section(_scores(evaluator.statistics()).overall, noun="sentences")]
