"""What a page shows of each kind of evaluator: a file per kind, which registers its functions in `base`."""

from vitkit.apps.report.pages import captions, classification, coco, panoptic, semantic, text
from vitkit.apps.report.pages.base import prediction_image, report_sections

__all__ = ["captions", "classification", "coco", "panoptic", "prediction_image", "report_sections", "semantic", "text"]
