"""DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605) on Swin-L (https://arxiv.org/abs/2103.14030) on COCO 2017,
four scales, 12 epochs.

The backbone starts from ImageNet-22k at 384 pixels, with windows of 12.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_swin_large_4scale.py
Reference: 56.8 box AP at 12 epochs (original README). 217,230,066 parameters with 91 classes. Here: not
           yet run.
"""

from vitkit.configs.dino_r50_4scale import config as base
from vitkit.configs.parts.swin import BACKBONES


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(**BACKBONES["swin_large"], drop_path=0.2)
    cfg["train"]["activation_checkpointing"] = True  # the original does so only for the backbone
    return cfg
