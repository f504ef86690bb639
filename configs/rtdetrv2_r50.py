"""RT-DETRv2-R50 on COCO 2017, 72 epochs (Lv et al. 2024, https://arxiv.org/abs/2407.17140).

The original also freezes the stem, which here trains with the backbone.

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetrv2_r50.py
Reference: 53.4 box AP, 71.6 AP50 (original README). 42,891,372 parameters with 80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetrv2 import rtdetrv2


def config():
    return rtdetrv2(50, epochs=72, strong_until=71)
