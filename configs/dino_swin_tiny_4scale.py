"""DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605) on Swin-T (https://arxiv.org/abs/2103.14030) on COCO 2017,
four scales, 12 epochs.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_swin_tiny_4scale.py
Reference: none published with this backbone. 47,436,216 parameters with 91 classes. Here: not
           yet run.
"""

from vitkit.configs.dino_r50_4scale import config as base
from vitkit.configs.parts.swin import BACKBONES


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(**BACKBONES["swin_tiny"], drop_path=0.2)
    return cfg
