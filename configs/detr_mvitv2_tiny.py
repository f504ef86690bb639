"""DETR (https://arxiv.org/abs/2005.12872) on MViTv2-T (https://arxiv.org/abs/2112.01526), COCO 2017.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_mvitv2_tiny.py
Reference: none published with this recipe, which is DETR-R50's. Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(type="mvitv2_tiny", pretrained=True, drop_path=0.2)
    return cfg
