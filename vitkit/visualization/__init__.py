"""Pictures: boxes, curves, attention."""

from vitkit.visualization.attention import (
    QueryLayer,
    draw_decoder_attention,
    draw_encoder_attention,
    draw_query_slots,
    draw_sampling_points,
    overlay_attention,
)
from vitkit.visualization.boxes import class_color, draw_detections, prediction_sheet
from vitkit.visualization.curves import plot_training, read_log

__all__ = [
    "QueryLayer",
    "class_color",
    "draw_decoder_attention",
    "draw_detections",
    "draw_encoder_attention",
    "draw_query_slots",
    "draw_sampling_points",
    "overlay_attention",
    "plot_training",
    "prediction_sheet",
    "read_log",
]
