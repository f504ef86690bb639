"""DETR-R101 on COCO 2017 (Carion et al. 2020, https://arxiv.org/abs/2005.12872).

DETR-R50 with a deeper backbone.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r101.py
Reference: 43.5 box AP at 500 epochs, dropping at 400 (original README). 60.5 M parameters, 152 GMACs
           (paper, table 1). Here: not yet run.
Weights:   detr-r101-2c7b67e5.pth
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
