"""The small detectors as published, and vitkit's own, on blood cells from random weights in 50 minutes.

The best networks of detectors_bccd.py under the whole recipe of configs/bccd/dino_r18.py: images of 272 pixels, mosaics
and a constant rate in the first six tenths of the run, then a cosine, and an average of the weights.

Run:  vitkit ablate detectors_bccd_long data.root=DIR --seeds 42
Here: see model_zoo/ablations/detectors_bccd_long.md.
"""

from vitkit.configs.ablations.detectors_bccd import ablation as in_15_minutes


def ablation():
    arms = in_15_minutes()["arms"]
    return dict(
        base="bccd/dino_r18",
        metrics=["bbox/AP", "bbox/AP50"],
        minutes=50.0,
        evaluations=10,
        arms={"DINO, ResNet-18": {"model.nms_iou": None}} | {name: arms[name] for name in ("RT-DETR-R18", "D-FINE-S")},
    )
