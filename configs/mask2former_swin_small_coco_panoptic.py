"""Mask2Former-Swin-S on COCO 2017 panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_small_coco_panoptic.py
           train.precision=bf16
Reference: 54.6 PQ, 44.7 mask AP, 64.2 mIoU (original model zoo). 68.8 M parameters, 313 GMACs (paper).
           Here: not yet run.
Weights:   maskformer2_swin_small_bs16_50ep/model_final_a407fd.pkl
"""

from vitkit.configs.mask2former_r50_coco_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_small")
