"""RT-DETR-R34 on COCO 2017, 72 epochs (Zhao et al. 2023, https://arxiv.org/abs/2304.08069).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetr_r34.py
Reference: 48.9 box AP, 66.8 AP50 (original README, weights converted from Paddle's). 31,441,668 parameters with
           80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetr import rtdetr


def config():
    return rtdetr(34)
