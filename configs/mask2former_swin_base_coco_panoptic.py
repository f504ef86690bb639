"""Mask2Former-Swin-B on COCO 2017 panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_base_coco_panoptic.py
           train.precision=bf16
Reference: 56.4 PQ, 46.3 mask AP, 67.1 mIoU (original model zoo). 106.9 M parameters, 466 GMACs (paper);
           55.1 PQ from ImageNet-1k weights (model.backbone.pretrained=true). Here: not yet run.
Weights:   maskformer2_swin_base_IN21k_384_bs16_50ep/model_final_54b88a.pkl
"""

from vitkit.configs.mask2former_r50_coco_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_base")
