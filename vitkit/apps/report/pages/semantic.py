"""The page of semantic maps."""

from functools import partial

from vitkit.apps.report.pages.base import prediction_image, report_sections
from vitkit.apps.report.pages.maps import MapPair, confusion_section, error_image, images_section
from vitkit.apps.report.sections import (
    Image,
    Section,
    SemanticOverlay,
    Table,
    missing_samples,
    overall_section,
    resample,
    value_rows,
)
from vitkit.evaluation.semantic import SemanticEvaluator


@report_sections.register
def semantic_sections(evaluator: SemanticEvaluator) -> list[Section]:
    """Return the sections of the report: metrics, classes, confusions, images with error maps."""
    statistics, pair_of = evaluator.statistics(), partial(semantic_pair, evaluator)
    _, scores = resample(statistics)
    total = len(statistics.sample_ids)
    alerts = missing_samples(total - len(evaluator.stored_predictions), total, "no prediction, which counts as missed.")
    columns = [name for name in ("IoU", "boundary IoU", "accuracy") if name in next(iter(scores.by_class.values()))]
    percentages = (100 * statistics.true.sum(axis=0) / max(statistics.true.sum(), 1)).tolist()
    rows = [[*row, each] for row, each in zip(value_rows(scores.by_class, columns), percentages)]
    return [
        overall_section(scores.overall, *alerts),
        Section("Classes", [Table(("class", *columns, "% of pixels"), rows)]),
        confusion_section(statistics, evaluator.confusion_matrix(), pair_of),
        images_section(statistics, pair_of),
    ]


@prediction_image.register
def semantic_image(evaluator: SemanticEvaluator, index: int) -> Image:
    """Return an image with its wrong pixels in red."""
    return error_image(index, semantic_pair(evaluator, index), "errors")


def semantic_pair(evaluator: SemanticEvaluator, index: int) -> MapPair:
    """Return the true and the predicted map of an image of the dataset."""
    dataset = evaluator.dataset
    truth, predicted = dataset.load_semantic(index), evaluator.read_predicted_map(dataset.image_ids[index])
    overlays = SemanticOverlay(truth, dataset.classes), SemanticOverlay(predicted, dataset.classes)
    return MapPair(truth, predicted, overlays)
