"""Complete models: backbone, neck and head."""

from vitkit.models import (  # noqa: F401
    classifier,
    deformable_detr,
    detr,
    detr_segmentation,
    dfine,
    dino,
    eomt,
    mask2former,
    maskformer,
    per_pixel,
    rf_detr,
    rt_detr,
    rt_detr_v2,
)
