"""DETR-R50 with groups of queries (Group DETR, Chen et al. 2022, https://arxiv.org/abs/2207.13085) on COCO 2017, 50
epochs.

Training has eleven groups of 100 queries, as in the paper, whose losses are averaged; inference uses one group. The
paper's models start from conditional, anchor or denoising queries. The same line adds groups to other heads.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/group_detr_r50.py
Reference: none published with DETR's own queries. Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["training_queries"] = [dict(type="QueryGroups", groups=11)]
    cfg["schedule"]["drop_at_epochs"] = [40]
    cfg["train"]["epochs"] = 50
    return cfg
