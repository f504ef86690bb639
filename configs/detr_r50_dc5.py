"""DETR-DC5-R50 on COCO 2017 (Carion et al. 2020, https://arxiv.org/abs/2005.12872).

A dilated last stage doubles the resolution of the transformer's input; one image per GPU, as in the original.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r50_dc5.py
Reference: 43.3 box AP at 500 epochs, dropping at 400 (original README). 41.5 M parameters, 187 GMACs
           (paper, table 1). Here: not yet run.
Weights:   detr-r50-dc5-f0fb7ef5.pth
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["dilation"] = True
    cfg["data"]["images_per_gpu"] = 1
    cfg["train"]["accumulate"] = 2  # 16 images per step on 8 GPUs, as in the base config
    return cfg
