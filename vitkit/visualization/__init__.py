"""Pictures: boxes, curves."""

from vitkit.visualization.boxes import class_color, draw_detections, prediction_sheet
from vitkit.visualization.curves import plot_training, read_log

__all__ = ["class_color", "draw_detections", "plot_training", "prediction_sheet", "read_log"]
