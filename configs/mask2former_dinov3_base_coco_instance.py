"""Mask2Former (https://arxiv.org/abs/2112.01527) on DINOv3 ViT-B/16 (https://arxiv.org/abs/2508.10104),
COCO 2017 instance segmentation.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_dinov3_base_coco_instance.py
           Frozen: model.backbone.frozen_stages=12
Reference: none published with this recipe, which is Mask2Former-R50's with layer-wise rates. Here: not yet run.
"""

from vitkit.configs.mask2former_r50_coco_instance import config as base
from vitkit.configs.parts.dino import DINOV3, with_plain_vit


def config():
    return with_plain_vit(base(), DINOV3["base"])
