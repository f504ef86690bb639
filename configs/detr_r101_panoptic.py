"""DETR-R101 with masks on COCO 2017 panoptic segmentation (Carion et al. 2020, section 4.4,
https://arxiv.org/abs/2005.12872).

DETR-R50 with masks, with a deeper backbone. The first step is detr_r50_panoptic_boxes.py with
model.backbone.depth=101.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r101_panoptic.py --init
           runs/detr_r50_panoptic_boxes/best.pth
Reference: 40.1 box AP, 33.0 mask AP, 45.1 PQ (original README). 61.8 M parameters with 250 classes. Here: not yet
           run.
Weights:   detr-r101-panoptic-40021d53.pth
"""

from vitkit.configs.detr_r50_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["depth"] = 101
    return cfg
