"""DINO-R50 with four scales on COCO 2017, 36 epochs (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_r50_4scale_36ep.py
Reference: 50.9 box AP at 36 epochs (original README). Here: not yet run.
"""

from vitkit.configs.dino_r50_4scale import config as base


def config():
    cfg = base()
    cfg["train"]["epochs"] = 36
    cfg["schedule"]["drop_at_epochs"] = [30]
    return cfg
