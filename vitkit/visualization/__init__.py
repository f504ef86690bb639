"""Pictures: boxes, masks, curves, attention."""

from vitkit.visualization.attention import (
    QueryLayer,
    draw_decoder_attention,
    draw_encoder_attention,
    draw_query_slots,
    draw_sampling_points,
    overlay_attention,
)
from vitkit.visualization.boxes import draw_detections, prediction_sheet
from vitkit.visualization.canvas import class_color
from vitkit.visualization.classification import classification_sheet, draw_classes
from vitkit.visualization.curves import plot_runs, plot_training, read_log
from vitkit.visualization.masks import (
    draw_masks,
    draw_panoptic,
    draw_semantic,
    instance_sheet,
    panoptic_sheet,
    semantic_sheet,
)

__all__ = [
    "QueryLayer",
    "class_color",
    "classification_sheet",
    "draw_classes",
    "draw_decoder_attention",
    "draw_detections",
    "draw_encoder_attention",
    "draw_masks",
    "draw_panoptic",
    "draw_query_slots",
    "draw_sampling_points",
    "draw_semantic",
    "instance_sheet",
    "overlay_attention",
    "panoptic_sheet",
    "plot_runs",
    "plot_training",
    "prediction_sheet",
    "read_log",
    "semantic_sheet",
]
