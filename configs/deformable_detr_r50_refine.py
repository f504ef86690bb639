"""Deformable DETR-R50 with iterative box refinement on COCO 2017 (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_r50_refine.py
Reference: 46.2 box AP at 50 epochs (original README). Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["head"]["refine_boxes"] = True
    return cfg
