"""RT-DETRv2-R101 on COCO 2017, 72 epochs (Lv et al. 2024, https://arxiv.org/abs/2407.17140).

The original also freezes the stem, which here trains with the backbone.

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetrv2_r101.py
Reference: 54.3 box AP, 72.8 AP50 (original README). 76,556,268 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetrv2 import rtdetrv2


def config():
    cfg = rtdetrv2(101, epochs=72, strong_until=71)
    cfg["optimizer"]["backbone_lr"] = 1e-6
    return cfg
