"""RT-DETRv2-R18 on COCO 2017, 120 epochs (Lv et al. 2024, https://arxiv.org/abs/2407.17140).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetrv2_r18.py
Reference: 47.9 box AP, 64.9 AP50 (original README). 20,184,464 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetrv2 import rtdetrv2


def config():
    cfg = rtdetrv2(18, epochs=120, strong_until=117, size_repeats=None)
    cfg["optimizer"]["backbone_lr"] = None  # the same as of the rest
    return cfg
