"""Reports of evaluations as one HTML file each: numbers with their intervals, curves, errors, and pictures of them."""

from vitkit.report.report import write_report

__all__ = ["write_report"]
