"""Evaluation reports as one HTML file each: metrics with intervals, curves, errors, and images that show them."""

from vitkit.apps.report.pages import prediction_image, report_sections
from vitkit.apps.report.report import write_report

__all__ = ["prediction_image", "report_sections", "write_report"]
