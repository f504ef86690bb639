"""RT-DETR-R18 on COCO 2017, 72 epochs (Zhao et al. 2023, https://arxiv.org/abs/2304.08069).

Run:       torchrun --nproc-per-node 4 tools/train.py configs/rtdetr_r18.py
Reference: 46.4 box AP, 63.7 AP50 (original README, weights converted from Paddle's). 20,184,464 parameters with
           80 classes. Here: not yet run.
"""

from vitkit.configs.parts.rtdetr import rtdetr


def config():
    return rtdetr(18)
