"""DETR-DC5-R50 with masks on COCO 2017 panoptic segmentation (Carion et al. 2020, section 4.4,
https://arxiv.org/abs/2005.12872).

DETR-R50 with masks, with a dilated last stage of the backbone. The first step is detr_r50_panoptic_boxes.py with
model.backbone.dilation=true.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r50_dc5_panoptic.py --init
           runs/detr_r50_panoptic_boxes/best.pth
Reference: 40.2 box AP, 31.9 mask AP, 44.6 PQ (original README). 42.9 M parameters with 250 classes. Here: not yet
           run.
Weights:   detr-r50-dc5-panoptic-da08f1b1.pth
"""

from vitkit.configs.detr_r50_panoptic import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"]["dilation"] = True
    return cfg
