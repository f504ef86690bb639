"""RT-DETRv2 on COCO 2017 (Lv et al. 2024, https://arxiv.org/abs/2407.17140): RT-DETR with other sampling and training.

Run:       torchrun --nproc-per-node 4 tools/train.py rtdetrv2_r18
Reference: the original README; parameters are with 80 classes. Here: not yet run.
"""

from typing import Literal

from vitkit.configs.parts.masks import with_masks
from vitkit.configs.parts.realtime import dfine_data
from vitkit.configs.rtdetr import config as rtdetr

VARIANTS = {
    "rtdetrv2_r18": (dict(depth=18), "47.9 box AP, 64.9 AP50, 120 epochs; 20,184,464 parameters"),
    "rtdetrv2_r34": (dict(depth=34), "49.9 box AP, 67.5 AP50, 120 epochs; 31,441,668 parameters"),
    "rtdetrv2_r50": (dict(depth=50), "53.4 box AP, 71.6 AP50, 72 epochs; 42,891,372 parameters"),
    "rtdetrv2_r101": (dict(depth=101), "54.3 box AP, 72.8 AP50, 72 epochs; 76,556,268 parameters"),
    "rtdetrv2_r50_masks": (dict(depth=50, masks=True), "none published with masks; 43,962,221 parameters"),
}
"""Name -> arguments of `config`, and what is published."""

TRAINING = {
    18: dict(epochs=120, strong_until=117, size_repeats=None, backbone_lr=None, no_weight_decay=["norms"]),
    34: dict(epochs=120, strong_until=117, size_repeats=3, backbone_lr=5e-5, no_weight_decay=["vectors"]),
    50: dict(epochs=72, strong_until=71, size_repeats=3, backbone_lr=1e-5, no_weight_decay=["norms"]),
    101: dict(epochs=72, strong_until=71, size_repeats=3, backbone_lr=1e-6, no_weight_decay=["norms"]),
}
"""Depth of the ResNet -> epochs, the arguments of `dfine_data`, and the optimizer's; a backbone_lr of None is lr."""


def config(depth: Literal[18, 34, 50, 101] = 50, masks: bool = False):
    training = TRAINING[depth]
    cfg = rtdetr(depth)
    cfg["model"]["type"] = "RTDETRv2"
    cfg["model"]["head"].update(type="RTDETRv2Head", num_points=[4, 4, 4], offset_scale=0.5, sampling="bilinear")
    cfg["data"] = dfine_data(training["strong_until"], size_repeats=training["size_repeats"])
    cfg["optimizer"].update(backbone_lr=training["backbone_lr"], no_weight_decay=training["no_weight_decay"])
    cfg["schedule"]["warmup_steps"] = 2000
    cfg["train"].update(epochs=training["epochs"], precision="auto")
    return with_masks(cfg) if masks else cfg
