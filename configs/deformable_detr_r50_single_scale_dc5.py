"""Single-scale Deformable DETR-DC5-R50 on COCO 2017 (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Its weights have the same names and shapes as those of the single-scale model without dilation: be careful which you
load.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_r50_single_scale_dc5.py
Reference: 41.5 box AP at 50 epochs (original README). Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50_single_scale import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["dilation"] = True
    return cfg
