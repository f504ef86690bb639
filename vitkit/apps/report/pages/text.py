"""The page of a model that translates; a language model has the default one."""

from vitkit.apps.report.pages.base import report_sections
from vitkit.apps.report.sections import Section, Table, overall_section, rank_samples, resample, value_rows
from vitkit.evaluation.text import TextEvaluator

_RANKED = 10  # number of sentences that are shown of the lowest and of the highest chrF


@report_sections.register
def text_sections(evaluator: TextEvaluator) -> list[Section]:
    """Return the sections of the report: metrics, also by length, and the worst and the best sentences."""
    statistics = evaluator.statistics()
    _, scores = resample(statistics)
    metric, _ = statistics.sample_scores()
    values, titles = rank_samples(statistics, _RANKED)
    answers = [evaluator.stored_predictions[index] for index in statistics.sample_ids]
    sentences = [
        Table(
            ("source", "got", "reference", metric),
            [
                (answers[k].source, answers[k].text or "(nothing)", answers[k].references[0], float(values[k]))
                for k in indices
            ],
            caption=title,
            digits=1,
        )
        for title, indices in titles
    ]
    counts, columns = {name: int(chosen.sum()) for name, chosen in statistics.groups.items()}, statistics.reported
    lengths = Table(("source", "sentences", *columns), value_rows(scores.by_class, columns, counts))
    return [
        overall_section(scores.overall, noun="sentences"),
        Section("Length of the source", [lengths]),
        Section("Sentences", sentences),
    ]
