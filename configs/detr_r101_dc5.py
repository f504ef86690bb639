"""DETR-DC5-R101 on COCO 2017 (Carion et al. 2020, https://arxiv.org/abs/2005.12872).

DETR-DC5-R50 with a deeper backbone.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r101_dc5.py
Reference: 44.9 box AP at 500 epochs, dropping at 400 (original README). 60.5 M parameters, 253 GMACs
           (paper, table 1). Here: not yet run.
Weights:   detr-r101-dc5-a2e86def.pth
"""

from vitkit.configs.detr_r50_dc5 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
