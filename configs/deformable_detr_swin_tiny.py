"""Deformable DETR (https://arxiv.org/abs/2010.04159) on Swin-T (https://arxiv.org/abs/2103.14030) on COCO 2017, with
iterative box refinement.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_swin_tiny.py
Reference: none published with this recipe, which is Deformable DETR-R50's. Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50_refine import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(type="swin_tiny", pretrained=True)
    return cfg
