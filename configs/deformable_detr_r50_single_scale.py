"""Single-scale Deformable DETR-R50 on COCO 2017 (Zhu et al. 2021, https://arxiv.org/abs/2010.04159): only res5.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_r50_single_scale.py
Reference: 39.4 box AP at 50 epochs (original README). Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["neck"].update(in_features=["res5"], num_levels=1)
    return cfg
