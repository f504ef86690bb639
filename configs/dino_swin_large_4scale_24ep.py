"""DINO-Swin-L with four scales on COCO 2017, 24 epochs (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_swin_large_4scale_24ep.py
Reference: none published with this backbone and 24 epochs. Here: not yet run.
"""

from vitkit.configs.dino_swin_large_4scale import config as base


def config():
    cfg = base()
    cfg["train"]["epochs"] = 24
    cfg["schedule"]["drop_at_epochs"] = [20]
    return cfg
