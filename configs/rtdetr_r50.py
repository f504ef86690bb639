"""RT-DETR-R50 on COCO 2017, 72 epochs (Zhao et al. 2023, https://arxiv.org/abs/2304.08069).

The original also freezes the stem, which here trains with the backbone.

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetr_r50.py
Reference: 53.1 box AP, 71.2 AP50 (original README, weights converted from Paddle's). 42,891,372 parameters with
           80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetr import rtdetr


def config():
    return rtdetr(50)
