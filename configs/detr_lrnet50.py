"""DETR (https://arxiv.org/abs/2005.12872) on LR-Net-50 (https://arxiv.org/abs/1904.11491), COCO 2017.

There are no published weights of LR-Net: train them first (configs/lrnet50_in1k.py) and set model.backbone.pretrained.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/detr_lrnet50.py model.backbone.pretrained=FILE
Reference: none published with this recipe, which is DETR-R50's. Here: not yet run.
"""

from vitkit.configs.detr_r50 import config as base


def config():
    cfg = base()
    cfg["model"]["backbone"] = dict(type="lrnet50")
    return cfg
