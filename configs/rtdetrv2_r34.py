"""RT-DETRv2-R34 on COCO 2017, 120 epochs (Lv et al. 2024, https://arxiv.org/abs/2407.17140).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetrv2_r34.py
Reference: 49.9 box AP, 67.5 AP50 (original README). 31,441,668 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetrv2 import rtdetrv2


def config():
    cfg = rtdetrv2(34, epochs=120, strong_until=117)
    cfg["optimizer"].update(backbone_lr=5e-5, no_weight_decay=["vectors"])
    return cfg
