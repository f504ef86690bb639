"""DETR (https://arxiv.org/abs/2005.12872) on ViT-B/16 (https://arxiv.org/abs/2010.11929), COCO 2017.

One map of stride 16; the blocks attend globally.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_vit_b16.py
Reference: none published with this recipe, which is DETR-R50's. Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(type="vit_base_patch16", pretrained=True, drop_path=0.1)
    return cfg
