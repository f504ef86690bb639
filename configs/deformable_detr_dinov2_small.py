"""Two-stage Deformable DETR (https://arxiv.org/abs/2010.04159) on DINOv2 ViT-S/14 (https://arxiv.org/abs/2304.07193),
whose patches are resampled to 16 pixels, COCO 2017.

Run:       torchrun --nproc-per-node 8 tools/train.py configs/deformable_detr_dinov2_small.py
           Frozen: model.backbone.frozen_stages=12
Reference: none published with this recipe, which is Deformable DETR-R50's with layer-wise rates. Here: not yet run.
"""

from vitkit.configs.deformable_detr_r50_two_stage import config as base
from vitkit.configs.parts.dino import DINOV2, with_plain_vit


def config():
    return with_plain_vit(base(), DINOV2["small"], strides=(8, 16, 32))
