"""The small detectors as published, and vitkit's own, on blood cells from random weights in 50 minutes.

The networks of detectors_bccd.py, and the two-stage Deformable DETR that DINO grew from, under the whole recipe of
configs/bccd/dino_r18.py: images of 224 pixels, mosaics and a constant rate in the first six tenths of the run, then a
cosine, and an average of the weights. RF-DETR-N has its own rate of 1e-4 (see there).

Run:  vitkit ablate detectors_bccd_long data.root=DIR --seeds 42 43
Here: see model_zoo/ablations/detectors_bccd_long.md.
"""

from vitkit.configs.ablations.detectors_bccd import networks
from vitkit.configs.bccd.deformable_detr import config as deformable_detr


def ablation():
    two_stages = deformable_detr()
    return dict(
        base="bccd/dino_r18",
        metrics=["bbox/AP", "bbox/AP50"],
        minutes=50.0,
        evaluations=10,
        settings={},
        arms={
            **networks(),
            "Deformable DETR, two stages": {
                "model": two_stages["model"] | dict(num_queries=80, num_detections=100, nms_iou=0.8),
                "criterion": two_stages["criterion"],
            },
        },
    )  # fmt: skip
