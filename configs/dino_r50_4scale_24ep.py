"""DINO-R50 with four scales on COCO 2017, 24 epochs (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/dino_r50_4scale_24ep.py
Reference: 50.4 box AP at 24 epochs (original README). Here: not yet run.
"""

from vitkit.configs.dino_r50_4scale import config as base


def config():
    cfg = base()
    cfg["train"]["epochs"] = 24
    cfg["schedule"]["drop_at_epochs"] = [20]
    return cfg
