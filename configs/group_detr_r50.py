"""DETR-R50 with groups of queries (Group DETR, Chen et al. 2022, https://arxiv.org/abs/2207.13085) on COCO 2017, 50
epochs.

Eleven groups of 100 queries in training, as many as in the paper, whose losses are averaged; inference has one. The
paper's models start from conditional, anchor or denoising queries. Any other head takes `model.groups`, too.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/group_detr_r50.py
Reference: none published with DETR's own queries. Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["groups"] = 11
    cfg["schedule"]["drop_at_epochs"] = [40]
    cfg["train"]["epochs"] = 50
    return cfg
