"""Mask2Former-Swin-T on Cityscapes panoptic segmentation (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Run:       torchrun --nproc-per-node 8 tools/train.py configs/mask2former_swin_tiny_cityscapes_panoptic.py
           train.precision=bf16
Reference: 63.9 PQ, 39.1 mask AP, 80.5 mIoU (original model zoo). 47.4 M parameters. Here: not yet run.
Weights:   maskformer2_swin_tiny_bs16_90k/model_final_ceba0f.pkl
"""

from vitkit.configs.mask2former_r50_cityscapes_panoptic import config as base
from vitkit.configs.parts.swin import with_swin


def config():
    return with_swin(base(), "swin_tiny")
