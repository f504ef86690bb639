"""DINO-R50 with five scales on COCO 2017, 36 epochs (Zhang et al. 2022, https://arxiv.org/abs/2203.03605).

Run:       torchrun --nproc-per-node 16 tools/train.py configs/dino_r50_5scale_36ep.py
Reference: 51.2 box AP at 36 epochs (original README). Here: not yet run.
"""

from vitkit.configs.dino_r50_5scale import config as base


def config():
    cfg = base()
    cfg["train"]["epochs"] = 36
    cfg["schedule"]["drop_at_epochs"] = [30]
    return cfg
