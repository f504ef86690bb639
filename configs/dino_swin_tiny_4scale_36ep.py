"""DINO-Swin-T with four scales on COCO 2017, 36 epochs (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_swin_tiny_4scale_36ep.py
Reference: none published with this backbone and 36 epochs. Here: not yet run.
"""

from vitkit.configs.dino_swin_tiny_4scale import config as base


def config():
    cfg = base()
    cfg["train"]["epochs"] = 36
    cfg["schedule"]["drop_at_epochs"] = [30]
    return cfg
