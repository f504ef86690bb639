"""DETR (Carion et al. 2020, https://arxiv.org/abs/2005.12872) on Swin-T (https://arxiv.org/abs/2103.14030), COCO 2017.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_swin_tiny.py
Reference: none published with this recipe, which is DETR-R50's. Here: not yet run to the end.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(type="swin_tiny", pretrained=True)
    return cfg
