"""The page of a model that writes captions."""

from vitkit.apps.report.pages.base import report_sections
from vitkit.apps.report.sections import (
    Gallery,
    Image,
    Section,
    missing_samples,
    number,
    overall_section,
    rank_samples,
    resample,
)
from vitkit.evaluation.captions import CaptionEvaluator

_RANKED = 10  # number of images that are shown of the lowest and of the highest CIDEr-D


@report_sections.register
def caption_sections(evaluator: CaptionEvaluator) -> list[Section]:
    """Return the sections of the report: metrics, and the images with the worst and the best captions."""
    statistics = evaluator.statistics()
    total = len(statistics.sample_ids)
    alerts = missing_samples(
        total - len(evaluator.stored_predictions), total, "no caption, which counts as an empty one."
    )
    values, titles = rank_samples(statistics, _RANKED)

    def image(k: int) -> Image:
        image_id = statistics.sample_ids[k]
        answer = evaluator.stored_predictions.get(image_id, "")
        lines = [answer or "(nothing)", f"CIDEr-D {number(values[k])}", *evaluator.dataset.references(k)]
        return Image(k, f"image {image_id}: {answer}", caption=lines)

    galleries = [Gallery(title, [[image(k)] for k in indices], long_side=300) for title, indices in titles]
    return [
        overall_section(resample(statistics)[1].overall, *alerts),
        Section("Images", galleries, "The caption in bold, the references below it."),
    ]
