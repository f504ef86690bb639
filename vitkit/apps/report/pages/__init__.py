"""The pages of each kind of evaluator: a file per kind, which registers its functions in `base`."""

from vitkit.apps.report.pages import captions, classification, coco, panoptic, semantic, text
from vitkit.apps.report.pages.base import extra_values, prediction_image, report_sections

__all__ = [
    "captions",
    "classification",
    "coco",
    "extra_values",
    "panoptic",
    "prediction_image",
    "report_sections",
    "semantic",
    "text",
]
