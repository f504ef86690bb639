"""DETR-R50 on the boxes of COCO 2017's things and stuff (Carion et al. 2020, section 4.4,
https://arxiv.org/abs/2005.12872).

The first of two steps to panoptic segmentation; detr_r50_panoptic.py is the second.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_r50_panoptic_boxes.py
Reference: none published for this step; with the mask head 38.8 box AP of the things (original README). Here: not yet
           run.
"""

from vitkit.configs.detr_r50 import config as base
from vitkit.configs.parts.coco_panoptic import coco_panoptic_multi_scale


def config():
    cfg = base()
    cfg["data"] = coco_panoptic_multi_scale(images_per_gpu=2)
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[200])
    cfg["train"]["epochs"] = 300
    return cfg
