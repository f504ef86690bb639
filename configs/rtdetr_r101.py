"""RT-DETR-R101 on COCO 2017, 72 epochs (Zhao et al. 2023, https://arxiv.org/abs/2304.08069).

The original also freezes the stem, which here trains with the backbone.

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetr_r101.py
Reference: 54.3 box AP, 72.8 AP50 (original README, weights converted from Paddle's). 76,556,268 parameters with
           80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetr import rtdetr


def config():
    cfg = rtdetr(101)
    cfg["optimizer"]["backbone_lr"] = 1e-6
    return cfg
